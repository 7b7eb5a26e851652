"""The interface of an environment: the tools a workflow may use and the return of its outcome."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_drmas.config.options import NoOptions, typed_options
from megatron_drmas.config.schema import EnvironmentConfig
from megatron_drmas.config.setting import EXTENSIONS
from megatron_drmas.data.questions import Question
from megatron_drmas.team.tool import TOOLS, Tool, tools_of
from megatron_drmas.team.trajectory import Outcome
from megatron_drmas.team.trajectory import ServiceFailure as ServiceFailure


@dataclass(frozen=True)
class Place:
    """Where an environment runs.

    Attributes:
        logs: folder for the log files of its services.
        start_timeout_s: how long a service may take to answer.
        restarted: called with the service that is restarted, and why.
    """

    logs: Path = Path("logs")
    start_timeout_s: float = 60.0
    restarted: Callable[[str, str], None] = lambda service, problem: None


class Environment:
    """A task: its tools, its services and the reward.  An asynchronous context manager.

    Everything that can block runs off the event loop, with a time limit.  Methods marked with `team.tool.tool` are the tools
    that it brings.

    Class attributes:
        Config: `EnvironmentConfig`, or a subclass of it whose fields are the settings that the environment brings,
            `environment.KEY`, each declared with `config.setting.setting`.
        Options: a dataclass with a typed default for each setting of `environment.options`.

    Attributes:
        options: an instance of it.
    """

    Config: type[EnvironmentConfig] = EnvironmentConfig
    Options: type = NoOptions

    def __init__(self, config: EnvironmentConfig, place: Place = Place()):
        self.config = config
        self.place = place
        self.options = typed_options("environment.options", f"environment {config.name!r}", self.Options, config.options)
        own = {name: replace(each, function=each.function.__get__(self)) for name, each in tools_of(type(self)).items()}
        self._tools: dict[str, Tool] = TOOLS | own

    @classmethod
    def tools(cls) -> dict[str, Tool]:
        """Every tool that a workflow in this environment may name: the registered ones and its own, unbound."""
        return TOOLS | tools_of(cls)

    @classmethod
    def check_config(cls, config: EnvironmentConfig, tools: tuple[str, ...], files: bool) -> None:
        """Check what can be checked before anything starts.

        Args:
            tools: that the workflow calls.
            files: also look at the files that the configuration names.

        Raises:
            ConfigError: the first setting that cannot work.
        """
        typed_options("environment.options", f"environment {config.name!r}", cls.Options, config.options)

    @classmethod
    def question_flaw(cls, question: Question) -> str | None:
        """Why a question cannot be asked here, as a phrase such as "has no tests"; None if it can."""
        return None

    def begin(self) -> bool:
        """Start the services that the environment runs itself, without waiting for them; whether there are any."""
        return False

    def end(self) -> None:
        """End what `begin` started."""

    async def __aenter__(self) -> "Environment":
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    async def call_tool(self, name: str, question: Question, arguments: dict[str, Any]) -> Any:
        """What a tool returns for a trajectory on `question`.

        Raises:
            TypeError: the workflow calls it with arguments that it does not take.
            TrajectoryFailure: it failed, or did not end in time.
        """
        return await self._tools[name].call(question, arguments)

    async def check(self) -> str | None:
        """Try what the environment relies on; called once, when the environment has been entered.

        Returns:
            What is worth saying of it, if anything.

        Raises:
            ConfigError: names the setting under which it cannot be reached or does not answer.
        """

    async def reward(self, question: Question, outcome: Outcome) -> float:
        """The return of a trajectory: any finite number.  One that is not finite masks the trajectory (cause `reward`).

        Raises:
            TrajectoryFailure: the outcome could not be graded for a reason outside the team.
        """
        raise TypeError(f"{type(self).__name__} does not define reward")

    def success(self, question: Question, outcome: Outcome, reward: float) -> bool:
        """Whether a trajectory counts as a success, in evaluations and in everything logged: here, a positive return.

        An environment that also pays for what is not a success (a form, a part of the way) says here what is one.

        Args:
            reward: what `reward` returned for this outcome.
        """
        return reward > 0


ENVIRONMENTS: dict[str, type[Environment]] = {}


def register_environment(name: str) -> Callable[[type[Environment]], type[Environment]]:
    """Make an environment available as `environment.name`."""

    def add(environment: type[Environment]) -> type[Environment]:
        if name in ENVIRONMENTS:
            raise ValueError(f"an environment named {name!r} exists already")
        ENVIRONMENTS[name] = environment
        EXTENSIONS[EnvironmentConfig][name] = environment.Config
        return environment

    return add
