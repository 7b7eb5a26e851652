"""A planner, a coder and a reflection on what the tests said, until all of them pass (UnityMAS-O's reflective coding)."""

from dataclasses import dataclass
from typing import Any

from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Outcome, Turn
from megatron_drmas.team.workflow import Context, Workflow, register_workflow


@dataclass(frozen=True)
class Attempt:
    """A past round, for prompts."""

    plan: str
    code: str
    problem: str  # of the first test that failed
    passed: int
    total: int
    reflection: str


@register_workflow("reflective_code")
class ReflectiveCodeWorkflow(Workflow):
    """In each of at most `max_turns` rounds the Planner plans, the Coder writes a program, and the tests are run on it.

    While some fail and a round is left, the Reflector says what went wrong.  Template variables: `question` (str) and
    `history` (list of `Attempt`, oldest first, at most `team.workflow.history`); the Coder also sees `plan`; the Reflector
    `plan`, `code`, `problem`, `passed` and `total`.  What the tests expect is in none of them.

    By itself a plan and a program earn the change of the share of tests that pass, R_t - R_(t-1) with R_0 = 0, and a
    reflection that of the next round, R_(t+1) - R_t.  A malformed program passes none.
    """

    agents = {
        "planner": ("question", "history"),
        "coder": ("question", "history", "plan"),
        "reflector": ("question", "history", "plan", "code", "problem", "passed", "total"),
    }
    answering = ("coder",)
    tools = ("run_tests",)

    async def run(self, context: Context, question: Question) -> Outcome:
        history: list[Attempt] = []
        share, reflection = 0.0, None
        for left in range(self.config.max_turns - 1, -1, -1):
            shown = {"question": question.text, "history": history[-self.config.history :] if self.config.history else []}
            planned = await context.call("planner", **shown)
            plan = planned.content or planned.text.strip()
            coded = await context.call("coder", plan=plan, **shown)
            tests: dict[str, Any] = {"passed": 0, "total": 1, "problem": "there is no program in the answer"}
            if coded.content is not None:
                tests = await context.tool("run_tests", code=coded.content)
            before, share = share, tests["passed"] / tests["total"]
            if context.use_turn_rewards:
                credited: list[Turn | None] = [planned, coded, reflection]
                for turn in filter(None, credited):
                    turn.reward = share - before
            if share == 1 or not left:
                break
            code = coded.content or coded.text.strip()
            reflection = await context.call("reflector", plan=plan, code=code, **tests, **shown)
            said = reflection.content or reflection.text.strip()
            history.append(Attempt(plan, code, tests["problem"], tests["passed"], tests["total"], said))
        return Outcome(coded.content, {"rounds": self.config.max_turns - left, "tests_passed": share})
