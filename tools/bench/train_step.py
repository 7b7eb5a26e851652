"""Speed of an actor's update: common beginnings shared, not shared, and a plain transformers loop of the same model.

    python -m tools.bench.train_step --model FOLDER [--questions 8] [--samples 4] [--prompt 150] [--response 64] [--rounds 3]
    python -m tools.bench.train_step --model FOLDER --trajectories RUN/trajectories/step_000001.jsonl --policy NAME

The rows are random tokens, `samples` responses to each of `questions` prompts, as a step of GRPO has them; or those that a
policy learned from in a step of a run with logging.token_ids=true logging.trajectories_per_step=null.  The loop takes
micro-batches of the same size, computes the log-probs of the responses, and makes an AdamW step.  All take turns; medians.
`mfu` is the shared update's, counting the tokens that it computes at 6 operations a parameter,
against a matmul of this machine.  The last line is JSON; `ratio` is against the loop.
"""

import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_drmas.batch import TurnBatch, gather_segments, offsets_of
from megatron_drmas.config.schema import PolicyConfig
from tools.ablation.command import count
from tools.bench.command import BenchParser

if TYPE_CHECKING:  # Megatron takes seconds, and warns
    from megatron_drmas.actor.policy_actor import PolicyActor

TARGET = 2.0


Row = tuple[list[int], list[int]]  # ids of the prompt and of the response


def random_rows(vocabulary: int, questions: int, samples: int, prompt: int, response: int) -> list[Row]:
    """`samples` random responses to each of `questions` random prompts."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocabulary, (questions, prompt), generator=generator).tolist()
    responses = torch.randint(0, vocabulary, (questions, samples, response), generator=generator).tolist()
    return [(ids, each) for ids, answers in zip(prompts, responses) for each in answers]


def recorded_rows(path: Path, policy: str) -> list[Row]:
    """What a policy learned from in a step.

    Raises:
        ValueError: the file has no ids of such turns.
    """
    trajectories = map(json.loads, path.read_text().splitlines())
    turns = [turn for trajectory in trajectories for turn in trajectory["turns"] if turn["policy"] == policy and turn["trained"]]
    if not turns or turns[0]["prompt_ids"] is None:
        raise ValueError(f"no token ids of turns that {policy} learned from")
    return [(turn["prompt_ids"], turn["response_ids"]) for turn in turns]


def make_batch(rows: list[Row]) -> TurnBatch:
    """The rows with random advantages."""
    zeros, ones = torch.zeros(len(rows), dtype=torch.int64), torch.ones(len(rows), dtype=torch.bool)
    total = sum(len(response) for _, response in rows)
    return TurnBatch(
        tokens=torch.tensor([token for prompt, response in rows for token in (*prompt, *response)]),
        offsets=offsets_of(torch.tensor([len(prompt) + len(response) for prompt, response in rows])),
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in rows]),
        engine_logprobs=torch.full((total,), -3.0),
        agent=zeros,
        policy=zeros,
        group=zeros,
        trajectory=torch.arange(len(rows)),
        sample=torch.arange(len(rows)),
        turn=zeros,
        reward=zeros.float(),
        valid=ones,
        trainable=ones,
        weight_versions=torch.zeros(total, dtype=torch.int32),
        agents=("agent",),
        policies=("policy",),
        questions=("question",),
        advantages=torch.randn(total, generator=torch.Generator().manual_seed(1)),
    )


def start_actor(model: str, tokens: int) -> "PolicyActor":
    """A single rank that neither recomputes nor, at first, shares."""
    from megatron_drmas.actor.policy_actor import PolicyActor
    from megatron_drmas.actor.settings import ActorSettings
    from megatron_drmas.devices import DEVICES

    DEVICES["cpu"].activate(0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    policy = PolicyConfig(model=model, micro_batch_tokens=tokens)
    actor = PolicyActor(ActorSettings("policy", policy, total_steps=1000), 0, 1, "127.0.0.1", port)
    actor.initialize(model)
    return actor


def padded_parts(batch: TurnBatch, tokens: int) -> list[Tensor]:
    """Rows by length, in parts of at most `tokens` with their padding."""
    parts: list[list[int]] = []
    for row in batch.lengths.argsort(descending=True).tolist():
        if not parts or (len(parts[-1]) + 1) * int(batch.lengths[parts[-1][0]]) > tokens:
            parts.append([])
        parts[-1].append(row)
    return [torch.tensor(part) for part in parts]


def transformers_loop(model: str, batch: TurnBatch, tokens: int) -> Callable[[], None]:
    """An update of the whole batch in plain transformers."""
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6)
    parts, column = padded_parts(batch, tokens), batch.advantages
    assert column is not None

    def part_loss(part: Tensor) -> Tensor:
        texts = [batch.tokens[batch.offsets[row] : batch.offsets[row + 1]] for row in part.tolist()]
        table = pad_sequence(texts, batch_first=True)
        places = torch.arange(table.shape[1])
        real = places < batch.lengths[part, None]
        predicted = real & (places >= batch.prompt_lengths[part, None])
        first = int(batch.prompt_lengths[part].min())
        logits = network(table, attention_mask=real.long(), logits_to_keep=places[first - 1 : -1]).logits
        logprobs = logits.log_softmax(-1).gather(2, table[:, first:, None])[:, :, 0][predicted[:, first:]]
        advantages = gather_segments(column, batch.response_offsets, part)
        return -((logprobs - logprobs.detach()).exp() * advantages).sum() / len(column)

    def update() -> None:
        optimizer.zero_grad()
        for part in parts:
            part_loss(part).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()

    return update


def matmul_rate() -> float:
    """Operations a second of a large float32 product."""
    a, b = torch.randn(2, 2048, 2048)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(seconds)


def main() -> None:
    """The command line."""
    parser = BenchParser(__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    for name, value in (("questions", 8), ("samples", 4), ("prompt", 150), ("response", 64), ("rounds", 3), ("tokens", 4096)):
        parser.add_argument(f"--{name}", type=count(1), default=value, help=f"(default: {value})")
    parser.add_argument("--threads", type=count(1), default=None, help="(default: every core)")
    parser.add_argument("--trajectories", type=Path, default=None, help="of a step of a run, instead of random rows")
    parser.add_argument("--policy", default=None, help="whose turns in --trajectories")
    args = parser.parse_args()
    if not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model {args.model}: has no config.json; give a Hugging Face folder")
    if (args.trajectories is None) != (args.policy is None):
        parser.error("--trajectories and --policy need each other")
    if args.trajectories:
        try:
            rows = recorded_rows(args.trajectories, args.policy)
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--trajectories {args.trajectories}: {error!r}; give a step of a run with logging.token_ids=true")
    else:
        vocabulary = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
        rows = random_rows(vocabulary, args.questions, args.samples, args.prompt, args.response)
    batch = make_batch(rows)
    if args.tokens < int(batch.lengths.max()):
        parser.error(f"--tokens {args.tokens}: a row has {int(batch.lengths.max())}")
    from megatron_drmas.cluster.machine import usable_cores

    torch.set_num_threads(args.threads or usable_cores())
    actor = start_actor(args.model, args.tokens)
    packed: dict[str, int] = {}

    def update(share: bool) -> None:
        actor.shares_beginnings = share
        report = actor.update(batch, 0)
        packed["tokens"] = round(len(batch.tokens) * (1 - report["shared_tokens"]))

    work = {
        "transformers": transformers_loop(args.model, batch, args.tokens),
        "not shared": lambda: update(False),
        "shared": lambda: update(True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    rates = []
    for number in range(args.rounds + 1):  # the first warms up
        rates.append(matmul_rate())
        for name, run in work.items():
            began = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:14}{median:9.3f} s {len(batch.tokens) / median:10.0f} tokens of rows/s")
    parameters = sum(parameter.numel() for parameter in actor.model.parameters())
    mfu = 6 * parameters * packed["tokens"] / medians["shared"] / statistics.median(rates)
    ratio = medians["transformers"] / medians["shared"]
    figures: dict[str, float | bool] = {"ratio": round(ratio, 2), "target": TARGET, "ok": ratio >= TARGET, "mfu": round(mfu, 3)}
    figures["shared_ratio"] = round(medians["not shared"] / medians["shared"], 2)
    print(json.dumps({"name": "train_step", **figures, "packed_tokens": packed["tokens"], "row_tokens": len(batch.tokens)}))
    sys.exit(ratio < TARGET)


if __name__ == "__main__":
    main()
