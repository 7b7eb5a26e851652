"""Attention head sizes that vLLM computes on a CPU."""

import ast
import importlib.util
from functools import cache
from pathlib import Path


@cache
def cpu_head_sizes() -> tuple[int, ...]:
    """The sizes that the installed vLLM lists, read from its source: importing it takes longer than a check may.

    Raises:
        LookupError: the installed vLLM has no such list.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise LookupError("vLLM is not installed")
    path = Path(spec.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LookupError(f"{path}: {error.strerror}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            returned = next(step.value for step in ast.walk(node) if isinstance(step, ast.Return) and step.value)
            return tuple(ast.literal_eval(returned))
    raise LookupError(f"{path} lists no head sizes")
