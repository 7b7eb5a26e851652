"""Metrics of a step in which policies are updated more than once."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.algorithm.teamtr import certificate
from megatron_drmas.algorithm.update_metrics import merge_metrics, stage_metrics


def update(tokens=10, steps=1, norm=1.0, agents=None, skipped=0, nonfinite=(), **values):
    return {
        "tokens": tokens,
        "skipped": skipped,
        "optimizer_steps": steps,
        "loss": norm / 2,
        "gradient_mass": norm,
        "grad_norm": norm,
        "grad_norm_max": norm,
        "entropy": float(tokens),
        "logprob_diff_max": norm,
        "lr": 0.1,
        "nonfinite_agents": list(nonfinite),
        "agents": agents or {0: {"entropy": 0.3}},
    } | values


def test_counts_add_up_maxima_are_kept_and_means_are_those_of_all_tokens_and_steps():
    first = update(tokens=30, steps=3, norm=999.0, skipped=1, nonfinite=[1])
    merged = merge_metrics(
        merge_metrics({}, {"writer": first}), {"writer": update(agents={1: {"entropy": 0.1}}, nonfinite=[0], lr=0.2)}
    )["writer"]
    assert (merged["tokens"], merged["skipped"], merged["optimizer_steps"], merged["nonfinite_agents"]) == (40, 1, 4, [0, 1])
    assert (merged["grad_norm"], merged["grad_norm_max"], merged["entropy"], merged["lr"]) == (749.5, 999.0, 25.0, 0.2)
    assert merged["agents"] == {0: {"entropy": 0.3}, 1: {"entropy": 0.1}}


def test_an_update_without_a_step_leaves_the_others_norm():
    nan = update(steps=0, norm=math.nan, skipped=1)
    for updates in ([nan, update(norm=2.0)], [update(norm=2.0), nan]):
        merged = merge_metrics({"writer": updates[0]}, {"writer": updates[1]})["writer"]
        assert merged["grad_norm"] == merged["grad_norm_max"] == 2.0 and merged["skipped"] == 1


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 4), st.floats(0, 10)), min_size=1, max_size=5))
def test_merging_one_by_one_is_the_whole(parts):
    merged = {}
    for tokens, steps, norm in parts:
        merged = merge_metrics(merged, {"writer": update(tokens, steps, norm)})
    tokens, steps = (sum(part[index] for part in parts) for index in (0, 1))
    assert merged["writer"]["entropy"] == pytest.approx(sum(part[0] ** 2 for part in parts) / tokens)
    assert merged["writer"]["grad_norm"] == pytest.approx(sum(part[1] * part[2] for part in parts) / steps)
    assert merged["writer"]["grad_norm_max"] == max(part[2] for part in parts)


def test_the_certificate_counts_the_trajectories_without_the_agent(make_batch):
    """Agent 1 speaks in one of eight trajectories."""
    batch = make_batch([0] * 8 + [1], [0] * 9, [*range(8), 7], [1.0] * 9)
    batch.advantages = torch.linspace(-2, 1, int(batch.response_lengths.sum()))
    trust = {"message_kl": 0.01, "message_kl_bound": 0.02, "beta": 0.5, "surrogate": 0.8}
    (values,) = stage_metrics({"writer": update(norm=3.0, agents={1: {"entropy": 0.1}}, **trust)}, batch).values()
    expected = certificate([0.1], [0.02], 2.0, 2)
    assert values["agents"] == {
        1: {
            "entropy": 0.1,
            "grad_norm": 3.0,
            "grad_norm_max": 3.0,
            "message_kl": 0.01,
            "message_kl_bound": 0.02,
            "beta": 0.5,
            "surrogate_gain": pytest.approx(0.1),
            "certificate": pytest.approx(expected),
        }
    }
    assert values["certificate"] == pytest.approx(expected) and "beta" not in values, "what is one agent's is not its policy's"
    both = merge_metrics({"writer": values}, {"writer": values | {"agents": {0: values["agents"][1]}}})["writer"]
    assert both["certificate"] == pytest.approx(2 * expected) and set(both["agents"]) == {0, 1}
