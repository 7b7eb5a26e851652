"""Runs a team's workflow on many questions at once: one coroutine a trajectory.

Nothing waits for a whole batch to finish an agent's turn; the calls of all trajectories meet in the engines'
continuous batching.  In deterministic mode they meet in *rounds* instead: engines are given work only when every live
trajectory waits for an engine, and in the order of the requests' seeds, so that what an engine computes together is a
function of the tokens alone.  The price is that an engine idles while a round's slowest response or tool call finishes.
"""

import asyncio
import bisect
import contextlib
import hashlib
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_drmas.concurrency import together
from megatron_drmas.config.schema import RolloutConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import Environment
from megatron_drmas.rollout.client import PolicyClient
from megatron_drmas.rollout.prompt_encoder import PromptEncoder
from megatron_drmas.rollout.tokenizer import ChatTokenizer
from megatron_drmas.team.team import Agent, Team
from megatron_drmas.team.trajectory import Outcome, Trajectory, TrajectoryFailure, Turn

FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.  `stream` separates the random numbers of one collection from another's."""

    temperature: float
    top_p: float
    stream: str

    def at(self, part: int | str) -> "Sampling":
        """The same sampling with random numbers of its own for a step, or a part of one."""
        return replace(self, stream=f"{self.stream}/{part}")


def call_seed(*parts: object) -> int:
    """A 31-bit seed that depends on nothing but its parts."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest(), "big") >> 1


def finite_reward(value: Any, of_what: str) -> float:
    """A reward as a number that training can compute with.

    Raises:
        TrajectoryFailure: it is none, is not finite, or is beyond float32.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= FLOAT32_MAX:
        raise TrajectoryFailure("reward", f"{of_what} {value!r}, which is not a finite number")
    return number


class Collector:
    """Collects trajectories of one team.

    Args:
        team: agents and workflow.
        environment: entered already.
        clients: one per policy, entered already.
        tokenizers: one per policy.
        config: limits of prompts and responses.
        seed: the run's seed.
    """

    def __init__(
        self,
        team: Team,
        environment: Environment,
        clients: dict[str, PolicyClient],
        tokenizers: dict[str, ChatTokenizer],
        config: RolloutConfig,
        seed: int,
    ):
        self.team = team
        self.environment = environment
        self.clients = clients
        self.tokenizers = tokenizers
        self.encoders = {name: PromptEncoder(tokenizer) for name, tokenizer in tokenizers.items()}
        self.config = config
        self.seed = seed
        self.live = 0  # branches of trajectories that run or wait; counted for deterministic mode
        self._lockstep = any(client.lockstep for client in clients.values())
        self._gate = asyncio.Semaphore(config.max_in_flight)  # of all collections that run at once

    async def collect(
        self, questions: list[Question], samples: int, sampling: Sampling, use_turn_rewards: bool = False
    ) -> list[Trajectory]:
        """Run the workflow `samples` times on each question.

        Args:
            use_turn_rewards: let the workflow find out what each call earns by itself.

        Returns:
            len(questions) x samples trajectories, a question's trajectories side by side.
        """
        groups = [group async for group in self.groups(questions, samples, sampling, use_turn_rewards)]
        return [trajectory for group in sorted(groups, key=lambda group: group[0].group) for trajectory in group]

    async def groups(
        self, questions: list[Question], samples: int, sampling: Sampling, use_turn_rewards: bool = False
    ) -> AsyncIterator[list[Trajectory]]:
        """As `collect`, a question at a time: its trajectories, in the order of their samples, when the last has finished."""
        waiting: dict[int, list[Trajectory]] = defaultdict(list)
        async with contextlib.aclosing(self.stream(questions, samples, sampling, use_turn_rewards)) as finished:
            async for trajectory in finished:
                waiting[trajectory.group].append(trajectory)
                if len(waiting[trajectory.group]) == samples:
                    yield sorted(waiting.pop(trajectory.group), key=lambda each: each.sample)

    async def stream(
        self, questions: list[Question], samples: int, sampling: Sampling, use_turn_rewards: bool = False
    ) -> AsyncGenerator[Trajectory, None]:
        """As `collect`, each trajectory when it has finished; closing the stream ends those that still run."""
        trajectories = [
            Trajectory(question, group, sample) for group, question in enumerate(questions) for sample in range(samples)
        ]
        finished: asyncio.Queue[Trajectory | None] = asyncio.Queue()

        async def run(trajectory: Trajectory) -> None:
            await self._run(trajectory, sampling, use_turn_rewards)
            finished.put_nowait(trajectory)

        async def run_all() -> None:
            try:
                await self._run_all(trajectories, run)
            finally:
                finished.put_nowait(None)

        running = asyncio.ensure_future(run_all())
        try:
            while (trajectory := await finished.get()) is not None:
                yield trajectory
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run_all(self, trajectories: list[Trajectory], run: Callable[[Trajectory], Awaitable[None]]) -> None:
        if self._lockstep:
            width = self.config.max_in_flight
            for start in range(0, len(trajectories), width):
                part = trajectories[start : start + width]
                self.live = len(part)
                await together(map(run, part))
            return

        async def gated(trajectory: Trajectory) -> None:
            async with self._gate:
                await run(trajectory)

        await together(map(gated, trajectories))

    async def _run(self, trajectory: Trajectory, sampling: Sampling, use_turn_rewards: bool) -> None:
        context = _TrajectoryContext(self, trajectory, sampling, use_turn_rewards)
        try:
            trajectory.outcome = await self.team.workflow.run(context, trajectory.question)
            trajectory.reward = await context.reward(trajectory.outcome)
            trajectory.success = bool(self.environment.success(trajectory.question, trajectory.outcome, trajectory.reward))
            earned: dict[str, list[float]] = defaultdict(list)
            for turn in trajectory.turns:
                place = f"question {trajectory.question.id}, sample {trajectory.sample}, call {turn.index} (agent {turn.agent})"
                turn.reward = finite_reward(turn.reward, f"{place} earned")
                earned[turn.agent].append(turn.reward)
            trajectory.role_rewards = {agent: sum(rewards) / len(rewards) for agent, rewards in earned.items()}
        except TrajectoryFailure as failure:
            trajectory.failure, trajectory.failure_detail = failure.cause, failure.detail
        finally:
            self.live -= 1
            self.next_round()

    def next_round(self) -> None:
        """In deterministic mode, start a round if every live trajectory, or branch of one, waits for an engine."""
        if self._lockstep and self.live and sum(client.waiting for client in self.clients.values()) == self.live:
            for client in self.clients.values():
                client.flush()


class _TrajectoryContext:
    """The `Context` of one trajectory."""

    def __init__(self, collector: Collector, trajectory: Trajectory, sampling: Sampling, use_turn_rewards: bool):
        self._collector = collector
        self._trajectory = trajectory
        self._sampling = sampling
        self.use_turn_rewards = use_turn_rewards
        self._calls = 0
        self._grades: dict[str | None, float] = {}

    async def call(self, role: str, **variables: Any) -> Turn:
        """Prompt, sample, parse, and append the turn; its seed depends on its place in the run alone."""
        agent = self._collector.team.of_role(role)
        policy = agent.config.policy
        tokenizer = self._collector.tokenizers[policy]
        index, self._calls = self._calls, self._calls + 1  # before anything is waited for: branches count in their order
        messages, prompt, prompt_ids = await self._prompt(agent, variables)
        limit = agent.config.max_response_tokens or self._collector.config.max_response_tokens
        seed = call_seed(
            self._collector.seed,
            self._sampling.stream,
            self._trajectory.group,
            self._trajectory.question.id,
            self._trajectory.sample,
            index,
        )
        response = self._collector.clients[policy].generate(
            prompt_ids, seed, self._sampling.temperature, self._sampling.top_p, limit
        )
        self._collector.next_round()
        sample = await response
        if sample.error is None and not np.isfinite(sample.logprobs).all():
            raise TrajectoryFailure("engine", f"log-probabilities of {agent.name!r} are not finite")
        if sample.error is not None or not len(sample.token_ids):
            raise TrajectoryFailure("engine", sample.error or f"empty response of {agent.name!r}")
        text = tokenizer.text(sample.token_ids.tolist())
        turn = Turn(
            agent.name,
            policy,
            index,
            messages,
            prompt_ids,
            sample.token_ids,
            sample.logprobs,
            limit,
            sample.finish_reason,
            sample.weight_versions,
            text,
            agent.parse(text, prompt),
        )
        bisect.insort(self._trajectory.turns, turn, key=lambda other: other.index)
        return turn

    async def together(self, calls: Iterable[Awaitable[Turn]]) -> list[Turn]:
        """Run calls side by side; until the last has ended each is live for itself, as this trajectory was before."""
        calls = list(calls)
        left = len(calls)
        self._collector.live += max(left - 1, 0)

        async def branch(call: Awaitable[Turn]) -> Turn:
            nonlocal left
            try:
                return await call
            finally:
                left -= 1
                if left:
                    self._collector.live -= 1
                    self._collector.next_round()

        turns = []
        for result in await asyncio.gather(*map(branch, calls), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            turns.append(result)
        return turns

    async def tool(self, name: str, **arguments: Any) -> Any:
        """Call a tool of the environment; how many results a list has is kept for the health rule."""
        result = await self._collector.environment.call_tool(name, self._trajectory.question, arguments)
        if isinstance(result, list):
            self._trajectory.found.append(len(result))
        return result

    async def grade(self, answer: str | None) -> float:
        return await self.reward(Outcome(answer))

    async def reward(self, outcome: Outcome) -> float:
        """The return of an outcome: its own, or the environment's, which grades a bare answer once, and again what has `info`."""
        if outcome.reward is not None:
            workflow = self._collector.team.workflow.config.name
            of_what = f"the outcome of workflow {workflow!r} has for question {self._trajectory.question.id!r}"
            return finite_reward(outcome.reward, of_what)
        if outcome.info or outcome.answer not in self._grades:
            environment, question = self._collector.environment, self._trajectory.question
            of_what = f"environment {environment.config.name!r} returned for question {question.id!r}"
            graded = finite_reward(await environment.reward(question, outcome), of_what)
            if outcome.info:  # the environment may look at it
                return graded
            self._grades[outcome.answer] = graded
        return self._grades[outcome.answer]

    def chance(self, name: str) -> float:
        """Drawn from the run's seed and the trajectory's place in the run, so a continued run draws the same."""
        place = (self._sampling.stream, self._trajectory.group, self._trajectory.question.id, self._trajectory.sample)
        return call_seed(self._collector.seed, *place, "chance", name) / 2**31

    async def _prompt(self, agent: Agent, variables: dict[str, Any]) -> tuple[list[dict[str, str]], str, np.ndarray]:
        """The messages of a call, the prompt as the template renders it, and its ids."""
        policy, limit = agent.config.policy, self._collector.config.max_prompt_tokens
        while True:
            messages = agent.messages(**variables)
            prompt = self._collector.tokenizers[policy].render_prompt(messages)
            prompt_ids = await self._collector.encoders[policy].ids(prompt)
            if len(prompt_ids) <= limit:
                return messages, prompt.text, prompt_ids
            history: list | None = variables.get("history")
            if not history:
                raise TrajectoryFailure(
                    "prompt_too_long",
                    f"prompt of {agent.name!r} has {len(prompt_ids)} tokens, rollout.max_prompt_tokens is {limit}",
                )
            variables = {**variables, "history": history[1:]}
