"""The interface between a workflow and whatever runs it, and the registry of workflows."""

import difflib
from dataclasses import dataclass, fields
from typing import Any, Awaitable, Callable, Iterable, Optional, Protocol

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_drmas.config.errors import ConfigError
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

    def chance(self, name: str) -> float:
        """A number in [0, 1) of this trajectory and `name`, uniform over trajectories and independent of what is sampled."""

    def supports(self, passages: list[str]) -> bool:
        """Whether an accepted answer stands in any of the passages."""


@dataclass
class NoOptions:
    """The options of a workflow that has none."""


class Workflow:
    """Who speaks when.  One instance serves all trajectories, so it keeps no state of its own.

    Class attributes:
        Options: a dataclass with a typed default for each setting of `team.workflow.options`; its `__post_init__` may refuse
            values with a `ConfigError`.
        agents: the roles that the workflow calls, and the variables that it gives the template of each; the team must
            define every one.
        needs_retrieval: whether it calls `Context.retrieve`.
        parsers: the parser of an agent whose content the workflow takes apart.
        verdicts: the agents that accept or reject, and the two words, (accept, reject), which must be among each one's `choices`.
            `run` sets `Turn.verdict` of the verdicts that the trajectory's return judges; others say nothing about it.
        min_turns: the least `max_turns` with which every agent can be called.
        answering: the roles whose content the environment grades, as the outcome's answer or for a call's own reward.
    """

    Options: type = NoOptions
    agents: dict[str, tuple[str, ...]] = {}
    needs_retrieval: bool = False
    parsers: dict[str, str] = {}
    verdicts: dict[str, tuple[str, str]] = {}
    min_turns: int = 1
    answering: tuple[str, ...] = ()

    def __init__(self, config: WorkflowConfig):
        self.config = config
        self.options = workflow_options(config.name, self.Options, config.options)

    async def run(self, context: Context, question: Question) -> Outcome:
        """Run one trajectory to its end."""
        raise TypeError(f"{type(self).__name__} does not define run")


def workflow_options(workflow: str, declared: type, given: dict[str, Any]) -> Any:
    """`given` as an instance of the dataclass `declared`.

    Raises:
        ConfigError: an option that the workflow does not have, or a value of the wrong type.
    """
    known = [field.name for field in fields(declared)]
    for name, value in given.items():
        key = f"team.workflow.options.{name}"
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"its options: {', '.join(known)}" if known else "it has none; remove it"
            raise ConfigError(key, value, f"is no option of workflow {workflow!r}", remedy)
        try:
            OmegaConf.merge(OmegaConf.structured(declared), {name: value})
        except OmegaConfBaseException as error:
            wanted = next(field.type for field in fields(declared) if field.name == name)
            raise ConfigError(key, value, "is of the wrong type", f"use {getattr(wanted, '__name__', wanted)}") from error
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(declared), given))


WORKFLOWS: dict[str, type[Workflow]] = {}


def register_workflow(name: str) -> Callable[[type[Workflow]], type[Workflow]]:
    """Make a workflow available as `team.workflow.name`."""

    def add(workflow: type[Workflow]) -> type[Workflow]:
        if name in WORKFLOWS:
            raise ValueError(f"a workflow named {name!r} exists already")
        WORKFLOWS[name] = workflow
        return workflow

    return add
