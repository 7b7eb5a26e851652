"""summary.json: the run in numbers that a program can read, rewritten after everything that is logged."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_drmas.observability.alarms import Episodes
from megatron_drmas.observability.health import share
from megatron_drmas.observability.history import write_atomically
from megatron_drmas.observability.metrics import FIGURES, HEALTH, of_scope
from megatron_drmas.observability.records import CHECKPOINT, GENERATE, GREEDY, SAMPLED, WEIGHT_SYNC

RUNNING, FINISHED = "running", "finished"
LARGEST = {key: metric.summary for key, metric in of_scope("policy").items() if metric.summary}


class Summary:
    """Totals and last values over the lines of metrics.jsonl.

    Adding the same lines always gives the same summary, so a resumed run adds the lines it kept and goes on.  The
    keys of `as_dict`:

        name, seed, status, step, steps      step: steps done; steps: steps planned
        evaluation     {sampled, greedy}: {step, questions, trained_on, samples, pass_questions, and {before, after} of reward,
                       success and pass_at_k}: avg@k and pass@k (see records.EvaluationRecord) at the last evaluation, and
                       before the first step where that was evaluated with the same settings; trained_on: of the questions,
                       those that are training questions too; None: not evaluated
        reward, success                      mean and share over trajectories, last step
        agents, policies                     metrics by name, last step each was in
        max_prob_ratio, max_logprob_diff     largest trainer/engine disagreement of any policy at any step
        seconds        by phase: start-up, steps and evaluations together; "other" is time outside every phase
        background     seconds of work beside the phases: writing checkpoints, evaluations that ran beside a step
        startup_seconds                      from the start of the process to the end of start-up, last start
        peak_memory_gib                      of the process tree (see memory.tree_bytes)
        weight_sync_share                    of the seconds of the steps
        tokens_generated, tokens_trained, tokens_per_second (generated, over the seconds of generation)
        masked, skipped, restarts            counts by cause, policy and cause
        alarms                               episodes by metric (see `alarms.Episodes`)
        health         {masked, truncated, invalid, zero_advantage, found_nothing: {last, worst, worst_step}}: shares of a step
        refused        {step, problem} of a step that was not trained on, which stopped the run; None: there is none
        changes        settings with which the run went on other than before: {step: {key: [old, new]}}
    """

    def __init__(self, name: str, seed: int, steps: int):
        self._values: dict[str, Any] = {
            "name": name,
            "seed": seed,
            "status": RUNNING,
            "step": 0,
            "steps": steps,
            "evaluation": {SAMPLED: None, GREEDY: None},
            "reward": None,
            "success": None,
            "agents": {},
            "policies": {},
            **dict.fromkeys(LARGEST.values()),
            "seconds": {},
            "background": {},
            "startup_seconds": None,
            "peak_memory_gib": 0.0,
            "weight_sync_share": 0.0,
            "tokens_generated": 0,
            "tokens_trained": 0,
            "tokens_per_second": None,
            "masked": {},
            "skipped": {},
            "restarts": {},
            "alarms": {},
            "health": {},
            "refused": None,
            "changes": {},
        }
        self._first: dict[str, dict[str, Any]] = {}  # mode -> its evaluation before the first step
        self._step_seconds: dict[str, float] = {}
        self._episodes = Episodes()

    def add(self, line: dict[str, Any]) -> None:
        """Take in the next line of metrics.jsonl."""
        _add_counts(self._values["seconds"], line["seconds"])
        _add_counts(self._values["background"], line.get("background", {}))
        self._values["peak_memory_gib"] = max(self._values["peak_memory_gib"], line["peak_memory_gib"])
        getattr(self, f"_add_{line['kind']}")(line)

    def as_dict(self) -> dict[str, Any]:
        return self._values

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(self._values, indent=2, allow_nan=False) + "\n")

    def _add_start(self, line: dict[str, Any]) -> None:
        self._values["status"] = RUNNING
        self._values["startup_seconds"] = line["startup_seconds"]

    def _add_restart(self, line: dict[str, Any]) -> None:
        _add_counts(self._values["restarts"], {line["cause"]: 1})

    def _add_step(self, line: dict[str, Any]) -> None:
        values = self._values
        values["step"], values["reward"], values["success"] = line["step"], line["reward"], line["success"]
        values["agents"].update(line["agents"])
        values["policies"].update(line["policies"])
        for metric, key in LARGEST.items():
            seen = [values[key], *(policy.get(metric) for policy in line["policies"].values())]
            values[key] = max((value for value in seen if value is not None), default=None)
        for key in ("masked", "skipped"):
            _add_counts(values[key], line[key])
        begun, _ = self._episodes.add(line["step"], line["alarms"])
        _add_counts(values["alarms"], Counter(episode.metric for episode in begun))
        for kind in HEALTH if line.get("health") else ():
            last = share(line["health"][kind]["team"])
            worst = values["health"].get(kind)
            if worst is None or last > worst["worst"]:
                worst = {"worst": last, "worst_step": line["step"]}
            values["health"][kind] = worst | {"last": last}
        values["tokens_generated"] += line["tokens_generated"]
        values["tokens_trained"] += line["tokens_trained"]
        _add_counts(self._step_seconds, line["seconds"])
        spent = sum(self._step_seconds.values()) - self._step_seconds.get(CHECKPOINT, 0.0)
        generating = self._step_seconds.get(GENERATE, 0.0)
        values["weight_sync_share"] = self._step_seconds.get(WEIGHT_SYNC, 0.0) / spent if spent else 0.0
        values["tokens_per_second"] = values["tokens_generated"] / generating if generating else None

    def _add_evaluation(self, line: dict[str, Any]) -> None:
        if line["step"] == 0:
            self._first[line["mode"]] = line
        first = self._first.get(line["mode"])
        before = first if first and comparable(first, line) else None
        after = line if line["step"] > 0 else None
        self._values["evaluation"][line["mode"]] = {
            key: line[key] for key in ("step", "questions", "trained_on", "samples", "pass_questions")
        } | {
            figure: {"before": before and before[figure], "after": after and after[figure]} for figure in (*FIGURES, "pass_at_k")
        }
        _add_counts(self._values["masked"], line["masked"])
        _add_counts(self._values["alarms"], Counter(alarm["metric"] for alarm in line.get("alarms", ())))

    def _add_refused(self, line: dict[str, Any]) -> None:
        self._values["refused"] = {"step": line["step"], "problem": line["problem"]}
        _add_counts(self._values["masked"], line["masked"])

    def _add_change(self, line: dict[str, Any]) -> None:
        self._values["changes"].setdefault(str(line["step"]), {}).update(line["changes"])

    def _add_end(self, line: dict[str, Any]) -> None:
        self._values["status"] = line["status"]


def comparable(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two evaluations, lines of metrics.jsonl, differ in nothing but the policies."""
    return all(first[key] == second[key] for key in ("mode", "temperature", "top_p", "samples", "asked"))


def _add_counts(totals: dict[str, float], counts: Mapping[str, float]) -> None:
    for key, count in counts.items():
        totals[key] = totals.get(key, 0) + count
