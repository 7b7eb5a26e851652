"""The interface of an environment: the tools a workflow may use and the return of its outcome."""

from types import TracebackType
from typing import Awaitable, Callable, Optional

from megatron_drmas.config.schema import EnvironmentConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Outcome


class Environment:
    """Asynchronous context manager; everything that can block runs off the event loop, with a time limit.

    Attributes:
        recover: set where the run itself serves what the environment retrieves from; brings that server back, given its
            address, what happened, and whether it has let a query wait too long.  Returns its address, another one if it had
            to be started again; what it raises ends the run.
    """

    recover: Optional[Callable[[str, str, bool], Awaitable[str]]] = None

    def __init__(self, config: EnvironmentConfig):
        self.config = config

    async def __aenter__(self) -> "Environment":
        return self

    async def __aexit__(self, kind: Optional[type], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        return None

    async def check(self) -> Optional[str]:
        """Try what the environment relies on; called once, when the environment has been entered.

        Returns:
            What is worth saying of it, if anything.

        Raises:
            ConfigError: names the setting under which it cannot be reached or does not answer.
        """

    async def retrieve(self, query: str) -> list[str]:
        """Passages for a query.

        Raises:
            TrajectoryFailure: the server failed or timed out.
        """
        raise TypeError(f"environment {self.config.name!r} has no retrieval; a search workflow needs environment.name=search")

    def supports(self, question: Question, passages: list[str]) -> bool:
        """Whether an accepted answer stands in any of the passages."""
        raise TypeError(f"environment {self.config.name!r} has no retrieval; a search workflow needs environment.name=search")

    async def reward(self, question: Question, outcome: Outcome) -> float:
        """The return of a trajectory: any finite number.  One that is not finite masks the trajectory (cause `reward`).

        Raises:
            TrajectoryFailure: the outcome could not be graded for a reason outside the team.
        """
        raise TypeError(f"{type(self).__name__} does not define reward")

    def success(self, question: Question, outcome: Outcome, reward: float) -> bool:
        """Whether a trajectory counts as a success, in evaluations and in everything logged: here, a positive return.

        An environment that also pays for what is no success (a form, a part of the way) says here what is one.

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
        return environment

    return add
