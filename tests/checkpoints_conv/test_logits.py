"""Log-probs against transformers in fp32, short and long, and what each known trap would do to them."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from checkpoints_conv import verify
from checkpoints_conv.__main__ import main
from checkpoints_conv.formats.hf_folder import INDEX, HfFolder
from checkpoints_conv.megatron import forward
from tests.checkpoints_conv import jobs
from tests.checkpoints_conv.family_models import FAMILIES, LLAMA3_ROPE, tiny_spec
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
    command = ["verify", str(folder), str(tmp_path / "megatron"), "--logits"]
    assert main([*command, "--tokens", "300"]) == 0
    out, err = capsys.readouterr()
    assert "at 256 of 300 tokens, within the tolerance" in out and "positions from 300 to 16384 were not compared" in err
    asked = []

    def passes(folder, config_folder, tokens, positions):
        asked.append((len(tokens), int(positions[-1])))
        return torch.zeros(2, 3, 5) if len(asked) == 1 else torch.full((1, 3, 5), 2e-5)

    monkeypatch.setattr(verify, "logprobs", passes)
    memory = {"SC_PAGE_SIZE": 1, "SC_AVPHYS_PAGES": 10**12}
    monkeypatch.setattr("os.sysconf", lambda name, real=os.sysconf: memory.get(name) or real(name))
    assert main(command) == 1
    assert "logits: max |Δ log-prob| 2e-05 at 256 of 4352 tokens, above the tolerance 1e-05" in capsys.readouterr().out
    assert asked == [(4352, 4351)] * 2


def swapped(tensors: dict) -> None:
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def without_bias(tensors: dict) -> None:
    tensors["model.layers.1.self_attn.k_proj.bias"].zero_()


def one_row(tensors: dict) -> None:
    tensors["model.layers.0.self_attn.v_proj.weight"][5].mul_(1.01)


def ways(folder, tokens: torch.Tensor) -> torch.Tensor:
    """As `forward.logprobs` of a Hugging Face folder, without a process of its own."""
    return torch.from_numpy(forward._hf_logprobs(folder, folder, tokens.tolist(), list(range(len(tokens)))))


@pytest.mark.parametrize("scale", [0.1, 0.4])
@pytest.mark.parametrize("fault", [swapped, without_bias, one_row])
def test_no_fault_hides_in_the_tolerance(ranks, models, tmp_path, fault, scale):
    """Where rounding is small and where large weights amplify it: the same model is within, a fault far above."""
    source = models("qwen2", num_hidden_layers=2, initializer_range=scale)
    faulty = Path(shutil.copytree(source, tmp_path / "faulty"))
    tensors = {name: HfFolder(source).tensor(name).clone() for name in HfFolder(source).names()}
    fault(tensors)
    for file in [*faulty.glob("*.safetensors"), faulty / INDEX]:
        file.unlink()
    save_file(tensors, faulty / "model.safetensors")
    tokens = tokens_of(SHORT)
    expected = ways(source, tokens)
    allowed = verify.noise_tolerance(expected)
    for folder, within in ((source, True), (faulty, False)):
        (got,) = ranks.run(Layout(), tmp_path / f"store{within}", jobs.logprobs, folder, tokens)
        largest = float((got - expected[-1]).abs().max())
        assert largest <= allowed if within else largest > 5 * allowed


def test_a_wrong_rope_factor_and_a_window_are_above_the_tolerance(models):
    """Of two configs over the same weights, at a length beyond the window."""
    tokens, llama, mistral = tokens_of(400), models("llama", **SMALL), models("mistral", **SMALL)
    for folder, change in ((llama, {"rope_parameters": {**LLAMA3_ROPE, "factor": 8.0}}), (mistral, {"sliding_window": 256})):
        right = ways(folder, tokens)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **change)
        with torch.no_grad():
            wrong = model(tokens[None]).logits[0].log_softmax(-1)
        assert (wrong - right[-1]).abs().max() > 10 * verify.noise_tolerance(right)


def test_positions_reach_from_the_first_to_the_last_token():
    assert forward.sample_positions(3).tolist() == [0, 1, 2]
    for count in (256, 257, 4352, 100_000):
        positions = forward.sample_positions(count)
        assert (positions[0], positions[-1], len(positions.unique())) == (0, count - 1, 256)


def test_the_default_length_shows_a_window_where_it_can_and_is_bounded(monkeypatch):
    memory = {"SC_PAGE_SIZE": 1, "SC_AVPHYS_PAGES": 10**12}
    monkeypatch.setattr("os.sysconf", memory.__getitem__)
    spec = tiny_spec("llama")
    assert forward.affordable_tokens(spec, 10**6) == 4352
    assert forward.affordable_tokens(spec, 2 * 10**8) == 1000
    assert forward.affordable_tokens(spec, 7 * 10**9) == 64
    assert forward.affordable_tokens(tiny_spec("llama", max_position_embeddings=32), 10**12) == 32
    memory["SC_AVPHYS_PAGES"] = 10**8
    tokens = forward.affordable_tokens(spec, 10**6)
    assert tokens < 4352 and 16 * spec.heads * tokens**2 <= 10**8 / 2
