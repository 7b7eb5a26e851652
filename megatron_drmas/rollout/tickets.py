"""Which questions each update trains on, and how early their trajectories may be sampled.

*Ticket* u is exactly the groups that update u trains on, u counted from 0 over the run.  With staleness k it is admitted, lowest
first, as soon as every engine serves the weights after u - k updates, and update u waits until its ticket is closed.  So a
token is sampled by weights that are at most k updates older than those that train on it: at admission the engines serve
version u - k or a later one, and versions only rise until update u, which is made from version u.  Nothing is dropped and
nothing slow is passed over.  With k = 0 a ticket is admitted when it is asked for, and sampling and training take turns.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from megatron_drmas.data.sampler import QuestionSampler

T = TypeVar("T")
Draw = Callable[[int], list[int]]
Collect = Callable[[int, Draw], Awaitable[T]]  # (update, draws indices of questions for it)


class Tickets(Generic[T]):
    """The tickets of a run, in order.

    Args:
        sampler: of the training questions.
        served: version of the weights that every engine has: updates made and published.
        updates: of the whole run; no ticket is admitted beyond.
        staleness: k.
        in_turn: sample one ticket after another, so that what the engines compute together is of one ticket.
    """

    def __init__(self, sampler: QuestionSampler, served: int, updates: int, staleness: int = 0, in_turn: bool = False):
        self._sampler = sampler
        self._served = served
        self._updates = updates
        self._staleness = staleness
        self._in_turn = in_turn
        self._next = served  # the ticket that `take` gives
        self._drawn: dict[int, list[int]] = {}  # of tickets that are not trained on: every index drawn for it, in order
        self._returned: list[int] = []  # drawn for tickets that did not need them when they were sampled again
        self._open: dict[int, asyncio.Task[T]] = {}
        self._collect: Collect[T] | None = None

    @asynccontextmanager
    async def running(self, collect: Collect[T]) -> AsyncIterator[None]:
        """Sample by `collect` from here on; what is not finished at the end is abandoned."""
        self._collect = collect
        try:
            yield
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """End the sampling of every ticket."""
        tasks, self._open = list(self._open.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def rewind(self, served: int, state: dict[str, Any]) -> None:
        """Go on as after `served` updates, when `state_dict` was `state`; no ticket is being sampled."""
        assert not self._open
        self._served = self._next = served
        self.load_state_dict(state)

    async def take(self) -> T:
        """What was sampled for the next update, when it is whole.

        Raises:
            Whatever ended its sampling.
        """
        self.admit()
        update, self._next = self._next, self._next + 1
        try:
            return await self._open[update]
        finally:
            self._open.pop(update, None)
            self._drawn.pop(update, None)

    def published(self, version: int) -> None:
        """Every engine serves the weights after `version` updates."""
        assert version >= self._served, f"weights {version} came after {self._served}"
        self._served = version

    def admit(self) -> None:
        """Begin to sample every ticket that may be."""
        for update in range(self._next, min(self._served + self._staleness + 1, self._updates)):
            if update not in self._open:
                before = self._open.get(update - 1) if self._in_turn else None
                self._open[update] = asyncio.ensure_future(self._sample(update, before))

    async def settle(self) -> None:
        """Wait until no ticket is being sampled; one that failed says so when it is taken."""
        if self._open:
            await asyncio.wait(self._open.values())

    def state_dict(self) -> dict[str, Any]:
        """The sampler's, and the questions of tickets that were begun: a run that continues samples these again, whole.

        A copy: what is drawn later belongs to later states.
        """
        opened = {str(update): list(drawn) for update, drawn in self._drawn.items()}
        return {
            **self._sampler.state_dict(),
            **({"open": opened} if opened else {}),
            **({"returned": list(self._returned)} if self._returned else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._drawn = {int(update): list(drawn) for update, drawn in state.get("open", {}).items()}
        self._returned = list(state.get("returned", ()))

    async def _sample(self, update: int, before: "asyncio.Task[T] | None") -> T:
        if before is not None:
            await asyncio.wait((before,))
        assert self._collect is not None, "`running` comes first"
        again, drawn = list(self._drawn.get(update, ())), self._drawn.setdefault(update, [])

        def draw(count: int) -> list[int]:
            repeated, again[:count] = again[:count], []
            returned, self._returned = self._returned[: count - len(repeated)], self._returned[count - len(repeated) :]
            new = returned + self._sampler.draw(count - len(repeated) - len(returned))
            drawn.extend(new)
            return repeated + new

        sampled = await self._collect(update, draw)
        if again:  # fewer questions were replaced than before: the rest is the next ticket's to draw
            del drawn[-len(again) :]
            self._returned += again
        return sampled
