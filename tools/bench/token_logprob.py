"""Memory of token log-probs and entropy for a vocabulary of 152k, forward and backward.

Measures the peak resident memory of `linear_token_logprobs` beyond its inputs, outputs and gradients, against one chunk
of logits.  Linux only: the peak is the kernel's own high-water mark.

    python -m tools.bench.token_logprob [--tokens 2048] [--chunk 512] [--hidden 256] [--vocab 152064]
"""

import json
import time
from pathlib import Path

import torch

from megatron_drmas.kernels.token_logprob import linear_token_logprobs
from tools.ablation.command import count
from tools.bench.command import BenchParser

TARGET = 1.3


def memory(key: str) -> int:
    """A memory figure of this process in bytes: VmRSS (resident now) or VmHWM (its peak since `reset_peak`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--tokens", type=count(1), default=2048)
    parser.add_argument("--chunk", type=count(1), default=512)
    parser.add_argument("--hidden", type=count(1), default=256)
    parser.add_argument("--vocab", type=count(1), default=152_064)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=generator).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden, generator=generator) / args.hidden**0.5).requires_grad_()
    targets = torch.randint(0, args.vocab, (args.tokens,), generator=generator)

    def run(tokens: int) -> None:
        logprobs, entropy = linear_token_logprobs(hidden[:tokens], weight, targets[:tokens], chunk=args.chunk)
        (logprobs + 0.01 * entropy).sum().backward()

    run(8)  # gradients and the library's own buffers exist from here on
    reset_peak()
    before = memory("VmRSS")
    start = time.perf_counter()
    run(args.tokens)
    seconds = time.perf_counter() - start
    gradients = (weight.numel() + hidden.numel()) * 4  # of this pass, before they are added to those that exist
    extra = memory("VmHWM") - before - gradients
    chunk = args.chunk * args.vocab * 4
    ratio = extra / chunk
    print(
        f"tokens {args.tokens}  vocab {args.vocab}  chunk {args.chunk} "
        f"({chunk / 2**20:.0f} MiB of float32 logits)  {seconds:.1f} s"
    )
    print(
        f"peak beyond inputs and gradients {extra / 2**20:.0f} MiB; "
        f"all logits would be {args.tokens * args.vocab * 4 / 2**20:.0f} MiB"
    )
    print(json.dumps({"name": "token_logprob_peak_memory", "ratio": round(ratio, 3), "target": TARGET, "ok": ratio < TARGET}))


if __name__ == "__main__":
    main()
