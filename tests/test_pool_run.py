"""Three policies that share one device by turns learn, bit for bit, what three with memory of their own do."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest


def train(team, out, repository, *overrides) -> tuple[dict[str, str], str]:
    """Digests of the exported policies, and what the run said."""
    settings = (
        f"output_dir={out}", f"variables.tiny_team={team}", "steps=2", "questions_per_step=4", "group_size=4",
        "deterministic=true",
        "+policy@policies.answer=tiny", f"policies.answer.model={team / 'llama'}", "team.agents.answer.policy=answer",
        "policies.qwen2.parallel.tensor=1", "policies.llama.parallel.pipeline=1", "checkpoint.every=1",
        *(f"policies.{name}.engine.kv_cache_mib=8" for name in ("qwen2", "llama", "answer")),
        "evaluation.before=false", "evaluation.after=false", "cluster.actor_threads=1", "cluster.engine_threads=1",
    )  # fmt: skip
    command = [sys.executable, "-m", "megatron_drmas.train", *settings, *overrides]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    exported = sorted(Path(out).glob("search_hetero/hf/*/model.safetensors"))
    digests = {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in exported}
    return digests, done.stdout + done.stderr


@pytest.mark.slow
def test_a_shared_device_changes_no_bit_and_halves_the_peak(tiny_team, tmp_path, repository):
    apart, _ = train(tiny_team, tmp_path / "apart", repository)
    shared, said = train(tiny_team, tmp_path / "shared", repository, "cluster.device=cpu", "cluster.gpus_per_node=1")
    assert len(apart) == 3 and shared == apart
    share = re.search(r"shared pool: at most .* GiB on GPU 0 of node 0, (\d+)% of the", said)
    assert share and int(share[1]) <= 50, said


@pytest.mark.slow
def test_a_device_that_is_too_small_is_refused_with_the_sum(tiny_team, tmp_path, repository):
    small = ("cluster.device=cpu", "cluster.gpus_per_node=1", "cluster.gpu_memory_gib=0.02")
    with pytest.raises(AssertionError, match=r"generate of .*\(engines of qwen2\).* GiB on GPU 0 of node 0, which has 0.02"):
        train(tiny_team, tmp_path, repository, *small)
