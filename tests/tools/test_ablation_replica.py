"""The replica: its model against transformers, its shared computation against an unshared one, its sampling and its rows."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tools.ablation.branches import Calls, Responses, response_logprobs, sample
from tools.ablation.tiny_lm import TinyLlama
from tools.tiny_team.models import LLAMA3_ROPE
from tools.tiny_team.tokenizer import END

VOCABULARY = 40


@pytest.fixture(scope="module", params=["default", "llama3"])
def folder(request, tmp_path_factory):
    """A random model of three layers whose heads share keys."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=16384,
        initializer_range=0.4,
        rope_parameters=LLAMA3_ROPE if request.param == "llama3" else {"rope_type": "default", "rope_theta": 10000.0},
    )
    path = tmp_path_factory.mktemp(request.param)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def calls():
    """Seven calls with three prompts of different lengths, the first one's longer than the others'."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in (9, 3, 5)]
    return Calls.of([prompts[index] for index in (0, 1, 0, 0, 2, 1, 0)])


@pytest.fixture
def responses():
    """Their responses; the calls 0, 2 and 3 have the same, 6 begins like them."""
    rows = [[5, 6, END], [7, END], [5, 6, END], [5, 6, END], [END], [8, 9, 10, END], [5, 7, END]]
    longest = max(map(len, rows))
    mask = torch.tensor([[k < len(row) for k in range(longest)] for row in rows])
    return Responses(torch.tensor([row + [0] * (longest - len(row)) for row in rows]), mask, torch.zeros(mask.shape))


def unshared_logprobs(model, calls, responses, temperature):
    """Every call on its own through transformers' model."""
    rows = []
    for prompt, response in zip(calls.which.tolist(), responses.lists()):
        ids = torch.tensor([calls.prompts[prompt] + response])
        logits = model(ids).logits[0, -len(response) - 1 : -1] / temperature
        rows.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return rows


def test_shared_computation_has_the_unshared_one_s_values_and_gradient(folder, calls, responses):
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = TinyLlama(folder)
    for parameter in model.parameters:
        parameter.requires_grad_()
    weight = torch.randn(responses.mask.shape, generator=torch.Generator().manual_seed(2))
    shared = response_logprobs(model, calls, responses, 0.6)
    ((shared * weight)[responses.mask]).sum().backward()
    expected = unshared_logprobs(reference, calls, responses, 0.6)
    sum((row * weight[number, : len(row)]).sum() for number, row in enumerate(expected)).backward()
    torch.testing.assert_close(shared[responses.mask], torch.cat(expected), atol=1e-5, rtol=1e-5)
    for name, parameter in reference.named_parameters():
        difference = (model.weights[name.removeprefix("model.")].grad - parameter.grad).norm()
        assert difference <= 1e-5 * parameter.grad.norm(), name


def test_sampling_is_the_inverse_distribution_and_its_logprobs_are_the_model_s(folder, calls):
    model, limit = TinyLlama(folder), 5
    uniform = torch.rand(len(calls), limit, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    drawn = sample(model, calls, uniform, 0.6)
    for row, (prompt, response) in enumerate(zip(calls.which.tolist(), drawn.lists())):
        assert END not in response[:-1] and (response[-1] == END or len(response) == limit)
        for k, token in enumerate(response):
            alone = Calls.of([calls.prompts[prompt] + response[:k]])
            candidates = Responses(
                torch.arange(VOCABULARY)[:, None], torch.ones(VOCABULARY, 1, dtype=torch.bool), torch.zeros(VOCABULARY, 1)
            )
            every = response_logprobs(model, Calls(alone.prompts, torch.zeros(VOCABULARY, dtype=torch.int64)), candidates, 0.6)[
                :, 0
            ]
            cumulative = every.double().exp().cumsum(0)
            assert cumulative[token] - every[token].exp() - 1e-5 <= uniform[row, k] <= cumulative[token] + 1e-5
            assert drawn.logprobs[row, k].item() == pytest.approx(every[token].item(), abs=1e-5)


def test_calls_that_draw_the_same_numbers_answer_the_same(folder, calls):
    uniform = torch.full((len(calls), 4), 0.5, dtype=torch.float64)
    answers = sample(TinyLlama(folder), calls, uniform, 1.0).lists()
    assert all(answers[i] == answers[j] for i in range(7) for j in range(7) if calls.which[i] == calls.which[j])


def test_selected_calls_keep_only_their_prompts(calls):
    part = calls.select(torch.tensor([4, 0, 6]))
    assert len(part.prompts) == 2 and [part.prompts[i] for i in part.which] == [calls.prompts[calls.which[i]] for i in (4, 0, 6)]
    assert math.prod(part.last.shape) == 2
