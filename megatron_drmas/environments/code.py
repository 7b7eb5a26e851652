"""Coding problems; the return is the share of the tests that a program passes, or whether it passes all."""

from dataclasses import dataclass, field
from types import TracebackType

from megatron_drmas.config.schema import EnvironmentConfig
from megatron_drmas.config.setting import setting
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import Environment, Place, register_environment
from megatron_drmas.environments.code_grading import Verdict, grade_code
from megatron_drmas.environments.code_tests import MalformedTests, read_tests
from megatron_drmas.sandbox.isolation import choose_kind
from megatron_drmas.sandbox.pool import SandboxPool
from megatron_drmas.sandbox.settings import SandboxConfig
from megatron_drmas.team.tool import tool
from megatron_drmas.team.trajectory import Outcome


@dataclass
class CodeConfig(EnvironmentConfig):
    """The code environment."""

    reward: str = setting(
        "What a program returns", "all", choices={"all": "1 if it passes every test, else 0", "share": "the share that it passes"}
    )
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)


@register_environment("code")
class CodeEnvironment(Environment):
    """Runs what the answering agent's parser accepted against the question's tests (see `environments.code_tests`), sandboxed.

    A program that takes too long, or that prints or uses too much, is the team's doing and fails.
    """

    Config = CodeConfig
    config: CodeConfig

    def __init__(self, config: CodeConfig, place: Place = Place()):
        super().__init__(config, place)
        self._pool: SandboxPool | None = None

    @classmethod
    def check_config(cls, config: EnvironmentConfig, tools: tuple[str, ...], files: bool) -> None:
        super().check_config(config, tools, files)
        assert isinstance(config, CodeConfig)
        if files:
            choose_kind(config.sandbox, "environment.sandbox")

    @classmethod
    def question_flaw(cls, question: Question) -> str | None:
        try:
            read_tests(question)
        except MalformedTests as error:
            return str(error)
        return None

    async def __aenter__(self) -> "CodeEnvironment":
        sandbox = self.config.sandbox
        self._pool = SandboxPool(sandbox, choose_kind(sandbox, "environment.sandbox"), sandbox.workers)
        await self._pool.__aenter__()
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            await self._pool.__aexit__(kind, error, trace)

    async def grade(self, question: Question, code: str) -> Verdict:
        """How a program does on the question's tests."""
        assert self._pool is not None, "the environment is entered first"
        return await grade_code(self._pool, code, read_tests(question))

    async def reward(self, question: Question, outcome: Outcome) -> float:
        if outcome.answer is None:
            return 0.0
        verdict = await self.grade(question, outcome.answer)
        return verdict.share if self.config.reward == "share" else float(verdict.passed == verdict.total)

    def success(self, question: Question, outcome: Outcome, reward: float) -> bool:
        return reward >= 1

    @tool("python", timeout_s=None)
    async def python(self, code: str) -> str:
        """What a Python program prints, its error last."""
        assert self._pool is not None, "the environment is entered first"
        result = await self._pool.run(code)
        if result.killed:
            return f"{result.stdout}\nThe program was stopped: it is over the limit of {result.killed}."
        return "\n".join(part for part in (result.stdout.rstrip(), result.stderr.rstrip()) if part)

    @tool("run_tests", timeout_s=None)
    async def run_tests(self, code: str, question: Question) -> dict:
        """How a program does on the question's tests: passed, total, and the problem of the first that failed."""
        verdict = await self.grade(question, code)
        return {"passed": verdict.passed, "total": verdict.total, "problem": verdict.problem}
