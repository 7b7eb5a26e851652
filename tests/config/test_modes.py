"""--print looks at nothing, --check at everything; neither starts a process or leaves a file."""

import sys

import pytest
import yaml

from megatron_drmas import evaluate, sft, train
from tools.tiny_team.models import POLICIES, build_model, save_policy


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    folder = tmp_path_factory.mktemp("team")
    for policy in POLICIES:
        save_policy(build_model(policy, seed=0), folder / policy)
    (folder / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    (folder / "eval.jsonl").write_text('{"question": "other", "answer": "a"}\n')
    (folder / "corpus.jsonl").write_text('{"id": "0", "contents": "c"}\n')
    (folder / "dialogues.jsonl").write_text('{"prompt": "q", "response": "a"}\n')
    return folder


@pytest.fixture
def run(team, monkeypatch, capsys, tmp_path):
    """A command in this process: exit code, output, errors."""

    def done(command, *arguments):
        models = (
            [f"policy.model={team}/qwen2", f"data={team}/dialogues.jsonl", "steps=20"]
            if command is sft
            else [f"variables.tiny_team={team}"]
        )
        monkeypatch.setattr(sys, "argv", ["command", f"output_dir={tmp_path}/out", *models, *arguments])
        code = command.main()
        assert not (tmp_path / "out").exists(), "a dry run leaves nothing"
        out, err = capsys.readouterr()
        return code, out, err

    return done


@pytest.mark.parametrize(
    "command, file", [(train, "data.train=/none"), (evaluate, "policies.llama.model=/none"), (sft, "data=/none")]
)
def test_printing_looks_at_no_file_and_checking_does(run, command, file):
    code, out, err = run(command, "--print", file)
    assert code == 0 and err == "" and "not looked at" in out.splitlines()[0] and "/none" in str(yaml.safe_load(out))
    assert run(command, "--check")[0] == 0
    code, out, err = run(command, "--check", file)
    assert code == 2 and out == "" and err.count("\n") == 1 and file.partition("=")[0] in err


def test_what_a_run_checks_first_is_checked(run):
    frozen = [f"policies.{policy}.trainable=false" for policy in ("qwen2", "llama")]
    assert run(train, "--print", *frozen)[0] == 0
    code, _, err = run(train, "--check", *frozen)
    assert code == 2 and "team.agents" in err
    assert run(evaluate, "--check", *frozen)[0] == 0


def test_a_machine_without_the_gpus_is_a_warning(run):
    code, _, err = run(train, "--check", "cluster.gpus_per_node=64")
    assert code == 0 and "warning: cluster.gpus_per_node = 64: torch sees" in err


def test_evaluation_on_training_questions_is_a_warning(run, team):
    code, _, err = run(train, "--check", f"data.eval={team}/train.jsonl")
    assert code == 0 and "train: warning: data.eval" in err and "all 1 questions are training questions" in err


def test_sft_takes_recipes_of_ones_own(run, tmp_path):
    (tmp_path / "ours.yaml").write_text("defaults:\n  - sft\n  - _self_\nbatch_size: 3\n")
    code, out, _ = run(sft, "--print", "--config-dir", str(tmp_path), "--config-name", "ours")
    assert code == 0 and yaml.safe_load(out)["batch_size"] == 3
    code, _, err = run(sft, "--print", "--config-dir", str(tmp_path), "--config-name", "none")
    assert code == 2 and "ours, sft" in err and str(tmp_path) in err


def test_print_and_check_exclude_each_other(run):
    with pytest.raises(SystemExit, match="2"):
        run(train, "--print", "--check")
