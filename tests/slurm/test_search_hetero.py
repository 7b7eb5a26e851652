"""slurm/search_hetero.sh on a one-machine Slurm: the script a cluster user submits, unchanged."""

import json
import time
from pathlib import Path

import pytest

from tests.slurm.lab import SMALL, slurm_lab

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm(repository):
    with slurm_lab(repository) as lab:
        yield lab


def test_slurm_accepts_the_script_as_it_is(slurm):
    """sbatch exits with an error, which the fixture raises, where it does not."""
    slurm("sbatch", "--test-only", "slurm/search_hetero.sh")
    slurm("sbatch", "--test-only", "--nodes=1", "slurm/search_hetero.sh", "--config-name", "search_hetero_8xh100")


def test_no_directive_stands_where_slurm_does_not_read_it(repository):
    lines = (repository / "slurm/search_hetero.sh").read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(directives) >= 8 and max(directives) < first_command


def test_a_submission_from_elsewhere_says_where_to_submit_from(slurm, tmp_path):
    script = str(slurm.repository / "slurm/search_hetero.sh")
    number = slurm("sbatch", "--parsable", f"--output={tmp_path}/log", script, cwd=tmp_path)
    job = slurm.wait(number, "FAILED", "COMPLETED", seconds=30)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0")
    assert "submit it from the repository's root" in (tmp_path / "log").read_text()


@pytest.mark.timeout(400)
def test_a_submitted_run_trains_and_ends_well(slurm, tmp_path):
    log = tmp_path / "job.log"
    number = slurm.submit(log, *SMALL, "name=submitted", f"output_dir={tmp_path}")
    job = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", seconds=360)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()[-3000:]
    summary = json.loads((tmp_path / "submitted/summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("finished", 2)
    assert None not in summary["evaluation"]["sampled"]["success"].values()
    assert (tmp_path / "submitted/report.html").exists()
    assert not Path(f"/tmp/ray_{number}").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_asked_to_stop_saves_queues_itself_again_and_finishes(slurm, tmp_path):
    log = tmp_path / "job.log"
    number = slurm.submit(log, *SMALL, "steps=40", "checkpoint.every=100", "name=stopped", f"output_dir={tmp_path}")
    metrics = tmp_path / "stopped/metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and '"kind":"step"' in metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    slurm("scancel", "--signal=USR1", "--batch", number)
    job = slurm.wait(number, "PENDING", "COMPLETED", "FAILED", seconds=120)
    assert job["JobState"] == "PENDING" and job["Restarts"] == "1", log.read_text()[-3000:]
    slurm("scontrol", "update", f"JobId={number}", "StartTime=now")
    job = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED", seconds=300)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()[-3000:]
    summary = json.loads((tmp_path / "stopped/summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("finished", 40)
