"""Processes that act as the ranks of a policy, kept over many tests; and batches to train on."""

import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait

import torch

from megatron_drmas.actor.settings import ActorSettings
from megatron_drmas.batch import TurnBatch
from megatron_drmas.config.schema import OptimizerConfig, ParallelConfig, PolicyConfig, PrecisionConfig
from tests.forked import forkserver

TIMEOUT_S = 120.0


class Ranks:
    """Up to `size` processes; each `run` gives the layout's ranks a fresh PolicyActor and a job to do with it."""

    def __init__(self, size: int):
        self.size = size
        self._start()

    def _start(self) -> None:
        context = forkserver()
        self.pipes, self.processes = [], []
        for _ in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,))
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, settings: ActorSettings, job: Callable, *args) -> list:
        """`job(actor, *args)` on every rank of the layout, `actor` being initialized from the policy's folder.

        Returns:
            What the ranks returned, by rank.

        Raises:
            AssertionError: a rank failed or did not answer; the next run gets new processes.
        """
        world = settings.policy.parallel.world_size
        port = _free_port()
        for rank in range(world):
            self.pipes[rank].send((settings, rank, world, port, job, args))
        results, deadline = {}, time.monotonic() + TIMEOUT_S
        while len(results) < world:
            waiting = {self.pipes[rank]: rank for rank in range(world) if rank not in results}
            ready = wait(waiting, timeout=deadline - time.monotonic())
            if not ready:
                self._restart()
                raise AssertionError(f"ranks {list(waiting.values())} of {world} did not answer within {TIMEOUT_S} s")
            for pipe in ready:
                try:
                    failed, results[waiting[pipe]] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    failed, results[waiting[pipe]] = True, "the process died"
                if failed:
                    self._restart()
                    raise AssertionError(f"rank {waiting[pipe]} of {world}:\n{results[waiting[pipe]]}")
        return [results[rank] for rank in range(world)]

    def _restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe) -> None:
    import torch

    from megatron_drmas.actor.policy_actor import PolicyActor

    torch.set_num_threads(1)
    while True:
        settings, rank, world, port, job, args = pipe.recv()
        try:
            actor = PolicyActor(settings, rank, world, "127.0.0.1", port)
            actor.initialize(settings.policy.model)
            result = job(actor, *args)
            actor.shutdown()
            pipe.send((False, result))
        except Exception:
            pipe.send((True, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def save(actor, folder: str) -> None:
    """A checkpoint from its beginning to its end."""
    actor.begin_save(folder)
    actor.finish_save()


LAYOUTS = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tensor=2),
    "tp2_sp": ParallelConfig(tensor=2, sequence=True),
    "pp2": ParallelConfig(pipeline=2),
    "dp2": ParallelConfig(data=2),
}
WIDE_LAYOUTS = {
    "tp2_pp2": ParallelConfig(tensor=2, pipeline=2),
    "tp2_sp_pp2": ParallelConfig(tensor=2, pipeline=2, sequence=True),
    "tp2_dp2": ParallelConfig(tensor=2, data=2),
    "pp2_dp2": ParallelConfig(pipeline=2, data=2),
}


def make_settings(
    model: str, layout: str = "tp1", precision: str = "fp32", optimizer: dict | None = None, **overrides
) -> ActorSettings:
    """Settings with a learning rate at which weights move; `optimizer` and `overrides` are fields of their classes."""
    policy = PolicyConfig(
        model=model,
        parallel=LAYOUTS[layout],
        optimizer=OptimizerConfig(**{"lr": 1e-3, "eps": 1e-5, **(optimizer or {})}),
        micro_batch_tokens=overrides.pop("micro_batch_tokens", 4096),
        recompute=overrides.pop("recompute", False),
        packing=overrides.pop("packing", "auto"),
    )
    return ActorSettings("policy", policy, PrecisionConfig(precision), **{"total_steps": 10, **overrides})


def make_batch(seed: int = 0, rows: int = 12, prompt: tuple[int, int] = (5, 40), response: tuple[int, int] = (1, 9)) -> TurnBatch:
    """Random rows of two agents; the engine's log-probs are those of a policy near the uniform one."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: int) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    prompts, responses = integers(*prompt, rows), integers(*response, rows)
    zeros = torch.zeros(rows, dtype=torch.int64)
    total = int(responses.sum())
    return TurnBatch(
        tokens=integers(3, 235, int((prompts + responses).sum())),
        offsets=torch.cat([zeros[:1], (prompts + responses).cumsum(0)]),
        prompt_lengths=prompts,
        engine_logprobs=-5.4 + 0.1 * torch.randn(total, generator=generator),
        agent=torch.arange(rows) % 2,
        policy=zeros,
        group=zeros,
        trajectory=torch.arange(rows),
        sample=torch.arange(rows),
        turn=zeros,
        reward=zeros.float(),
        valid=torch.ones(rows, dtype=torch.bool),
        trainable=torch.ones(rows, dtype=torch.bool),
        weight_versions=torch.zeros(total, dtype=torch.int32),
        agents=("first", "second"),
        policies=("policy",),
        questions=("question",),
        advantages=torch.randn(total, generator=generator),
    )


def make_tree_batch(seed: int = 0, rows: int = 16) -> TurnBatch:
    """`make_batch` with rows that begin alike: of few tokens at first, some equal, some the beginning of another.

    What is prompt in one row may be response in another.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(seed, rows, prompt=(2, 30), response=(1, 9))
    places = torch.arange(len(batch.tokens)) - torch.repeat_interleave(batch.offsets[:-1], batch.lengths)
    choices = torch.where(places < 12, 1 + (places % 5 == 4).long(), torch.where(places < 20, 2, 230))
    tokens = 3 + (torch.rand(len(batch.tokens), generator=generator) * choices).long()
    for row in range(0, rows - 1, 4):  # equal rows
        length = int(min(batch.lengths[row], batch.lengths[row + 1]))
        first, second = (int(batch.offsets[r]) for r in (row, row + 1))
        tokens[second : second + length] = tokens[first : first + length]
    return replace(batch, tokens=tokens)
