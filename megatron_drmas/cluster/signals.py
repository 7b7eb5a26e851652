"""A polite end: the step in progress is finished and saved before the run stops."""

import asyncio
import signal
from typing import Optional

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what Slurm sends on preemption, at a time limit, and by --signal


class StopRequest:
    """Remembers that the run was asked to stop; constructed inside the running event loop.

    The first signal asks; a second one ends the process as it would without this class.
    """

    def __init__(self) -> None:
        self.requested: Optional[str] = None
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._ask, number)

    def _ask(self, number: signal.Signals) -> None:
        self.requested = signal.Signals(number).name
        for handled in SIGNALS:
            self._loop.remove_signal_handler(handled)
