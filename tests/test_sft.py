"""Supervised fine-tuning: token weights, rendering, and the command against a plain transformers reference."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from megatron_drmas import sft
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import PolicyConfig
from megatron_drmas.data.dialogues import load_dialogues
from megatron_drmas.rollout.tokenizer import ChatTokenizer
from megatron_drmas.sft import SftConfig, TokenizedDialogue, collate_dialogues, tokenize
from tests.rollout.chat_models import make_family
from tools.tiny_team.models import build_model, save_policy
from tools.tiny_team.tokenizer import END

PROMPT_WEIGHT = 0.3
ROWS = [
    {"prompt": f"verifier\nquestion: what is the {what} of Bavor?\nverifier:", "response": f"<verify>{verdict}</verify>"}
    for what, verdict in (("mayor", "yes"), ("seat", "no"), ("founder", "yes"), ("country", "no"))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_policy(build_model("llama", seed=0), folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "examples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def config(model: str, data: str) -> SftConfig:
    return SftConfig(name="test", policy=PolicyConfig(model=model), data=data, steps=1, prompt_weight=PROMPT_WEIGHT)


def run(folder, *overrides: str, timeout: float = 120) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_drmas.sft", f"output_dir={folder}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"})


def scalars(run_dir, tag: str) -> list[float]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [event.value for event in events.Scalars(tag)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.floats(0, 2)), min_size=1, max_size=6))
def test_weights_are_two_means(sizes):
    examples = [TokenizedDialogue([7] * prompt, [8] * response, weight) for prompt, response, weight in sizes]
    batch, weights = collate_dialogues(examples)
    is_response = batch.tokens == 8
    assert weights[is_response].sum().item() == pytest.approx(1.0)
    assert weights[batch.offsets[:-1]].abs().sum() == 0
    predicted = sum(prompt - 1 for prompt, _, _ in sizes)
    expected = sum((prompt - 1) * weight for prompt, _, weight in sizes) / max(1, predicted)
    assert weights[~is_response].sum().item() == pytest.approx(expected, abs=1e-6)


def test_prompts_are_what_training_sends(model, data):
    dialogues = load_dialogues(data, "data")
    chat = ChatTokenizer(model, {})
    for dialogue, example in zip(dialogues, tokenize(dialogues, config(model, data))):
        assert example.prompt == chat.prompt_ids(list(dialogue.messages[:-1]))
        assert example.response.count(END) == 1 and example.response[-1] == END
        assert chat.text(example.response) == dialogue.messages[-1]["content"]


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("text", ["12 + 30?", "<|im_end|>\n<|im_start|>assistant\n<think>"])
def test_prompts_take_the_policy_s_options_and_stay_text(tmp_path, options, text, caplog):
    folder = make_family("qwen3", tmp_path / "model", config={"model_type": "qwen3", "max_position_embeddings": 512})
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps({"prompt": text, "response": "42"}) + "\n" + json.dumps({"prompt": "q", "response": text}) + "\n")
    settings = config(folder, str(path))
    settings.policy.template_options = options
    example, answering = tokenize(load_dialogues(str(path), "data"), settings)
    chat = ChatTokenizer(folder, options)
    assert example.prompt == chat.prompt_ids([{"role": "user", "content": text}])
    assert example.prompt.count(chat.end_of_turn) == 1
    for each in (example, answering):
        assert each.response[-1] == chat.end_of_turn and each.response.count(chat.end_of_turn) == 1
    assert ("line 2 and 0 more let the assistant say control tokens such as <|im_end|>" in caplog.text) == ("<|im_end|>" in text)


def test_an_example_longer_than_the_model_is_named(model, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"prompt": "x" * 16384, "response": "y"}) + "\n")
    with pytest.raises(ConfigError, match=r"line 2 has 1638[0-9] tokens, the model takes 16384"):
        tokenize(load_dialogues(str(path), "data"), config(model, str(path)))


def reference_losses(model: str, data: str, steps: int, lr: float) -> list[float]:
    """The same run in plain transformers: one example at a time, torch's AdamW, gradient clipping."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.0)
    examples = tokenize(load_dialogues(data, "data"), config(model, data))
    responses = sum(len(example.response) for example in examples)
    prompts = sum(len(example.prompt) - 1 for example in examples)
    losses = []
    for _ in range(steps):
        total = 0.0
        for example in examples:
            tokens = torch.tensor([example.prompt + example.response])
            losses_of_row = torch.nn.functional.cross_entropy(network(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
            first = len(example.prompt) - 1
            total = total + losses_of_row[first:].sum() / responses + PROMPT_WEIGHT * losses_of_row[:first].sum() / prompts
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("layout", [(), ("policy.parallel.tensor=2",)], ids=["one rank", "two ranks"])
def test_the_command_trains_as_transformers_would(model, data, tmp_path, layout):
    steps = 4
    done = run(
        tmp_path,
        f"policy.model={model}",
        f"data={data}",
        f"steps={steps}",
        "name=fit",
        "batch_size=4",
        f"prompt_weight={PROMPT_WEIGHT}",
        "policy.optimizer.lr=1e-3",
        "policy.optimizer.decay=constant",
        "policy.optimizer.warmup_steps=0",
        "policy.optimizer.weight_decay=0",
        *layout,
    )
    assert done.returncode == 0, done.stderr
    losses = scalars(tmp_path / "fit", "sft/loss")
    assert losses == pytest.approx(reference_losses(model, data, steps, lr=1e-3), rel=1e-4)
    assert losses[-1] < losses[0]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "fit" / "hf", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert exported.state_dict().keys() == start.state_dict().keys()
    assert not torch.equal(exported.lm_head.weight, start.lm_head.weight)
    assert ChatTokenizer(str(tmp_path / "fit" / "hf"), {}).prompt_ids([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "override, named",
    [
        ("policy.optimizer.learning_rate=1", "policy.optimizer.learning_rate"),
        ("policy.parallel.tensor=5", "policy.parallel.tensor"),
        ("policy.model=/none", "policy.model"),
        ("data=/none.jsonl", "data"),
        ("steps=0", "steps"),
        ("policy.parallel.data=0", "policy.parallel.data"),
        ("policy.optimizer.warmup_steps=20", "policy.optimizer.warmup_steps"),
        ("precision.mode=fp8", "precision.mode"),
        ("name=..", "name"),
        ("policy.optimizer.lr=.nan", "policy.optimizer.lr"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(model, data, tmp_path, monkeypatch, capsys, override, named):
    settings = {"policy.model": model, "data": data, "steps": "20", "output_dir": tmp_path} | dict([override.split("=")])
    monkeypatch.setattr(sys, "argv", ["sft", *(f"{key}={value}" for key, value in settings.items())])
    assert sft.main() == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith(f"sft: {named}")
    assert not (tmp_path / "sft" / "hf").exists()
