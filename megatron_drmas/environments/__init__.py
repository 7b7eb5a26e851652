"""The environments that come with the package; importing this registers them."""

from megatron_drmas.environments import code, math, search

__all__ = ["code", "math", "search"]
