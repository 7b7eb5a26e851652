"""A real model: SmolLM2-135M-Instruct goes round and says the same in transformers, Megatron and vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints_conv.__main__ import main
from tests.checkpoints_conv import jobs
from tests.checkpoints_conv.ranks import Layout

pytestmark = pytest.mark.slow

COUNT = 64
QUESTION = "Tell me a long story about a lighthouse keeper."
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompt, count = json.loads(sys.argv[1])
llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=2**28)
sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
output = llm.generate([{"prompt_token_ids": prompt}], sampling)[0].outputs[0]
print("TOKENS", json.dumps(list(output.token_ids)))
"""


@pytest.fixture(scope="module")
def smollm2() -> Path:
    folder = os.environ.get("DRMAS_SMOLLM2")
    if not folder:
        pytest.skip("DRMAS_SMOLLM2 names no folder that tools/smollm2.py made")
    return Path(folder)


@pytest.fixture(scope="module")
def back(smollm2, tmp_path_factory) -> Path:
    """The model after HF -> Megatron -> HF."""
    work = tmp_path_factory.mktemp("smollm2")
    assert main(["to-megatron", "--hf", str(smollm2), "--out", str(work / "megatron")]) == 0
    assert main(["to-hf", "--megatron", str(work / "megatron"), "--out", str(work / "back")]) == 0
    return work / "back"


@pytest.fixture(scope="module")
def prompt(smollm2) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.fixture(scope="module")
def answer(smollm2, prompt) -> list[int]:
    """Greedy tokens of transformers; the answer is longer than COUNT, so no end token is among them."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=COUNT)
    return output[0, len(prompt) :].tolist()


def test_it_goes_round(smollm2, back):
    assert main(["verify", str(smollm2), str(back)]) == 0
    assert AutoTokenizer.from_pretrained(back).chat_template == AutoTokenizer.from_pretrained(smollm2).chat_template


@pytest.mark.parametrize("tensor", [1, 3])
def test_megatron_says_the_same(ranks, back, prompt, answer, tmp_path, tensor):
    """Given the answer so far, the likeliest token is the answer's next one, at every position: greedy decoding."""
    tokens = torch.tensor(prompt + answer)
    for logprobs in ranks.run(Layout(tensor=tensor), tmp_path / "store", jobs.logprobs, back, tokens):
        assert logprobs[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_vllm_says_the_same(back, prompt, answer):
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", VLLM, json.dumps([str(back), prompt, COUNT])],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("TOKENS "))
    assert json.loads(line.removeprefix("TOKENS ")) == answer
