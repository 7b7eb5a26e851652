"""Options that a plug-in declares as a dataclass, typed and checked."""

import difflib
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_drmas.config.errors import ConfigError


@dataclass
class NoOptions:
    """The options of what has none."""


def typed_options(key: str, owner: str, declared: type, given: dict[str, Any]) -> Any:
    """`given` as an instance of the dataclass `declared`.

    Args:
        key: their place in the configuration, such as team.workflow.options.
        owner: whose they are, for errors, such as "workflow 'voting'".

    Raises:
        ConfigError: an option that is not declared, or a value of the wrong type.
    """
    known = [field.name for field in fields(declared)]
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            remedy = (
                f"did you mean {key}.{near[0]}?"
                if near
                else f"its options: {', '.join(known)}"
                if known
                else "it has none; remove it"
            )
            raise ConfigError(f"{key}.{name}", value, f"is not an option of {owner}", remedy)
        try:
            OmegaConf.merge(OmegaConf.structured(declared), {name: value})
        except OmegaConfBaseException as error:
            wanted = next(field.type for field in fields(declared) if field.name == name)
            raise ConfigError(
                f"{key}.{name}", value, "is of the wrong type", f"use {getattr(wanted, '__name__', wanted)}"
            ) from error
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(declared), given))
