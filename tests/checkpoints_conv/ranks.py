"""Processes that act as Megatron ranks, kept over many tests and layouts."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.forked import forkserver

TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Layout:
    """Tensor, pipeline, virtual pipeline (chunks a rank) and expert parallel sizes; the rest is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    expert: int = 1
    world: int = 0  # 0: tensor x pipeline x expert

    @property
    def size(self) -> int:
        return self.world or self.tensor * self.pipeline * self.expert

    def __str__(self) -> str:
        return f"tp{self.tensor}-pp{self.pipeline}-vpp{self.virtual or 1}-ep{self.expert}-n{self.size}"


class Ranks:
    """Up to `size` processes; each `run` initializes Megatron in one layout and does one job on every rank."""

    def __init__(self, size: int):
        context = forkserver()
        self._pipes, self._processes = [], []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,))
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, layout: Layout, store: Path, job: Callable, *args) -> list:
        """`job(*args)` on every rank of the layout.

        Args:
            store: a file that does not exist yet, where the ranks meet.

        Returns:
            What the ranks returned, by rank.
        """
        for rank in range(layout.size):
            self._pipes[rank].send((layout, rank, store, job, args))
        answers = []
        for rank in range(layout.size):
            assert self._pipes[rank].poll(TIMEOUT_S), f"rank {rank} of {layout} did not answer within {TIMEOUT_S} s"
            answers.append(self._pipes[rank].recv())
        failures = [f"rank {rank} of {layout}:\n{text}" for rank, (failed, text) in enumerate(answers) if failed]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes):
            pipe.close()
            process.join(10)
            process.kill()


def _serve(pipe) -> None:
    from tests.checkpoints_conv import jobs

    while True:
        try:
            layout, rank, store, job, args = pipe.recv()
        except EOFError:
            return
        try:
            jobs.initialize(layout, rank, store)
            answer = (False, job(*args))
        except Exception:  # reported by `run`, in pytest's process
            answer = (True, traceback.format_exc())
        finally:
            jobs.destroy()
        pipe.send(answer)
