"""An engine on a mixture of experts: it holds and computes what was sent, fused layout and all."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints_conv.formats.hf_folder import HfFolder
from megatron_drmas.config.schema import EngineConfig
from megatron_drmas.rollout.engine_messages import EngineSettings
from megatron_drmas.weight_sync.errors import WeightSyncError
from megatron_drmas.weight_sync.verify import compare
from tests.engine_process import EngineProcess, prompt, request
from tests.tiny_models import make_qwen3_moe


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    source = HfFolder(folder)
    return {name: source.tensor(name) for name in source.names()}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("normalize", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_experts_are_what_was_sent_and_compute_what_transformers_does(tmp_path, workers, normalize):
    folder = make_qwen3_moe(str(tmp_path / "old"), norm_topk_prob=normalize)
    new = make_qwen3_moe(str(tmp_path / "new"), seed=1, norm_topk_prob=normalize)
    sent = tensors_of(new)
    size = EngineConfig(tensor=workers, max_model_len=128, max_num_seqs=8, kv_cache_mib=32)
    with EngineProcess(EngineSettings("solver", folder, (2,), size)) as engine:
        digests = engine.update(sent.items(), version=1)
        compare(digests, engine.call("weight_digests"), "the engine")
        (sample,) = engine.generate([request(1, prompt(30))])
        victim = "model.layers.1.mlp.experts.3.up_proj.weight"
        engine.update({**sent, victim: sent[victim] + 1e-3}.items(), version=2)
        with pytest.raises(WeightSyncError, match=rf"1 of \d+ tensors differ: {victim}"):
            compare(digests, engine.call("weight_digests"), "the engine")
    model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt(30), *sample.token_ids]])).logits[0, 29:-1]
    expected = (logits / 0.7).log_softmax(-1).gather(-1, torch.from_numpy(sample.token_ids).long()[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)
