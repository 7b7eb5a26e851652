"""A polite end: the step in progress is finished and saved before the run stops.

A terminal's Ctrl-C reaches every process of its foreground group.  The run's own processes do not receive it: Ray blocks SIGINT
in all that it starts, and the environment's services have sessions of their own.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Ctrl-C; Slurm on preemption and at a time limit; by --signal


class StopRequest:
    """Remembers that the run was asked to stop; constructed in the task that a stop may cancel.

    While `polite` the first signal only asks, and before and after that it cancels the task; a second one always cancels it.
    After that every signal does what it does without this class.

    Attributes:
        requested: name of the first signal; None: none came.
        aborted: the task was cancelled.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.aborted = False
        self._came = asyncio.Event()
        self._say: Callable[[str], None] | None = None
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # a shell's background job is not to hear its Ctrl-C
                self._loop.add_signal_handler(number, self._ask, number)

    def _ask(self, number: signal.Signals) -> None:
        first = self.requested is None
        self.requested = self.requested or signal.Signals(number).name
        self._came.set()
        if first and self._say is not None:
            self._say(f"{self.requested}: the step in progress will be finished and saved; a second signal stops at once")
            return
        self.aborted = True
        if self._task is not None:
            self._task.cancel()
        self.close()

    def polite(self, say: Callable[[str], None] | None) -> None:
        """From here on there is work that can be finished and saved.

        Args:
            say: receives what the first signal sets off; None: there is none from then on.
        """
        self._say = say

    async def unless_requested(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, which a request cancels: it can be done again when the run continues."""
        working, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._came.wait())
        try:
            await asyncio.wait((working, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait((working,))
        if not working.cancelled():
            working.result()

    def close(self) -> None:
        """Leave the signals to what they do otherwise."""
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)


def reinstall_handlers() -> None:
    """Give `SIGNALS` back to Python: Ray's core takes SIGTERM for itself, of which Python knows nothing.  In the main thread."""
    for number in SIGNALS:
        signal.signal(number, signal.getsignal(number))
        signal.siginterrupt(number, False)
