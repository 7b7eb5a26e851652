"""What a key of the configuration means, for `--explain KEY` and for the reference page."""

import difflib
import typing
from collections.abc import Mapping
from typing import Any

from omegaconf import MISSING

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.setting import Key, keys_of


def explain(schema: type, path: str, registries: Mapping[str, typing.Iterable[str]] | None = None) -> str:
    """What a key, or every key of a section, means.

    Args:
        schema: the configuration's class.
        path: such as algorithm.loss.clip_high, policies.qwen2.optimizer, or policies.NAME.optimizer.
        registries: the names that are registered, by registry.

    Raises:
        ConfigError: no such key.
    """
    keys = list(keys_of(schema))
    found = [key for key in keys if _is_under(path.split("."), key.path.split("."))]
    if not found:
        paths = list(dict.fromkeys(key.path for key in keys))
        near = (
            difflib.get_close_matches(path, paths, n=3, cutoff=0.5)
            or [p for p in paths if p.split(".")[-1] == path.split(".")[-1]][:3]
        )
        raise ConfigError("--explain", path, "no such key", f"near it: {', '.join(near)}" if near else "--print lists every key")
    return "\n".join(describe(key, registries or {}) for key in found if key.setting or not key.section)


def describe(key: Key, registries: Mapping[str, typing.Iterable[str]]) -> str:
    """One key in a few lines: path, type, default, bounds, meaning, choices."""
    known = key.setting
    facts = [type_name(key.type)] if not key.section else []
    if not key.section:
        facts.append("must be set" if key.default == MISSING else f"default {default_text(key.default)}")
    if known and known.bounds:
        facts.append(f"in {known.bounds}")
    if key.owner:
        facts.append(f"of {key.path.partition('.')[0]} {key.owner}")
    lines = [f"{key.path}  ({', '.join(facts)})" if facts else f"{key.path}"]
    if known:
        lines.append(f"    {known.meaning}")
        lines += [f"    - {choice}: {text}" if text else f"    - {choice}" for choice, text in known.choices.items()]
        if known.registry and known.registry in registries:
            lines.append(f"    one of: {', '.join(sorted(registries[known.registry]))}")
    return "\n".join(lines)


def type_name(kind: Any) -> str:
    """A type as a person writes it: "int", "int or null", "list of str"."""
    arguments = typing.get_args(kind)
    if type(None) in arguments:
        return f"{type_name(next(a for a in arguments if a is not type(None)))} or null"
    if typing.get_origin(kind) is list:
        return f"list of {type_name(arguments[0])}"
    if typing.get_origin(kind) is dict:
        return f"map of names to {type_name(arguments[1])}"
    return "any" if kind is Any else kind.__name__


def default_text(value: Any) -> str:
    """A default as YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_under(path: list[str], key: list[str]) -> bool:
    return len(path) <= len(key) and all(mine == its or its == "NAME" for mine, its in zip(path, key))
