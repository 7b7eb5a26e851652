"""Evaluator-Optimizer: one agent solves, another says what is wrong, until it finds nothing or has spoken often enough."""

from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Outcome
from megatron_drmas.team.workflow import Context, Workflow, register_workflow
from megatron_drmas.workflows.math import Review


@register_workflow("eval_opt")
class EvalOptWorkflow(Workflow):
    """The Generator solves; the Evaluator says "correct", or "incorrect" with a critique, at most `max_turns` times.

    Template variables of both: `question` (str), `history` (list of `Review`, oldest first, at most
    `team.workflow.history`); the Evaluator also sees `solution` (str).

    The last critique is answered by a last solution, which is not evaluated: `max_turns` counts verdicts, where in `math` it
    counts solutions.  A malformed verdict counts as "incorrect".  By itself a solution earns its grade, and a verdict 1 if the
    solution's grade bears it out.  The trajectory's return judges the verdict "correct", but no other: its solution is not
    what is returned.
    """

    agents = {"generator": ("question", "history"), "evaluator": ("question", "history", "solution")}
    verdicts = {"evaluator": ("correct", "incorrect")}
    answering = ("generator",)

    async def run(self, context: Context, question: Question) -> Outcome:
        correct, incorrect = self.verdicts["evaluator"]
        history: list[Review] = []
        while True:
            shown = {"question": question.text, "history": history[-self.config.history :] if self.config.history else []}
            proposal = await context.call("generator", **shown)
            if context.use_turn_rewards:
                proposal.reward = await context.grade(proposal.content)
            if len(history) == self.config.max_turns:
                return Outcome(proposal.content, {"evaluations": len(history), "accepted": False})
            verdict = await context.call("evaluator", solution=proposal.text.strip(), **shown)
            if context.use_turn_rewards:
                verdict.reward = float(verdict.content == (correct if proposal.reward > 0 else incorrect))
            if verdict.content == correct:
                verdict.verdict = 1
                return Outcome(proposal.content, {"evaluations": len(history) + 1, "accepted": True})
            history.append(Review(proposal.text.strip(), verdict.text.strip()))
