"""The head sizes that vLLM lists."""

import vllm.v1.attention.backends.cpu_attn as cpu_attn

from megatron_drmas.rollout.head_sizes import cpu_head_sizes


def test_they_are_those_of_the_installed_vllm():
    assert list(cpu_head_sizes()) == cpu_attn.CPUAttentionBackend.get_supported_head_sizes()
