"""TensorBoard scalars of a run, under stable tags.

agent/<agent>/<metric>  policy/<policy>/<metric>   the metrics of a step
team/reward  team/success  team/trajectories  team/tokens_generated  team/tokens_trained
time/<phase>  time/step                            seconds
throughput/tokens_per_second                       generated, over the seconds of generation
masked/<cause>  skipped/<policy>                   counts
health/<kind>                                      shares of the step, see `health`
alarm/<metric>/<agent or policy>                   the value that raised an alarm
evaluation/<mode>/reward  evaluation/<mode>/success  evaluation/<mode>/pass_at_k
evaluation/<mode>/by_source/<source>/reward  evaluation/<mode>/by_source/<source>/success
"""

import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megatron_drmas.observability.health import WHAT, share
from megatron_drmas.observability.records import GENERATE


class TensorBoard:
    """Writes lines of metrics.jsonl as scalars.

    Args:
        folder: of the event files.
        step: steps the run has done; what a previous writer wrote after them is purged when the folder is read.
    """

    def __init__(self, folder: Path, step: int):
        # Event files are read in the order of their names, which tell seconds apart and nothing finer.
        while any(folder.glob(f"events.out.tfevents.{int(time.time())}.*")):
            time.sleep(0.05)
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, line: dict[str, Any]) -> None:
        """The scalars of a line of kind "step" or "evaluation"; values that are not finite are written as NaN."""
        scalars = _step_scalars(line) if line["kind"] == "step" else _evaluation_scalars(line)
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, float("nan") if value is None else value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _step_scalars(line: dict[str, Any]) -> dict[str, Any]:
    seconds = line["seconds"]
    scalars = {f"team/{key}": line[key] for key in ("reward", "success", "trajectories", "tokens_generated", "tokens_trained")}
    scalars |= {f"agent/{agent}/{key}": value for agent, metrics in line["agents"].items() for key, value in metrics.items()}
    scalars |= {f"policy/{name}/{key}": value for name, metrics in line["policies"].items() for key, value in metrics.items()}
    scalars |= {f"time/{phase}": value for phase, value in seconds.items()} | {"time/step": sum(seconds.values())}
    scalars |= {f"{key}/{who}": count for key in ("masked", "skipped") for who, count in line[key].items()}
    scalars |= {f"health/{kind}": share(line["health"][kind]["team"]) for kind in WHAT if line["health"]}
    scalars |= {f"alarm/{alarm['metric']}/{alarm['who']}": alarm["value"] for alarm in line["alarms"]}
    if seconds.get(GENERATE):
        scalars["throughput/tokens_per_second"] = line["tokens_generated"] / seconds[GENERATE]
    return scalars


def _evaluation_scalars(line: dict[str, Any]) -> dict[str, Any]:
    prefix = f"evaluation/{line['mode']}"
    by_source = {
        f"{prefix}/by_source/{source}/{figure}": found[figure]
        for source, found in line["by_source"].items()
        for figure in ("reward", "success")
    }
    return {f"{prefix}/{figure}": line[figure] for figure in ("reward", "success", "pass_at_k")} | by_source
