"""Orchestrator-Workers: one agent plans, Workers follow its strategies at the same time, one agent answers."""

import json

from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Outcome
from megatron_drmas.team.workflow import Context, Workflow, register_workflow


@register_workflow("orch_workers")
class OrchWorkersWorkflow(Workflow):
    """The Orchestrator proposes strategies, a Worker solves by each of the first `width`, the Synthesizer answers.

    Template variables of all: `question` (str); the Orchestrator's `width` (int), a Worker's `strategy` (str), the
    Synthesizer's `solutions` (list of str, the Workers' outputs in the strategies' order).

    A plan without a well-formed strategy gives no answer.  By itself a Worker's solution earns its grade, as does the
    Synthesizer's, and a plan the mean of its Workers' grades.
    """

    agents = {"orchestrator": ("question", "width"), "worker": ("question", "strategy"), "synthesizer": ("question", "solutions")}
    parsers = {"orchestrator": "tags"}
    answering = ("worker", "synthesizer")

    async def run(self, context: Context, question: Question) -> Outcome:
        """One plan, its solutions and their synthesis; the outcome's `info` holds the number of strategies followed.

        Raises:
            TrajectoryFailure: of a call or a grade.
        """
        plan = await context.call("orchestrator", question=question.text, width=self.config.width)
        strategies = json.loads(plan.content)[: self.config.width] if plan.content is not None else []
        if not strategies:
            return Outcome(None, {"strategies": 0})
        solutions = await context.together(
            context.call("worker", question=question.text, strategy=strategy) for strategy in strategies
        )
        answer = await context.call(
            "synthesizer", question=question.text, solutions=[solution.text.strip() for solution in solutions]
        )
        if context.use_turn_rewards:
            for solution in solutions:
                solution.reward = await context.grade(solution.content)
            plan.reward = sum(solution.reward for solution in solutions) / len(solutions)
            answer.reward = await context.grade(answer.content)
        return Outcome(answer.content, {"strategies": len(strategies)})
