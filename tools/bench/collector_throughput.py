"""Tokens per second of a step's generation by the whole team, against vLLM alone on the same requests.

    python -m tools.bench.collector_throughput [--rounds 5] [key=value …]

The team of configs/search_hetero.yaml (or what overrides make of it) collects a step's trajectories through Ray, engines
and retrieval server.  Then vLLM, in a process of its own per policy, gets every request of that policy at once, so that it
waits for no verdict and no passage: one policy after the other, each alone on the machine (`ratio`), and all policies at
once (`ratio_at_once`, the bound for a team that never waits).  All take turns, so that a busy machine is busy for all.
The last line is JSON.
"""

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_drmas.cluster.machine import fit_to_machine
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.rollout.client import PolicyClient
from megatron_drmas.rollout.engine_messages import EngineSettings, Request
from megatron_drmas.rollout.tokenizer import ChatTokenizer
from megatron_drmas.validate import validate
from tools.ablation.command import count
from tools.bench.command import BenchParser
from tools.bench.rollout_throughput import ENVIRONMENT, child, vllm_alone

TARGET = 0.5  # of vLLM alone
ALONE, AT_ONCE = "vLLM alone, one policy after the other", "vLLM alone, all policies at once"


def start_alone(config: RunConfig) -> dict[str, Connection]:
    """vLLM on every policy's model, started one after the other."""
    spawn, pipes = multiprocessing.get_context("spawn"), {}
    for name, policy in config.policies.items():
        pipes[name], end = spawn.Pipe()
        settings = EngineSettings(
            name,
            policy.model,
            ChatTokenizer(policy.model, policy.template_options).stop_ids,
            policy.engine,
            dtype=config.precision.rollout,
            seed=config.seed,
            threads=config.cluster.engine_threads or 1,
        )
        spawn.Process(target=child, args=(end, vllm_alone, settings), daemon=True).start()
        end.close()  # or a child that died would be waited for
        pipes[name].recv()
    return pipes


def run_alone(pipes: dict[str, Connection], requests: dict[str, list[Request]], at_once: bool) -> dict:
    """Seconds until the last policy is done, and all tokens."""
    began, tokens = time.perf_counter(), 0
    for name, pipe in pipes.items():
        pipe.send(requests[name])
        tokens += 0 if at_once else pipe.recv()["tokens"]
    tokens += sum(pipe.recv()["tokens"] for pipe in pipes.values()) if at_once else 0
    return {"seconds": time.perf_counter() - began, "tokens": tokens}


async def measure(config: RunConfig, rounds: int) -> bool:
    """Run both, print the figures; whether the target is met."""
    from megatron_drmas.cluster.cluster import Cluster
    from megatron_drmas.data.questions import load_questions
    from megatron_drmas.rollout.collector import Sampling

    questions = load_questions(config.data.train, "data.train")
    best: dict[str, dict] = {}
    async with Cluster(config, actors=False) as cluster:
        pipes = start_alone(config)
        requests = {name: record(client) for name, client in cluster.collector.clients.items()}
        for number in range(rounds + 1):  # the first warms up
            for seen in requests.values():
                seen.clear()
            drawn = [
                questions[(number * config.questions_per_step + k) % len(questions)] for k in range(config.questions_per_step)
            ]
            sampling = Sampling(config.rollout.temperature, config.rollout.top_p, "bench").at(number)
            before, began = cluster.generated_tokens, time.perf_counter()
            await cluster.collector.collect(drawn, config.group_size, sampling)
            team = {"seconds": time.perf_counter() - began, "tokens": cluster.generated_tokens - before}
            results = {"team": team, ALONE: run_alone(pipes, requests, False), AT_ONCE: run_alone(pipes, requests, True)}
            assert len({result["tokens"] for result in results.values()}) == 1, f"all must have sampled the same: {results}"
            for name, result in results.items():
                result["rate"] = result["tokens"] / result["seconds"]
                if number and (name not in best or result["rate"] > best[name]["rate"]):
                    best[name] = result | {"requests": sum(map(len, requests.values()))}
        for pipe in pipes.values():
            pipe.send(None)
    for name, result in best.items():
        print(
            f"{name}: {result['requests']} requests, {result['tokens']} tokens in {result['seconds']:.2f} s, "
            f"{result['rate']:.0f} tokens/s"
        )
    ratio, at_once = (best["team"]["rate"] / best[name]["rate"] for name in (ALONE, AT_ONCE))
    figures = {"ratio": round(ratio, 3), "target": TARGET, "ok": ratio >= TARGET, "ratio_at_once": round(at_once, 3)}
    print(json.dumps({"name": "collector_throughput", **figures}))
    return ratio >= TARGET


def record(client: PolicyClient) -> list[Request]:
    """A list that receives every request made of a `PolicyClient` from now on."""
    seen: list[Request] = []
    generate = client.generate

    def recorded(*request: Any) -> Any:
        seen.append(Request(len(seen), *request))
        return generate(*request)

    client.generate = recorded  # type: ignore[method-assign, assignment]
    return seen


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--rounds", type=count(1), default=5)
    parser.add_argument("overrides", nargs="*", help="of configs/search_hetero.yaml")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        from tools.tiny_team.__main__ import copy_team

        copy_team(Path(folder, "team"), seed=0)
        try:
            config = compose_config(
                "search_hetero", [f"variables.tiny_team={folder}/team", f"output_dir={folder}", *args.overrides]
            )
            validate(config)
        except ConfigError as error:
            parser.error(str(error))
        config, _ = fit_to_machine(config)
        os.environ["OMP_NUM_THREADS"] = str(config.cluster.engine_threads)
        ok = asyncio.run(measure(config, args.rounds))
    sys.exit(not ok)


if __name__ == "__main__":
    main()
