"""Supervised fine-tuning of one policy through its Megatron actor.

    python -m megatron_drmas.sft policy.model=FOLDER data=EXAMPLES.jsonl steps=N [key=value …]

Every turn of the assistant is learned, each with the chat template's own rendering of what came before it.  The loss of a batch
is the mean cross entropy of these turns' tokens, end of turn included, plus `prompt_weight` times the mean over the tokens
before each dialogue's last turn.  The run folder <output_dir>/<name> gets config.yaml, tensorboard/ and hf/, a Hugging
Face folder that training takes as a policy's model.  All ranks run on this machine.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import PolicyConfig, PrecisionConfig
from megatron_drmas.config.setting import check_settings, setting
from megatron_drmas.data.dialogues import Dialogue, load_dialogues
from megatron_drmas.data.sampler import QuestionSampler
from megatron_drmas.run_lock import RunLock


@dataclass
class SftConfig:
    """The configuration of a fine-tuning run; configs/sft/sft.yaml."""

    name: str = setting("Of the run; its folder is <output_dir>/<name>")
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: str = setting("JSON lines; see megatron_drmas.data.dialogues")
    steps: int = setting("Optimizer steps", minimum=1)
    batch_size: int = setting("Examples of an optimizer step", 32, minimum=1)
    prompt_weight: float = setting("Of the loss on prompts; an example's own prompt_weight goes first", 0.0, minimum=0)
    shuffle: bool = setting("Draw the examples in a random order, another one in each epoch", True)
    seed: int = setting("Of everything random", 0, minimum=0, below=2**31)
    output_dir: str = setting("Folder of run folders", "outputs")
    device: str = setting("What the ranks run on", "auto", choices={"auto": "a GPU where torch sees one", "cpu": "", "cuda": ""})
    threads: int | None = setting(
        "CPU threads of each rank; null: OMP_NUM_THREADS, or the cores shared by all ranks", None, minimum=1
    )


ConfigStore.instance().store(name="sft_schema", node=SftConfig)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenizedDialogue:
    """Token ids (prompt, response) of each turn to learn, and the weight of the loss on the last one's prompt."""

    turns: list[tuple[list[int], list[int]]]
    prompt_weight: float


def validate(config: SftConfig, files: bool = True, machine: bool = True) -> list[str]:
    """Check what can be checked before anything starts.

    Args:
        config: a composed configuration.
        files: also check the model's folder and the run's.
        machine: also check that this machine has the GPUs; otherwise that it lacks them is a warning.

    Returns:
        What is not an error and should be said, a line each.

    Raises:
        ConfigError: the first setting that cannot work.
    """
    import torch

    from megatron_drmas.actor.precision import check_precision
    from megatron_drmas.validate import check_model, check_name, check_output, check_policy

    check_settings(config)
    check_name(config.name)
    check_policy("policy", config.policy, config.steps)
    device = _device(config)
    warnings = []
    if files:
        if device == "cuda" and torch.cuda.device_count() < config.policy.parallel.world_size:
            lacking = ConfigError(
                "device",
                config.device,
                f"torch sees {torch.cuda.device_count()} GPUs on this machine",
                "use device=cpu, or a smaller layout",
            )
            if machine:
                raise lacking
            warnings.append(str(lacking))
        check_precision(config.precision, device, check_model("policy", config.policy).layers)
        check_output(Path(config.output_dir) / config.name)
    return warnings


def finetune(config: SftConfig, progress: Callable[[dict], None] = lambda metrics: None) -> Path:
    """Run a configuration to its end.

    Args:
        config: a composed configuration.
        progress: called after each step with its metrics (`step`, `loss`, `grad_norm`, `lr`, …).

    Returns:
        The Hugging Face folder with the fine-tuned policy.

    Raises:
        ConfigError: an unreadable data file, an example longer than the model, or another process has the run's folder.
        RuntimeError: a rank failed, or a gradient was not finite.
    """
    with RunLock(Path(config.output_dir) / config.name):
        return _finetune(config, progress)


def _finetune(config: SftConfig, progress: Callable[[dict], None]) -> Path:
    examples = tokenize(load_dialogues(config.data, "data"), config)
    config, fitted = fit_to_machine(config, examples)
    if fitted:
        print(f"sft: {fitted}", file=sys.stderr)
    run_dir = Path(config.output_dir) / config.name
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    world_size, port = config.policy.parallel.world_size, _free_port()
    if world_size == 1:
        _train_rank(0, config, examples, port, progress)
    else:
        import torch.multiprocessing as processes

        context = processes.get_context("spawn")
        reports = context.SimpleQueue()
        ranks = processes.spawn(_train_rank, (config, examples, port, reports.put), nprocs=world_size, join=False)
        while not ranks.join(timeout=0.2):
            while not reports.empty():
                progress(reports.get())
        while not reports.empty():
            progress(reports.get())
    return run_dir / "hf"


def tokenize(dialogues: list[Dialogue], config: SftConfig) -> list[TokenizedDialogue]:
    """Render dialogues with the policy's chat template and its options.

    A turn's prompt ids are those that training would send to an engine, so a template that rewrites earlier turns (Qwen3 drops
    their reasoning) rewrites them here too; its response ends with the token that ends an assistant's turn in the template,
    which ends a response in an engine too.

    Raises:
        ConfigError: an example is longer than the model, or the chat template refuses it, leaves a message out, or changes
            a prompt once it is answered.
    """
    from transformers import AutoConfig

    from megatron_drmas.rollout.tokenizer import ChatError
    from megatron_drmas.validate_templates import load_chat

    chat = load_chat("policy", config.policy)
    longest = AutoConfig.from_pretrained(config.policy.model, local_files_only=True).max_position_embeddings
    examples, spelled = [], []
    for dialogue in dialogues:
        turns = []
        for last in dialogue.learned:
            messages = list(dialogue.messages[: last + 1])
            try:
                chat.check_roles(tuple(message["role"] for message in messages))
                chat.check_prompt(messages[:-1])
                prompt, response = chat.dialogue_ids(messages)
            except ChatError as error:
                raise ConfigError("data", config.data, f"line {dialogue.line}: {error.problem}", error.remedy) from error
            if len(prompt) + len(response) > longest:
                problem = f"line {dialogue.line} has {len(prompt) + len(response)} tokens, the model takes {longest}"
                raise ConfigError("data", config.data, problem, "shorten it")
            turns.append((prompt, response))
            spelled += [(dialogue.line, name) for name in chat.spelled(messages[-1])]
        weight = config.prompt_weight if dialogue.prompt_weight is None else dialogue.prompt_weight
        examples.append(TokenizedDialogue(turns, weight))
    if spelled:
        (line, name), more = spelled[0], len({line for line, _ in spelled}) - 1
        message = "%s: line %d and %d more let the assistant say control tokens such as %s; it learns to spell them"
        logger.warning(message, config.data, line, more, name)
    return examples


def collate_dialogues(examples: list[TokenizedDialogue]) -> tuple[Any, Any]:
    """A `TokenBatch` with a row for every turn to learn, and the weight of every token, float32 [T].

    A response token weighs 1 / (response tokens of the batch); a token of the prompt of a dialogue's last turn weighs the
    dialogue's prompt_weight / (such tokens of the batch), all others, and first tokens, which nothing predicts, 0.
    """
    import torch

    from megatron_drmas.batch import TokenBatch, offsets_of

    turns = [turn for example in examples for turn in example.turns]
    responses = sum(len(response) for _, response in turns)
    prompts = max(1, sum(len(example.turns[-1][0]) - 1 for example in examples))
    weights = []
    for example in examples:
        for turn in example.turns:
            prompt_weight = example.prompt_weight / prompts if turn is example.turns[-1] else 0.0
            prompt, response = turn
            weights += [0.0] + [prompt_weight] * (len(prompt) - 1) + [1.0 / responses] * len(response)
    batch = TokenBatch(
        tokens=torch.tensor([token for prompt, response in turns for token in prompt + response]),
        offsets=offsets_of(torch.tensor([len(prompt) + len(response) for prompt, response in turns])),
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in turns]),
    )
    return batch, torch.tensor(weights, dtype=torch.float32)


def _train_rank(
    rank: int, config: SftConfig, examples: list[TokenizedDialogue], port: int, report: Callable[[dict], None]
) -> None:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    from megatron_drmas.actor.policy_actor import PolicyActor
    from megatron_drmas.actor.settings import ActorSettings

    device = _device(config)
    if device == "cpu":
        torch.set_num_threads(rank_threads(config))
    else:
        torch.cuda.set_device(rank)
    settings = ActorSettings(
        name=config.name,
        policy=config.policy,
        precision=config.precision,
        seed=config.seed,
        deterministic=True,
        device=device,
        total_steps=config.steps,
    )
    run_dir = Path(config.output_dir) / config.name
    actor = PolicyActor(settings, rank, config.policy.parallel.world_size, "127.0.0.1", port)
    actor.initialize(config.policy.model)
    sampler = QuestionSampler(len(examples), config.seed, config.shuffle)
    writer = SummaryWriter(str(run_dir / "tensorboard")) if rank == 0 else None
    for step in range(1, config.steps + 1):
        batch, weights = collate_dialogues([examples[index] for index in sampler.draw(config.batch_size)])
        metrics = actor.sft_step(batch, step, weights)
        if metrics["skipped"]:
            raise RuntimeError(
                f"step {step}: the gradient is not finite; lower policy.optimizer.lr ({config.policy.optimizer.lr})"
            )
        if writer is not None:
            for name in ("loss", "grad_norm", "lr"):
                writer.add_scalar(f"sft/{name}", metrics[name], step)
            report({"step": step, **metrics})
    if writer is not None:
        writer.close()
    actor.export_hf(str(run_dir / "hf"))
    actor.shutdown()


def fit_to_machine(config: SftConfig, examples: list[TokenizedDialogue]) -> tuple[SftConfig, str]:
    """The configuration with what it leaves to the machine's memory, and what was chosen; "" where nothing was open."""
    from megatron_drmas.cluster.machine import Actor, fit_actors, gpu_memory, model_spec

    policy, device = config.policy, _device(config)
    if policy.recompute is not None and policy.micro_batch_tokens is not None:
        return config, ""
    longest = max(len(prompt) + len(response) for example in examples for prompt, response in example.turns)
    actor = Actor(model_spec(policy), config.precision.mode, device, longest)
    gpu = gpu_memory() if device == "cuda" else None
    chosen, texts = fit_actors({config.name: policy}, {config.name: actor}, gpu)
    return replace(config, policy=chosen[config.name]), "; ".join(texts)


def _device(config: SftConfig) -> str:
    import torch

    return config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def rank_threads(config: SftConfig) -> int:
    """CPU threads of each rank."""
    from megatron_drmas.cluster.machine import asked_threads, usable_cores

    return config.threads or asked_threads() or max(1, usable_cores() // config.policy.parallel.world_size)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    """The command line."""
    from megatron_drmas.command import run_command
    from megatron_drmas.config.load import SFT_DIR

    def command(config: SftConfig) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        os.environ.setdefault("OMP_NUM_THREADS", str(rank_threads(config)))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as bar:
            task = bar.add_task(config.name, total=config.steps)
            folder = finetune(
                config, lambda m: bar.update(task, completed=m["step"], description=f"{config.name} loss {m['loss']:.3f}")
            )
        print(f"fine-tuned policy: {folder}")

    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    try:
        return run_command(
            "python -m megatron_drmas.sft",
            command,
            validate,
            lambda config: tokenize(load_dialogues(config.data, "data"), config),
            name="sft",
            schema=SftConfig,
            recipes=SFT_DIR,
        )
    except KeyboardInterrupt:
        print("sft: stopped by SIGINT; nothing is kept of it", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
