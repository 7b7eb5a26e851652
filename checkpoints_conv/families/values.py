"""Values of a config.json, of the kind that they must be."""

import reprlib
import sys
from typing import Any

from checkpoints_conv.errors import ConversionError


def whole(config: dict, key: str, default: int | None = None, most: int = 2**31) -> int:
    """A size; `default` where the config has none or null.

    Raises:
        ConversionError: names the key that is missing, or whose value is not a whole number from 1 to `most`.
    """
    value = _present(config, key, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ConversionError(f"config.json has {key}={shown(value)}; it must be a whole number from 1 to {most}")
    return value


def positive(config: dict, key: str) -> float:
    """A factor.

    Raises:
        ConversionError: names the key that is missing, or whose value is not a positive number.
    """
    value = _present(config, key)
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ConversionError(f"config.json has {key}={shown(value)}; it must be a positive number")
    return float(value)


def flag(config: dict, key: str) -> bool:
    """A switch; off where the config has none or null.

    Raises:
        ConversionError: names the key whose value is neither true nor false.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConversionError(f"config.json has {key}={shown(value)}; it must be true or false")
    return bool(value)


def group(config: dict, key: str, kind: type) -> Any:
    """A list or an object; an empty one where the config has none or null.

    Raises:
        ConversionError: names the key whose value is another.
    """
    value = config.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ConversionError(f"config.json has {key}={shown(value)}; it must be {'a list' if kind is list else 'an object'}")
    return value


def shown(value: Any) -> str:
    """A value in a message, however long it is."""
    return reprlib.repr(value)


def _present(config: dict, key: str, default: Any = None) -> Any:
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ConversionError(f"config.json has no {key!r}")
    return value
