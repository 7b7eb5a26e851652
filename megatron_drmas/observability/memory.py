"""Peak memory of the run's process tree."""

import os
import threading
import time

import psutil

BUSY_SHARE = 0.02  # of one core, at most, for looking


def tree_bytes(pid: int) -> int:
    """Memory of a process and all its descendants, in bytes.

    Each process counts with its proportional set size (PSS): a page that several processes share is split among
    them, so that it counts once in the sum.  Where the system does not tell (another user's process, no Linux), the
    resident set size is used instead, which counts shared pages fully.  Shared memory that no process of the tree has
    mapped, and processes started outside the tree, are not counted.
    """
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_process_bytes(process) for process in processes)


def _process_bytes(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
        return getattr(full, "pss", full.rss)
    except psutil.AccessDenied:
        pass
    except psutil.NoSuchProcess:
        return 0
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


class MemorySampler:
    """Looks at the tree below this process from a background thread and remembers the most it saw.

    Args:
        interval_s: minimum time between two looks; longer where one look costs more than `BUSY_SHARE` of it.
    """

    def __init__(self, interval_s: float = 2.0):
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory sampler", daemon=True)
        self._thread.start()

    @property
    def peak_gib(self) -> float:
        return self.peak_bytes / 2**30

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        wait = 0.0
        while not self._stop.wait(wait):
            before = time.thread_time()
            self.peak_bytes = max(self.peak_bytes, tree_bytes(os.getpid()))
            wait = max(self._interval_s, (time.thread_time() - before) / BUSY_SHARE)
