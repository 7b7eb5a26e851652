"""`setting`: a key of the configuration with its meaning, bounds and choices; checked and explained from there."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, cast, get_type_hints

from omegaconf import MISSING as REQUIRED

from megatron_drmas.config.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """What is known of one key.

    Attributes:
        meaning: a phrase or sentences, with the unit.
        minimum, maximum: inclusive bounds of a number.
        above, below: exclusive bounds of a number.
        choices: the values it may have, each with what it means ("" where the value says it).
        registry: the values are the names registered in this registry (workflow, environment, parser, …).
    """

    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    registry: str | None = None

    def objection(self, value: Any) -> tuple[str, str] | None:
        """(problem, remedy) of a value, or None if it is allowed; the registries are not looked at."""
        if value is None:
            return None
        if self.choices and value not in self.choices:
            return "unknown", f"choose one of: {', '.join(self.choices)}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if not math.isfinite(value):
            return "is not a finite number", "use one"
        if self.minimum is not None and value < self.minimum:
            return "is too small", f"use at least {self.minimum:.12g}"
        if self.maximum is not None and value > self.maximum:
            return "is too large", f"use at most {self.maximum:.12g}"
        if self.above is not None and value <= self.above:
            return "is too small", f"use more than {self.above:.12g}"
        if self.below is not None and value >= self.below:
            return "is too large", f"use less than {self.below:.12g}"
        return None

    @property
    def bounds(self) -> str:
        """The bounds as a reader writes them, such as "(0, 1]"; "" without any."""
        if self.above is None and self.below is None and self.minimum is None and self.maximum is None:
            return ""
        low = (
            f"({self.above:.12g}" if self.above is not None else f"[{self.minimum:.12g}" if self.minimum is not None else "(-inf"
        )
        high = (
            f"{self.below:.12g})" if self.below is not None else f"{self.maximum:.12g}]" if self.maximum is not None else "inf)"
        )
        return f"{low}, {high}"


def setting(meaning: str, default: Any = REQUIRED, **known: Any) -> Any:
    """A dataclass field that is a key of the configuration.

    Args:
        meaning: see `Setting`.
        default: its value unless it is set; a class or function makes it; left out: the key must be set.
        known: the other attributes of `Setting`.
    """
    metadata = {"setting": Setting(meaning, **known)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


# Section -> name that the section's `name` may have -> subclass of the section with the settings that the name brings
EXTENSIONS: dict[type, dict[str, type]] = defaultdict(dict)


@dataclass(frozen=True)
class Key:
    """One key of a configuration class.

    Attributes:
        path: has NAME where the configuration names something itself.
        owner: the name in `EXTENSIONS` that brings the key; "" for a key that is always there.
    """

    path: str
    type: Any
    default: Any
    setting: Setting | None
    section: bool
    owner: str = ""


def keys_of(schema: type, prefix: str = "", defaults: Any = None) -> Iterator[Key]:
    """Every key of a configuration class, sections before what is in them, in the order of the class; extensions come last.

    Args:
        prefix: of the paths.
        defaults: an instance whose values are the defaults; None: those of the class.
    """
    hints = get_type_hints(schema)
    for item in fields(schema):
        path = f"{prefix}{item.name}"
        kind = hints[item.name]
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if defaults is not None:
            default = getattr(defaults, item.name)
        held: tuple[Any, ...] = getattr(kind, "__args__", ())
        inner, below = (
            (held[1], f"{path}.NAME.")
            if getattr(kind, "__origin__", None) is dict and is_dataclass(held[1])
            else (kind, f"{path}.")
        )
        yield Key(path, kind, default, item.metadata.get("setting"), is_dataclass(inner))
        if is_dataclass(inner):
            yield from keys_of(cast(type, inner), below, default if is_dataclass(default) else None)
            for name, extended in EXTENSIONS[cast(type, inner)].items():
                inherited = {known.name for known in fields(cast(type, inner))}
                for key in keys_of(extended, below):
                    if key.path.removeprefix(below).split(".")[0] not in inherited:
                        yield replace(key, owner=name)


def check_settings(node: Any, prefix: str = "") -> None:
    """Hold every value of a composed configuration against its key's bounds and choices.

    Raises:
        ConfigError: the first value that is out of them, or is a number that is not finite.
    """
    if is_dataclass(node):
        children = [(item.name, getattr(node, item.name), item.metadata.get("setting")) for item in fields(node)]
    elif isinstance(node, Mapping):
        children = [(str(name), value, None) for name, value in node.items()]
    else:
        return
    for name, value, known in children:
        path = f"{prefix}.{name}" if prefix else name
        objection = (known or Setting("")).objection(value)
        if objection:
            raise ConfigError(path, value, *objection)
        check_settings(value, path)
