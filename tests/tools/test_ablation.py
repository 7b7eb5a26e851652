"""The ablation's arithmetic, on runs made up here."""

import argparse
import json
import math

import pytest
import torch

from megatron_drmas.algorithm.advantages import check_advantage_config, compute_advantages
from megatron_drmas.batch import TurnBatch
from megatron_drmas.config.algorithm import AlgorithmConfig
from tools.ablation.report import write_figure, write_table
from tools.ablation.results import count_spikes, mean_and_error, read_run, summarize
from tools.ablation.ungated import frozen_results
from tools.ablation.variants import VARIANTS


def write_metrics(path, norms, skipped=0):
    lines = [
        {
            "kind": "step",
            "step": step + 1,
            "reward": 0.5,
            "skipped": {"p": skipped} if step == 0 and skipped else {},
            "policies": {"p": {"grad_norm": norm}},
            "agents": {"a": {"baseline_inflation": 2.0}, "b": {}},
        }
        for step, norm in enumerate(norms)
    ]
    lines += [
        {"kind": "evaluation", "step": 0, "mode": "sampled", "success": 0.0, "pass_at_k": 0.0},
        {"kind": "evaluation", "step": len(norms), "mode": "sampled", "success": 0.25, "pass_at_k": 0.5},
        {"kind": "evaluation", "step": len(norms), "mode": "greedy", "success": 0.75, "pass_at_k": 0.75},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_is_read(tmp_path):
    run = read_run(write_metrics(tmp_path / "metrics.jsonl", [1.0, None, 2.0], skipped=3))
    assert run.rewards == [0.5] * 3 and run.nonfinite == 3 and run.inflation == {"a": [2.0] * 3}
    assert math.isnan(run.grad_norms["p"][1])
    assert (run.exact_match, run.pass_at_k, run.greedy) == (0.25, 0.5, 0.75)


def test_spikes():
    assert count_spikes([1.0] * 10 + [5.1] + [1.0] * 3) == 1
    assert count_spikes([1.0] * 10 + [4.9]) == 0
    assert count_spikes([1.0, 100.0, 1.0]) == 0, "too early for a median"
    assert count_spikes([0.0] * 10 + [1.0] * 11) == 0, "no gradient is no norm"
    assert count_spikes([1.0] * 10 + [0.01] * 15 + [1.0]) == 0, "a median that has fallen near 0 makes no spikes"
    assert count_spikes([1.0] * 19 + [100.0] * 21) == 19, "an explosion that lasts is one: the floor knows no later steps"
    assert count_spikes([math.nan] * 6) == 0
    assert count_spikes([1.0] * 6 + [math.nan, 2000.0]) == 1


def test_standard_error():
    mean, error = mean_and_error([1.0, 2.0, 3.0])
    assert (mean, error) == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert mean_and_error([4.0]) == (4.0, 0.0) and math.isnan(mean_and_error([])[0])


def test_table_and_figure_are_written(tmp_path):
    runs = {"fp32": {name: [read_run(write_metrics(tmp_path / f"{name}.jsonl", [1.0, 2.0]))] * 2 for name in VARIANTS}}
    frozen = {name: {"grad_norm": {"p": {"mean": 0.5, "max": 1.5}}, "squared_advantage": {"a": 1.25}} for name in VARIANTS}
    trained = {"fp32": {name: summarize(of) for name, of in runs["fp32"].items()}}
    task = {"max_turns": 2, "factors": {"a": {"calls": 3.0, "single_calls": 1.0, "baseline_inflation": 2.5}}}
    write_table(tmp_path / "ablation.md", task, frozen, trained)
    text = (tmp_path / "ablation.md").read_text()
    assert "| a | 2.5 | 3.0 | 1.0 |" in text and "0.5 (1.5) | 1.25" in text
    assert "| μ_k, σ_k | 2 | 0.25 ± 0 | 0.75 ± 0 | 0 ± 0 | 2 ± 0 | 0 | 43.8 / 58.3 |" in text
    write_figure(tmp_path / "ablation.png", runs)
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
    write_table(tmp_path / "ablation.md", task, frozen, {})


def test_results_of_other_arguments_are_not_taken_for_ones_own(tmp_path):
    args = argparse.Namespace(out=tmp_path, tiny_team=tmp_path / "team", team="search_tiny", max_turns=2, frozen_batches=1)
    made = {"tiny_team": str(args.tiny_team), "team": "search_tiny", "max_turns": "4", "frozen_batches": "1"}
    (tmp_path / "frozen.json").write_text(json.dumps({"arguments": made, "max_turns": 4}))
    with pytest.raises(SystemExit, match="made with --max-turns 4, not 2; choose another --out"):
        frozen_results(args, None)
    args.max_turns = 4
    assert frozen_results(args, None)["max_turns"] == 4


def test_variants_are_valid_and_different():
    generator = torch.Generator().manual_seed(0)
    rows = 60
    trajectory = torch.arange(rows) // 3
    batch = TurnBatch(
        tokens=torch.zeros(2 * rows, dtype=torch.int64),
        offsets=torch.arange(rows + 1) * 2,
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        engine_logprobs=torch.zeros(rows),
        agent=torch.randint(0, 3, (rows,), generator=generator),
        policy=torch.zeros(rows, dtype=torch.int64),
        group=trajectory // 5,
        trajectory=trajectory,
        sample=trajectory % 5,
        turn=torch.arange(rows) % 3,
        reward=torch.randint(0, 2, (20,), generator=generator).float()[trajectory],
        valid=torch.rand(rows, generator=generator) > 0.1,
        trainable=torch.ones(rows, dtype=torch.bool),
        weight_versions=torch.zeros(rows, dtype=torch.int32),
        agents=("a", "b", "c"),
        policies=("p",),
        questions=("p", "q", "r", "s"),
    )
    results = []
    for variant in VARIANTS.values():
        check_advantage_config(variant.advantage)
        results.append(compute_advantages(batch, AlgorithmConfig(advantage=variant.advantage)))
        assert all(override.startswith("algorithm.advantage.") for override in variant.overrides)
    assert all(not torch.allclose(a, b) for i, a in enumerate(results) for b in results[:i])
