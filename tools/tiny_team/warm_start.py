"""The tiny team's warm start: supervised fine-tuning of both policies through the Megatron actor."""

import multiprocessing
import os
import queue
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path

from tools.tiny_team.data import write_jsonl
from tools.tiny_team.dialogues import Noise, stream_examples

BATCH = 32


@dataclass(frozen=True)
class Recipe:
    """One policy's fine-tuning: whose calls it learns, in equal parts, and for how long.

    Training ends long before the learning rate has decayed: reinforcement learning gets a team that copies names
    well but judges badly, with an exact match of 0.2-0.3 sampled.
    """

    agents: tuple[str, ...]
    steps: int
    decay_steps: int
    noise: Noise
    lr: float = 3e-3
    seed: int = 0


RECIPES = {
    "qwen2": Recipe(("verifier",), steps=90, decay_steps=180, noise=Noise()),
    "llama": Recipe(("search", "answer"), steps=500, decay_steps=600, noise=Noise(early_yes=0.3)),
}


def write_examples(policy: str, path: Path) -> None:
    """Exactly the examples that the policy's recipe will see, in order."""
    recipe = RECIPES[policy]
    count = recipe.steps * BATCH // len(recipe.agents)
    kept: dict[str, list] = {agent: [] for agent in recipe.agents}
    stream = stream_examples(recipe.seed, recipe.noise)
    while any(len(examples) < count for examples in kept.values()):
        example = next(stream)
        if example.agent in kept:
            kept[example.agent].append(example)
    turns = zip(*(islice(examples, count) for examples in kept.values()))
    write_jsonl(path, ({"messages": example.messages} for turn in turns for example in turn))


def make_policies(out: Path) -> Iterator[dict]:
    """Train both policies side by side, one process each, and write out/qwen2 and out/llama in bfloat16.

    Yields:
        After each step of either: `policy`, `step`, `steps`, `loss`.

    Raises:
        RuntimeError: a process failed; its traceback is on standard error.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    with tempfile.TemporaryDirectory() as scratch:
        processes = {
            name: context.Process(target=_make_policy, args=(name, out, Path(scratch), reports), daemon=True) for name in RECIPES
        }
        for process in processes.values():
            process.start()
        while any(process.is_alive() for process in processes.values()) or not reports.empty():
            try:
                yield reports.get(timeout=0.2)
            except queue.Empty:
                _raise_if_failed(processes)
        _raise_if_failed(processes)


def _raise_if_failed(processes: Mapping[str, BaseProcess]) -> None:
    for name, process in processes.items():
        if process.exitcode:
            raise RuntimeError(f"fine-tuning of policy {name!r} failed with exit code {process.exitcode}")


def _make_policy(policy: str, out: Path, scratch: Path, reports: multiprocessing.Queue) -> None:
    import torch

    torch.set_num_threads(1)

    from megatron_drmas.config.schema import OptimizerConfig, PolicyConfig, PrecisionConfig
    from megatron_drmas.sft import SftConfig, finetune
    from tools.tiny_team.models import build_model, save_policy, store_policy

    recipe, start, data = RECIPES[policy], scratch / f"{policy}_start", scratch / f"{policy}.jsonl"
    save_policy(build_model(policy, recipe.seed), start)
    write_examples(policy, data)
    optimizer = OptimizerConfig(lr=recipe.lr, beta2=0.95, decay="linear", decay_steps=recipe.decay_steps, warmup_steps=10)
    config = SftConfig(
        name=policy,
        policy=PolicyConfig(model=str(start), optimizer=optimizer, micro_batch_tokens=8192, recompute=False),
        precision=PrecisionConfig(mode="fp32"),
        data=str(data),
        steps=recipe.steps,
        batch_size=BATCH,
        prompt_weight=0.3,
        shuffle=False,
        seed=recipe.seed,
        output_dir=str(scratch),
        device="cpu",
    )
    tuned = finetune(
        config, lambda m: reports.put({"policy": policy, "step": m["step"], "steps": recipe.steps, "loss": m["loss"]})
    )
    store_policy(tuned, out / policy)
