"""The gated search team: who speaks, what a trajectory returns, its draws, and its options."""

import asyncio
import math
from dataclasses import dataclass

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import megatron_drmas.workflows  # noqa: F401  registers
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import CONFIG_DIR, compose_config
from megatron_drmas.config.options import typed_options
from megatron_drmas.config.schema import EnvironmentConfig, RolloutConfig, WorkflowConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import Environment
from megatron_drmas.rollout.collector import Collector, Sampling
from megatron_drmas.team.team import Team
from megatron_drmas.team.trajectory import Outcome, Turn
from megatron_drmas.team.workflow import WORKFLOWS, Workflow
from megatron_drmas.validate import validate
from tests.scripted import ScriptedTools

QUESTION = Question("0", "who?", ("x",))


class Script(ScriptedTools):
    """A context whose Search agent asks these queries; a query finds the passages "about QUERY" and "other"."""

    def __init__(self, queries, chance, answer="x", use_turn_rewards=False):
        self.queries, self.drawn, self.answer, self.use_turn_rewards = list(queries), chance, answer, use_turn_rewards
        self.turns, self.histories = [], []

    async def call(self, agent, **variables):
        assert set(variables) == set(WORKFLOWS["search_gated"].agents[agent])
        self.histories.append(variables["history"])
        content = self.queries.pop(0) if agent == "search" else self.answer
        self.turns.append(
            Turn(agent, "p", len(self.turns), [], [0], [0], [0.0], 8, "stop", [(0, 1)], content or "garbage", content)
        )
        return self.turns[-1]

    async def retrieve(self, query):
        return [f"about {query}", "other"]

    async def grade(self, answer):
        return float(answer == "x")

    def chance(self, name):
        return self.drawn

    def supports(self, passages):
        return any("x" in passage.split() for passage in passages)


def run(queries, chance=0.0, answer="x", use_turn_rewards=False, max_turns=2, **options):
    script = Script(queries, chance, answer, use_turn_rewards)
    config = WorkflowConfig(name="search_gated", max_turns=max_turns, options=options)
    outcome = asyncio.run(WORKFLOWS["search_gated"](config).run(script, QUESTION))
    return script, [turn.agent for turn in script.turns], outcome


def test_answer_speaks_as_soon_as_a_passage_holds_the_answer():
    assert run(["x"])[1:] == (["search", "answer"], Outcome("x", {"searches": 1, "found": True}))
    script, agents, outcome = run(["a", "x"])
    assert agents == ["search", "search", "answer"] and outcome.reward is None
    assert [step.query for step in script.histories[-1]] == ["a", "x"]


def test_without_such_a_passage_nobody_answers_and_the_workflow_says_what_that_returns():
    _, agents, outcome = run(["a", None, "b"], max_turns=3, otherwise=1.0)
    assert agents == ["search"] * 3 and (outcome.answer, outcome.reward) == (None, 1.0)
    assert run(["a", "b"])[2].reward == 0.0


@pytest.mark.parametrize("chance, keep, kept", [(0.0, 0.0, False), (0.29, 0.3, True), (0.3, 0.3, False), (0.999, 1.0, True)])
def test_retrieval_loses_the_answer_in_a_share_of_the_trajectories(chance, keep, kept):
    script, agents, outcome = run(["x", "x"], chance, keep=keep)
    assert outcome.info["found"] == kept and ("answer" in agents) == kept
    shown = [passage for step in script.histories[-1] for passage in step.passages]
    assert shown == (["about x", "other"] if kept else ["other"])


def test_calls_earn_their_own():
    script, _, _ = run(["a", "x"], answer="y", use_turn_rewards=True)
    assert [turn.reward for turn in script.turns] == [0.0, 1.0, 0.0]


class World(Environment):
    async def reward(self, question, outcome):
        return 0.25


class Draws(Workflow):
    """Keeps its draws; a trajectory whose number "a" is below 0.5 returns it."""

    async def run(self, context, question):
        drawn = {name: context.chance(name) for name in "ab"}
        return Outcome(None, drawn, reward=drawn["a"] if drawn["a"] < 0.5 else None)


def draw(seed=0, stream="train/1", questions=20, samples=20):
    team = Team({}, Draws(WorkflowConfig(name="draws")))
    collector = Collector(team, World(EnvironmentConfig(name="world")), {}, {}, RolloutConfig(), seed)
    asked = [Question(str(number), "?", ("x",)) for number in range(questions)]
    return asyncio.run(collector.collect(asked, samples, Sampling(1.0, 1.0, stream)))


def test_chances_are_the_trajectory_s_own_and_repeatable():
    trajectories = draw()
    numbers = [of.outcome.info[name] for of in trajectories for name in "ab"]
    assert numbers == [of.outcome.info[name] for of in draw() for name in "ab"]
    assert len(set(numbers)) == len(numbers) and all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 5 / math.sqrt(12 * len(numbers))
    for other in (draw(seed=1), draw(stream="train/2")):
        assert not set(numbers) & {of.outcome.info[name] for of in other for name in "ab"}


def test_an_outcome_s_own_return_goes_before_the_environment_s():
    for trajectory in draw():
        own = trajectory.outcome.info["a"]
        assert trajectory.reward == (own if own < 0.5 else 0.25)


@dataclass
class Typed:
    share: float = 0.5
    rounds: int = 2
    strict: bool = False


@given(st.fixed_dictionaries({}, optional={"share": st.floats(0, 1), "rounds": st.integers(0, 9), "strict": st.booleans()}))
def test_options_are_the_declared_ones_with_their_defaults(given_options):
    assert typed_options("team.workflow.options", "workflow 'w'", Typed, given_options) == Typed(**given_options)


@pytest.mark.parametrize(
    "options, key, said",
    [
        ({"shar": 1.0}, "team.workflow.options.shar", "did you mean team.workflow.options.share?"),
        ({"zzz": 1.0}, "team.workflow.options.zzz", "its options: share, rounds, strict"),
        ({"rounds": 1.5}, "team.workflow.options.rounds", "use int"),
        ({"share": "much"}, "team.workflow.options.share", "use float"),
        ({"strict": [True]}, "team.workflow.options.strict", "use bool"),
        ({"share": None}, "team.workflow.options.share", "use float"),
    ],
)
def test_a_wrong_option_is_named(options, key, said):
    with pytest.raises(ConfigError) as error:
        typed_options("team.workflow.options", "workflow 'w'", Typed, options)
    assert str(error.value).startswith(key) and said in str(error.value)


@pytest.mark.parametrize(
    "name, override, said",
    [
        ("search_gated", "team.workflow.options.keep=1.5", "use a number in [0, 1]"),
        ("search_gated", "team.workflow.options.keep=.nan", "team.workflow.options.keep"),
        ("search_hetero", "+team.workflow.options.keep=0.5", "it has none"),
    ],
)
def test_options_are_checked_before_a_run(name, override, said):
    with pytest.raises(ConfigError) as error:
        validate(compose_config(name, [override]), files=False)
    assert said in str(error.value)


def test_the_team_s_prompts_are_those_of_the_tiny_team():
    gated, tiny = (
        yaml.safe_load((CONFIG_DIR / "team" / f"{name}.yaml").read_text())["agents"] for name in ("search_gated", "search_tiny")
    )
    for agent in gated:
        assert {**gated[agent], "policy": "llama", "trainable": True} == {**tiny[agent], "trainable": True}
