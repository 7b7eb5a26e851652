"""A step's schedule as data: which resident of the pool is in which state, phase by phase; computed before anything starts.

Actors and engines that share GPUs take turns.  While the team generates, every engine is awake and the actors that share
GPUs with one are on the host.  Then policies are updated in *waves*, side by side where they fit and in turn where they do
not, largest first, with the engines on their GPUs asleep.  Then each policy's new weights go to its engines, which need
them with nothing but the actor's parameters on the device, and last all engines take their KV caches again.

What has its GPUs to itself never moves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

Gpu = tuple[int, int]  # node, device


class State(StrEnum):
    """What a resident has on its devices."""

    ON_DEVICE = "on device"  # an actor that trains, or an engine that generates
    WEIGHTS = "weights"  # an actor's parameters, or an engine's weights without its KV cache
    AWAY = "away"  # an actor on the host, or an engine asleep


@dataclass(frozen=True)
class Resident:
    """The actor, or all engines, of one policy.

    Attributes:
        policy: its name.
        role: actor | engines.
        bytes: state -> GPU -> what it holds there, its temporary peak included.
    """

    policy: str
    role: str
    bytes: Mapping[State, Mapping[Gpu, int]]

    @property
    def name(self) -> str:
        return f"{self.role} of {self.policy}"

    @property
    def gpus(self) -> frozenset[Gpu]:
        return frozenset(self.bytes[State.ON_DEVICE])


@dataclass(frozen=True)
class Phase:
    """A part of a step.

    Attributes:
        name: generate, update or sync.
        policies: that it is about.
        states: resident's name -> state.
    """

    name: str
    policies: tuple[str, ...]
    states: Mapping[str, State]


class PoolOverflow(RuntimeError):
    """Residents would hold more of a device together than it has."""


@dataclass
class Schedule:
    """The phases of a step, in order.

    Attributes:
        residents: by name.
        limit: bytes of every device; None: no limit.
    """

    residents: Mapping[str, Resident]
    phases: Sequence[Phase]
    limit: int | None = None

    def phase(self, name: str) -> list[Phase]:
        """The phases of this name."""
        return [phase for phase in self.phases if phase.name == name]

    @property
    def generating(self) -> Phase:
        """The one phase in which the team generates."""
        (found,) = self.phase("generate")
        return found

    @property
    def takes_turns(self) -> bool:
        """Whether anybody is ever away."""
        return any(state != State.ON_DEVICE for phase in self.phases for state in phase.states.values())

    def held(self, states: Mapping[str, State]) -> dict[Gpu, int]:
        """Bytes on each GPU."""
        return held(self.residents.values(), states)

    def peak(self) -> dict[Gpu, int]:
        """The most that any phase holds on each GPU."""
        found: dict[Gpu, int] = {}
        for phase in self.phases:
            for gpu, size in self.held(phase.states).items():
                found[gpu] = max(found.get(gpu, 0), size)
        return found

    def everything(self) -> dict[Gpu, int]:
        """Bytes on each GPU if all residents stayed on it."""
        return self.held(dict.fromkeys(self.residents, State.ON_DEVICE))

    def check(self, what: str, policies: Iterable[str], states: Mapping[str, State]) -> None:
        """Raises PoolOverflow if residents in these states hold more of a GPU than the limit."""
        if self.limit is None:
            return
        for gpu, size in self.held(states).items():
            if size > self.limit:
                parts = {each.name: each.bytes[states[each.name]].get(gpu, 0) for each in self.residents.values()}
                sums = " + ".join(f"{part / 2**30:.2f} ({name})" for name, part in parts.items() if part)
                raise PoolOverflow(
                    f"{what} of {', '.join(policies)}: {sums} = {size / 2**30:.2f} GiB on GPU {gpu[1]} of node {gpu[0]}, "
                    f"which has {self.limit / 2**30:.2f}"
                )

    def lines(self) -> list[str]:
        """The schedule as text: a line for each phase, with what is on the devices and the fullest of them."""
        lines = []
        for phase in self.phases:
            here = [
                f"{name}{'' if state == State.ON_DEVICE else f' ({state})'}"
                for name, state in phase.states.items()
                if state != State.AWAY
            ]
            fullest = max(self.held(phase.states).values(), default=0)
            of = f" {' + '.join(phase.policies)}" if phase.name in ("update", "sync") else ""
            lines.append(f"{phase.name}{of}: {', '.join(here)}; {fullest / 2**30:.2f} GiB on the fullest device")
        return lines


def held(residents: Iterable[Resident], states: Mapping[str, State]) -> dict[Gpu, int]:
    """Bytes on each GPU with residents in these states."""
    found: dict[Gpu, int] = {}
    for resident in residents:
        for gpu, size in resident.bytes[states[resident.name]].items():
            found[gpu] = found.get(gpu, 0) + size
    return found


def step_schedule(residents: Iterable[Resident], limit: int | None = None) -> Schedule:
    """The schedule of a step.

    Args:
        residents: an actor and the engines of every trainable policy, the engines of a frozen one.
        limit: bytes of every device; None: whatever shares a device takes turns.

    Raises:
        PoolOverflow: a phase cannot fit; names it, the device and what is on it.
    """
    everyone = {each.name: each for each in residents}
    engines = [each for each in everyone.values() if each.role == "engines"]
    actors = [each for each in everyone.values() if each.role == "actor"]
    roomy = (
        limit is not None and max(held(everyone.values(), dict.fromkeys(everyone, State.ON_DEVICE)).values(), default=0) <= limit
    )
    generating = {each.name: State.ON_DEVICE for each in engines}
    generating |= {each.name: State.ON_DEVICE if roomy or not _meets(each, engines) else State.AWAY for each in actors}

    def updating(wave: Sequence[Resident]) -> dict[str, State]:
        """Engines on the GPUs of these actors are asleep."""
        states = generating if roomy else generating | {each.name: State.AWAY for each in engines if _meets(each, wave)}
        return states | {each.name: State.ON_DEVICE for each in wave}

    def side_by_side(wave: Sequence[Resident], another: Resident) -> bool:
        if limit is None:
            return not _meets(another, wave)
        return max(held(everyone.values(), updating([*wave, another])).values(), default=0) <= limit

    by_size = sorted(actors, key=lambda each: (-sum(each.bytes[State.ON_DEVICE].values()), each.policy))
    waves = _waves(by_size, side_by_side)
    phases = [Phase("generate", tuple(each.policy for each in engines), generating)]
    phases += [Phase("update", tuple(each.policy for each in wave), updating(wave)) for wave in waves]

    slept = {
        name for phase in phases for name, state in phase.states.items() if state == State.AWAY and name not in _names(actors)
    }
    states = generating | dict.fromkeys(slept, State.AWAY)
    own = {each.policy: each for each in engines}

    def at_once(wave: Sequence[Resident], another: Resident) -> bool:
        return roomy or not (another.gpus | own[another.policy].gpus) & {
            gpu for each in wave for gpu in each.gpus | own[each.policy].gpus
        }

    for wave in _waves(sorted(actors, key=lambda each: each.policy), at_once):
        states |= {own[each.policy].name: State.WEIGHTS for each in wave if own[each.policy].name in slept}
        lent = {each.name: State.WEIGHTS if generating[each.name] == State.AWAY else State.ON_DEVICE for each in wave}
        phases.append(Phase("sync", tuple(each.policy for each in wave), states | lent))
    schedule = Schedule(everyone, phases, limit)
    for phase in phases:
        schedule.check(phase.name, phase.policies, phase.states)
    return schedule


def _meets(resident: Resident, others: Iterable[Resident]) -> bool:
    return any(resident.gpus & other.gpus for other in others)


def _names(residents: Iterable[Resident]) -> set[str]:
    return {each.name for each in residents}


def _waves(actors: Iterable[Resident], may_join: Callable[[Sequence[Resident], Resident], bool]) -> list[list[Resident]]:
    """Actors in their order, each in the first wave that it may join."""
    waves: list[list[Resident]] = []
    for actor in actors:
        wave = next((wave for wave in waves if may_join(wave, actor)), None)
        if wave is None:
            waves.append([actor])
        else:
            wave.append(actor)
    return waves
