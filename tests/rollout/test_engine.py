"""A real engine on a tied Llama with Llama-3 RoPE scaling: what it samples, and how it takes new weights."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from megatron_drmas.config.schema import EngineConfig
from megatron_drmas.rollout.engine_messages import EngineError, EngineSettings, Sample
from tests.engine_process import EngineProcess, prompt, request, said
from tests.tiny_models import make_llama

TEMPERATURE = 0.7
LONG = 80  # tokens; more than two blocks of the prefix cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A model whose files say nothing about stop tokens, and ask for a sampling that nobody wants."""
    folder = make_llama(str(tmp_path_factory.mktemp("llama")), eos_token_id=None)
    asked = {
        "do_sample": True,
        "temperature": 0.1,
        "top_k": 1,
        "top_p": 0.1,
        "min_p": 0.9,
        "repetition_penalty": 5.0,
        "max_new_tokens": 1,
    }
    (Path(folder) / "generation_config.json").write_text(json.dumps(asked))
    return folder


@pytest.fixture(scope="module")
def running(folder):
    size = EngineConfig(max_model_len=256, max_num_seqs=32, kv_cache_mib=64)
    with EngineProcess(EngineSettings("solver", folder, (2,), size, sleep=True)) as engine:
        yield engine


@pytest.fixture
def engine(running, folder) -> EngineProcess:
    """The engine with the folder's weights, whatever a test before did to it."""
    running.update(hf_tensors(LlamaForCausalLM.from_pretrained(folder)), version=0)
    return running


def hf_tensors(model: LlamaForCausalLM) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]


def another(folder: str) -> LlamaForCausalLM:
    """The folder's model after a step that changed every weight."""
    model = LlamaForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def reference(
    model: LlamaForCausalLM, prompt_ids: list[int], sample: Sample, temperature: float, top_p: float = 1.0
) -> torch.Tensor:
    """Log-probs of the sampled ids under the distribution that they should have been drawn from."""
    ids = torch.tensor([[*prompt_ids, *sample.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1].float()
    logprobs = (logits / temperature).log_softmax(-1)
    order = logprobs.argsort(-1, descending=True)
    before = logprobs.gather(-1, order).exp().cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    dropped = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, order, before >= top_p)
    kept = logprobs.masked_fill(dropped, -math.inf).log_softmax(-1)
    return kept.gather(-1, torch.from_numpy(sample.token_ids).long()[:, None])[:, 0]


def assert_logprobs(model, prompt_ids, sample, temperature=TEMPERATURE, top_p=1.0) -> None:
    assert sample.error is None
    expected = reference(model, prompt_ids, sample, temperature, top_p)
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)


def test_logprobs_are_those_of_the_distribution_sampled_from(engine, folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    requests = [request(i, prompt(5 + 9 * i, i), temperature=TEMPERATURE) for i in range(8)]
    requests += [request(10 + i, prompt(5 + 9 * i, i), temperature=1.3, top_p=0.6) for i in range(4)]
    for asked, sample in zip(requests, engine.generate(requests)):
        assert_logprobs(model, asked.prompt_ids, sample, asked.temperature, asked.top_p)


def test_greedy_takes_the_likeliest_token(engine, folder):
    (sample,) = engine.generate([request(1, prompt(20), temperature=0.0)])
    model = LlamaForCausalLM.from_pretrained(folder)
    assert_logprobs(model, prompt(20), sample, temperature=1.0)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt(20), *sample.token_ids]])).logits[0, 19:-1]
    assert logits.argmax(-1).tolist() == sample.token_ids.tolist()


def test_a_request_gives_the_same_alone_and_in_a_batch(engine):
    requests = [request(i, prompt(10 + 3 * i, i % 4), max_tokens=6 + i % 5) for i in range(20)]
    together = engine.generate(requests)
    for index in (0, 7, 19):
        engine.call("reset_prefix_cache")
        (alone,) = engine.generate([requests[index]])
        assert alone.token_ids.tolist() == together[index].token_ids.tolist()
        assert alone.logprobs == pytest.approx(together[index].logprobs, abs=1e-5)


def test_seeds_alone_tell_responses_apart(engine):
    samples = engine.generate([request(i, prompt(12), seed=i // 2, temperature=2.0) for i in range(16)])
    responses = [tuple(sample.token_ids) for sample in samples]
    assert responses[::2] == responses[1::2] and len(set(responses)) == 8


def test_neighboring_seeds_draw_from_the_distribution(engine, folder):
    draws = 2000
    samples = engine.generate([request(i, prompt(12), max_tokens=1) for i in range(draws)])
    drawn = torch.bincount(torch.tensor([sample.token_ids[0] for sample in samples]), minlength=235)
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([prompt(12)])).logits[0, -1]
    expected = (logits / TEMPERATURE).softmax(-1) * draws
    common = expected > 5
    chi_square = ((drawn - expected)[common] ** 2 / expected[common]).sum()
    assert chi_square < 2 * common.sum() + 20


def test_a_response_ends_at_the_stop_token_and_holds_it(engine):
    samples = engine.generate([request(i, prompt(6, i), temperature=1.5, max_tokens=100) for i in range(32)])
    ended = [sample for sample in samples if sample.finish_reason == "stop"]
    assert ended and all(sample.token_ids.tolist().index(2) == len(sample.token_ids) - 1 for sample in ended)
    cut = [sample for sample in samples if sample.finish_reason == "length"]
    assert all(len(sample.token_ids) == 100 and 2 not in sample.token_ids for sample in cut)


@pytest.mark.parametrize(
    "bad, message",
    [
        (request(1, []), "empty"),
        (request(1, [5, 235]), "235"),
        (request(1, [-1]), "-1"),
        (request(1, prompt(256)), "max_model_len=256"),
        (request(1, prompt(5), temperature=-1.0), "temperature"),
        (request(1, prompt(5), top_p=0.0), "top_p"),
    ],
)
def test_a_bad_request_is_its_own_error_and_nobody_elses(engine, bad, message):
    good = request(2, prompt(5))
    failed, sample = engine.generate([bad, good])
    assert message in failed.error and failed.finish_reason == "refused" and not len(failed.token_ids)
    assert sample.error is None and len(sample.token_ids) == 8


def test_responses_are_cut_at_the_models_length(engine):
    (sample,) = engine.generate([request(1, prompt(250), max_tokens=100)])
    assert sample.finish_reason == "length" and len(sample.token_ids) <= 6


def test_tied_weights_are_new_everywhere_after_an_update(engine, folder):
    model = another(folder)
    engine.update(hf_tensors(model), version=3)
    (sample,) = engine.generate([request(1, prompt(30), temperature=TEMPERATURE)])
    assert sample.weight_versions == [(3, len(sample.token_ids))]
    assert_logprobs(model, prompt(30), sample)


def test_no_prefix_of_the_old_weights_survives_an_update(engine, folder):
    engine.generate([request(1, prompt(LONG))])
    before = engine.call("stats")["cached_tokens"]
    engine.generate([request(1, prompt(LONG))])
    assert engine.call("stats")["cached_tokens"] >= before + LONG // 2
    model = another(folder)
    engine.update(hf_tensors(model), version=1)
    (sample,) = engine.generate([request(1, prompt(LONG))])
    assert_logprobs(model, prompt(LONG), sample)


def test_requests_in_flight_go_on_with_the_new_weights(engine, folder):
    old, new = LlamaForCausalLM.from_pretrained(folder), another(folder)
    steps = engine.call("stats")["steps"]
    requests = [request(i, prompt(LONG, i % 2), max_tokens=150) for i in range(16)]
    engine.call("submit", requests)
    while engine.call("stats")["steps"] < steps + 3:
        pass
    engine.update(hf_tensors(new), version=1)
    samples = engine.collect([asked.key for asked in requests])
    assert all(sample.error is None for sample in samples)
    switched = 0
    for asked, sample in zip(requests, samples):
        measured = torch.tensor(sample.logprobs)
        by_old = (measured - reference(old, asked.prompt_ids, sample, TEMPERATURE)).abs() < 1e-4
        by_new = (measured - reference(new, asked.prompt_ids, sample, TEMPERATURE)).abs() < 1e-4
        assert bool((by_old | by_new).all())  # every token's log-prob is exact under one of the two, in this order
        assert bool((by_old.int().diff() <= 0).all())
        switched += bool(by_old.any() and by_new.any())
    assert switched


def test_a_sleeping_engine_serves_nobody_and_keeps_the_weights_that_it_was_told_to(engine, folder):
    asked = [request(1, prompt(30))]
    (before,) = engine.generate(asked)
    engine.call("sleep", True)
    with pytest.raises(EngineError, match="is asleep"):
        engine.call("submit", asked)
    engine.call("wake_weights")
    engine.call("wake_cache")
    assert said(engine.generate(asked)) == said([before])
    engine.call("sleep", False)
    engine.call("wake_weights")
    with pytest.raises(EngineError, match="cannot wake: its weights are incomplete .lost when it fell asleep"):
        engine.call("wake_cache")
    engine.update(hf_tensors(LlamaForCausalLM.from_pretrained(folder)), version=0)
    with pytest.raises(EngineError, match="is asleep"):
        engine.call("submit", asked)
    engine.call("wake_cache")
    assert said(engine.generate(asked)) == said([before])


def test_an_engine_with_requests_does_not_sleep(engine):
    engine.call("submit", [request(1, prompt(30), max_tokens=150)])
    with pytest.raises(EngineError, match="cannot sleep: 1 requests are in flight"):
        engine.call("sleep", True)
    engine.collect([1])


def test_weights_that_are_not_a_number_cost_the_sample_not_the_engine(engine, folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    engine.update(hf_tensors(model), version=1)
    (sample,) = engine.generate([request(1, prompt(9))])
    assert "nan" in sample.error and not len(sample.logprobs)
    engine.update(hf_tensors(LlamaForCausalLM.from_pretrained(folder)), version=2)
    assert engine.generate([request(1, prompt(9))])[0].error is None
