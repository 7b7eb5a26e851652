"""The interface between a workflow and whatever runs it, and the registry of workflows."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from megatron_drmas.config.options import NoOptions, typed_options
from megatron_drmas.config.schema import WorkflowConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Outcome, Turn


class Context(Protocol):
    """What a workflow can do while it runs one trajectory.

    Attributes:
        use_turn_rewards: whether what a call earns by itself (`Turn.reward`) counts: algorithm.reward.turn or .role is not 0.
            A workflow need not find it out otherwise.
    """

    use_turn_rewards: bool

    async def call(self, role: str, **variables: Any) -> Turn:
        """Call the agent that has a role.

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

    async def tool(self, name: str, **arguments: Any) -> Any:
        """What one of the workflow's `tools` returns; see `megatron_drmas.team.tool`.

        Raises:
            TrajectoryFailure: it failed, or did not end in time.
        """

    async def grade(self, answer: str | None) -> float:
        """What the trajectory would return with this answer.

        Raises:
            TrajectoryFailure: the answer could not be graded for a reason outside the team.
        """

    def chance(self, name: str) -> float:
        """A number in [0, 1) of this trajectory and `name`, uniform over trajectories and independent of what is sampled."""


class Workflow:
    """Which agent is called when.  One instance serves all trajectories, so it keeps no state of its own.

    Class attributes:
        Options: a dataclass with a typed default for each setting of `team.workflow.options`; its `__post_init__` may refuse
            values with a `ConfigError`.
        agents: the roles that the workflow calls, and the variables that it gives the template of each; the team must have
            an agent for every one.
        tools: the names of the tools that it calls, its environment's or registered ones.
        parsers: the parser of an agent whose content the workflow takes apart.
        verdicts: the agents that accept or reject, and the two words, (accept, reject), which must be among each one's `choices`.
            `run` sets `Turn.verdict` of the verdicts that the trajectory's return judges; others say nothing about it.
        min_turns: the smallest `max_turns` with which every agent can be called.
        answering: the roles whose content the environment grades, as the outcome's answer or for a call's own reward.
    """

    Options: type = NoOptions
    agents: dict[str, tuple[str, ...]] = {}
    tools: tuple[str, ...] = ()
    parsers: dict[str, str] = {}
    verdicts: dict[str, tuple[str, str]] = {}
    min_turns: int = 1
    answering: tuple[str, ...] = ()

    def __init__(self, config: WorkflowConfig):
        self.config = config
        self.options = typed_options("team.workflow.options", f"workflow {config.name!r}", self.Options, config.options)

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
