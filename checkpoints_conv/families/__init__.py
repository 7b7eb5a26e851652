"""Model families by HF architecture.  Every module of this package that defines FAMILY is one."""

import importlib
import pkgutil

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families.base import FOREIGN, Family
from checkpoints_conv.families.values import group

FAMILIES: dict[str, Family] = {}
for _module in pkgutil.iter_modules(__path__):
    _family = getattr(importlib.import_module(f"{__name__}.{_module.name}"), "FAMILY", None)
    if _family is not None:
        FAMILIES[_family.architecture] = _family


def family_of(config: dict) -> Family:
    """The family that a config.json belongs to.

    Raises:
        ConversionError: names the architecture and those that are known, or what the checkpoint is instead.
    """
    for key, what in FOREIGN.items():
        if config.get(key) is not None:
            raise ConversionError(f"config.json has {key!r}: {what}")
    architectures = group(config, "architectures", list)
    if len(architectures) != 1:
        raise ConversionError(f"config.json must name one architecture in 'architectures', got {architectures}")
    if not isinstance(architectures[0], str) or architectures[0] not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConversionError(f"architecture {architectures[0]!r} is not supported; known: {known}")
    return FAMILIES[architectures[0]]
