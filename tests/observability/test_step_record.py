"""What a step's log line says of its batch and of the actors' metrics."""

from dataclasses import replace

from megatron_drmas.algorithm.advantages import compute_advantages
from megatron_drmas.config.algorithm import AlgorithmConfig
from megatron_drmas.observability.alarms import Watch
from megatron_drmas.observability.records import plain
from megatron_drmas.rollout.collate import collate
from megatron_drmas.rollout.dynamic_sampling import NO_SIGNAL
from megatron_drmas.observability.step_record import step_record
from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Trajectory, Turn

AGENTS = ("search", "answer")


def turn(agent, index, valid=True):
    return Turn(agent, "writer", index, [], [5, 6], [7, 8, 1], [-0.1, -0.2, -0.3], 8, "stop", 0, "text", "text" if valid else None)


def trajectories():
    def one(sample, reward, turns, failure=None):
        question = Question("q", "what?", ("x",), "tests", {})
        return Trajectory(question, 0, sample, turns, reward=reward, failure=failure)

    return [
        one(0, 1.0, [turn("search", 0), turn("answer", 1)]),
        one(1, 0.0, [turn("search", 0, valid=False), turn("search", 1), turn("answer", 2)]),
        one(2, 0.0, [turn("search", 0)], failure="retrieval"),
    ]


def metrics(**values):
    return {"writer": {"tokens": 10, "loss": 0.5, "skipped": 0, "nonfinite_agents": [], "agents": {0: {"entropy": 0.3}}} | values}


def record(of_policies):
    batch = collate(trajectories(), AGENTS, ("writer",), set(AGENTS))
    batch.advantages = compute_advantages(batch, AlgorithmConfig())
    return step_record(1, trajectories(), batch, of_policies, tokens_generated=18)


def test_failed_trajectories_are_counted_and_count_for_nothing_else():
    step = record(metrics())
    assert step.reward == 0.5 and step.trajectories == 3 and step.masked == {"retrieval": 1}
    assert step.agents["search"]["calls_per_trajectory"] == 1.5 and abs(step.agents["search"]["invalid_rate"] - 1 / 3) < 1e-6
    assert step.agents["search"]["entropy"] == 0.3


def test_the_shares_of_a_step_are_counted_by_agent():
    """Returns 1 and 0 of one question: both agents learn, but search's valid and invalid rows differ from each other too."""
    step = record(metrics())
    assert step.health["masked"] == {"team": [1, 3], "agents": {"search": [1, 3], "answer": [0, 2]}}
    assert step.health["invalid"] == {"team": [1, 5], "agents": {"search": [1, 3], "answer": [0, 2]}}
    assert step.health["truncated"]["team"] == [0, 5] and step.health["rewarded"]["team"] == [1, 2]
    assert step.health["zero_advantage"] == {"team": [0, 5], "agents": {"search": [0, 3], "answer": [0, 2]}}
    assert step.agents["search"]["masked_rate"] == 1 / 3 and step.agents["answer"]["zero_advantage_rate"] == 0.0


def test_rows_without_an_advantage_are_counted_where_they_learn():
    same = [replace(each, reward=0.0, turns=[turn("search", 0), turn("answer", 1)], failure=None) for each in trajectories()]
    batch = collate(same, AGENTS, ("writer",), {"search"})
    batch.advantages = compute_advantages(batch, AlgorithmConfig())
    step = step_record(1, same, batch, metrics(), tokens_generated=18)
    assert step.health["zero_advantage"] == {"team": [3, 3], "agents": {"search": [3, 3]}}


def test_a_skipped_step_names_the_policy_and_the_agents_in_it():
    step = record(metrics(skipped=1, nonfinite_agents=[1]))
    assert step.skipped == {"writer": 1} and step.nonfinite == {"writer": ["answer"]}
    (alarm,) = Watch({"writer": list(AGENTS)}).check(plain(step))
    assert alarm["message"].startswith("step 1: policy writer (agents search, answer) skipped 1 optimizer step")
    assert alarm["message"].endswith("loss of answer")


def test_the_reward_is_that_of_all_questions_drawn():
    """Dynamic sampling replaces questions that every trajectory solves; the team earned their returns nevertheless."""
    drawn = trajectories()
    drawn += [replace(drawn[0], group=1, sample=sample, failure=NO_SIGNAL) for sample in range(3)]
    batch = collate(drawn, AGENTS, ("writer",), set(AGENTS))
    batch.advantages = compute_advantages(batch, AlgorithmConfig())
    step = step_record(1, drawn, batch, metrics(), tokens_generated=18)
    assert step.reward == 0.8 and step.masked == {"retrieval": 1, NO_SIGNAL: 3}
