"""Every recipe of configs/algorithm trains the tiny team, in emulated FP8 too."""

import json
import math
import os
import subprocess
import sys

import pytest

from megatron_drmas.config.load import CONFIG_DIR

RECIPES = sorted(path.stem for path in (CONFIG_DIR / "algorithm").glob("*.yaml"))
SMALL = (
    "steps=1",
    "questions_per_step=4",
    "group_size=4",
    "evaluation.before=false",
    "evaluation.after=false",
    "checkpoint.export=false",
)


@pytest.fixture(scope="module")
def train(tiny_team, tmp_path_factory, repository):
    """One training step; returns what it measured."""
    folder = tmp_path_factory.mktemp("recipes")

    def run(name, *overrides):
        command = [
            sys.executable,
            "-m",
            "megatron_drmas.train",
            f"name={name}",
            f"output_dir={folder}",
            f"variables.tiny_team={tiny_team}",
        ]
        done = subprocess.run(
            [*command, *SMALL, *overrides], cwd=repository, capture_output=True, text=True, env={**os.environ, "RAY_ADDRESS": ""}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        return next(line for line in lines if line["kind"] == "step")

    return run


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains(recipe, train):
    step = train(recipe, f"algorithm={recipe}")
    assert step["policies"] and not step["skipped"]
    for metrics in step["policies"].values():
        assert math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
        assert ("certificate" in metrics) == (recipe == "teamtr")
    for agent in step["agents"].values():
        assert ("certificate" in agent) == (recipe == "teamtr" and "tokens" in agent)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_emulated_fp8_trains(recipe, train):
    step = train(f"fp8_{recipe}", "precision=fp8_emulated", f"precision.fp8.recipe={recipe}")
    for metrics in step["policies"].values():
        assert math.isfinite(metrics["grad_norm"]) and metrics["prob_ratio"] > 1.0001, "the engines do not round"


@pytest.mark.slow
def test_a_kl_to_the_first_policy_and_a_verdict_credit(train):
    step = train("reference", "algorithm.loss.kl_coef=0.01", "algorithm.reward.verdict=0.1", "algorithm.updates_per_batch=2")
    assert all(metrics["kl_reference"] >= 0 for metrics in step["policies"].values())
