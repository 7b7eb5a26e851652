"""One agent, one call: the baseline that every team is measured against."""

from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Outcome
from megatron_drmas.team.workflow import Context, Workflow, register_workflow


@register_workflow("single")
class SingleWorkflow(Workflow):
    """The agent `solver` answers at once.  Template variables: `question` (str).  By itself a solution earns its grade."""

    agents = {"solver": ("question",)}
    answering = ("solver",)

    async def run(self, context: Context, question: Question) -> Outcome:
        solution = await context.call("solver", question=question.text)
        if context.use_turn_rewards:
            solution.reward = await context.grade(solution.content)
        return Outcome(solution.content)
