"""Voting: several independent solutions at the same time, and an agent that picks one of them."""

from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Outcome
from megatron_drmas.team.workflow import Context, Workflow, register_workflow


@register_workflow("voting")
class VotingWorkflow(Workflow):
    """`width` Voters solve the same prompt; the Aggregator names the number of one, which is the answer.

    Template variables: `question` (str); the Aggregator also sees `candidates` (list of str, the Voters' outputs in order).

    A pick that is malformed, or of a candidate that does not exist or is malformed itself, is not an answer: there is no falling
    back to the first.  Where every candidate is malformed the Aggregator is not asked.  By itself a vote earns its grade; a
    pick earns 1 if the candidate is right, -1 if it is not although another is, and 0 where none is.

    The Voters are calls 0 to `width` - 1 of every trajectory, so `algorithm.advantage.group_key=question_agent_turn`
    compares each slot with itself.
    """

    agents = {"voter": ("question",), "aggregator": ("question", "candidates")}
    answering = ("voter",)

    async def run(self, context: Context, question: Question) -> Outcome:
        """One round of votes and a pick; the outcome's `info` holds the pick as it was parsed.

        Raises:
            TrajectoryFailure: of a call or a grade.
        """
        votes = await context.together(context.call("voter", question=question.text) for _ in range(self.config.width))
        if all(vote.content is None for vote in votes):
            return Outcome(None, {"pick": None})
        candidates = [vote.text.strip() for vote in votes]
        pick = await context.call("aggregator", question=question.text, candidates=candidates)
        picked = {str(number): vote for number, vote in enumerate(votes, 1)}.get(pick.content or "")
        answer = picked.content if picked else None
        if context.use_turn_rewards:
            for vote in votes:
                vote.reward = await context.grade(vote.content)
            if any(vote.reward > 0 for vote in votes):
                pick.reward = 1.0 if await context.grade(answer) > 0 else -1.0
        return Outcome(answer, {"pick": pick.content})
