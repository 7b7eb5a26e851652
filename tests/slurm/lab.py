"""A throw-away Slurm on this machine, and what is asked of it."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SMALL = (
    "steps=2",
    "questions_per_step=4",
    "group_size=2",
    "data.eval_limit=8",
    "evaluation.greedy=false",
    "checkpoint.export=false",
)


class Lab:
    """A running one-machine Slurm."""

    def __init__(self, repository: Path, environment: dict[str, str]):
        self.repository = repository
        self.environment = environment

    def __call__(self, *command: str, cwd: Path | None = None, timeout: float = 30) -> str:
        done = subprocess.run(
            command, cwd=cwd or self.repository, env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, log: Path, *overrides: str) -> str:
        return self("sbatch", "--parsable", f"--output={log}", "slurm/search_hetero.sh", *overrides)

    def job(self, number: str) -> dict[str, str]:
        return dict(field.partition("=")[::2] for field in self("scontrol", "show", "job", number).split())

    def wait(self, number: str, *states: str, seconds: float) -> dict[str, str]:
        """The job's fields once it is in one of `states`, or in whatever state it is when the time is up."""
        deadline = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states and time.monotonic() < deadline:
            time.sleep(0.5)
        return job


@contextmanager
def slurm_lab(repository: Path, nodes: int = 1, networks: bool = False) -> Iterator[Lab]:
    """A Slurm of so many nodes; with `networks` each has a network namespace, an address and a host name of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(tempfile.mkdtemp(prefix="slurm_lab_"))  # pytest's folders are private, and munged wants its socket reachable
    root.chmod(0o755)
    shell = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}  # `cluster` sets some in this process
    environment = shell | {
        "SLURM_LAB_ROOT": str(root),
        "SLURM_CONF": str(root / "etc/slurm.conf"),
        "SLURM_BASE_PORT": str(port),
        "SLURM_NODES": str(nodes),
        "SLURM_NETNS": str(int(networks)),
    }
    lab = Lab(repository, environment)
    try:
        lab("bash", "tests/slurm_lab/start_slurm.sh", timeout=60)
        yield lab
    finally:
        subprocess.run(["bash", "tests/slurm_lab/stop_slurm.sh"], cwd=repository, env=environment, timeout=60, check=True)
        shutil.rmtree(root)
