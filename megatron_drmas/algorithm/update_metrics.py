"""Metrics of a step's updates: one per policy, or with `algorithm.sequential` one per agent."""

import math

from megatron_drmas.algorithm.teamtr import certificate
from megatron_drmas.batch import TurnBatch
from megatron_drmas.kernels.segments import dense_index

SUMMED = ("tokens", "skipped", "optimizer_steps", "certificate")
LARGEST = ("grad_norm_max", "logprob_diff_max")
OF_STEPS = ("loss", "gradient_mass", "grad_norm")  # means over optimizer steps; all others are means over tokens
LATEST = ("lr",)
TRUST_REGION = ("message_kl", "message_kl_bound", "beta", "surrogate_gain", "certificate")


def stage_metrics(metrics: dict[str, dict], batch: TurnBatch) -> dict[str, dict]:
    """What the actors report of a stage; under TeamTR the update's figures become those of the agent that it was for.

    Such an agent gets grad_norm and grad_norm_max, message_kl, message_kl_bound and beta, surrogate_gain (the mean over all
    trajectories of the batch, those included in which the agent did not speak) and certificate (see `teamtr.certificate`).
    Its policy gets the certificate too.

    Args:
        metrics: of the actors, by policy.
        batch: all rows that the stage sampled, with advantages.
    """
    for values in metrics.values():
        if "message_kl" in values:
            trajectories = dense_index(batch.group, batch.trajectory)[0].unique().numel()
            largest, calls = float(batch.filled("advantages").abs().max()), int(batch.turn.max()) + 1
            values["surrogate_gain"] = values.pop("surrogate") / trajectories
            values["certificate"] = certificate([values["surrogate_gain"]], [values["message_kl_bound"]], largest, calls)
            (agent,) = values["agents"]
            values["agents"][agent] |= {key: values[key] for key in ("grad_norm", "grad_norm_max")}
            values["agents"][agent] |= {key: values[key] if key == "certificate" else values.pop(key) for key in TRUST_REGION}
    return metrics


def merge_metrics(earlier: dict[str, dict], later: dict[str, dict]) -> dict[str, dict]:
    """Metrics by policy of all updates so far.

    Of a policy that was updated twice counts and certificates add up, maxima are the larger, lr is the later one's, and means
    are those of all tokens or optimizer steps.
    """
    return earlier | {
        policy: _merge(earlier[policy], values) if policy in earlier else values for policy, values in later.items()
    }


def _merge(a: dict, b: dict) -> dict:
    merged = {"nonfinite_agents": sorted({*a["nonfinite_agents"], *b["nonfinite_agents"]}), "agents": a["agents"] | b["agents"]}
    for key in b.keys() - merged.keys():
        if key in SUMMED:
            merged[key] = a[key] + b[key]
        elif key in LATEST:
            merged[key] = b[key]
        elif key in LARGEST:
            merged[key] = max((value for value in (a[key], b[key]) if not math.isnan(value)), default=math.nan)
        else:
            weight = "optimizer_steps" if key in OF_STEPS else "tokens"
            shares = [(values[key], values[weight]) for values in (a, b) if values[weight]]
            merged[key] = sum(value * share for value, share in shares) / sum(share for _, share in shares) if shares else b[key]
    return merged
