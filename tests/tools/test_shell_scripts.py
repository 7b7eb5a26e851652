"""Every shell script parses; `tools/test.sh --lint` has shellcheck read them."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    *sorted(
        path.relative_to(ROOT) for folder in ("tools", "slurm", "tests/slurm_lab") for path in (ROOT / folder).glob("**/*.sh")
    ),
    Path(".ci/run"),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_parses(script):
    done = subprocess.run(["bash", "-n", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
