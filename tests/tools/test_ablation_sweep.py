"""The replica's runs on the shipped tiny team: contexts, pairing, continuing, and the report."""

import json
import math
import subprocess
import sys

import pytest
import torch

from megatron_drmas.rollout.tokenizer import ChatTokenizer
from tools.ablation import sweep
from tools.ablation.contexts import SAMPLES, ContextStudy
from tools.ablation.replica import Replica, Settings, backward, row_advantages, turn_batch
from tools.ablation.replica_command import main, parse
from tools.ablation.replica_report import Part, write_report
from tools.ablation.tiny_lm import TinyLlama
from tools.ablation.variants import VARIANTS
from tools.ablation.warm_starts import warm_start

SETTINGS = Settings(warm_start=0, seed=0, questions=4, samples=8, updates=1, variant="agent", rate=5e-4, steps=4)


@pytest.fixture(scope="module")
def contexts(tiny_team):
    study = ContextStudy(tiny_team)
    return {split: study.draw(split, 8) for split in SAMPLES}


@pytest.fixture(scope="module")
def replica(tiny_team, contexts):
    return Replica(contexts, ChatTokenizer(str(tiny_team / "llama"), {}))


@pytest.fixture
def model(tiny_team):
    model = TinyLlama(tiny_team / "llama")
    for parameter in model.parameters:
        parameter.requires_grad_()
    return model


def test_contexts_are_the_workflow_s_own(contexts, tiny_team):
    tokenizer = ChatTokenizer(str(tiny_team / "llama"), {})
    assert any(context.prompt for of in contexts["train"] for context in of.kept)
    for of in contexts["train"]:
        assert len(of.kept) == len(of.lost) == SAMPLES["train"]
        for context in of.kept + of.lost:
            assert 1 <= len(context.valid) <= 2 and (context.prompt or len(context.valid) == 2)
        assert all(context.prompt is None for context in of.lost)
        for context in of.kept:
            if context.prompt:
                text = tokenizer.text(list(context.prompt))
                assert "answerer:" in text and any(answer in text for answer in of.answers)
        assert tokenizer.text(list(of.gold)).replace(" ", "") == f"<answer>{of.answers[0]}</answer>"


def test_a_rollout_has_every_trajectory_s_rows(replica, model):
    rollout = replica.rollout(model, SETTINGS, [0, 1, 2, 3], torch.Generator().manual_seed(0))
    batch, answers = rollout.batch, rollout.answers
    assert len(batch.trajectory.unique()) == 32 and batch.group.tolist() == (batch.trajectory // 8).tolist()
    assert int(answers.sum()) == len(rollout.calls) == len(rollout.responses.lists()) > 0
    answered = set(batch.trajectory[answers].tolist())
    assert all(
        reward == 0 for trajectory, reward in zip(batch.trajectory.tolist(), batch.reward.tolist()) if trajectory not in answered
    )
    last = dict(zip(batch.trajectory.tolist(), batch.turn.tolist()))
    assert all(batch.turn[answers] == torch.tensor([last[trajectory] for trajectory in batch.trajectory[answers].tolist()]))


def test_runs_that_differ_in_variant_see_the_same_first_batch(replica, tiny_team):
    runs = [
        replica.run(tiny_team / "llama", Settings(**{**SETTINGS.__dict__, "variant": variant}))
        for variant in ("agent", "group_step")
    ]
    for column in ("reward", "called", "called_match", "factor", "entropy"):
        assert runs[0][column][0] == runs[1][column][0]
    assert runs[0]["norm"] != runs[1]["norm"]
    again = replica.run(tiny_team / "llama", SETTINGS)
    assert {**again, "seconds": 0} == {**runs[0], "seconds": 0}


def test_mini_batches_share_out_the_whole_gradient(replica, model):
    """At the policy that sampled, token means of parts add up to the whole's when weighed by their tokens."""
    rollout = replica.rollout(model, SETTINGS, [0, 1, 2, 3], torch.Generator().manual_seed(1))
    advantages = row_advantages(rollout.batch, "group_step")[rollout.answers]
    rows = torch.arange(len(advantages))
    lengths = rollout.responses.lengths.double()

    def gradient(part):
        backward(model, rollout, advantages, part, ratios=True)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters])

    whole = gradient(rows)
    parts = sum(gradient(part) * float(lengths[part].sum() / lengths.sum()) for part in rows.tensor_split(3))
    assert whole.norm() > 0 and (whole - parts).norm() <= 1e-4 * whole.norm()


def test_trajectory_weighting_gives_all_rows_of_a_trajectory_its_mean_score():
    rows = [(trajectory, turn, turn % 2, (trajectory, turn) != (0, 3)) for trajectory in range(5) for turn in range(8)]
    advantages = row_advantages(turn_batch(rows, [0] * 5, [0.0] * 5), "group_trajectory").view(5, 8)
    assert torch.allclose(advantages[0], torch.tensor(-4 / math.sqrt(5)), atol=1e-3)
    assert torch.allclose(advantages[1:], torch.tensor(1 / math.sqrt(5)), atol=1e-3)


def test_the_whole_experiment_is_ordered_so_that_what_is_finished_is_paired():
    runs = list(sweep.plan(parse([])))
    assert len(runs) == len(set(runs)) == 10 * 3 * 2 * 2 * 4 * 5
    of_one_pair = len(runs) // 60
    pairs = [
        {(run.seed, run.updates, run.warm_start) for run in runs[start : start + of_one_pair]}
        for start in range(0, len(runs), of_one_pair)
    ]
    assert all(len(pair) == 1 for pair in pairs)
    order = [pair.pop() for pair in pairs]
    assert order == sorted(order)


def test_results_go_on_where_they_stopped(tmp_path):
    sweep.append_result(tmp_path, {"settings": {"seed": 0}})
    with open(tmp_path / sweep.RESULTS, "a") as file:
        file.write('{"settings": {"se')  # a crash while it wrote
    assert sweep.read_results(tmp_path) == [{"settings": {"seed": 0}}]
    sweep.append_result(tmp_path, {"settings": {"seed": 1}})
    assert [result["settings"]["seed"] for result in sweep.read_results(tmp_path)] == [0, 1]


def fake_result(settings, dev, held_out):
    match = {split: {"sampled": value, "greedy": value} for split, value in (("dev", dev), ("eval", held_out))}
    columns = {name: [0.5] * settings.steps for name in ("reward", "called_match", "zero", "squared", "entropy", "norm")}
    return {
        "settings": settings.__dict__,
        "seconds": 1.0,
        "evaluations": match,
        "signal": 0.25,
        **columns,
        "factor": [2.5, None, 2.25, 2.0][: settings.steps],
    }


def test_the_report_pairs_by_seed_and_chooses_rates_on_dev(tmp_path, tiny_team):
    args = parse(
        [
            "--out",
            str(tmp_path),
            "--tiny-team",
            str(tiny_team),
            "--seeds",
            "0",
            "1",
            "--warm-starts",
            "0",
            "--variants",
            "agent",
            "group_step",
            "--rates",
            "1e-3",
            "2e-3",
            "--sizes",
            "4x8",
            "--updates",
            "1",
            "--steps",
            "4",
        ]
    )
    for settings in sweep.plan(args):
        gain = 0.25 if settings.variant == "agent" else 0.125 * settings.seed
        dev = settings.rate if settings.variant == "agent" else -settings.rate
        sweep.append_result(tmp_path, fake_result(settings, dev, gain + settings.rate))
    stranger = Settings(0, 0, 4, 8, 1, "agent", 0.5, steps=4)
    sweep.append_result(tmp_path, fake_result(stranger, 9.0, 9.0))
    text = write_report(args)
    # agent at 0.002: 0.252; group at 0.001: 0.001 and 0.126
    assert "| μ_k, σ_k | 0.002 | 2 | 0.252 ± 0.000 |" in text
    assert "| μ, σ (by call) | 0.001 | 2 | 0.064 ± 0.794 | 0.064 ± 0.794 | +0.189 ± 0.794 | +0.189 |" in text
    assert "| 2.5 – 2 | 50% | 0.50 / 0.50 | 0.00 | 0.25 |" in text
    assert "9.0" not in text, "a rate that was not asked for"
    assert (tmp_path / "replica.png").exists() and (tmp_path / "replica.md").read_text() == text


def test_a_rate_that_some_pairs_lack_cannot_win_by_it():
    def result(dev):
        return {"evaluations": {"dev": {"sampled": dev}}}

    part = Part(4, 8, 1, {("agent", 1e-3): {(0, 0): result(0.6), (0, 1): result(0.2)}, ("agent", 2e-3): {(0, 0): result(0.5)}})
    assert part.best_rate("agent") == 1e-3


def test_the_command_runs_only_what_is_missing(tmp_path, tiny_team, contexts, capsys, monkeypatch):
    trained = []

    class Recorded(Replica):
        def run(self, folder, settings):
            trained.append(settings)
            return fake_result(settings, 0.5, 0.5)

    monkeypatch.setattr("tools.ablation.replica.Replica", Recorded)
    monkeypatch.setattr("tools.ablation.contexts.load_contexts", lambda tiny_team, path: contexts)
    monkeypatch.setattr("tools.ablation.warm_starts.warm_start", lambda tiny_team, out, seed: tiny_team / "llama")
    options = ["--out", str(tmp_path), "--tiny-team", str(tiny_team), "--warm-starts", "0"]
    options += ["--rates", "1e-3", "--sizes", "4x8", "--updates", "1", "--steps", "4"]
    main([*options, "--seeds", "0"])
    assert [run.variant for run in trained] == list(VARIANTS)
    main([*options, "--seeds", "0", "1"])
    assert [run.seed for run in trained] == [0] * 5 + [1] * 5
    assert "μ_k, σ_k" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option, value, said",
    [
        ("--sizes", "16", "16x64"),
        ("--sizes", "4x1", "two samples"),
        ("--rates", "nan", "not a number"),
        ("--keep", "1.5", "not a number in [0, 1]"),
        ("--seeds", "-1", "not a whole number of at least 0"),
        ("--variants", "best", "invalid choice"),
    ],
)
def test_a_wrong_option_is_refused(option, value, said, capsys):
    with pytest.raises(SystemExit):
        parse([option, value])
    assert said in capsys.readouterr().err


def test_a_result_is_strict_json(replica, tiny_team):
    result = replica.run(tiny_team / "llama", SETTINGS)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_a_warm_start_is_made_once_and_weakens_the_policy(tiny_team, tmp_path, repository):
    script = (
        "import sys; from pathlib import Path; import tools.ablation.warm_starts as made; made.STEPS = 6; made.BATCH = 4; "
        "print(made.warm_start(Path(sys.argv[1]), Path(sys.argv[2]), 7))"
    )
    command = [sys.executable, "-c", script, str(tiny_team), str(tmp_path)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "warm_starts" / "7"
    assert done.stdout.strip() == str(folder) and [of.name for of in folder.parent.iterdir()] == ["7"]
    before, after = TinyLlama(tiny_team / "llama").weights, TinyLlama(folder).weights
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    assert warm_start(tmp_path / "no team", tmp_path, 7) == folder, "what is there is not made again"


def test_a_run_in_which_answer_never_speaks_learns_nothing(replica, tiny_team, model):
    result = replica.run(tiny_team / "llama", Settings(**{**SETTINGS.__dict__, "keep": 0.0}))
    assert result["called"] == [0] * 4 and result["norm"] == [0.0] * 4 and result["signal"] is None
    assert result["called_match"] == result["factor"] == result["zero"] == [None] * 4
    assert result["evaluations"]["eval"] == replica.evaluate(model, "eval")
