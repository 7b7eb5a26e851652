"""What the senders for GPUs publish is what vLLM's own back ends read; without a GPU, CUDA's and NCCL's calls are recorded."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

TENSORS = [("a", torch.arange(6.0).view(2, 3).t()), ("b", torch.ones(4, dtype=torch.float32))]


@pytest.fixture(scope="module")
def elsewhere():
    """A process that may import vLLM, which changes torch."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function: pool.submit(function).result(timeout=120)


def handle(tensor: torch.Tensor) -> tuple:
    return None, (tensor.dtype, tensor.is_contiguous())


def ipc_update_info() -> dict:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    from megatron_drmas.weight_sync.ipc_sender import IpcSender

    with (
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.get_device_properties", return_value=SimpleNamespace(uuid="GPU-7")),
        mock.patch("torch.cuda.current_stream"),
        mock.patch("torch.cuda.ipc_collect"),
        mock.patch("megatron_drmas.weight_sync.ipc_sender.reduce_tensor", handle),
    ):
        sender = IpcSender(iter(TENSORS), 10**6, torch.bfloat16)
        info = IPCWeightTransferUpdateInfo(**sender.next_bucket())
        assert sender.next_bucket() is None
        sender.close()
    return vars(info)


def test_ipc_publishes_a_handle_per_tensor_for_its_own_gpu(elsewhere):
    info = elsewhere(ipc_update_info)
    assert info["names"] == ["a", "b"] and info["shapes"] == [[3, 2], [4]] and info["dtype_names"] == ["bfloat16"] * 2
    assert info["ipc_handles"] == [{"GPU-7": (torch.bfloat16, True)}] * 2


def nccl_messages() -> tuple[dict, list, list]:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    from megatron_drmas.weight_sync.nccl_sender import NcclSender, NcclTransport

    sent = []

    def broadcast(tensor: torch.Tensor, src: int, stream: object) -> None:
        sent.append((tensor.tolist(), src))

    ranks = [
        NCCLWeightTransferInitInfo(**info) for info in NcclTransport.engine_init_infos([("10.0.0.1", 29500)], engines=2, tensor=4)
    ]
    with mock.patch("torch.cuda.current_stream"):
        sender = NcclSender(SimpleNamespace(broadcast=broadcast), {}, iter(TENSORS), 10**6)
        info = NCCLWeightTransferUpdateInfo(**sender.next_bucket())
    return vars(info), sent, [(rank.rank_offset, rank.world_size, rank.packed) for rank in ranks]


def test_nccl_broadcasts_the_tensors_in_the_order_of_their_names(elsewhere):
    info, sent, ranks = elsewhere(nccl_messages)
    assert info["names"] == ["a", "b"] and info["dtype_names"] == ["float32"] * 2
    assert sent == [(tensor.tolist(), 0) for _, tensor in TENSORS]
    assert ranks == [(1, 9, False), (5, 9, False)]


def stage_messages() -> tuple[list, list, list]:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    from megatron_drmas.weight_sync import nccl_stages
    from megatron_drmas.weight_sync.nccl_sender import NcclStagesTransport

    addresses = [("10.0.0.1", 29500), ("10.0.0.2", 29501)]
    joined: list[tuple] = []
    received: list[tuple] = []

    class Group:
        def __init__(self, info: NCCLWeightTransferInitInfo, worker: int):
            self.name = (info.master_address, info.master_port)
            joined.append((*self.name, info.rank_offset + worker, info.world_size))

        def broadcast(self, tensor: torch.Tensor, src: int, stream: object) -> None:
            received.append((self.name, list(tensor.shape), src))

        def destroy(self) -> None:
            joined.append(("left", *self.name))

    senders = []
    for info in NcclStagesTransport.sender_init_infos(addresses, engines=2, tensor=2):
        transport = NcclStagesTransport()
        with mock.patch("vllm.distributed.weight_transfer.nccl_common.trainer_init", lambda info: Group.__new__(Group)):
            transport.join(info)
        transport._communicator.broadcast = lambda tensor, src, stream: None
        senders.append(transport)
    buckets = []
    with mock.patch("torch.cuda.current_stream"):
        for transport, tensor in zip(senders, TENSORS):
            buckets.append(transport.sender([tensor], 10**6, None, True, False).next_bucket())
        for index, info in enumerate(NcclStagesTransport.engine_init_infos(addresses, engines=2, tensor=2)):
            for worker in range(2):
                engine = nccl_stages.NcclStagesEngine.__new__(nccl_stages.NcclStagesEngine)
                engine.parallel_config, engine.device, engine.packed = worker, torch.device("cpu"), False
                engine.model = SimpleNamespace(load_weights=lambda weights: None)
                with mock.patch.object(nccl_stages, "worker_init_process_group", Group):
                    engine.init_transfer_engine(engine.parse_init_info(info))
                if (index, worker) == (1, 1):
                    for bucket in reversed(buckets):
                        engine.receive_weights(engine.parse_update_info(bucket))
                    engine.shutdown()
    return joined, received, [bucket["names"] for bucket in buckets]


def test_every_stage_has_a_group_and_its_buckets_travel_in_it(elsewhere):
    joined, received, names = elsewhere(stage_messages)
    first, second = ("10.0.0.1", 29500), ("10.0.0.2", 29501)
    assert joined[:8] == [(*stage, rank, 5) for rank in (1, 2, 3, 4) for stage in (first, second)]
    assert names == [["a"], ["b"]] and received == [(second, [4], 0), (first, [3, 2], 0)]
    assert joined[8:] == [("left", *second), ("left", *first)]
