"""Mathematics questions; the return is 1 for a right answer and 0 otherwise."""

from dataclasses import dataclass, field
from types import TracebackType

from megatron_drmas.config.schema import EnvironmentConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import Environment, Place, register_environment
from megatron_drmas.environments.grading import Grader, GraderConfig
from megatron_drmas.team.trajectory import Outcome


@dataclass
class MathConfig(EnvironmentConfig):
    """The math environment."""

    grader: GraderConfig = field(default_factory=GraderConfig)


@register_environment("math")
class MathEnvironment(Environment):
    r"""Grades what the answering agent's parser accepted, or the box in it, in worker processes with a time limit.

    The rules are those of `answers.equality`.  An answer that the grader cannot finish in time is the team's doing and counts
    as wrong.
    """

    Config = MathConfig
    config: MathConfig

    def __init__(self, config: MathConfig, place: Place = Place()):
        super().__init__(config, place)
        self._grader = Grader(config.grader.workers, config.grader.timeout_s, config.grader.memory_mib)

    async def __aenter__(self) -> "MathEnvironment":
        await self._grader.start()
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._grader.close()

    async def reward(self, question: Question, outcome: Outcome) -> float:
        if outcome.answer is None:
            return 0.0
        for gold in question.answers:
            if (await self._grader.grade(outcome.answer, gold)).correct:
                return 1.0
        return 0.0
