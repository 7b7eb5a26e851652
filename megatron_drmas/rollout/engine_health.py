"""Whether an engine may serve, judged by what it finishes: a wedged engine still answers when it is asked how it is."""

import time
from collections.abc import Callable
from enum import StrEnum

FAILURES = 3  # errors in a row, of an engine that finishes nothing in between


class EngineState(StrEnum):
    """Of one engine."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"  # serves on: it has returned an error, or been silent for half of the time that it may be
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"  # runs, and has not got the policy's weights yet
    RETIRED = "retired"  # is not started again


class EngineHealth:
    """The state of one engine.

        HEALTHY ⇄ SUSPECT → DEAD → RESTARTING → STALE → HEALTHY
                              └→ RETIRED         └→ DEAD

    From DEAD the only way to HEALTHY is a new process with a complete weight update.

    Args:
        silence_s: with requests and without a finished one, after which it is dead.
        clock: seconds.
    """

    def __init__(self, silence_s: float, clock: Callable[[], float] = time.monotonic):
        self.state = EngineState.HEALTHY
        self._silence_s = silence_s
        self._clock = clock
        self._heard: float | None = None  # None: it has nothing to do
        self._failures = 0
        self._by_errors = False  # it died of errors, and has finished nothing since

    @property
    def serves(self) -> bool:
        """Whether requests may go to it, and what it answers be used."""
        return self.state in (EngineState.HEALTHY, EngineState.SUSPECT)

    def working(self, has_requests: bool) -> None:
        """It has requests to finish, or none; silence counts from the first."""
        if not has_requests:
            self._heard = None
        elif self._heard is None:
            self._heard = self._clock()

    def progressed(self) -> None:
        """It has finished a request."""
        if self.serves:
            self._heard, self._failures, self._by_errors = self._clock(), 0, False
            self.state = EngineState.HEALTHY

    def failed(self) -> bool:
        """It has returned an error.

        Returns:
            Whether the request is to be tried again: not where a new process returns errors as the one before it did.
        """
        self._require("returned an error", EngineState.HEALTHY, EngineState.SUSPECT)
        self._heard = self._clock()
        if self._by_errors:
            return False
        self._failures += 1
        self.state = EngineState.SUSPECT
        if self._failures == FAILURES:
            self.state, self._by_errors = EngineState.DEAD, True
        return True

    def silent_for(self) -> float:
        """Seconds since it was heard of; half of what it may be makes it suspect, and all of it dead."""
        silence = 0.0 if self._heard is None else self._clock() - self._heard
        if self.serves and silence >= self._silence_s:
            self.state = EngineState.DEAD
        elif self.serves and silence >= self._silence_s / 2:
            self.state = EngineState.SUSPECT
        return silence

    def died(self) -> None:
        """Its process has ended, its connection has, or its update has failed."""
        if self.state is not EngineState.RETIRED:
            self.state = EngineState.DEAD

    def restarting(self) -> None:
        """The process is killed, and a new one comes."""
        self._require("was restarted", EngineState.DEAD)
        self.state = EngineState.RESTARTING

    def started(self) -> None:
        """The new process runs, with the model folder's weights."""
        self._require("started", EngineState.RESTARTING)
        self.state, self._failures, self._heard = EngineState.STALE, 0, None

    def updated(self) -> None:
        """It has got every tensor of the policy's weights, and they were compared."""
        self._require("was updated", EngineState.STALE)
        self.state = EngineState.HEALTHY

    def retired(self) -> None:
        """It is not started again."""
        self.state = EngineState.RETIRED

    def _require(self, event: str, *states: EngineState) -> None:
        if self.state not in states:
            raise RuntimeError(f"an engine that is {self.state} {event}")
