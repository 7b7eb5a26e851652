"""An engine of two workers: the same weights and log-probs as one."""

import pytest
import torch
from transformers import Qwen2ForCausalLM

from megatron_drmas.config.schema import EngineConfig
from megatron_drmas.rollout.engine_messages import EngineSettings
from megatron_drmas.weight_sync.verify import compare
from tests.engine_process import EngineProcess, prompt, request
from tests.tiny_models import make_qwen2


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])  # one: both workers hold a copy
def test_two_workers_hold_and_compute_what_was_sent(tmp_path, kv_heads):
    folder = make_qwen2(str(tmp_path), hidden_size=128, num_attention_heads=4, num_key_value_heads=kv_heads)
    model = Qwen2ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    size = EngineConfig(tensor=2, max_model_len=128, max_num_seqs=8, kv_cache_mib=32)
    with EngineProcess(EngineSettings("solver", folder, (2,), size)) as engine:
        sent = engine.update(model.state_dict().items(), version=1)
        compare(sent, engine.call("weight_digests"), "the engine")
        (sample,) = engine.generate([request(1, prompt(30))])
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt(30), *sample.token_ids]])).logits[0, 29:-1]
    expected = (logits / 0.7).log_softmax(-1).gather(-1, torch.from_numpy(sample.token_ids).long()[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)
