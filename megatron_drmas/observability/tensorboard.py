"""TensorBoard scalars of a run; docs/metrics.md names every tag."""

import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megatron_drmas.observability.health import share
from megatron_drmas.observability.metrics import FIGURES, HEALTH, LINE_KEYS, of_scope
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
        for tag, value in scalars(line).items():
            self._writer.add_scalar(tag, float("nan") if value is None else value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def scalars(line: dict[str, Any]) -> dict[str, float | None]:
    """Tag -> value of a line of kind "step" or "evaluation" of metrics.jsonl; None: not finite."""
    return _step_scalars(line) if line["kind"] == "step" else _evaluation_scalars(line)


def _step_scalars(line: dict[str, Any]) -> dict[str, float | None]:
    seconds = line["seconds"]
    found = {f"team/{key}": line[key] for key in of_scope("team")}
    found |= {f"workflow/{key}": value for key, value in line.get("workflow", {}).items()}
    for scope, key in LINE_KEYS.items():
        found |= {f"{scope}/{who}/{name}": value for who, values in line[key].items() for name, value in values.items()}
    found |= {f"time/{phase}": value for phase, value in seconds.items()} | {"time/step": sum(seconds.values())}
    found |= {f"time/background/{work}": value for work, value in line.get("background", {}).items()}
    found |= {f"{key}/{who}": count for key in ("masked", "skipped") for who, count in line[key].items()}
    found |= {f"health/{kind}": share(line["health"][kind]["team"]) for kind in HEALTH if line.get("health")}
    found |= {f"alarm/{alarm['metric']}/{alarm['who']}": alarm["value"] for alarm in line["alarms"]}
    if seconds.get(GENERATE):
        found["throughput/tokens_per_second"] = line["tokens_generated"] / seconds[GENERATE]
    return found


def _evaluation_scalars(line: dict[str, Any]) -> dict[str, float | None]:
    prefix = f"evaluation/{line['mode']}"
    found = {f"{prefix}/{key}": line[key] for key in (*FIGURES, "pass_at_k")}
    for source, values in line["by_source"].items():
        found |= {f"{prefix}/by_source/{source}/{key}": values[key] for key in FIGURES}
    return found
