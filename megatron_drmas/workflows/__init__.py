"""The workflows that come with the package; importing this registers them."""

from megatron_drmas.workflows import eval_opt, math, orch_workers, reflective_code, search, single, voting

__all__ = ["eval_opt", "math", "orch_workers", "reflective_code", "search", "single", "voting"]
