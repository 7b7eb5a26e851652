"""Every shell script parses, and shellcheck finds nothing in it."""

import shutil
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


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed; Debian: apt-get install shellcheck")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
