"""Solver and Verifier in a loop (Dr. MAS, arXiv 2602.08847, math task)."""

from dataclasses import dataclass
from typing import Optional

from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Outcome
from megatron_drmas.team.workflow import Context, Workflow, register_workflow


@dataclass(frozen=True)
class Review:
    """A rejected solution and why; an entry of the prompts' `history`."""

    solution: str
    feedback: str


@register_workflow("math")
class MathWorkflow(Workflow):
    """The Solver proposes, the Verifier approves or rejects, for at most `max_turns` loops.

    Template variables: `question` (str), `history` (list of `Review`, oldest first, at most `team.workflow.history`);
    the Verifier also sees `solution` (str).

    The last solution is the answer, approved or not.  A malformed verdict counts as "reject".

    By itself a solution earns its grade, and a verdict 1 if the solution's grade bears it out.
    """

    agents = {"solver": ("question", "history"), "verifier": ("question", "history", "solution")}
    answering = ("solver",)

    async def run(self, context: Context, question: Question) -> Outcome:
        history: list[Review] = []
        solution: Optional[str] = None
        for loop in range(1, self.config.max_turns + 1):
            proposal = await context.call("solver", question=question.text, history=self._recent(history))
            solution = proposal.content
            verdict = await context.call(
                "verifier", question=question.text, history=self._recent(history), solution=proposal.text.strip(),
            )
            if context.rewards_turns:
                proposal.reward = await context.grade(solution)
                verdict.reward = float(verdict.content == ("approve" if proposal.reward > 0 else "reject"))
            if verdict.content == "approve":
                return Outcome(solution, {"loops": loop, "approved": True})
            history.append(Review(proposal.text.strip(), verdict.text.strip()))
        return Outcome(solution, {"loops": self.config.max_turns, "approved": False})

    def _recent(self, history: list[Review]) -> list[Review]:
        return history[-self.config.history:] if self.config.history else []
