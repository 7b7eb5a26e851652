"""The bandit: the lemma by formula, by enumeration and in the project's own statistics, and what it learns."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.algorithm.early_warning import agent_statistics
from tools.ablation.bandit import CELLS, Task, baseline_growth, call_advantages, enumerate_batches, learn, lemma_factor
from tools.ablation.replica import turn_batch

SHARES = st.floats(0.02, 0.98)


@given(SHARES, SHARES, st.sampled_from([0.0, 0.25, 1.0]))
def test_the_lemma_s_factor_is_what_enumeration_gives(gate, accuracy, otherwise):
    of = enumerate_batches(gate, accuracy, otherwise, samples=3)
    assert of.factor == pytest.approx(lemma_factor(gate, accuracy, otherwise), rel=1e-9)
    assert of.growth == pytest.approx(baseline_growth(gate, accuracy, otherwise), rel=1e-9)
    assert of.bias < 1e-12, "a constant baseline leaves the mean gradient"


@given(SHARES, SHARES)
def test_the_factor_of_a_gate_whose_others_return_0(gate, accuracy):
    expected = (1 - accuracy + (1 - gate) ** 2 * accuracy) / (gate * (1 - gate * accuracy))
    assert lemma_factor(gate, accuracy, 0.0) == pytest.approx(expected, rel=1e-9)
    assert gate > 1 / 3 or expected >= 2


def test_a_gate_that_lets_all_pass_changes_nothing():
    assert lemma_factor(1.0, 0.4, 0.0) == pytest.approx(1.0) and baseline_growth(1.0, 0.4, 0.0) == 1.0


@given(st.lists(st.lists(st.sampled_from([0, 1, 2]), min_size=4, max_size=4), min_size=1, max_size=5))
def test_the_project_s_own_factor_is_the_mean_over_calls_of_the_batch_s(outcomes):
    """Outcomes: 0 stopped at the gate, 1 wrong, 2 right."""
    returns = torch.tensor(outcomes).eq(2).double()
    called = torch.tensor(outcomes) > 0
    rows = [(number, 0, 0, True) for number in range(returns.numel())]
    rows += [(number, 1, 1, True) for number, passed in enumerate(called.flatten().tolist()) if passed]
    batch = turn_batch(rows, [place for place, of in enumerate(outcomes) for _ in of], returns.flatten().tolist())
    statistics = agent_statistics(batch)[1]
    variance = returns.var(1, correction=0)
    watched = called & (variance > 0)[:, None]
    if not watched.any():
        assert "baseline_inflation" not in statistics
        return
    squares = (returns - returns.mean(1, keepdim=True)).square() / torch.where(variance > 0, variance, 1.0)[:, None]
    assert statistics["baseline_inflation"] == pytest.approx(float(squares[watched].mean()), rel=1e-6)


def test_agent_wise_rows_are_zero_where_a_cell_has_no_spread_and_else_at_least_a_half():
    of = enumerate_batches(0.35, 0.55, 0.0)
    nonzero = {label: of.second_moment[label] / (1 - of.zero[label]) for label in CELLS}
    assert 0.5 <= nonzero["μ_k, σ_k"] < nonzero["μ, σ"]
    assert of.zero["μ_k, σ_k"] > of.zero["μ, σ"]


def test_advantages_are_of_the_calls_and_of_all_trajectories():
    returns, called = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64), torch.tensor([[True, True, False, False]])
    assert call_advantages(returns, called, "group", "group").tolist() == [
        [pytest.approx(1.5, rel=1e-5), pytest.approx(-0.5, rel=1e-5), 0.0, 0.0]
    ]
    half = 2**-0.5
    assert call_advantages(returns, called, "agent", "agent").tolist() == [
        [pytest.approx(half, rel=1e-5), pytest.approx(-half, rel=1e-5), 0.0, 0.0]
    ]


def test_the_sign_decides_what_the_group_s_baseline_does():
    reward = {}
    for otherwise in (0.0, 1.0):
        for label in ("μ, σ", "μ_k, σ_k"):
            reward[otherwise, label] = learn(Task(otherwise=otherwise), *CELLS[label], 0.03, 4).reward[:, -1]
    assert (reward[0.0, "μ_k, σ_k"] > reward[0.0, "μ, σ"]).all() and (reward[1.0, "μ_k, σ_k"] < reward[1.0, "μ, σ"]).all()


def test_a_seed_s_run_does_not_depend_on_the_others():
    few, more = (learn(Task(steps=20), "agent", "agent", 0.1, seeds) for seeds in (1, 3))
    torch.testing.assert_close(few.reward[0], more.reward[0])
    assert not torch.equal(more.reward[0], more.reward[1])


def test_the_command_writes_table_figure_and_data(tmp_path, repository):
    command = [
        sys.executable,
        "-m",
        "tools.reproduce_ablation",
        "--bandit",
        "--seeds",
        "2",
        "--steps",
        "8",
        "--rates",
        "0.1",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (tmp_path / "bandit.md").read_text().strip() and "| 2.414418 | 2.414418 |" in done.stdout
    assert (tmp_path / "bandit.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (tmp_path / "bandit.svg").read_text()
    assert len(json.loads((tmp_path / "bandit.json").read_text())) == 8
