"""Log-probs, supervised steps and exported weights agree with transformers."""

import pytest
import torch
import transformers

from tests.actor.ranks import LAYOUTS, make_batch, make_settings, make_tree_batch
from tests.actor.reference import Reference
from tests.tiny_models import LLAMA3_ROPE, make_llama


def logprobs_of(actor, batch):
    return actor.token_logprobs(batch)


@pytest.mark.parametrize("layout", ["tp1", "tp2_sp", "pp2", "dp2"])
def test_logprobs_at_length_with_llama3_rope_scaling(ranks, tmp_path, layout):
    """At 1,500 tokens a factor that is dropped or applied linearly changes log-probs by far more than the tolerance."""
    rope = {**LLAMA3_ROPE, "rope_theta": 500000.0, "factor": 32.0}
    model = make_llama(str(tmp_path / "model"), rope_parameters=rope, max_position_embeddings=131072)
    batch = make_batch(rows=3, prompt=(1000, 1400), response=(80, 100))
    settings = make_settings(model, layout, temperature=0.7)
    by_rank = ranks.run(settings, logprobs_of, batch)
    with torch.no_grad():
        expected = Reference(model, temperature=0.7).token_logprobs(batch)
    for logprobs in by_rank:
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)


def sft_twice(actor, batch, weights):
    return [actor.sft_step(batch, step, weights) for step in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_supervised_step_is_weighted_cross_entropy(ranks, models, layout):
    batch = make_tree_batch()
    weights = torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(3)) / len(batch.tokens)
    weights[::3] = 0
    weights[batch.offsets[:-1]] = 9.0  # of first tokens, which nothing predicts
    reference = Reference(models["qwen2"])
    wanted = torch.cat([weights[start + 1 : end] for start, end in zip(batch.offsets[:-1], batch.offsets[1:])])
    settings = make_settings(models["qwen2"], layout, temperature=0.5, micro_batch_tokens=120)
    for report in ranks.run(settings, sft_twice, batch, weights)[0]:
        loss = -(wanted * torch.cat(reference.rows(batch))).sum()
        assert report["loss"] == pytest.approx(float(loss), rel=1e-4)
        assert report["grad_norm"] == pytest.approx(reference.step(loss), rel=1e-3)
        assert report["tokens"] == int((wanted > 0).sum())


def export_after_a_step(actor, folder):
    actor.update(make_batch(), 0)
    actor.export_hf(folder)
    return actor.token_logprobs(make_batch(1))


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2", "dp2"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_exported_folder_is_the_trained_policy(ranks, models, tmp_path, family, layout):
    folder = str(tmp_path / "exported")
    by_rank = ranks.run(make_settings(models[family], layout), export_after_a_step, folder)
    reference = Reference(folder)
    with torch.no_grad():
        torch.testing.assert_close(by_rank[0], reference.token_logprobs(make_batch(1)), rtol=0, atol=1e-5)
    start = transformers.AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32)
    assert set(reference.model.state_dict()) == set(start.state_dict())
    changed = [not torch.equal(value, start.state_dict()[name]) for name, value in reference.model.state_dict().items()]
    assert all(changed), "some tensor was not trained or not exported"
