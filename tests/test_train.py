"""Whole runs of the tiny team: real actors, engines, retrieval and weight updates."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_drmas.observability.metrics import metric_of
from megatron_drmas.observability.tensorboard import scalars

SMALL = [
    "questions_per_step=4",
    "group_size=4",
    "evaluation.before=false",
    "evaluation.after=false",
    "checkpoint.every=0",
    "deterministic=true",
]


@pytest.fixture(scope="module")
def train(tiny_team, tmp_path_factory, repository):
    """Run the command; returns the run folder."""
    output_dir = tmp_path_factory.mktemp("runs")

    def run(name, *overrides):
        command = [
            sys.executable,
            "-m",
            "megatron_drmas.train",
            f"name={name}",
            f"output_dir={output_dir}",
            f"variables.tiny_team={tiny_team}",
        ]
        done = subprocess.run(
            [*command, *SMALL, *overrides], cwd=repository, capture_output=True, text=True, env={**os.environ, "RAY_ADDRESS": ""}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return output_dir / name

    return run


def steps(run_dir):
    """What each step measured, without its times; all of it is in the table of metrics."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = {tag for line in lines if line["kind"] in ("step", "evaluation") for tag in scalars(line)}
    assert [tag for tag in logged if metric_of(tag) is None] == []
    return {
        line["step"]: {key: line[key] for key in ("reward", "agents", "policies", "tokens_generated")}
        for line in lines
        if line["kind"] == "step"
    }


@pytest.mark.timeout(900)
def test_a_run_that_is_continued_equals_an_undisturbed_one_bit_for_bit(train):
    """What is on the disk after two steps, and a process of its own, make the third step of the run that went on."""
    settings = ("steps=3", "checkpoint.every=2")
    run_dir = train("run", *settings)
    undisturbed = Path(shutil.copytree(run_dir, run_dir.with_name("undisturbed")))
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    shutil.rmtree(run_dir / "checkpoints" / "step_000003")
    shutil.rmtree(run_dir / "hf")
    (run_dir / "trajectories" / "step_000003.jsonl").unlink()
    continued = train("run", *settings)
    assert steps(continued) == steps(undisturbed) and len(steps(continued)) == 3
    for step in (1, 2, 3):
        name = f"trajectories/step_{step:06d}.jsonl"
        assert (continued / name).read_text() == (undisturbed / name).read_text()
    exported = list(undisturbed.glob("hf/*/*.safetensors"))
    assert len(exported) >= 2
    for weights in exported:
        assert (continued / weights.relative_to(undisturbed)).read_bytes() == weights.read_bytes()
    summary = json.loads((continued / "summary.json").read_text())
    assert (
        summary["restarts"]
        and summary["status"] == "finished"
        and summary["max_prob_ratio"] <= 1.01
        and summary["max_logprob_diff"] <= 1e-3
    )
    from transformers import AutoModelForCausalLM

    from megatron_drmas.rollout.tokenizer import load_tokenizer

    for folder in (continued / "hf").iterdir():
        assert AutoModelForCausalLM.from_pretrained(folder).dtype.itemsize == 4 and load_tokenizer(str(folder)).chat_template
