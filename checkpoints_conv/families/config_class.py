"""What a config.json means to transformers, absent keys included: the attributes of transformers' own config class."""

import copy
import importlib
import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from checkpoints_conv.errors import ConversionError

UNUSED = ("dtype", "torch_dtype")  # of the stored weights; the class would import torch to look them up
ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_ABSENT = object()
_private: dict[str, ModuleType] = {}  # transformers' modules as imported here


def config_class(model_type: str, name: str) -> type:
    """transformers' class of a model type, such as "mistral" and "MistralConfig"."""
    module = f"transformers.models.{model_type}.configuration_{model_type}"
    with _quiet():
        return getattr(sys.modules.get(module) or _import_without_torch(module), name)


def transformers_config(model_type: str, name: str, config: dict) -> Any:
    """The config object that transformers makes of the contents of a config.json, with RoPE standardized as its models do.

    Raises:
        ConversionError: transformers refuses the config; quotes its message, which names the key.
    """
    kind = config_class(model_type, name)
    values = {key: copy.deepcopy(value) for key, value in config.items() if key not in UNUSED}
    with _quiet():
        try:
            made = kind(**values)
            made.standardize_rope_params()
        except Exception as error:  # any failure of their code on this file is a refusal of the file
            raise ConversionError(f"transformers' {name} refuses this config.json: {' '.join(str(error).split())}") from error
    return made


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings: what it warns of is refused here, by name."""
    log = logging.getLogger("transformers")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _import_without_torch(module: str) -> ModuleType:
    """A module of transformers, imported as if torch were not installed; other imports of transformers are unaffected.

    Where torch can be imported, a config's module takes four times as long: it also imports model code and scikit-learn.
    """
    if module not in _private:
        torch, advice = sys.modules.get("torch", _ABSENT), os.environ.get(ADVICE, _ABSENT)
        whole = _take_transformers()
        handlers = list(logging.getLogger("transformers").handlers)
        sys.modules.update(_private, torch=None)  # type: ignore[call-overload]  # None: an import fails
        os.environ[ADVICE] = "1"  # not that there is no torch
        try:
            importlib.import_module(module)
        finally:
            _private.update(_take_transformers())
            sys.modules.update(whole)
            _restore(sys.modules, "torch", torch)
            _restore(os.environ, ADVICE, advice)
            logging.getLogger("transformers").handlers[:] = handlers
    return _private[module]


def _take_transformers() -> dict[str, ModuleType]:
    """The modules of transformers, out of `sys.modules`."""
    return {key: sys.modules.pop(key) for key in list(sys.modules) if key.partition(".")[0] == "transformers"}


def _restore(mapping: MutableMapping, key: str, before: Any) -> None:
    if before is _ABSENT:
        del mapping[key]
    else:
        mapping[key] = before
