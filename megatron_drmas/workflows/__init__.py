"""The workflows that come with the package; importing this registers them."""

from megatron_drmas.workflows import math, search, single

__all__ = ["math", "search", "single"]
