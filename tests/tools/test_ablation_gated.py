"""The gated team's runs by the project: their settings, what counts as finished, and the report."""

import json

import pytest

from megatron_drmas.config.load import compose_config
from megatron_drmas.config.validate import validate
from tools.ablation import gated_command as gated
from tools.ablation.command import keep_arguments


def arguments(tmp_path, *options):
    return gated.parse(["--out", str(tmp_path), "--tiny-team", str(tmp_path / "team"), "--steps", "2", *options])


def write_run(tmp_path, name, returns, steps=2, match=0.5):
    folder = tmp_path / "gated" / name
    (folder / "hf" / "answer").mkdir(parents=True)
    (folder / "hf" / "answer" / "config.json").write_text("{}")
    (folder / "answer_match.json").write_text(json.dumps({"sampled": match, "greedy": match}))
    lines = [
        {
            "kind": "step",
            "step": step + 1,
            "reward": 0.1,
            "skipped": {},
            "policies": {"answer": {"grad_norm": 1.5 + step}},
            "agents": {"search": {}, "answer": {"baseline_inflation": 2.5, "return_mean": returns}},
        }
        for step in range(steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("precision", ["fp32", "fp8_emulated"])
def test_a_run_s_settings_are_a_valid_configuration(tmp_path, precision):
    args = arguments(tmp_path)
    name, *overrides = gated.settings(args, tmp_path / "answer", precision, "group_step", 5e-4, 3)[1:]
    config = compose_config(name, overrides)
    validate(config, files=False)
    assert (config.seed, config.precision.mode, config.policies["answer"].optimizer.lr) == (3, precision, 5e-4)
    assert (config.algorithm.advantage.mean, config.algorithm.advantage.std) == ("group", "group")
    assert not config.policies["search"].trainable and config.policies["answer"].trainable


def test_the_report_pairs_by_seed_and_takes_only_finished_runs(tmp_path):
    args = arguments(tmp_path, "--rates", "1e-3")
    for seed, match in ((0, 0.5), (1, 0.625)):
        write_run(tmp_path, gated.run_name("fp32", "group_step", 1e-3, seed), 0.25, match=match)
        write_run(tmp_path, gated.run_name("fp32", "agent", 1e-3, seed), 0.75, match=match + 0.125)
    write_run(tmp_path, gated.run_name("fp32", "agent", 1e-3, 2), 0.75, steps=1, match=0.0)
    text = gated.write_report(args, gated.Examiner(args))
    assert (
        "| fp32 | 0.001 | μ, σ (by call) | 2 | 0.562 ± 0.794 | 0.562 ± 0.794 | 0.250 ± 0.000 | – | 2.00 / 2.50 | 2.50 2.50 2.50 |"
        in text
    )
    assert "| fp32 | 0.001 | μ_k, σ_k | 2 | 0.688 ± 0.794 | 0.688 ± 0.794 | 0.750 ± 0.000 | +0.125 ± 0.000 |" in text
    assert (tmp_path / "gated.md").read_text() == text and (tmp_path / "gated.png").exists()
    assert set(json.loads((tmp_path / "gated.json").read_text())) == {"fp32/0.001/group_step", "fp32/0.001/agent"}


def test_finished_runs_are_not_started_again(tmp_path, monkeypatch):
    args = arguments(tmp_path, "--rates", "1e-3", "--seeds", "0")
    write_run(tmp_path, gated.run_name("fp32", "group_step", 1e-3, 0), 0.25)
    started = []

    def train(runs, name, settings, advance):
        started.append(name)
        write_run(tmp_path, name, 0.5)

    monkeypatch.setattr(gated, "train_run", train)
    monkeypatch.setattr(gated, "warm_start", lambda tiny_team, out, seed: tmp_path)
    with gated.progress_bars() as bars:
        gated._run_all(args, gated.Examiner(args), bars)
    assert started == [gated.run_name("fp32", "agent", 1e-3, 0)]


def test_a_folder_of_other_arguments_is_refused(tmp_path):
    saved = tmp_path / "gated" / "arguments.json"
    keep_arguments(saved, arguments(tmp_path), ("warm_start", "steps"))
    keep_arguments(saved, arguments(tmp_path), ("warm_start", "steps"))
    with pytest.raises(SystemExit, match="made with --warm-start 0, not 1; choose another --out"):
        keep_arguments(saved, arguments(tmp_path, "--warm-start", "1"), ("warm_start", "steps"))
