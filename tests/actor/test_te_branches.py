"""Transformer Engine's attention is told of a trie what the local attention computes; its kernels have not run here."""

import os
import subprocess
import sys

import pytest


def test_its_arguments_describe_the_local_attention(repository):
    engine = repository / ".venv" / "te"
    if not (engine / "transformer_engine").is_dir():
        pytest.skip("Transformer Engine's Python half is not in .venv/te; tools/test.sh fetches it")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.actor.te_branches"],
        env={**os.environ, "PYTHONPATH": f"{engine}:{repository}"},
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and run.stdout.endswith("equal\n"), run.stderr
