"""Long work: a progress bar of bytes with rate and remaining time, and two threads to keep a disk busy."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Callable, Iterable, Iterator, TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

THREADS = 2
Item, Result = TypeVar("Item"), TypeVar("Result")


@contextmanager
def byte_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; yields a function that takes the bytes done since the last call, from any thread."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total)
        try:
            yield lambda count: progress.advance(task, count)
        except BaseException:
            progress.live.transient = True  # the error is what is left to read
            raise


def run_parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`work` on every item, on `THREADS` threads in the items' order; after an error, nothing more is begun.

    Returns:
        The results, in order.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
