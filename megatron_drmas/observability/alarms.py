"""Early warning: metrics that run away, named with their policy and agents."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Optional

WINDOW = 50  # steps of the running median
WARM_UP = 5  # steps before a running median counts
START = 10  # steps whose median is the metric's start


@dataclass(frozen=True)
class Limit:
    """What a healthy metric of an agent or a policy keeps to.  A value that is not finite always alarms.

    The running median tells a jump.  A slow drift takes the running median with it, so it is told by the start.
    """

    metric: str
    most: Optional[float] = None  # absolute
    above: Optional[float] = None  # times the running median
    below: Optional[float] = None  # times the running median
    far_above: Optional[float] = None  # times the start
    far_below: Optional[float] = None  # times the start
    floor: float = 0.0  # a smaller median counts as this, and nothing is below it


LIMITS = (
    Limit("grad_norm_max", above=5.0, far_above=20.0, floor=1e-3),
    Limit("prob_ratio", most=1.05),
    Limit("corrected_fraction", most=0.05),
    Limit("entropy", above=3.0, below=0.1, far_above=5.0, far_below=0.05, floor=0.02),
    Limit("response_length", above=3.0, below=1 / 3, far_above=5.0, far_below=0.2, floor=4.0),
    Limit("baseline_inflation", most=3.0),
)


@dataclass
class _Seen:
    """The values of one metric that later ones are held against."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    first: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.recent.append(value)
        if len(self.first) < START:
            self.first.append(value)


class Watch:
    """Holds each step's metrics against `LIMITS` and the steps before.

    Args:
        agents_of: policy -> the agents that it speaks for, to name them in an alarm.
    """

    def __init__(self, agents_of: dict[str, list[str]]):
        self._agents_of = agents_of
        self._seen: dict[tuple[str, str, str], _Seen] = {}

    def check(self, line: dict[str, Any]) -> list[dict[str, Any]]:
        """The alarms of one step; takes the step into the running medians.

        Args:
            line: step, skipped, nonfinite, agents and policies as in metrics.jsonl: metrics by name, None for a value
                that is not finite.

        Returns:
            One dictionary an alarm: metric, who (agent or policy), value, message.
        """
        alarms = []
        for policy, count in line["skipped"].items():
            problem = f"skipped {count} optimizer step(s): the gradient was not finite"
            if line["nonfinite"].get(policy):
                problem += f", nor was the loss of {', '.join(line['nonfinite'][policy])}"
            message = f"step {line['step']}: {self._called('policies', policy)} {problem}"
            alarms.append({"metric": "skipped", "who": policy, "value": count, "message": message})
        for limit in LIMITS:
            for scope in ("agents", "policies"):
                for who, metrics in line[scope].items():
                    if limit.metric in metrics and not (scope == "agents" and self._is_its_policy(who, limit.metric, line)):
                        value = metrics[limit.metric]
                        problem = self._problem(limit, (limit.metric, scope, who), value)
                        if problem:
                            message = f"step {line['step']}: {limit.metric} of {self._called(scope, who)} {problem}"
                            alarms.append({"metric": limit.metric, "who": who, "value": value, "message": message})
        return alarms

    def _problem(self, limit: Limit, key: tuple[str, str, str], value: Optional[float]) -> Optional[str]:
        if value is None:
            return "is not finite"
        seen = self._seen.setdefault(key, _Seen())
        usual = median(seen.recent) if len(seen.recent) >= WARM_UP else None
        start = median(seen.first) if len(seen.first) >= START else None
        seen.add(value)
        if limit.most is not None and value > limit.most:
            return f"is {value:.4g}, over {limit.most:g}"
        references = ((usual, limit.above, limit.below, "its running median"), (start, limit.far_above, limit.far_below, "its start,"))
        for reference, above, below, called in references:
            if reference is None:
                continue
            if above is not None and value > above * max(reference, limit.floor):
                return f"is {value:.4g}, over {above:g} times {called} {reference:.4g}"
            if below is not None and reference > limit.floor and value < below * reference:
                return f"is {value:.4g}, under {below:.2g} times {called} {reference:.4g}"
        return None

    def _is_its_policy(self, agent: str, metric: str, line: dict[str, Any]) -> bool:
        """Whether the agent has a policy to itself that reports the same metric: one alarm is enough."""
        return any(agents == [agent] and metric in line["policies"].get(policy, {}) for policy, agents in self._agents_of.items())

    def _called(self, scope: str, who: str) -> str:
        if scope == "agents":
            return f"agent {who}"
        agents = self._agents_of.get(who, [])
        return f"policy {who} (agents {', '.join(agents)})" if agents else f"policy {who}"
