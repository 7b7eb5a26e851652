"""A team one of whose policies is a mixture of experts: trained, synchronized with its engine and exported."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from checkpoints_conv.formats.hf_folder import HfFolder, read_config

EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def team(tiny_team, tmp_path_factory) -> Path:
    """The tiny team, and beside it a Qwen3-MoE with its tokenizer."""
    team = tmp_path_factory.mktemp("team")
    shutil.copytree(tiny_team, team, dirs_exist_ok=True)
    dense = read_config(team / "qwen2")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            **{key: dense[key] for key in ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")},
            bos_token_id=None, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True, tie_word_embeddings=True,
        )  # fmt: skip
        Qwen3MoeForCausalLM(config).save_pretrained(team / "moe")
    for path in (team / "qwen2").iterdir():
        if not (team / "moe" / path.name).exists():
            shutil.copy(path, team / "moe")
    return team


@pytest.mark.slow
def test_a_mixture_of_experts_goes_through_a_run(team, tmp_path, repository):
    """Weight decay moves the weights even where nothing is learned, so that the later update brings other experts."""
    settings = (
        "name=moe", f"output_dir={tmp_path}", f"variables.tiny_team={team}", f"policies.qwen2.model={team / 'moe'}",
        "policies.qwen2.parallel.tensor=1", "policies.llama.parallel.pipeline=1", "policies.qwen2.optimizer.lr=0.01",
        "policies.qwen2.optimizer.weight_decay=0.1", "steps=2", "questions_per_step=2", "group_size=2", "evaluation.before=false",
        "evaluation.after=false",
    )  # fmt: skip
    command = [sys.executable, "-m", "megatron_drmas.train", *settings]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, env={**os.environ, "RAY_ADDRESS": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "moe" / "metrics.jsonl").read_text().splitlines()]
    assert [line["policies"]["qwen2"]["prob_ratio"] for line in lines if line["kind"] == "step"] == pytest.approx(
        [1.0] * 2, abs=1e-4
    )
    before, after = HfFolder(team / "moe"), HfFolder(tmp_path / "moe" / "hf" / "qwen2")
    assert after.shapes == before.shapes
    torch.testing.assert_close(after.tensor(EXPERT), before.tensor(EXPERT) * 0.999**2, rtol=1e-4, atol=1e-7)
