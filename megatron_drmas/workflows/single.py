"""One agent, one call: the baseline that every team is measured against."""

from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Outcome
from megatron_drmas.team.workflow import Context, Workflow, register_workflow


@register_workflow("single")
class SingleWorkflow(Workflow):
    """The agent `solver` answers at once.  Template variables: `question` (str)."""

    agents = ("solver",)

    async def run(self, context: Context, question: Question) -> Outcome:
        return Outcome((await context.call("solver", question=question.text)).content)
