"""Speed of the agent-wise advantage kernel on a GPU, against a device copy.

Checks the kernel against the torch reference, then prints bytes per second: what the kernel must read and write once,
over its median time; and the same for a copy of as many bytes within the device.  Not run yet: there was no GPU.

    bash tools/gpu_check.sh advantage
"""

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch

from megatron_drmas.kernels.agent_advantage import agent_advantages
from tools.bench.command import BenchParser

TARGET = 0.8
SHAPES = {"a million rows of 64 tokens": (1_000_000, 20, 64), "640 rows of 800 tokens": (640, 5, 800), "ragged": (200_000, 20, 0)}


def problem(rows: int, group: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """scores, group, agent, offsets on the device; tokens 0: lengths between 1 and 2048."""
    generator = torch.Generator("cuda").manual_seed(0)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (rows,), device="cuda", generator=generator)

    lengths = integers(tokens, tokens + 1) if tokens else integers(1, 2049)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return integers(0, 2).float(), torch.arange(rows, device="cuda") // group, integers(0, 3), offsets


def median_seconds(function: Callable[[], object], repeat: int = 50) -> float:
    for _ in range(5):
        function()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def main() -> None:
    BenchParser(__doc__).parse_args()
    if not torch.cuda.is_available():
        sys.exit("advantage_gpu: needs an NVIDIA GPU that torch can use")
    print(torch.cuda.get_device_name())
    for name, shape in SHAPES.items():
        inputs = scores, group, agent, offsets = problem(*shape)
        for mean in ("group", "agent"):
            for std in ("group", "agent", "none"):
                expected = agent_advantages(scores.cpu(), group.cpu(), agent.cpu(), offsets.cpu(), mean, std)
                torch.testing.assert_close(agent_advantages(*inputs, mean, std).cpu(), expected, rtol=1e-4, atol=1e-4)
        moved = sum(tensor.numel() * tensor.element_size() for tensor in inputs) + int(inputs[3][-1]) * 4
        ours = moved / median_seconds(partial(agent_advantages, *inputs))
        source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copy = moved / median_seconds(partial(target.copy_, source))
        print(f"{name}: {ours / 1e9:.0f} GB/s; device copy {copy / 1e9:.0f} GB/s")
        print(
            json.dumps(
                {"name": f"advantage_gpu ({name})", "ratio": round(ours / copy, 3), "target": TARGET, "ok": ours / copy >= TARGET}
            )
        )


if __name__ == "__main__":
    main()
