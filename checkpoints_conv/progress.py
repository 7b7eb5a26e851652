"""Long work: a progress bar of bytes with rate and remaining time, and two threads to keep a disk busy."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

THREADS = 2
Item = TypeVar("Item")


@contextmanager
def byte_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; yields a function that takes the bytes done since the last call, from any thread."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total)
        try:
            yield lambda count: progress.advance(task, count)
        except BaseException:
            progress.live.transient = True  # the error is what is left to read
            raise


def run_parallel(work: Callable[[Item], Iterator[int]], items: Iterable[Item], advance: Callable[[int], None]) -> None:
    """`work` on every item, on `THREADS` threads in the items' order; after an error or Ctrl-C, each stops at its next step.

    Args:
        work: does its work step by step and yields the bytes of each.
        advance: takes the bytes of a step; called from any thread.
    """
    stopped = threading.Event()

    def run(item: Item) -> None:
        try:
            steps = iter(()) if stopped.is_set() else work(item)
            for done in steps:
                advance(done)
                if stopped.is_set():
                    break
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(run, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stopped.set()
            raise
