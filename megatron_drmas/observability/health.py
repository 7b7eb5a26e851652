"""Whether a step is fit to be learned from: shares that warn, and shares that stop the run (`config.HealthConfig`).

A *count* is `[n, of]`.  The counts of a step, as metrics.jsonl holds them, are

    masked          trajectories cut short by a failure that is not the team's; of an agent: of those in which it spoke
    truncated       responses that reached their limit, of the calls of the other trajectories
    invalid         outputs that could not be parsed, of the same calls
    zero_advantage  rows whose advantage is 0, of the rows that learn
    found_nothing   queries that were answered without a passage, of the same trajectories' queries
    rewarded        trajectories that returned more than 0, of those that ended, whether the environment calls them a success or
                    not; judged only together with zero_advantage

each as {"team": count, "agents": {agent: count}}.  The rule looks at nothing else, so a resumed run that reads its log again
judges as an undisturbed one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from megatron_drmas.config.schema import HealthConfig, ShareConfig
from megatron_drmas.observability.metrics import HEALTH
from megatron_drmas.team.trajectory import NO_SIGNAL, Trajectory

NOTHING_LEARNABLE = "nothing_learnable"
REMEDIES = {
    "truncated": "raise rollout.max_response_tokens or the agent's max_response_tokens",
    "invalid": "read trajectories/; a warm start (megatron_drmas.sft) teaches a format",
    "zero_advantage": "use questions that the team solves now and then, or a larger group_size",
    "found_nothing": "see what the retrieval server answers to them",
    "retrieval": "see what the retrieval server says, or raise environment.retrieval.timeout_s",
    "engine": "see the engines' logs",
    "prompt_too_long": "raise rollout.max_prompt_tokens",
}

Count = Sequence[int]
Counts = dict[str, dict[str, Any]]


class UnhealthyRun(RuntimeError):
    """The run stops, because going on would waste its time or ruin what it has learned."""


def share(count: Count) -> float:
    """n / of; 0 of nothing."""
    return count[0] / count[1] if count[1] else 0.0


def count_causes(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """Trajectories that are left out of an update, by cause; those that dynamic sampling replaced are."""
    return dict(Counter(trajectory.failure for trajectory in trajectories if trajectory.failure))


def count_masked(trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """How many trajectories failed; those that dynamic sampling replaced did not."""
    team = [0, 0]
    agents: dict[str, list[int]] = {}
    for trajectory in trajectories:
        failed = trajectory.failure not in (None, NO_SIGNAL)
        for count in (team, *(agents.setdefault(agent, [0, 0]) for agent in {turn.agent for turn in trajectory.turns})):
            count[0] += failed
            count[1] += 1
    return {"team": team, "agents": agents}


def count_step(trajectories: Sequence[Trajectory], zero_advantage: Mapping[str, Count]) -> Counts:
    """The counts of a step.

    Args:
        trajectories: all of the step's.
        zero_advantage: of every agent.
    """
    finished = [trajectory for trajectory in trajectories if trajectory.failure is None]
    turns = [turn for trajectory in finished for turn in trajectory.turns]
    queries = [n for trajectory in finished for n in trajectory.found]
    calls = Counter(turn.agent for turn in turns)
    truncated = Counter(turn.agent for turn in turns if turn.finish_reason == "length")
    invalid = Counter(turn.agent for turn in turns if not turn.valid)
    by_agent = {
        "truncated": {agent: [truncated[agent], calls[agent]] for agent in calls},
        "invalid": {agent: [invalid[agent], calls[agent]] for agent in calls},
        "zero_advantage": {agent: list(count) for agent, count in zero_advantage.items() if count[1]},
    }
    return {
        "masked": count_masked(trajectories),
        **{
            kind: {"team": [sum(column) for column in zip([0, 0], *found.values())], "agents": found}
            for kind, found in by_agent.items()
        },
        "found_nothing": {"team": [sum(not n for n in queries), len(queries)], "agents": {}},
        "rewarded": {"team": [sum(trajectory.reward > 0 for trajectory in finished), len(finished)], "agents": {}},
    }


def refusal(trajectories: Sequence[Trajectory], config: HealthConfig, when: str) -> str | None:
    """Why these trajectories must be neither trained on nor averaged: too many of them are masked; None if they may.

    Args:
        when: begins the message, such as "step 3".
    """
    for who, count in _over(count_masked(trajectories), config.masked.stop, config.min_calls):
        failed = [trajectory for trajectory in trajectories if trajectory.failure not in (None, NO_SIGNAL)]
        causes = count_causes(failed)
        worst = max(causes, key=causes.__getitem__)
        detail = Counter(trajectory.failure_detail for trajectory in failed if trajectory.failure == worst).most_common(1)[0][0]
        whose = f" in which agent {who} spoke" if who else ""
        return (
            f"{when}: {count[0]} of {count[1]} trajectories{whose} were masked ({_listed(causes)}; most often {detail}), and "
            f"health.masked.stop is {config.masked.stop:g}; {REMEDIES.get(worst, 'read trajectories/')}"
        )
    return None


def evaluation_alarms(line: dict[str, Any], config: HealthConfig) -> list[dict[str, Any]]:
    """Alarms of an evaluation's line of metrics.jsonl, in which `masked` counts causes and `trajectories` all."""
    count = [sum(line["masked"].values()), line["trajectories"]]
    if config.masked.warn is None or share(count) < config.masked.warn:
        return []
    when = f"evaluation after {line['step']} steps, {line['mode']}"
    message = f"{when}: {count[0]} of {count[1]} trajectories were masked ({_listed(line['masked'])})"
    return [_alarm("masked", f"{line['mode']} evaluation", share(count), config.masked.warn, message)]


def in_short(alarms: Iterable[dict[str, Any]]) -> str:
    """Those of a step's alarms that are about its health, in a few words."""
    words = []
    for alarm in alarms:
        if alarm["metric"] == NOTHING_LEARNABLE:
            words.append("nothing learnable")
        elif alarm["metric"] in HEALTH:
            whose = "" if alarm["who"] == "team" else f" of {alarm['who']}"
            words.append(f"{alarm['metric'].replace('_', ' ')}{whose} {alarm['value']:.2f}")
    return ", ".join(words)


class HealthRule:
    """Judges the steps of a run, one after another.

    Attributes:
        stop: why the run must stop after the last step that was judged; None if it may continue.
        healthy: whether that step's policies can be relied on: few trajectories were masked, something could be learned, and
            no share reached its stop threshold.
    """

    def __init__(self, config: HealthConfig):
        self._config = config
        self._in_a_row: dict[tuple[str, str | None], int] = {}
        self.stop: str | None = None
        self.healthy = True

    def check(self, line: dict[str, Any]) -> list[dict[str, Any]]:
        """The alarms of one step, as `alarms.Watch.check` returns them; brings `stop` and `healthy` up to date.

        Args:
            line: step, masked and health as in metrics.jsonl; a step without counts is not judged.
        """
        in_a_row = {}
        self.stop, self.healthy = None, True
        if not line.get("health"):
            return []
        for kind, who, problem in self._stops(line):
            in_a_row[kind, who] = self._in_a_row.get((kind, who), 0) + 1
            if in_a_row[kind, who] >= self._config.patience and self.stop is None:
                so_long = f"so it was for {in_a_row[kind, who]} steps in a row (health.patience = {self._config.patience})"
                self.stop = f"step {line['step']}: {problem}; {so_long}"
        self._in_a_row = in_a_row
        alarms = list(self._warnings(line))
        self.healthy = not in_a_row and all(alarm["metric"] != "masked" for alarm in alarms)
        return alarms

    def _warnings(self, line: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """An alarm a kind about the whole step, which names the agents; without one, an alarm for each agent."""
        counts, step = line["health"], line["step"]
        nothing = _why_nothing(counts)
        if nothing:
            yield _alarm(NOTHING_LEARNABLE, "team", 1.0, 1.0, f"step {step}: {nothing}")
        for kind, what in HEALTH.items():
            limits: ShareConfig = getattr(self._config, kind)
            over = list(_over(counts[kind], limits.warn, self._config.min_calls))
            if not over or (kind == "zero_advantage" and nothing):
                continue
            agents = ", ".join(f"{who} {n} of {of}" for who, (n, of) in over if who)
            causes = (
                _listed({cause: count for cause, count in line["masked"].items() if cause != NO_SIGNAL})
                if kind == "masked"
                else ""
            )
            for who, count in over[:1] if over[0][0] is None else over:
                more = "; ".join(part for part in (causes, "" if who or len(counts[kind]["agents"]) == 1 else agents) if part)
                problem = f"{_whose(who)}{count[0]} of {count[1]} {what}{f' ({more})' if more else ''}"
                yield _alarm(kind, who or "team", share(count), cast(float, limits.warn), f"step {step}: {problem}")

    def _stops(self, line: dict[str, Any]) -> Iterator[tuple[str, str | None, str]]:
        """What is as bad as it may be for `patience` steps: kind, agent (None: the step), problem and remedy.

        A team that earns a reward every time has nothing to learn either, but no reason to stop for it.
        """
        counts = line["health"]
        nothing = _why_nothing(counts)
        if nothing and share(counts["rewarded"]["team"]) < 1:
            yield NOTHING_LEARNABLE, None, nothing
        for kind in (kind for kind in HEALTH if kind != "masked"):
            stop = getattr(self._config, kind).stop
            for who, count in _over(counts[kind], stop, self._config.min_calls):
                problem = f"{_whose(who)}{count[0]} of {count[1]} {HEALTH[kind]}, and health.{kind}.stop is {stop:g}"
                yield kind, who, f"{problem}; {REMEDIES[kind]}"


def _over(counts: dict[str, Any], limit: float | None, min_calls: int) -> Iterator[tuple[str | None, Count]]:
    """Who is at the limit or above: None for the whole step, then agents."""
    if limit is None:
        return
    if counts["team"][1] and share(counts["team"]) >= limit:
        yield None, counts["team"]
    for agent, count in sorted(counts["agents"].items()):
        if count[1] >= min_calls and share(count) >= limit:
            yield agent, count


def _whose(agent: str | None) -> str:
    return f"agent {agent}: " if agent else ""


def _why_nothing(counts: Counts) -> str | None:
    """Why the step teaches nothing, and what may help; None if any row of it has an advantage."""
    zero, rows = counts["zero_advantage"]["team"]
    if zero < rows:
        return None
    rewarded, finished = counts["rewarded"]["team"]
    returned = {0: "no trajectory earned a reward", finished: "every trajectory earned a reward"}.get(
        rewarded, "no question's returns differ"
    )
    reasons = [returned] if finished else []
    remedy = REMEDIES["zero_advantage"]
    for kind in ("invalid", "truncated"):
        count = counts[kind]["team"]
        if count[0]:
            reasons.append(f"{count[0]} of {count[1]} {HEALTH[kind]}")
        if share(count) >= 0.5:
            remedy = REMEDIES[kind]
    what = f"all {rows} advantages are 0" if rows else "no row is left to learn from"
    return f"nothing can be learned: {what} ({', '.join(reasons) or 'no trajectory ended'}); {remedy}"


def _listed(causes: dict[str, int]) -> str:
    return ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items()))


def _alarm(metric: str, who: str, value: float, limit: float, message: str) -> dict[str, Any]:
    return {"metric": metric, "who": who, "value": value, "beyond": value / limit, "message": message}
