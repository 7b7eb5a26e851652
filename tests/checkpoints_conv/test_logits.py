"""Log-probs against transformers in fp32, short and long, and what each known trap would do to them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints_conv import verify
from checkpoints_conv.__main__ import main
from tests.checkpoints_conv import jobs
from tests.checkpoints_conv.family_models import FAMILIES
from tests.checkpoints_conv.ranks import Layout

SHORT, LONG = 64, 4096
TOLERANCE = 1e-5
SMALL = {"num_hidden_layers": 2, "initializer_range": 0.1}  # attention is far from uniform, rounding is not amplified


def reference(folder, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs [t, vocab] by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens[None]).logits[0].log_softmax(-1)


def tokens_of(count: int) -> torch.Tensor:
    return torch.randint(131, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_short(ranks, models, tmp_path, family, tied):
    folder, tokens = models(family, tied, **SMALL), tokens_of(SHORT)
    expected = reference(folder, tokens)
    for tensor in (1, 2):
        for got in ranks.run(Layout(tensor=tensor), tmp_path / f"store{tensor}", jobs.logprobs, folder, tokens):
            assert (got - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_long(ranks, models, tmp_path, family):
    folder, tokens = models(family, **SMALL), tokens_of(LONG)
    (got,) = ranks.run(Layout(), tmp_path / "store", jobs.logprobs, folder, tokens)
    assert (got - reference(folder, tokens)).abs().max() <= TOLERANCE


def test_a_dropped_rope_factor_shows_at_length(ranks, models, tmp_path):
    """Without Llama 3's factor the error grows with length: the reason for the long test."""
    folder = models("llama", **SMALL)
    errors = []
    for count in (SHORT, LONG):
        tokens = tokens_of(count)
        (got,) = ranks.run(Layout(), tmp_path / f"store{count}", jobs.logprobs, folder, tokens, 1.0)
        errors.append(float((got - reference(folder, tokens)).abs().max()))
    assert errors[1] > 100 * TOLERANCE and errors[1] > 3 * errors[0]


@pytest.mark.parametrize("option", ["--tokens=0", "--tokens=-5", "--tolerance=nan", "--tolerance=-1"])
def test_verify_refuses_numbers_that_are_none(option, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["verify", str(tmp_path), str(tmp_path), "--logits", option])
    assert exit.value.code == 2 and "is not a positive number" in capsys.readouterr().err


def test_verify_compares_a_forward_pass(models, tmp_path, capsys, monkeypatch):
    folder = models("qwen2", **SMALL)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")  # the tests' own; a user's shell has none
    assert main(["to-megatron", "--hf", str(folder), "--out", str(tmp_path / "megatron")]) == 0
    assert main(["verify", str(folder), str(tmp_path / "megatron"), "--logits"]) == 0
    assert "within the tolerance" in capsys.readouterr().out
    passes = iter([torch.zeros(3, 5), torch.zeros(3, 5) + 2e-5])
    monkeypatch.setattr(verify, "logprobs", lambda *args: next(passes))
    assert main(["verify", str(folder), str(tmp_path / "megatron"), "--logits"]) == 1
    assert "logits: max |Δ log-prob| 2e-05 over 64 tokens, above the tolerance 1e-05" in capsys.readouterr().out
