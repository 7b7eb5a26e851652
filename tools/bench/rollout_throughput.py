"""Tokens per second of an engine behind submit and poll, against vLLM alone on the same requests.

    python -m tools.bench.rollout_throughput [--model FOLDER] [--requests 600] [--rounds 5]

Both hold the same model with the same settings, one process each, and take turns, so that a busy machine is busy for
both.  Prints start-up seconds, memory and the seconds of a weight update as well; the last line is JSON.
"""

import asyncio
import dataclasses
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from megatron_drmas.config.schema import EngineConfig
from megatron_drmas.rollout.engine_messages import EngineSettings, Request
from megatron_drmas.rollout.tokenizer import ChatTokenizer
from tools.ablation.command import count
from tools.bench.command import BenchParser

END = 2  # ends a response of the random model
TARGET = 0.5  # of vLLM alone
GROUP = 8  # requests that share a prompt
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def make_requests(count: int, vocab_size: int) -> list[Request]:
    """Prompts of 60 to 100 tokens, responses of 4 to 12, a seed each."""
    draw = random.Random(0)
    requests = []
    for key in range(count):
        if key % GROUP == 0:
            prompt = np.array([draw.randrange(3, vocab_size) for _ in range(draw.randint(60, 100))])
        requests.append(Request(key, prompt, key, 1.0, 1.0, draw.randint(4, 12)))
    return requests


def make_model(folder: str) -> str:
    """A random Llama of the tiny team's size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=235,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def vllm_alone(settings: EngineSettings) -> Callable[[list[Request]], dict]:
    """All requests into an `LLMEngine`, then steps until it is empty."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    import megatron_drmas.weight_sync.extension  # noqa: F401  registers
    from megatron_drmas.rollout.vllm_settings import engine_args

    llm = LLMEngine.from_engine_args(engine_args(settings))

    def run(requests: list[Request]) -> dict:
        llm.reset_prefix_cache()
        began, tokens, left = time.perf_counter(), 0, len(requests)
        for request in requests:
            params = SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed,
                max_tokens=request.max_tokens,
                logprobs=0,
                flat_logprobs=True,
                stop_token_ids=list(settings.stop_ids),
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            llm.add_request(str(request.key), tokens_input(request.prompt_ids), params)
        while left:
            for output in llm.step():
                tokens += len(output.outputs[0].token_ids)
                left -= 1
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    return run


def engine(settings: EngineSettings) -> Callable[[list[Request]], dict]:
    """The same through `Engine`, with a weight update before every round."""
    import torch

    from checkpoints_conv.formats.hf_folder import HfFolder
    from megatron_drmas.rollout.engine import Engine
    from megatron_drmas.weight_sync.shm_sender import ShmSender

    served, folder, loop = Engine(settings), HfFolder(settings.model), asyncio.new_event_loop()
    served.start()

    async def update() -> float:
        began = time.perf_counter()
        sender = ShmSender(((name, folder.tensor(name)) for name in folder.names()), 2**28, getattr(torch, settings.dtype))
        await served.begin_update()
        while (info := sender.next_bucket()) is not None:
            await served.load_bucket(info)
        await served.finish_update(1)
        sender.close()
        return time.perf_counter() - began

    async def round_trip(requests: list[Request]) -> dict:
        update_s = await update()
        began, tokens, left = time.perf_counter(), 0, len(requests)
        await served.submit(requests)
        while left:
            for sample in await served.poll(10.0):
                tokens += len(sample.token_ids)
                left -= 1
        return {"seconds": time.perf_counter() - began, "tokens": tokens, "update_s": update_s}

    return lambda requests: loop.run_until_complete(round_trip(requests))


def child(connection: Connection, build: Callable, settings: EngineSettings) -> None:
    """Load, report, then run the rounds that are asked for."""
    import psutil

    began = time.perf_counter()
    run = build(settings)
    connection.send({"start_s": time.perf_counter() - began, "memory_gib": psutil.Process().memory_info().rss / 2**30})
    while (requests := connection.recv()) is not None:
        connection.send(run(requests))


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--model", help="Hugging Face folder; default: a random Llama of the tiny team's size")
    parser.add_argument("--requests", type=count(1), default=600)
    parser.add_argument("--rounds", type=count(1), default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    if args.model and not os.path.isfile(os.path.join(args.model, "config.json")):
        parser.error(f"--model {args.model}: has no config.json; give a Hugging Face folder")
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_model(folder)
        with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
            requests = make_requests(args.requests, json.load(file)["vocab_size"])
        stop_ids = ChatTokenizer(model, {}).stop_ids if args.model else [END]
        settings = EngineSettings("bench", model, stop_ids, EngineConfig(max_model_len=1024, max_num_seqs=128), dtype=args.dtype)
        ok = measure(settings, requests, args.rounds)
    sys.exit(not ok)


def measure(settings: EngineSettings, requests: list[Request], rounds: int) -> bool:
    """Run both, print the figures; whether the target is met."""
    spawn = multiprocessing.get_context("spawn")
    pipes = {}
    for build in (vllm_alone, engine):
        pipe, end = spawn.Pipe()
        spawn.Process(target=child, args=(end, build, dataclasses.replace(settings)), daemon=True).start()
        started = pipe.recv()
        print(f"{build.__name__}: start {started['start_s']:.1f} s, {started['memory_gib']:.2f} GiB", flush=True)
        pipes[build.__name__] = pipe
    best: dict[str, dict] = {}
    for number in range(rounds + 1):  # the first warms up
        for name, pipe in pipes.items():
            pipe.send(requests)
            result = pipe.recv()
            if number and (name not in best or result["seconds"] < best[name]["seconds"]):
                best[name] = result
    for pipe in pipes.values():
        pipe.send(None)
    assert best["engine"]["tokens"] == best["vllm_alone"]["tokens"], "both must have sampled the same responses"
    rates = {name: result["tokens"] / result["seconds"] for name, result in best.items()}
    for name, result in best.items():
        done = f"{len(requests)} requests, {result['tokens']} tokens in {result['seconds']:.2f} s"
        print(f"{name}: {done}, {rates[name]:.0f} tokens/s")
    print(f"weight update: {best['engine']['update_s']:.3f} s")
    ratio = rates["engine"] / rates["vllm_alone"]
    ok = ratio >= TARGET
    print(json.dumps({"name": "rollout_throughput", "ratio": round(ratio, 3), "target": TARGET, "ok": ok}))
    return ok


if __name__ == "__main__":
    main()
