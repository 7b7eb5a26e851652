"""Solver and Verifier in a loop (Dr. MAS, arXiv 2602.08847, math task)."""

from dataclasses import dataclass

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

    The first approved solution is the answer, else that of the last loop.  That one is not reviewed: no verdict on it could
    change anything.  A malformed verdict counts as "reject".  The outcome's `info` holds the loops, and whether the Verifier
    approved the answer.

    By itself a solution earns its grade, and a verdict 1 if the solution's grade bears it out.  The trajectory's return judges
    an approval, but no rejection: what was rejected is not what is returned.
    """

    agents = {"solver": ("question", "history"), "verifier": ("question", "history", "solution")}
    verdicts = {"verifier": ("approve", "reject")}
    min_turns = 2
    answering = ("solver",)

    async def run(self, context: Context, question: Question) -> Outcome:
        approve, reject = self.verdicts["verifier"]
        history: list[Review] = []
        while True:
            proposal = await context.call("solver", question=question.text, history=self._recent(history))
            if context.use_turn_rewards:
                proposal.reward = await context.grade(proposal.content)
            loops = len(history) + 1
            if loops == self.config.max_turns:
                return Outcome(proposal.content, {"loops": loops, "approved": False})
            verdict = await context.call(
                "verifier", question=question.text, history=self._recent(history), solution=proposal.text.strip()
            )
            if context.use_turn_rewards:
                verdict.reward = float(verdict.content == (approve if proposal.reward > 0 else reject))
            if verdict.content == approve:
                verdict.verdict = 1
                return Outcome(proposal.content, {"loops": loops, "approved": True})
            history.append(Review(proposal.text.strip(), verdict.text.strip()))

    def _recent(self, history: list[Review]) -> list[Review]:
        return history[-self.config.history :] if self.config.history else []
