"""Every shell script parses; `tools/test.sh --lint` has shellcheck read them."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    Path(".ci/run"),
    *sorted(path.relative_to(ROOT) for top in ("tools", "slurm", "tests/slurm_lab") for path in (ROOT / top).glob("**/*.sh")),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_parses(script):
    done = subprocess.run(["bash", "-n", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
