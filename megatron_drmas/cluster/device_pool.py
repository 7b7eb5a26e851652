"""Residents of the pool going from phase to phase of a step: releases first, then what takes their room, by an account."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager

from megatron_drmas.cluster.schedule import Gpu, Phase, PoolOverflow, Schedule, State
from megatron_drmas.concurrency import together

RANK = {State.AWAY: 0, State.WEIGHTS: 1, State.ON_DEVICE: 2}
ALLOWANCE_BYTES = 512 << 20  # above the plan, of what a resident that has left reports

# Brings a resident from one state to another; an engine that leaves keeps its weights if `keep`.  Returns the bytes that it
# still holds on its fullest device where it knows, and None where it does not.
Move = Callable[[State, State, bool], Awaitable[int | None]]


class DevicePool:
    """The account of what is on each device, and the only way to change it.

    One change is under way at a time.  Room is taken only when every resident that leaves has said that it has left, so that
    no order of answers holds more than the schedule's phases say.

    Args:
        schedule: of a step.
        moves: resident's name -> how it is moved.
        states: of the residents at the beginning.

    Attributes:
        peak: the most that the account has held on each GPU, in bytes.
    """

    def __init__(self, schedule: Schedule, moves: Mapping[str, Move], states: Mapping[str, State]):
        self.schedule = schedule
        self.peak: dict[Gpu, int] = {}
        self._moves = moves
        self._states = dict(states)
        self._lock = asyncio.Lock()
        self._note_peak()

    @property
    def states(self) -> Mapping[str, State]:
        return self._states

    def summary(self) -> str:
        """The fullest device's peak against what it would hold if all residents stayed on it."""
        everything = self.schedule.everything()
        gpu = max(self.peak, key=self.peak.__getitem__)
        peak, all_of_it = self.peak[gpu], everything[gpu]
        return (
            f"at most {peak / 2**30:.3f} GiB on GPU {gpu[1]} of node {gpu[0]}, {peak / all_of_it:.0%} of the "
            f"{all_of_it / 2**30:.3f} that all residents take together"
        )

    async def enter(self, phase: Phase, keep: Collection[str] = (), idle: Collection[str] = ()) -> None:
        """Go to a phase.

        Args:
            keep: policies whose engines keep their weights when they leave, since no weight update follows.
            idle: policies that the phase brings nothing of to the devices.

        Raises:
            PoolOverflow: the phase does not fit, or who left still holds memory.
        """
        states = dict(phase.states)
        for name, resident in self.schedule.residents.items():
            if resident.policy in idle:
                states[name] = min(states[name], self._states[name], key=RANK.__getitem__)
        await self._go(phase.name, phase.policies, states, keep)

    @asynccontextmanager
    async def lend(self, policy: str) -> AsyncIterator[None]:
        """A policy's actor whole on its devices, with what shares them away; afterwards everything is as it was."""
        before, everyone = dict(self._states), self.schedule.residents.values()
        actor = next(each for each in everyone if (each.policy, each.role) == (policy, "actor"))
        if before[actor.name] == State.ON_DEVICE:
            yield
            return
        meeting = [each.name for each in everyone if each.gpus & actor.gpus and each is not actor]
        states = before | dict.fromkeys(meeting, State.AWAY) | {actor.name: State.ON_DEVICE}
        keep = {self.schedule.residents[name].policy for name in meeting}
        await self._go("lending", [policy], states, keep)
        yield
        await self._go("returning", [policy], before, keep)

    @asynccontextmanager
    async def vacated(self, policy: str) -> AsyncIterator[None]:
        """The devices of a policy's engines empty, so that one of them can be started as at first; it comes asleep, as the others
        are, and afterwards everything is as it was."""
        before, everyone = dict(self._states), self.schedule.residents.values()
        engines = next(each for each in everyone if (each.policy, each.role) == (policy, "engines"))
        states = before | {each.name: State.AWAY for each in everyone if each.gpus & engines.gpus}
        keep = {each.policy for each in everyone}
        await self._go("vacating", [policy], states, keep)
        yield
        await self._go("returning", [policy], before, keep)

    async def meet(self, policy: str) -> None:
        """A policy's actor and engines as they are when weights go from one to the other; nothing else moves."""
        phase = next(phase for phase in self.schedule.phase("sync") if policy in phase.policies)
        own = {name: state for name, state in phase.states.items() if self.schedule.residents[name].policy == policy}
        await self._go("meeting", [policy], dict(self._states) | own, [policy])

    async def _go(self, what: str, policies: Collection[str], states: Mapping[str, State], keep: Collection[str]) -> None:
        async with self._lock:
            self.schedule.check(what, policies, states)
            changes = [name for name, state in states.items() if state != self._states[name]]
            leaving = [name for name in changes if RANK[states[name]] < RANK[self._states[name]]]
            await together(self._move(name, states[name], keep) for name in leaving)
            await together(self._move(name, states[name], keep) for name in changes if name not in leaving)

    async def _move(self, name: str, state: State, keep: Collection[str]) -> None:
        resident = self.schedule.residents[name]
        before = self._states[name]
        entering = RANK[state] > RANK[before]
        if entering:  # counted before it comes and until it has gone
            self._states[name] = state
            self._note_peak()
        left = await self._moves[name](before, state, resident.policy in keep)
        self._states[name] = state
        planned = max(resident.bytes[state].values(), default=0)
        if not entering and left is not None and left > planned + ALLOWANCE_BYTES:
            raise PoolOverflow(
                f"{name} still holds {left / 2**30:.2f} GiB of a device after it left; the plan says {planned / 2**30:.2f}"
            )

    def _note_peak(self) -> None:
        self.schedule.check("the account", sorted({each.policy for each in self.schedule.residents.values()}), self._states)
        for gpu, size in self.schedule.held(self._states).items():
            self.peak[gpu] = max(self.peak.get(gpu, 0), size)
