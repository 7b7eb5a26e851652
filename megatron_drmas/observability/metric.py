"""What a row of the table of metrics says (`observability.metrics`)."""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache


class Reduction(StrEnum):
    """How the actors' values become one, over tokens, micro-batches, ranks, optimizer steps and a step's updates."""

    TOKEN_MEAN = "mean over tokens"
    TOKEN_SUM = "sum over tokens, mean over optimizer steps"
    TOKEN_MAX = "largest of all tokens"
    UPDATE_MEAN = "mean over a step's updates, by tokens"
    STEP_MEAN = "mean over optimizer steps"
    STEP_MAX = "largest of the optimizer steps"
    SUM = "sum"
    LAST = "that of the last optimizer step"


@dataclass(frozen=True)
class Limit:
    """What a healthy metric of an agent or a policy keeps to.  A value that is not finite always alarms.

    The running median shows a jump.  A slow drift takes the running median with it, so it is measured from the start.
    """

    most: float | None = None  # absolute
    above: float | None = None  # times the running median
    below: float | None = None  # times the running median
    far_above: float | None = None  # times the start
    far_below: float | None = None  # times the start
    floor: float = 0.0  # a smaller median counts as this, and nothing is below it


@dataclass(frozen=True)
class Chart:
    """How a metric is drawn in the report."""

    hint: str = ""  # beside the title; the unit where it is empty
    log: bool = False
    bounds: tuple[float, float] | None = None  # least range of the axis
    bins: str = "mean"  # what represents many steps in one bin
    minus: float = 0.0  # taken from the value
    front: bool = True  # False: under "more metrics", if it changes


@dataclass(frozen=True)
class Metric:
    """A row of the table."""

    name: str
    title: str
    unit: str
    reduction: str
    description: str
    chart: Chart = Chart(front=False)
    when: str = ""  # when it is logged, such as "where returns differ"; empty: always
    console: bool = False
    summary: str = ""  # key of summary.json with the largest value of any policy at any step
    limit: Limit | None = None
    event: str = ""  # of a health metric: what is said of its count, after "n of m"
    tensorboard: bool = True

    @property
    def key(self) -> str:
        """The name's last part: the key in metrics.jsonl."""
        return self.name.rpartition("/")[2]

    @property
    def scope(self) -> str:
        """The name's first part."""
        return self.name.partition("/")[0]

    @property
    def hint(self) -> str:
        """What the report says beside the title."""
        return self.chart.hint or self.unit

    def matches(self, tag: str) -> bool:
        """Whether `tag` is this metric's, with the names filled in."""
        return bool(_pattern(self.name).fullmatch(tag))


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+\}", name)
    inner = "[^/]+" if len(parts) == 2 and parts[1] else ".+"
    return re.compile(inner.join(map(re.escape, parts)), re.DOTALL)
