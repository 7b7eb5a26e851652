"""What Megatron and Transformer Engine are told for `precision: fp8`, read back from the recipe objects on the CPU."""

import json
import os
import subprocess
import sys

import pytest

from megatron_drmas.actor.precision import environment
from megatron_drmas.config.schema import Fp8Config, PrecisionConfig

READ_BACK = """
import json, sys
from tests.te_stub.engine import install
install()
from checkpoints_conv.megatron import cpu
cpu.install()
import torch
torch.cuda.get_device_capability = lambda *device: (9, 0)
torch.cuda.get_device_properties = lambda *device: type("Hopper", (), {"major": 9, "minor": 0})
from contextlib import nullcontext
from megatron.core.fp8_utils import get_fp8_context, get_fp8_recipe
from megatron_drmas.actor.model import policy_config
from megatron_drmas.actor.settings import ActorSettings
from megatron_drmas.config.schema import Fp8Config, PolicyConfig, PrecisionConfig
from checkpoints_conv.families import family_of

spec_of = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=64, hidden_size=64, intermediate_size=128,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4,
    tie_word_embeddings=True, hidden_act="silu", torch_dtype="bfloat16")
spec = family_of(spec_of).model_spec(spec_of)
for fp8 in json.loads(sys.argv[1]):
    settings = ActorSettings("policy", PolicyConfig(model=""), PrecisionConfig("fp8", fp8=Fp8Config(**fp8)), device="cuda")
    config = policy_config(spec, settings)
    recipe = get_fp8_recipe(config)
    told = {
        "recipe": type(recipe).__name__,
        "format": recipe.fp8_format.name,
        "bf16_layers": [n for n in range(4) if isinstance(get_fp8_context(config, n), nullcontext)],
        "parameters": config.fp8_param,
        "dtype": str(config.params_dtype),
    }
    for name in ("margin", "amax_history_len", "amax_compute_algo"):
        told[name] = getattr(recipe, name, None)
    if hasattr(recipe, "fp8_quant_fwd_inp"):
        told["power_of_two_scales"] = recipe.fp8_quant_fwd_inp.power_2_scale
    print(json.dumps(told))
"""


CONFIGS = (
    Fp8Config("delayed", margin=2, amax_history_len=16),
    Fp8Config("tensorwise", bf16_first_layers=1, bf16_last_layers=2),
    Fp8Config("blockwise", bf16_last_layers=1),
)


@pytest.fixture(scope="module")
def told(repository):
    """What was told for each of CONFIGS."""
    engine = repository / ".venv" / "te"
    if not (engine / "transformer_engine").is_dir():
        pytest.skip("Transformer Engine's Python half is not in .venv/te; tools/test.sh fetches it")
    variables = {"PYTHONPATH": f"{engine}:{repository}", **environment(PrecisionConfig("fp8", fp8=CONFIGS[-1]))}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_BACK, json.dumps([fp8.__dict__ for fp8 in CONFIGS])],
        env={**os.environ, **variables},
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def test_delayed_scaling(told):
    expected = {
        "recipe": "TEDelayedScaling",
        "format": "HYBRID",
        "bf16_layers": [],
        "parameters": False,
        "dtype": "torch.bfloat16",
    }
    assert told[0] == expected | {"margin": 2, "amax_history_len": 16, "amax_compute_algo": "max"}


def test_tensorwise_scaling_with_layers_in_bf16(told):
    assert told[1]["recipe"] == "Float8CurrentScaling" and told[1]["format"] == "HYBRID" and not told[1]["parameters"]
    assert told[1]["bf16_layers"] == [0, 2, 3]


def test_blockwise_scaling_uses_float32_scales(told):
    assert told[2]["recipe"] == "Float8BlockScaling" and told[2]["format"] == "HYBRID"
    assert told[2]["power_of_two_scales"] is False
    assert told[2]["bf16_layers"] == [3]
