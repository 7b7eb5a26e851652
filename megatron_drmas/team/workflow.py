"""The interface between a workflow and whatever runs it, and the registry of workflows."""

from typing import Any, Awaitable, Callable, Iterable, Optional, Protocol

from megatron_drmas.config.schema import WorkflowConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Outcome, Turn


class Context(Protocol):
    """What a workflow can do while it runs one trajectory.

    Attributes:
        rewards_turns: whether what a call earns by itself (`Turn.reward`) counts: algorithm.reward.turn or .role is not 0.
            A workflow need not find it out otherwise.
    """

    rewards_turns: bool

    async def call(self, agent: str, **variables: Any) -> Turn:
        """Let an agent speak.

        The agent's prompt template is rendered with `variables`.  If the prompt is longer than allowed, entries are
        taken from the front of the list `variables["history"]` until it fits.

        Raises:
            TrajectoryFailure: the engine failed, or the prompt cannot be made to fit.
        """

    async def together(self, calls: Iterable[Awaitable[Turn]]) -> list[Turn]:
        """Let several calls run at the same time; they count in the order in which they are given.

        Raises:
            TrajectoryFailure: the first of them that failed, when all have ended.
        """

    async def retrieve(self, query: str) -> list[str]:
        """Passages for a query, in the order in which a prompt shows them.

        Raises:
            TrajectoryFailure: the retrieval server failed or timed out.
        """

    async def grade(self, answer: Optional[str]) -> float:
        """What the trajectory would return with this answer.

        Raises:
            TrajectoryFailure: the answer could not be graded for a reason outside the team.
        """

    def supports(self, passages: list[str]) -> bool:
        """Whether an accepted answer stands in any of the passages."""


class Workflow:
    """Who speaks when.  One instance serves all trajectories, so it keeps no state of its own.

    Class attributes:
        agents: the roles that the workflow calls, and the variables that it gives the template of each; the team must
            define every one.
        needs_retrieval: whether it calls `Context.retrieve`.
        parsers: the parser of an agent whose content the workflow takes apart.
        verdicts: the agents that accept or reject, and the two words, (accept, reject), which must be among each one's `choices`.
            `run` sets `Turn.verdict` of the verdicts that the trajectory's return judges; others say nothing about it.
        min_turns: the least `max_turns` with which every agent can be called.
        answering: the roles whose content the environment grades, as the outcome's answer or for a call's own reward.
    """

    agents: dict[str, tuple[str, ...]] = {}
    needs_retrieval: bool = False
    parsers: dict[str, str] = {}
    verdicts: dict[str, tuple[str, str]] = {}
    min_turns: int = 1
    answering: tuple[str, ...] = ()

    def __init__(self, config: WorkflowConfig):
        self.config = config

    async def run(self, context: Context, question: Question) -> Outcome:
        """Run one trajectory to its end."""
        raise TypeError(f"{type(self).__name__} does not define run")


WORKFLOWS: dict[str, type[Workflow]] = {}


def register_workflow(name: str) -> Callable[[type[Workflow]], type[Workflow]]:
    """Make a workflow available as `team.workflow.name`."""

    def add(workflow: type[Workflow]) -> type[Workflow]:
        if name in WORKFLOWS:
            raise ValueError(f"a workflow named {name!r} exists already")
        WORKFLOWS[name] = workflow
        return workflow

    return add
