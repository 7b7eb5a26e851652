"""What a step's log line says of its batch and of the actors' metrics."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.algorithm.advantages import compute_advantages
from megatron_drmas.algorithm.scores import row_scores
from megatron_drmas.config.algorithm import AlgorithmConfig
from megatron_drmas.config.load import compose_config
from megatron_drmas.data.questions import Question
from megatron_drmas.observability.alarms import Watch
from megatron_drmas.observability.records import plain
from megatron_drmas.rollout.collate import collate
from megatron_drmas.rollout.dynamic_sampling import NO_SIGNAL
from megatron_drmas.step_record import Stage, chosen, merge_metrics, merge_stages, step_record, trajectory_records
from megatron_drmas.team.trajectory import Outcome, Trajectory, Turn

AGENTS = ("search", "answer")


def turn(agent, index, valid=True):
    return Turn(
        agent, "writer", index, [], [5, 6], [7, 8, 1], [-0.1, -0.2, -0.3], 8, "stop", [(0, 3)], "text", "text" if valid else None
    )


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


def record(of_policies):
    batch = collate(trajectories(), AGENTS, ("writer",), set(AGENTS))
    batch.advantages = compute_advantages(batch, AlgorithmConfig())
    return step_record(1, stage(trajectories(), batch, of_policies))


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
    step = step_record(1, stage(same, batch, metrics()))
    assert step.health["zero_advantage"] == {"team": [3, 3], "agents": {"search": [3, 3]}}


def test_a_skipped_step_names_the_policy_and_the_agents_in_it():
    step = record(metrics(skipped=1, nonfinite_agents=[1]))
    assert step.skipped == {"writer": 1} and step.nonfinite == {"writer": ["answer"]}
    (alarm,) = Watch({"writer": list(AGENTS)}).check(plain(step))
    assert alarm["message"].startswith("step 1: policy writer (agents search, answer) skipped 1 optimizer step")
    assert alarm["message"].endswith("loss of answer")


class Letters:
    def prompt_text(self, ids):
        return "".join(f"<{token}>" for token in ids)


def configured(*overrides):
    return compose_config("search_hetero", list(overrides))


def stage(drawn, batch, reported, version=0):
    return Stage(drawn, batch, reported, version - batch.weight_versions)


def collated(drawn, learners=AGENTS):
    batch = collate(drawn, AGENTS, ("writer",), set(learners))
    batch.advantages = compute_advantages(batch, AlgorithmConfig())
    return batch


def test_a_trajectory_is_kept_with_everything_that_was_made_of_it():
    drawn = trajectories()
    drawn[0].outcome = Outcome("x", {"searches": 2, "odd": {1, 2}})
    drawn[0].success = True
    drawn[2].failure_detail = "500"
    batch = collated(drawn, learners=["answer"])
    kept = trajectory_records(drawn, configured(), {"writer": Letters()}, batch)
    first, second, failed = map(plain, kept)
    assert (first["question_id"], first["group"], first["sample"], first["reward"], first["success"], first["answer"]) == (
        "q",
        0,
        0,
        1.0,
        True,
        "x",
    )
    assert first["info"] == {"searches": 2, "odd": repr({1, 2})} and first["masked"] is None
    turn = first["turns"][1]
    assert (turn["prompt"], turn["finish_reason"], turn["weight_versions"], turn["response_tokens"]) == (
        "<5><6>",
        "stop",
        [[0, 3]],
        3,
    )
    assert (
        turn["logprob_mean"] == pytest.approx(-0.2) and turn["logprob_min"] == pytest.approx(-0.3) and turn["prompt_ids"] is None
    )
    assert [turn["trained"] for turn in first["turns"]] == [False, True]
    rows = iter(range(len(batch)))
    scores = row_scores(batch, configured().algorithm)
    for trajectory in (first, second):
        for turn in trajectory["turns"]:
            row = next(rows)
            assert (
                turn["score"] == pytest.approx(scores[row].item())
                and turn["advantage"] == batch.advantages[batch.response_offsets[row]].item()
            )
    assert second["turns"][0]["score"] < second["turns"][1]["score"], "the invalid output's penalty"
    assert failed["masked"] == "retrieval: 500" and failed["turns"][0]["score"] is None


def test_token_ids_are_kept_on_request():
    (turn,) = trajectory_records(trajectories()[2:], configured("logging.token_ids=true"), {"writer": Letters()})[0].turns
    assert (turn.prompt_ids, turn.response_ids) == ([5, 6], [7, 8, 1])
    assert turn.logprobs == pytest.approx([-0.1, -0.2, -0.3])


@given(st.lists(st.sampled_from([None, None, None, "retrieval", "engine"]), max_size=60), st.none() | st.integers(0, 20))
def test_as_many_are_kept_as_asked_for_in_their_order_and_every_failure_is_among_them(failures, most):
    drawn = [
        Trajectory(Question(str(number), "?", ("x",)), number, 0, failure=failure) for number, failure in enumerate(failures)
    ]
    kept = chosen(drawn, most)
    assert kept == sorted(set(kept)) and len(kept) == min(len(drawn), len(drawn) if most is None else most)
    if most is None or most >= 2:
        assert {drawn[number].failure for number in kept} - {None} == set(failures) - {None}
    if most and len(drawn) > most and not any(failures):
        assert max(after - before for before, after in pairwise([*kept, len(drawn)])) <= len(drawn) // most + 1


def test_all_stages_of_a_step_count():
    """Under algorithm.sequential each agent's update samples trajectories of its own."""
    first, second = trajectories(), trajectories()
    for trajectory in second:
        trajectory.reward = 0.25
    stages = [
        stage(first, collated(first, ["search"]), {"writer": update()}),
        stage(second, collated(second, ["answer"]), {"writer": update(agents={1: {"entropy": 0.1}})}),
    ]
    whole = merge_stages(stages)
    merged, batch = whole.trajectories, whole.batch
    assert merged == first + second and [trajectory.group for trajectory in merged] == [0, 0, 0, 1, 1, 1]
    step = step_record(1, whole)
    assert step.trajectories == 6 and step.masked == {"retrieval": 2} and step.reward == pytest.approx((1 + 0 + 0.25 + 0.25) / 4)
    assert step.agents["search"]["calls"] == 6 and len(batch) == sum(len(stage.batch) for stage in stages)
    kept = trajectory_records(merged, configured(), {"writer": Letters()}, batch)
    trained = [{turn.agent for turn in trajectory.turns if turn.trained} for trajectory in kept]
    assert trained == [{"search"}, {"search"}, set(), {"answer"}, {"answer"}, set()]
    assert merge_stages(stages[:1]) is stages[0]


def test_success_is_the_share_of_trajectories():
    drawn = trajectories()
    drawn[1].success = True
    assert step_record(1, stage(drawn, collated(drawn), metrics())).success == 0.5


def test_the_reward_is_that_of_all_questions_drawn():
    """Dynamic sampling replaces questions that every trajectory solves; the team earned their returns nevertheless."""
    drawn = trajectories()
    drawn += [replace(drawn[0], group=1, sample=sample, failure=NO_SIGNAL) for sample in range(3)]
    batch = collate(drawn, AGENTS, ("writer",), set(AGENTS))
    batch.advantages = compute_advantages(batch, AlgorithmConfig())
    step = step_record(1, stage(drawn, batch, metrics()))
    assert step.reward == 0.8 and step.masked == {"retrieval": 1, NO_SIGNAL: 3}


def test_of_a_refused_step_as_many_are_kept_as_of_any_step():
    config = configured("logging.trajectories_per_step=2", "logging.trajectories_per_evaluation=0")
    assert len(trajectory_records(trajectories(), config, {"writer": Letters()}, refused=True)) == 2


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


@pytest.mark.parametrize(
    "values, logged",
    [
        ((True, False), {"key": 0.5}),
        ((3, 0), {"key": 1.5}),
        ((math.inf, 2), {"key": 2.0}),
        ((10**400, math.nan), {}),
        (("3", None), {}),
    ],
)
def test_the_numbers_of_a_workflow_are_averaged_over_the_trajectories_that_ended(values, logged):
    drawn = trajectories()
    for trajectory, value in zip(drawn, (*values, 7)):
        trajectory.outcome = Outcome("x", {"key": value})
    assert step_record(1, stage(drawn, collated(drawn), metrics())).workflow == logged


def test_ages_are_those_of_each_agents_tokens_and_of_what_its_trajectories_had_sampled():
    """Versions by call: search 3, then 2 and 3 within a response; answer 3; training from version 3."""
    calls = [turn("search", 0), turn("search", 1), turn("answer", 2)]
    calls[0].weight_versions, calls[1].weight_versions, calls[2].weight_versions = [(3, 3)], [(2, 2), (3, 1)], [(3, 3)]
    (drawn, other, _) = trajectories()
    drawn.turns, other.turns = calls, [turn("answer", 0)]
    other.turns[0].weight_versions = [(3, 3)]
    batch = collated([drawn, other])
    agents = step_record(1, stage([drawn, other], batch, metrics(), version=3)).agents
    assert agents["search"]["age"] == pytest.approx(2 / 6) and agents["search"]["age_max"] == 1
    assert (agents["answer"]["age"], agents["answer"]["age_max"], agents["answer"]["context_age_max"]) == (0, 0, 1)
