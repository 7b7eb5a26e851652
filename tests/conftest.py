"""What every test shares: the environment of a machine without a GPU, and skips that say why."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

# Set before any test module imports torch, transformers or vLLM.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import megatron_drmas.environments  # noqa: F401  registers, as every command does

# The same examples on every run; a slow machine is no failure.
settings.register_profile("drmas", deadline=None, derandomize=True)
settings.load_profile("drmas")

SLURM_COMMANDS = ("sbatch", "srun", "slurmctld", "slurmd", "munged")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # of processes that share the files between them, which should end together
        items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            _skip(items, "gpu", "needs an NVIDIA GPU that torch can use")
    missing = [c for c in SLURM_COMMANDS if shutil.which(c, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if os.geteuid() != 0:
        _skip(items, "slurm", "starting a one-machine Slurm needs root")
    elif missing:
        _skip(items, "slurm", f"not installed: {', '.join(missing)}; Debian: slurmctld slurmd slurm-client munge")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds setup.py."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_team(tmp_path_factory) -> Path:
    """The tiny team's models, questions and corpus, as its tool makes them; not to be changed."""
    from tools.tiny_team.__main__ import copy_team

    folder = tmp_path_factory.mktemp("tiny_team")
    copy_team(folder, 0)
    return folder


@pytest.fixture(scope="session")
def public_data() -> Path:
    """A folder of public question sets (bamboogle.jsonl, gsm8k_part.jsonl, …), named by DRMAS_DATA."""
    folder = os.environ.get("DRMAS_DATA")
    if not folder:
        pytest.skip("DRMAS_DATA names no folder of public question sets")
    return Path(folder)
