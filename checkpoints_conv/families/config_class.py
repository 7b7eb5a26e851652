"""What a config.json says to transformers, absent keys included: the attributes of its own config class."""

import copy
import importlib
import logging
import os
import sys
from contextlib import contextmanager
from typing import Any, Iterator

from checkpoints_conv.errors import ConversionError

UNUSED = ("dtype", "torch_dtype")  # of the stored weights; the class would import torch to look them up
_hide_torch = False


def keep_torch_out() -> None:
    """Import transformers without torch, in a process that asks it for configs only.

    With torch it imports its model code too (and scikit-learn), which takes four times as long as the rest.
    """
    global _hide_torch
    _hide_torch = True
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is no PyTorch


def config_class(model_type: str, name: str) -> type:
    """transformers' class of a model type, such as "mistral" and "MistralConfig"."""
    with _without_torch() if _hide_torch else _quiet():
        return getattr(importlib.import_module(f"transformers.models.{model_type}.configuration_{model_type}"), name)


def transformers_config(model_type: str, name: str, config: dict) -> Any:
    """The config object that transformers makes of the contents of a config.json, RoPE standardised as its models do it.

    Raises:
        ConversionError: transformers refuses the config; its words, which name the key.
    """
    kind = config_class(model_type, name)
    values = {key: copy.deepcopy(value) for key, value in config.items() if key not in UNUSED}
    with _quiet():
        try:
            made = kind(**values)
            made.standardize_rope_params()
        except Exception as error:  # whatever foreign code makes of a foreign file is a refusal of that file
            raise ConversionError(f"transformers' {name} refuses this config.json: {' '.join(str(error).split())}") from error
    return made


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of transformers': what it warns of is refused here, by name."""
    log = logging.getLogger("transformers")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _without_torch() -> Iterator[None]:
    torch = sys.modules.get("torch")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if torch is None:
            del sys.modules["torch"]
        else:
            sys.modules["torch"] = torch
