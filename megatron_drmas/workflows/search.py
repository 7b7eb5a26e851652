"""Iterative search with three agents (Dr. MAS, arXiv 2602.08847, search task).

Each turn the Verifier decides whether what was found answers the question.  "no" lets the Search agent write a query,
whose passages join the history; "yes" lets the Answer agent answer, which ends the trajectory.
"""

from dataclasses import dataclass

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Outcome
from megatron_drmas.team.workflow import Context, Workflow, register_workflow


@dataclass(frozen=True)
class SearchStep:
    """One query and what it found; an entry of the prompts' `history`."""

    query: str
    passages: list[str]


def recent(history: list[SearchStep], length: int) -> list[SearchStep]:
    """The last `length` entries."""
    return history[-length:] if length else []


@register_workflow("search")
class SearchWorkflow(Workflow):
    """Verifier → Search, until the Verifier says yes → Answer.

    Template variables: `question` (str), `history` (list of `SearchStep`, oldest first, at most
    `team.workflow.history`), `turn` (1-based), `max_turns`.

    A malformed verdict counts as "no" and a malformed query finds nothing; both still cost the row its invalid-output
    penalty.  A team that has no "yes" after `max_turns` verdicts gives no answer.

    By itself a query earns 1 if a passage it found holds the answer, a verdict 1 if it is "yes" exactly when a passage of
    the history does, and an answer its grade.  The trajectory's return judges a "yes", but no "no": a team that gives no
    answer fails because of it, and one that gives it later has searched since.
    """

    agents = dict.fromkeys(("verifier", "search", "answer"), ("question", "history", "turn", "max_turns"))
    verdicts = {"verifier": ("yes", "no")}
    min_turns = 2
    tools = ("search", "supports")
    answering = ("answer",)

    async def run(self, context: Context, question: Question) -> Outcome:
        yes, no = self.verdicts["verifier"]
        history: list[SearchStep] = []
        for turn in range(1, self.config.max_turns + 1):
            shown = {"question": question.text, "turn": turn, "max_turns": self.config.max_turns}
            verdict = await context.call("verifier", history=self._recent(history), **shown)
            if context.use_turn_rewards:
                passages = [passage for step in self._recent(history) for passage in step.passages]
                found = await context.tool("supports", passages=passages)
                verdict.reward = float(verdict.content == (yes if found else no))
            if verdict.content == yes:
                verdict.verdict = 1
                answer = await context.call("answer", history=self._recent(history), **shown)
                if context.use_turn_rewards:
                    answer.reward = await context.grade(answer.content)
                return Outcome(answer.content, {"verdicts": turn, "searches": len(history)})
            if turn == self.config.max_turns:
                break
            query = await context.call(self.searcher(history), history=self._recent(history), **shown)
            if query.content is not None:
                history.append(SearchStep(query.content, await context.tool("search", query=query.content)))
                if context.use_turn_rewards:
                    query.reward = float(await context.tool("supports", passages=history[-1].passages))
        return Outcome(None, {"verdicts": self.config.max_turns, "searches": len(history)})

    def searcher(self, history: list[SearchStep]) -> str:
        """The agent that writes the next query."""
        return "search"

    def _recent(self, history: list[SearchStep]) -> list[SearchStep]:
        return recent(history, self.config.history)


@register_workflow("search_follow_up")
class SearchFollowUpWorkflow(SearchWorkflow):
    """`SearchWorkflow` with a fourth role: every query after the first is the Follow-up agent's.

    A question that one query answers has no need of it, and a hasty Verifier never lets it be called: a role that is rare
    by design, for comparing normalizations.
    """

    agents = SearchWorkflow.agents | {"follow_up": SearchWorkflow.agents["search"]}
    min_turns = 3

    def searcher(self, history: list[SearchStep]) -> str:
        return "follow_up" if history else "search"


@dataclass
class GatedOptions:
    """Settings of `search_gated`."""

    keep: float = 1 / 3  # share of the trajectories in which retrieval keeps the passages that hold the answer
    otherwise: float = 0.0  # return of a trajectory that found no such passage

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1:
            raise ConfigError(
                "team.workflow.options.keep", self.keep, "is not a share of the trajectories", "use a number in [0, 1]"
            )


@register_workflow("search_gated")
class SearchGatedWorkflow(Workflow):
    """Search at most `max_turns` times; only where a passage with the answer was found is the Answer agent called.

    Template variables: those of `SearchWorkflow`.

    Retrieval loses every passage that holds the answer in a share 1 - `keep` of the trajectories, drawn trajectory by
    trajectory.  A trajectory that found none ends without an answer and returns `otherwise`.  So the Answer agent is called
    in a part of each question's trajectories, whose mean return differs from all trajectories' by construction: a
    conditional role, for comparing normalizations.

    With g the share that calls it and p its accuracy (the others returning 0), the factor by which a group baseline
    multiplies the second moment of its gradient is (1 - p + (1 - g)^2 p) / (g (1 - g p)): at least 2 for g <= 1/3.
    By itself a query earns 1 if a passage it found holds the answer, and an answer its grade.
    """

    Options = GatedOptions
    agents = {name: SearchWorkflow.agents[name] for name in ("search", "answer")}
    tools = ("search", "supports")

    async def run(self, context: Context, question: Question) -> Outcome:
        history: list[SearchStep] = []
        lost = context.chance("retrieval loses the answer") >= self.options.keep
        for turn in range(1, self.config.max_turns + 1):
            shown = {"question": question.text, "turn": turn, "max_turns": self.config.max_turns}
            query = await context.call("search", history=recent(history, self.config.history), **shown)
            if query.content is None:
                continue
            passages = await context.tool("search", query=query.content)
            if lost:
                passages = [passage for passage in passages if not await context.tool("supports", passages=[passage])]
            history.append(SearchStep(query.content, passages))
            found = await context.tool("supports", passages=passages)
            if context.use_turn_rewards:
                query.reward = float(found)
            if found:
                answer = await context.call("answer", history=recent(history, self.config.history), **shown)
                if context.use_turn_rewards:
                    answer.reward = await context.grade(answer.content)
                return Outcome(answer.content, {"searches": len(history), "found": True})
        return Outcome(None, {"searches": len(history), "found": False}, reward=self.options.otherwise)
