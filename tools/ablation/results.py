"""What training runs show: rewards, gradient norms, spikes and final scores, read from their metrics.jsonl."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev

from megatron_drmas.observability.history import read_json_lines

SPIKE = 5.0  # times the running median
WARM_UP = 5  # steps before a running median counts
FLOOR = 0.25  # of the largest running median so far: a smaller one counts as this


@dataclass
class Run:
    """One training run."""

    rewards: list[float] = field(default_factory=list)
    grad_norms: dict[str, list[float]] = field(default_factory=dict)  # by policy; nan where no step was made
    nonfinite: int = 0  # optimizer steps skipped for a gradient that was not finite
    inflation: dict[str, list[float]] = field(default_factory=dict)  # lemma factor by agent
    returns: dict[str, list[float]] = field(default_factory=dict)  # by agent, mean over its calls of their trajectories' return
    exact_match: float | None = None  # sampled, after the last step
    pass_at_k: float | None = None
    greedy: float | None = None

    @property
    def spikes(self) -> dict[str, int]:
        return {policy: count_spikes(norms) for policy, norms in self.grad_norms.items()}


def read_run(path: Path) -> Run:
    """The run whose metrics.jsonl this is."""
    run = Run()
    for line in read_json_lines(path):
        if line["kind"] == "step":
            run.rewards.append(line["reward"] if line["reward"] is not None else math.nan)
            run.nonfinite += sum(line["skipped"].values())
            for policy, metrics in line["policies"].items():
                norm = metrics["grad_norm"]
                run.grad_norms.setdefault(policy, []).append(math.nan if norm is None else norm)
            for agent, metrics in line["agents"].items():
                if metrics.get("baseline_inflation") is not None:
                    run.inflation.setdefault(agent, []).append(metrics["baseline_inflation"])
                if metrics.get("return_mean") is not None:
                    run.returns.setdefault(agent, []).append(metrics["return_mean"])
        elif line["kind"] == "evaluation" and line["step"] > 0:
            if line["mode"] == "greedy":
                run.greedy = line["success"]
            else:
                run.exact_match, run.pass_at_k = line["success"], line["pass_at_k"]
    return run


def count_spikes(norms: list[float]) -> int:
    """Steps whose norm is over 5 x the running median of the steps before, those without a gradient aside.

    A running median that has fallen under a quarter of its largest value counts as that: where nearly all groups have
    become constant, norms near 0 would make every ordinary step a spike.
    """
    finite = [norm for norm in norms if math.isfinite(norm) and norm > 0]
    largest, spikes = 0.0, 0
    for step in range(WARM_UP, len(finite)):
        usual = median(finite[:step])
        largest = max(largest, usual)
        spikes += finite[step] > SPIKE * max(usual, FLOOR * largest)
    return spikes


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error over seeds; nan without a value, error 0 with one."""
    if not values:
        return math.nan, math.nan
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def summarize(runs: list[Run]) -> dict:
    """The figures of one variant over its seeds."""
    policies = sorted({policy for run in runs for policy in run.grad_norms})

    def over(values: Iterable[float | None]) -> dict[str, float]:
        mean, error = mean_and_error([value for value in values if value is not None])
        return {"mean": mean, "standard_error": error}

    def finite(norms: list[float]) -> list[float]:
        return [norm for norm in norms if math.isfinite(norm)] or [math.nan]

    return {
        "runs": len(runs),
        "exact_match": over(run.exact_match for run in runs),
        "pass_at_k": over(run.pass_at_k for run in runs),
        "greedy": over(run.greedy for run in runs),
        "spikes": {policy: over(run.spikes.get(policy) for run in runs) for policy in policies},
        "grad_norm_median": {
            policy: over(median(finite(run.grad_norms[policy])) for run in runs if policy in run.grad_norms)
            for policy in policies
        },
        "grad_norm_max": {
            policy: over(max(finite(run.grad_norms[policy])) for run in runs if policy in run.grad_norms) for policy in policies
        },
        "nonfinite_steps": sum(run.nonfinite for run in runs),
    }
