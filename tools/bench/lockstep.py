"""Trajectories per second of a team whose calls never wait for each other, against the same team in lockstep.

    python -m tools.bench.lockstep [--rounds 3] [--tokens 16] [--tool-s 0.5] [--tail 1.0] [key=value …]

The team of configs/search_hetero.yaml (or what overrides make of it) collects a step's trajectories through Ray, engines and
retrieval server.  In lockstep every trajectory's k-th call is made when all that still run have come to their k-th call, as in
trainers that play a team turn by turn; both policies' calls of a turn go out together, which is kind to it.  The tiny models
answer in a few tokens at once, so lengths and a slow tool are injected: each response is followed by further sampled tokens,
which are thrown away, and each search by a wait.  Both are log-normal with a standard deviation of --tail in the logarithm and
at most 16 times the median, drawn from the call's seed or the query, so that both collectors do the same work.  Both take
turns on the same questions with the same random numbers.  The last line is JSON; `ratio` is of the medians.
"""

import asyncio
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megatron_drmas.cluster.machine import fit_to_machine
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import Environment
from megatron_drmas.rollout.client import PolicyClient
from megatron_drmas.rollout.engine_messages import Sample
from megatron_drmas.validate import validate
from tools.ablation.command import count, number
from tools.bench.command import BenchParser

TARGET = 2.0  # times the trajectories a second of lockstep
LONGEST = 16  # times the median


def long_tailed(median: float, tail: float, *seed: object) -> float:
    """A log-normal number that depends on nothing but its arguments."""
    return min(median * math.exp(random.Random("/".join(map(str, seed))).gauss(0.0, tail)), median * LONGEST)


def lengthen(client: PolicyClient, stop_ids: list[int], extra: Callable[[int], int]) -> None:
    """Let a client's engines go on for `extra(seed)` tokens after the longest response, and give the response alone.

    The engines must have been started without the ids that end a response.
    """
    generate = client.generate

    async def shortened(asked: Awaitable[Sample], limit: int) -> Sample:
        sample = await asked
        end = next((place for place, token in enumerate(sample.token_ids[:limit], 1) if token in stop_ids), limit)
        spans = [(version, end) for version, _ in sample.weight_versions[:1]]
        return replace(sample, token_ids=sample.token_ids[:end], logprobs=sample.logprobs[:end], weight_versions=spans)

    def lengthened(prompt_ids: np.ndarray, seed: int, temperature: float, top_p: float, max_tokens: int) -> Awaitable[Sample]:
        return shortened(generate(prompt_ids, seed, temperature, top_p, max_tokens + extra(seed)), max_tokens)

    client.generate = lengthened  # type: ignore[method-assign, assignment]


def slow_down(environment: Environment, wait_s: Callable[[str, str], float]) -> None:
    """Let each search of an environment wait for `wait_s(question's id, query)`."""
    call_tool = environment.call_tool

    async def slowly(name: str, question: Question, arguments: dict[str, Any]) -> Any:
        found = await call_tool(name, question, arguments)
        if name == "search":
            await asyncio.sleep(wait_s(question.id, arguments["query"]))
        return found

    environment.call_tool = slowly  # type: ignore[method-assign]


async def measure(config: RunConfig, rounds: int, tokens: int, tool_s: float, tail: float) -> bool:
    """Run both, print the figures; whether the target is met."""
    from megatron_drmas.cluster import cluster as clusters
    from megatron_drmas.data.questions import load_questions
    from megatron_drmas.rollout.collector import Collector, Sampling

    class Endless(clusters.PolicyRuntime):
        """Engines that stop at the limit of tokens alone."""

        def __init__(self, name: str, config: RunConfig, stop_ids: list[int], *rest: Any):
            super().__init__(name, config, [], *rest)

    questions = load_questions(config.data.train, "data.train")[: config.questions_per_step]
    sampling = Sampling(config.rollout.temperature, config.rollout.top_p, "bench")
    seconds: dict[str, list[float]] = {"free": [], "lockstep": []}
    made: set[tuple[int, int]] = set()
    with mock.patch.object(clusters, "PolicyRuntime", Endless):
        cluster = clusters.Cluster(config, actors=False)
        await cluster.__aenter__()
    try:
        first = cluster.collector
        slow_down(first.environment, partial(long_tailed, tool_s, tail))
        for name, client in first.clients.items():
            lengthen(client, first.tokenizers[name].stop_ids, lambda seed: round(long_tailed(tokens, tail, seed)))
        for number in range(rounds + 1):  # the first warms up, and fills the caches of prompts
            for kind, values in seconds.items():
                for client in first.clients.values():
                    client.lockstep = kind == "lockstep"
                collector = Collector(
                    first.team, first.environment, first.clients, first.tokenizers, first.config, first.seed
                )  # looks at its clients once
                before, began = cluster.generated_tokens, time.perf_counter()
                trajectories = await collector.collect(questions, config.group_size, sampling)
                if number:
                    values.append(time.perf_counter() - began)
                made.add((sum(len(each.turns) for each in trajectories), cluster.generated_tokens - before))
    finally:
        await cluster.__aexit__(None, None, None)
    assert len(made) == 1, f"all must have sampled the same: {made}"
    ((calls, generated),) = made
    print(f"{len(trajectories)} trajectories, {calls} calls, {generated} tokens")
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    for kind, median in medians.items():
        print(f"{kind:9}{median:7.2f} s {len(trajectories) / median:7.1f} trajectories/s")
    ratio = medians["lockstep"] / medians["free"]
    print(json.dumps({"name": "lockstep", "ratio": round(ratio, 2), "target": TARGET, "ok": ratio >= TARGET}))
    return ratio >= TARGET


def main() -> None:
    """The command line."""
    parser = BenchParser(__doc__)
    parser.add_argument("--rounds", type=count(1), default=3, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=count(0), default=16, help="median of what follows a response (default: %(default)s)")
    parser.add_argument("--tool-s", type=number(0, 60), default=0.5, help="median of a search's wait (default: %(default)s)")
    parser.add_argument("--tail", type=number(0, 3), default=1.0, help="0: always the median (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", help="of configs/search_hetero.yaml")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        from tools.tiny_team.__main__ import copy_team

        copy_team(Path(folder, "team"), seed=0)
        length = 256 + (LONGEST + 1) * args.tokens
        settings = [f"policies.{name}.engine.max_model_len={length}" for name in ("qwen2", "llama")]
        try:
            config = compose_config(
                "search_hetero", [f"variables.tiny_team={folder}/team", f"output_dir={folder}", *settings, *args.overrides]
            )
            validate(config)
        except ConfigError as error:
            parser.error(str(error))
        config, _ = fit_to_machine(config)
        os.environ["OMP_NUM_THREADS"] = str(config.cluster.engine_threads)
        ok = asyncio.run(measure(config, args.rounds, args.tokens, args.tool_s, args.tail))
    sys.exit(not ok)


if __name__ == "__main__":
    main()
