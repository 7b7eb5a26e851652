"""The environments that come with the package; importing this registers them."""

from megatron_drmas.environments import math, search

__all__ = ["math", "search"]
