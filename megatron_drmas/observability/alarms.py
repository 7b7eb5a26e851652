"""Early warning: metrics that run away, named with their policy and agents; and episodes, in which an alarm is reported once."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megatron_drmas.observability.metric import Limit
from megatron_drmas.observability.metrics import LINE_KEYS, METRICS

QUIET = 5  # steps without an alarm that end its episode
WINDOW = 50  # steps of the running median
WARM_UP = 5  # steps before a running median counts
START = 10  # steps whose median is the metric's start


@dataclass
class _Seen:
    """The values of one metric that later ones are held against."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    first: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.recent.append(value)
        if len(self.first) < START:
            self.first.append(value)


@dataclass
class Episode:
    """One metric of one agent, policy or team out of bounds, from a step to another."""

    metric: str
    who: str
    began: int
    last: int
    worst: int  # step
    beyond: float | None  # how far at its worst, as a multiple of the limit; None: not finite
    problem: str  # the message at its worst, without the step
    open: bool = True

    def text(self) -> str:
        """The whole episode on one line."""
        if self.began == self.last:
            return f"step {self.began}: {self.problem}"
        when = f"from step {self.began} on" if self.open else f"steps {self.began} to {self.last}"
        return f"{when}, worst in {self.worst}: {self.problem}"

    def end_text(self) -> str:
        """That it is over, on one line; what it was about was said when it began."""
        what = self.metric + ("" if self.who == "team" else f" of {self.who}")
        if self.began == self.last:
            return f"over: {what}, in step {self.began} only"
        return f"over: {what}, in steps {self.began} to {self.last}, worst in step {self.worst}"


class Episodes:
    """Folds the alarms of a run's steps into episodes: alarms of one metric and owner with fewer than `QUIET` steps between them.

    Adding the same alarms always gives the same episodes.
    """

    def __init__(self) -> None:
        self.all: list[Episode] = []
        self._open: dict[tuple[str, str], Episode] = {}

    def add(self, step: int, alarms: Iterable[dict[str, Any]]) -> tuple[list[Episode], list[Episode]]:
        """Take in a step; the episodes that begin and those that have ended with it."""
        begun = []
        for alarm in alarms:
            key, problem = (alarm["metric"], alarm["who"]), alarm["message"].removeprefix(f"step {step}: ")
            episode = self._open.get(key)
            if episode is None:
                episode = Episode(*key, step, step, step, alarm.get("beyond"), problem)
                self._open[key] = episode
                self.all.append(episode)
                begun.append(episode)
            elif episode.beyond is not None and ((beyond := alarm.get("beyond")) is None or beyond > episode.beyond):
                episode.worst, episode.beyond, episode.problem = step, beyond, problem
            episode.last = step
        ended = [episode for episode in self._open.values() if step - episode.last >= QUIET]
        for episode in ended:
            episode.open = False
            del self._open[episode.metric, episode.who]
        return begun, ended


class Watch:
    """Holds each step's metrics against the limits in the table of metrics and the steps before.

    Args:
        agents_of: policy -> the agents that it serves, to name them in an alarm.
        causes: metric -> what in the configuration may explain its alarm.
    """

    def __init__(self, agents_of: dict[str, list[str]], causes: dict[str, str] | None = None):
        self._agents_of = agents_of
        self._causes = causes or {}
        self._seen: dict[tuple[str, str, str], _Seen] = {}

    def check(self, line: dict[str, Any]) -> list[dict[str, Any]]:
        """The alarms of one step; takes the step into the running medians.

        Args:
            line: step, skipped, nonfinite, agents and policies as in metrics.jsonl: metrics by name, None for a value
                that is not finite.

        Returns:
            One dictionary an alarm: metric, who (agent or policy), value, beyond (how far, as a multiple of the limit; None:
            the value is not finite), message.
        """
        alarms = []
        for policy, count in line["skipped"].items():
            problem = f"skipped {count} optimizer step(s): the gradient was not finite"
            if line["nonfinite"].get(policy):
                problem += f", nor was the loss of {', '.join(line['nonfinite'][policy])}"
            message = f"step {line['step']}: {self._called('policies', policy)} {problem}"
            alarms.append({"metric": "skipped", "who": policy, "value": count, "beyond": float(count), "message": message})
        for metric in METRICS:
            if metric.limit is None:
                continue
            scope = LINE_KEYS[metric.scope]
            for who, values in line[scope].items():
                if metric.key not in values or (scope == "agents" and self._is_its_policy(who, metric.key, line)):
                    continue
                found = self._problem(metric.limit, (metric.key, scope, who), values[metric.key])
                if found:
                    message = f"step {line['step']}: {metric.key} of {self._called(scope, who)} {found[1]}"
                    if metric.key in self._causes:
                        message += f"; likely: {self._causes[metric.key]}"
                    alarm = {
                        "metric": metric.key,
                        "who": who,
                        "value": values[metric.key],
                        "beyond": found[0],
                        "message": message,
                    }
                    alarms.append(alarm)
        return alarms

    def _problem(self, limit: Limit, key: tuple[str, str, str], value: float | None) -> tuple[float | None, str] | None:
        """How far the value is beyond which limit; None where it keeps to all."""
        if value is None:
            return None, "is not finite"
        seen = self._seen.setdefault(key, _Seen())
        usual = median(seen.recent) if len(seen.recent) >= WARM_UP else None
        start = median(seen.first) if len(seen.first) >= START else None
        seen.add(value)
        if limit.most is not None and value > limit.most:
            return value / limit.most, f"is {value:.4g}, over {limit.most:g}"
        references = (
            (usual, limit.above, limit.below, "its running median"),
            (start, limit.far_above, limit.far_below, "its start,"),
        )
        for reference, above, below, called in references:
            if reference is None:
                continue
            if above is not None and value > above * max(reference, limit.floor):
                return value / (
                    above * max(reference, limit.floor)
                ), f"is {value:.4g}, over {above:g} times {called} {reference:.4g}"
            if below is not None and reference > limit.floor and value < below * reference:
                return _times(below * reference, value), f"is {value:.4g}, under {below:.2g} times {called} {reference:.4g}"
        return None

    def _is_its_policy(self, agent: str, metric: str, line: dict[str, Any]) -> bool:
        """Whether the agent has a policy to itself that reports the same metric: one alarm is enough."""
        return any(agents == [agent] and metric in line["policies"].get(policy, {}) for policy, agents in self._agents_of.items())

    def _called(self, scope: str, who: str) -> str:
        if scope == "agents":
            return f"agent {who}"
        agents = self._agents_of.get(who, [])
        return f"policy {who} (agents {', '.join(agents)})" if agents else f"policy {who}"


def _times(limit: float, value: float) -> float | None:
    """limit / value; None where that is not a number."""
    return limit / value if value > 0 else None


def likely_causes(config: dict[str, Any]) -> dict[str, str]:
    """Metric -> what in a run's configuration, as plain data, may make it alarm."""
    rollout, precision = config.get("rollout", {}), config.get("precision", {})
    causes = []
    if rollout.get("top_p", 1.0) < 1.0:
        causes.append(f"rollout.top_p = {rollout['top_p']:g} samples from a part of the distribution only")
    if precision.get("mode") == "fp32" and precision.get("rollout") == "bfloat16":
        causes.append(
            "precision.rollout = bfloat16 rounds the engines' weights, precision.mode = fp32 does not round the trainer's"
        )
    if str(precision.get("mode")).startswith("fp8"):
        causes.append(f"precision.mode = {precision['mode']} rounds in the trainer only")
    return {"prob_ratio": ", ".join(causes)} if causes else {}
