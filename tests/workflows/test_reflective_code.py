"""Reflective coding: who is called, what each call earns, and what nobody is shown."""

import asyncio

import pytest

from megatron_drmas.config.schema import WorkflowConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Turn
from megatron_drmas.team.workflow import WORKFLOWS

QUESTION = Question("0", "double a number", (), extra={"tests": {"inputs": ["1"], "outputs": ["expected output"]}})


class Script:
    """Programs are the shares that they pass, of four tests; None is malformed."""

    def __init__(self, programs, use_turn_rewards=True):
        self.use_turn_rewards, self.turns, self.shown = use_turn_rewards, [], []
        self._programs = list(programs)

    async def call(self, role, **variables):
        assert set(variables) == set(WORKFLOWS["reflective_code"].agents[role])
        self.shown.append(variables)
        content = self._programs.pop(0) if role == "coder" else f"{role} says"
        content = None if content is None else str(content)
        self.turns.append(
            Turn(role, "p", len(self.turns), [], [0], [0], [0.0], 8, "stop", [(0, 1)], content or "garbage", content)
        )
        return self.turns[-1]

    async def tool(self, name, code):
        assert name == "run_tests"
        return {"passed": int(4 * float(code)), "total": 4, "problem": "" if code == "1" else "test 1: wrong output"}


def run(programs, max_turns=3, **options):
    script = Script(programs, **options)
    config = WorkflowConfig(name="reflective_code", max_turns=max_turns, history=1)
    return script, asyncio.run(WORKFLOWS["reflective_code"](config).run(script, QUESTION))


def test_it_goes_on_until_all_tests_pass_or_no_round_is_left():
    script, outcome = run([0.25, 1])
    assert [turn.agent for turn in script.turns] == ["planner", "coder", "reflector", "planner", "coder"]
    assert (outcome.answer, outcome.info) == ("1", {"rounds": 2, "tests_passed": 1.0})
    script, outcome = run([0.25, 0.5, 0.5])
    assert [turn.agent for turn in script.turns] == ["planner", "coder", "reflector"] * 2 + ["planner", "coder"]
    assert (outcome.answer, outcome.info) == ("0.5", {"rounds": 3, "tests_passed": 0.5})


@pytest.mark.parametrize(
    "programs, earned",
    [
        ([0.25, 0.75, 0.75], [0.25, 0.25, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0]),
        ([0.5, None, 1], [0.5, 0.5, -0.5, -0.5, -0.5, 1.0, 1.0, 1.0]),
        ([1], [1.0, 1.0]),
    ],
)
def test_a_call_earns_the_change_of_the_share_and_a_reflection_that_of_the_next_round(programs, earned):
    script, _ = run(programs)
    assert [turn.reward for turn in script.turns] == earned
    assert all(turn.reward == 0 for turn in run(programs, use_turn_rewards=False)[0].turns)


def test_a_program_that_is_not_there_passes_nothing_and_prompts_hold_what_is_known_but_not_what_is_expected():
    script, outcome = run([None, 0.25], max_turns=2)
    assert outcome.answer == "0.25" and script.shown[2]["problem"] == "there is no program in the answer"
    (attempt,) = script.shown[-1]["history"]
    assert (attempt.plan, attempt.code, attempt.reflection, attempt.passed) == ("planner says", "garbage", "reflector says", 0)
    assert "expected output" not in repr(script.shown)
