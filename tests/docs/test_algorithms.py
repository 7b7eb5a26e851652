"""docs/algorithms.md lists what is registered, and its example is what the code computes."""

import re

import pytest

from megatron_drmas.algorithm.advantages import compute_advantages
from megatron_drmas.algorithm.agent_statistics import agent_statistics
from megatron_drmas.algorithm.estimators import ESTIMATORS
from megatron_drmas.algorithm.losses import LOSSES
from megatron_drmas.config.algorithm import AdvantageConfig, AlgorithmConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.rollout.collate import collate
from megatron_drmas.team.trajectory import Trajectory, Turn

# Who speaks in each trajectory of the example's question, and what it returns.
EXAMPLE = (("search answer", 1.0), ("search answer", 0.0), ("search search", 0.0), ("search", 0.0))
COLUMNS = {
    ("group", "group", "step"): 1,
    ("agent", "group", "step"): 2,
    ("group", "agent", "step"): 3,
    ("agent", "agent", "step"): 4,
    ("group", "group", "trajectory"): 5,
}


@pytest.fixture(scope="module")
def page(repository) -> str:
    return (repository / "docs" / "algorithms.md").read_text()


@pytest.fixture(scope="module")
def batch():
    def turn(agent, index):
        return Turn(agent, "p", index, [], [1], [2], [0.0], 4, "stop", [(0, 1)], "x", "x")

    trajectories = [
        Trajectory(
            Question("q", "q", ("a",)), 0, sample, [turn(*each[::-1]) for each in enumerate(agents.split())], reward=reward
        )
        for sample, (agents, reward) in enumerate(EXAMPLE)
    ]
    return collate(trajectories, ("search", "answer"), ("p",), {"search", "answer"})


def table(page: str, title: str) -> list[list[str]]:
    """The rows of the first table after a heading, without its head."""
    lines = page.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


def test_presets(page, repository):
    presets = {path.stem for path in (repository / "configs" / "algorithm").glob("*.yaml")}
    named = [name for row in table(page, "Presets") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(presets)


def test_estimators_and_losses(page):
    advantages, losses = page.partition("## Advantages")[2].partition("## Losses")[::2]
    assert all(f"`{name}`" in advantages for name in ESTIMATORS)
    assert all(f"- `{name}`" in losses for name in LOSSES)


def test_example(page, batch):
    rows = table(page, "An example")
    assert len(rows) == len(batch)
    for (mean, std, weighting), column in COLUMNS.items():
        config = AlgorithmConfig(advantage=AdvantageConfig(mean=mean, std=std, weighting=weighting), invalid_penalty=0.0)
        shown = [float(row[column].replace("−", "-")) for row in rows]
        assert compute_advantages(batch, config).tolist() == pytest.approx(shown, abs=0.0051), (mean, std, weighting)


def test_example_s_factors(page, batch):
    shown = re.search(r"factor is ([\d.]+) for Search and ([\d.]+) for Answer", " ".join(page.split()))
    found = [each["baseline_inflation"] for each in agent_statistics(batch)]
    assert [float(value) for value in shown.groups()] == pytest.approx(found, abs=0.0051)
