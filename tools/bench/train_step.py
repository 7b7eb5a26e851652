"""Speed of an actor's update: common beginnings shared, not shared, and a plain transformers loop of the same model.

    python -m tools.bench.train_step --model FOLDER [--questions 8] [--samples 4] [--prompt 150] [--response 64] [--rounds 3]

The rows are random tokens: `samples` responses to each of `questions` prompts, as a step of GRPO has them.  The loop takes
micro-batches of the same size, computes the log-probs of the responses, and makes an AdamW step.  All take turns; medians.
`mfu` is the shared update's, counting the tokens that it computes at 6 operations a parameter,
against a matmul of this machine.  The last line is JSON; `ratio` is against the loop.
"""

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_drmas.actor.policy_actor import PolicyActor
from megatron_drmas.actor.settings import ActorSettings
from megatron_drmas.batch import TurnBatch, offsets_of
from megatron_drmas.config.schema import PolicyConfig
from tools.ablation.command import count

TARGET = 2.0


def make_batch(vocabulary: int, questions: int, samples: int, prompt: int, response: int) -> TurnBatch:
    """`questions` x `samples` rows; advantages and engine log-probs are random."""
    generator = torch.Generator().manual_seed(0)
    rows = questions * samples
    prompts = torch.randint(0, vocabulary, (questions, prompt), generator=generator).repeat_interleave(samples, 0)
    responses = torch.randint(0, vocabulary, (rows, response), generator=generator)
    zeros, ones = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.bool)
    return TurnBatch(
        tokens=torch.cat([prompts, responses], 1).flatten(),
        offsets=offsets_of(zeros + prompt + response),
        prompt_lengths=zeros + prompt,
        engine_logprobs=torch.full((rows * response,), -3.0),
        agent=zeros,
        policy=zeros,
        group=torch.arange(questions).repeat_interleave(samples),
        trajectory=torch.arange(rows),
        turn=zeros,
        reward=zeros.float(),
        valid=ones,
        trainable=ones,
        weight_version=zeros,
        agents=("agent",),
        policies=("policy",),
        advantages=torch.randn(rows * response, generator=generator),
    )


def start_actor(model: str, tokens: int) -> PolicyActor:
    """A single rank that neither recomputes nor, at first, shares."""
    from megatron_drmas.devices import DEVICES

    DEVICES["cpu"].activate(0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    policy = PolicyConfig(model=model, micro_batch_tokens=tokens)
    actor = PolicyActor(ActorSettings("policy", policy, total_steps=1000), 0, 1, "127.0.0.1", port)
    actor.initialize(model)
    return actor


def transformers_loop(model: str, batch: TurnBatch, tokens: int) -> Callable[[], None]:
    """An update of the whole batch in plain transformers."""
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6)
    length, prompt = int(batch.lengths[0]), int(batch.prompt_lengths[0])
    assert batch.advantages is not None
    rows, advantages = batch.tokens.view(-1, length), batch.advantages.view(len(batch), -1)

    def update() -> None:
        optimizer.zero_grad()
        for part, advantage in zip(rows.split(max(1, tokens // length)), advantages.split(max(1, tokens // length))):
            logits = network(part, logits_to_keep=length - prompt + 1).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(2, part[:, prompt:, None])[:, :, 0]
            (-((logprobs - logprobs.detach()).exp() * advantage).sum() / advantages.numel()).backward()
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    for name, value in (("questions", 8), ("samples", 4), ("prompt", 150), ("response", 64), ("rounds", 3), ("tokens", 4096)):
        parser.add_argument(f"--{name}", type=count(1), default=value, help=f"(default: {value})")
    parser.add_argument("--threads", type=count(1), default=None, help="(default: every core)")
    args = parser.parse_args()
    if not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model {args.model}: has no config.json; give a Hugging Face folder")
    if args.tokens < args.prompt + args.response:
        parser.error(f"--tokens {args.tokens}: a row has {args.prompt + args.response}")
    from joblib import cpu_count

    torch.set_num_threads(args.threads or cpu_count())
    config = json.loads((Path(args.model) / "config.json").read_text())
    batch = make_batch(config["vocab_size"], args.questions, args.samples, args.prompt, args.response)
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
