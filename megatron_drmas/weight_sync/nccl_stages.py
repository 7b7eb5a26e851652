"""Engine's side of the `nccl_stages` back end of vLLM's weight-transfer API.  Untested here."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_process_group
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo


@dataclass
class StagesInitInfo(WeightTransferInitInfo):
    """For each pipeline stage of the actor, what vLLM's own back end joins a group with."""

    stages: list[dict]


@dataclass
class StageUpdateInfo(NCCLWeightTransferUpdateInfo):
    """A bucket of one stage."""

    stage: int


class NcclStagesEngine(NCCLWeightTransferEngine):
    """vLLM's dense NCCL back end with a group for each sender; a bucket names its sender's."""

    init_info_cls = StagesInitInfo
    update_info_cls = StageUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._groups: list[Any] = []

    def init_transfer_engine(self, init_info: StagesInitInfo) -> None:
        """Join every stage's group, in the order of the stages on every worker."""
        infos = (NCCLWeightTransferInitInfo(**stage) for stage in init_info.stages)
        self._groups = [worker_init_process_group(info, self.parallel_config) for info in infos]

    def receive_weights(self, update_info: StageUpdateInfo) -> None:
        """Take a bucket's broadcasts from its stage."""
        self.model_update_group = self._groups[update_info.stage]
        super().receive_weights(update_info)

    def shutdown(self) -> None:
        """Leave the groups."""
        self.model_update_group = None
        while self._groups:
            self._groups.pop().destroy()
