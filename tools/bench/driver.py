"""CPU time and memory of the driver: what it spends on a turn when engines cost nothing.

    python -m tools.bench.driver [--trajectories 10000] [--model FOLDER] [--words 0] [key=value …]

The team of configs/search_hetero.yaml (or what overrides make of it) collects trajectories with its own collector, workflow,
tokenizers, chat templates, environment and retrieval server, and the rows are collated.  Only the engines are stubs in this
process that answer at once: the Verifier accepts one verdict in four, the Search agent asks one of 200 queries.  `--model`
gives every policy another folder's tokenizer and chat template, and `--words` makes responses longer.

CPU time is that of all threads of this process, the stubs' included.  `ratio` is the limit of a millisecond a turn over what
was measured.  The trajectories come in two halves that both stay: memory must grow no faster with the second, and all of the
process must stay below the limit.  The last line is JSON.
"""

import asyncio
import contextlib
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

import megatron_drmas.environments
import megatron_drmas.workflows  # noqa: F401  registers
from megatron_drmas.config.load import compose_config
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.data.questions import load_questions
from megatron_drmas.environments.base import ENVIRONMENTS, Place
from megatron_drmas.rollout.client import PolicyClient
from megatron_drmas.rollout.collate import collate
from megatron_drmas.rollout.collector import Collector, Sampling
from megatron_drmas.rollout.engine_messages import Request, Sample
from megatron_drmas.rollout.tokenizer import ChatTokenizer
from megatron_drmas.team.team import Team
from megatron_drmas.team.trajectory import Trajectory
from tools.ablation.command import count
from tools.bench.command import BenchParser

LIMIT_MS = 1.0  # of CPU a turn
LIMIT_GIB = 2.0
LIMIT_GROWTH = 1.2  # memory of the second half over that of the first
QUERIES = 200
ACCEPTS = 4  # one verdict in so many is "yes"


class StubEngine:
    """Answers a request at once with one of `answers`, by the request's longest response and seed."""

    def __init__(self, answers: Callable[[Request], np.ndarray]):
        self._answers = answers
        self._finished: list[Sample] = []
        self._arrived = asyncio.Event()

    async def submit(self, requests: list[Request]) -> None:
        for request in requests:
            ids = self._answers(request)
            self._finished.append(Sample(request.key, ids, np.full(len(ids), -0.5), "stop", [(0, len(ids))]))
        self._arrived.set()

    async def poll(self, timeout_s: float) -> list[Sample]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout_s)
        self._arrived.clear()
        finished, self._finished = self._finished, []
        return finished


def scripted(config: RunConfig, policy: str, tokenizer: ChatTokenizer, queries: list[str], words: int) -> StubEngine:
    """A stub that answers for every agent of a policy; agents are told apart by their `max_response_tokens`."""
    filler = "the question of the founder " * (words // 5 + 1)

    def ids(text: str) -> np.ndarray:
        said = " ".join([*filler.split()[:words], text])
        return np.array(tokenizer.dialogue_ids([{"role": "user", "content": "?"}, {"role": "assistant", "content": said}])[1])

    answers = {}
    for name, agent in config.team.agents.items():
        if agent.policy == policy:
            contents = {"verifier": ["yes"] + ["no"] * (ACCEPTS - 1), "search": queries}.get(name, ["Hogax", "Hebux"])
            answers[agent.max_response_tokens] = [ids(f"<{agent.tag}>{content}</{agent.tag}>") for content in contents]
    return StubEngine(lambda request: answers[request.max_tokens][request.seed % len(answers[request.max_tokens])])


async def measure(config: RunConfig, trajectories: int, words: int) -> bool:
    """Collect and collate, print the figures; whether the target is met."""
    questions = load_questions(config.data.train, "data.train")
    draw = random.Random(0)
    queries = [question.text.rstrip("?").removeprefix("what is ") for question in draw.sample(questions, QUERIES)]
    tokenizers = {name: ChatTokenizer(policy.model, policy.template_options) for name, policy in config.policies.items()}
    environment = ENVIRONMENTS[config.environment.name](config.environment, Place(Path(config.output_dir)))
    process, kept, cpu_s, rss = psutil.Process(), list[Trajectory](), dict[str, float](), list[int]()
    try:
        environment.begin()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(environment)
            await environment.check()
            clients = {
                name: await stack.enter_async_context(
                    PolicyClient(name, [scripted(config, name, tokenizer, queries, words)], timeout_s=60)
                )
                for name, tokenizer in tokenizers.items()
            }
            collector = Collector(Team.from_config(config.team), environment, clients, tokenizers, config.rollout, config.seed)

            async def collect(groups: int, part: str) -> list[Trajectory]:
                drawn = [questions[number % len(questions)] for number in range(groups)]
                return await collector.collect(drawn, config.group_size, Sampling(1.0, 1.0, part), use_turn_rewards=True)

            await collect(16, "warm up")
            for half in ("first half", "second half"):
                gc.collect()
                rss.append(process.memory_info().rss)
                began = time.process_time()
                kept += await collect(trajectories // config.group_size // 2, half)
                cpu_s[f"collect, {half}"] = time.process_time() - began
            rss.append(process.memory_info().rss)
    finally:
        environment.end()
    began = time.process_time()
    batch = collate(kept, tuple(config.team.agents), tuple(config.policies), set(config.team.agents))
    cpu_s["collate"] = time.process_time() - began
    peak_gib = max(process.memory_info().rss, *rss) / 2**30
    turns, tokens = len(batch), int(batch.offsets[-1])
    failed = sum(trajectory.failure is not None for trajectory in kept)
    for what, seconds in cpu_s.items():
        share = turns if what == "collate" else turns / 2
        print(f"{what:22}{seconds:8.2f} s CPU, {seconds / share * 1e3:.3f} ms a turn")
    first, second = rss[1] - rss[0], rss[2] - rss[1]
    print(
        f"{len(kept)} trajectories, {failed} failed, {turns} turns, {tokens} tokens; memory +{first / 2**20:.0f} MiB, "
        f"+{second / 2**20:.0f} MiB, {peak_gib:.2f} GiB in all, {(first + second) / tokens:.1f} bytes a token"
    )
    ratio = LIMIT_MS / (sum(cpu_s.values()) / turns * 1e3)
    ok = ratio >= 1 and not failed and peak_gib <= LIMIT_GIB and second <= LIMIT_GROWTH * first
    figures = {"ratio": round(ratio, 3), "target": 1.0, "ok": ok, "peak_gib": round(peak_gib, 3)}
    print(json.dumps({"name": "driver", **figures, "growth": round(second / first, 2)}))
    return ok


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--trajectories", type=count(1), default=10_000)
    parser.add_argument("--model", type=Path, help="folder of another tokenizer for every policy; default: the tiny team's")
    parser.add_argument("--words", type=count(0), default=0, help="before the tagged answer of every response (default: 0)")
    parser.add_argument("overrides", nargs="*", help="of configs/search_hetero.yaml")
    args = parser.parse_args()
    if args.trajectories < 160 or args.words < 0:
        parser.error("--trajectories takes at least 160, --words at least 0")
    if args.model and not (args.model / "tokenizer_config.json").is_file():
        parser.error(f"--model {args.model}: no tokenizer_config.json there; name a Hugging Face folder")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        from tools.tiny_team.__main__ import copy_team

        copy_team(Path(folder, "team"), seed=0)
        models = [f"policies.{name}.model={args.model}" for name in ("qwen2", "llama") if args.model]
        overrides = [f"variables.tiny_team={folder}/team", f"output_dir={folder}", *models, *args.overrides]
        ok = asyncio.run(measure(compose_config("search_hetero", overrides), args.trajectories, args.words))
    sys.exit(not ok)


if __name__ == "__main__":
    main()
