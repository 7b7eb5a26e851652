"""The tiny team over several nodes of a Slurm, each with an address of its own, by the script that a user submits."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.slurm.lab import SMALL, slurm_lab

pytestmark = pytest.mark.slurm

ACROSS = ("cluster.device=cpu", "cluster.gpus_per_node=2")  # virtual GPUs: a policy on each node
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")


@pytest.fixture(scope="module")
def slurm(repository):
    probe = subprocess.run(["ip", "netns", "add", "probe"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"nodes with networks of their own need `ip netns`: {probe.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", "probe"], check=True)
    with slurm_lab(repository, nodes=3, networks=True) as lab:
        yield lab


def submit(slurm, log, *arguments, options=()):
    options = ("--parsable", "--nodes=2", f"--output={log}", *options)
    return slurm("sbatch", *options, "slurm/search_hetero.sh", *SMALL, *ACROSS, *arguments)


def wait_for_a_step(folder: Path, steps: int = 1, seconds: float = 300):
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + seconds
    while not (metrics.exists() and metrics.read_text().count('"kind":"step"') >= steps) and time.monotonic() < deadline:
        time.sleep(0.2)


@pytest.mark.timeout(400)
def test_a_team_trains_across_two_nodes(slurm, tmp_path):
    log = tmp_path / "job.log"
    number = submit(slurm, log, "name=two", f"output_dir={tmp_path}")
    job = slurm.wait(number, *ENDED, seconds=360)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()[-3000:]
    summary = json.loads((tmp_path / "two/summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("finished", 2)
    said = log.read_text()
    assert "Ray: 2 of 2 nodes have joined" in said and "actor of qwen2, actor of llama" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_whose_node_is_lost_is_queued_again_and_goes_on_elsewhere(slurm, tmp_path):
    log = tmp_path / "job.log"
    number = submit(slurm, log, "steps=12", "checkpoint.every=1", "name=lost", f"output_dir={tmp_path}")
    wait_for_a_step(tmp_path / "lost", 2)
    slurm("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=lost")
    job = slurm.wait(number, "PENDING", *ENDED, seconds=120)
    assert job["JobState"] == "PENDING" and job["Restarts"] == "1", log.read_text()[-3000:]
    slurm("scontrol", "update", f"JobId={number}", "StartTime=now")
    job = slurm.wait(number, *ENDED, seconds=360)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()[-3000:]
    summary = json.loads((tmp_path / "lost/summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("finished", 12)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_saves_and_queues_itself_again_before_its_time_is_up(slurm, tmp_path):
    log = tmp_path / "job.log"
    options = ("--time=00:04:00", "--signal=B:USR1@90")
    number = submit(slurm, log, "steps=1000", "checkpoint.every=1000", "name=limit", f"output_dir={tmp_path}", options=options)
    wait_for_a_step(tmp_path / "limit")
    job = slurm.wait(number, "PENDING", *ENDED, "TIMEOUT", seconds=300)
    slurm("scancel", number)
    assert job["Restarts"] == "1", log.read_text()[-3000:]
    assert "stopped by SIGUSR1" in log.read_text() and list((tmp_path / "limit/checkpoints").glob("step_*"))
