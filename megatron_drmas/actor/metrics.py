"""What an update reports, from the sums that the loss leaves on each rank."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_drmas.actor.packing import MicroBatch
from megatron_drmas.actor.parallel import owns_results
from megatron_drmas.algorithm.losses import LossOutputs
from megatron_drmas.observability.metric import Reduction
from megatron_drmas.observability.metrics import LOSS_SUMS, UPDATE_REDUCTIONS

SUMS = ("tokens", *LOSS_SUMS)  # of LossOutputs


class UpdateMetrics:
    """Per-agent sums and maxima of the loss over micro-batches, ranks and optimizer steps."""

    def __init__(self, agents: int, device: str, reference: bool = False):
        self.device = device
        self.names = [name for name in LOSS_SUMS if reference or name != "kl_reference"]
        self.sums = torch.zeros(len(SUMS), agents, dtype=torch.float64)
        self.largest_mismatch = torch.zeros(agents, dtype=torch.float64)
        self.nonfinite_agents: set[int] = set()
        self.grad_norms: list[float] = []  # of the steps that were made
        self.skipped = 0
        self.packed_tokens = self.row_tokens = 0  # of this rank's micro-batches

    def count_packing(self, micro_batches: list[MicroBatch]) -> None:
        """Note how many tokens of rows the model computes, and how many the rows have."""
        self.packed_tokens += sum(micro.tokens.shape[1] for micro in micro_batches)
        self.row_tokens += sum(micro.row_tokens for micro in micro_batches)

    def add(self, outputs: list[LossOutputs], grad_norm: float, stepped: bool) -> None:
        """Add one optimizer step's micro-batches of all ranks; collective."""
        sums, largest = torch.zeros_like(self.sums), torch.zeros_like(self.largest_mismatch)
        for output in outputs if owns_results() else []:
            sums += torch.stack([output.sums.get(name, torch.zeros_like(output.sums["tokens"])).double().cpu() for name in SUMS])
            largest = torch.maximum(largest, output.maxima["logprob_diff_max"].double().cpu())
        sums, largest = sums.to(self.device), largest.to(self.device)
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        sums = sums.cpu()
        self.sums += sums
        self.largest_mismatch = torch.maximum(self.largest_mismatch, largest.cpu())
        finite = (sums[SUMS.index("loss")] + sums[SUMS.index("gradient_mass")]).isfinite()
        self.nonfinite_agents |= set((~finite).nonzero().flatten().tolist())
        if stepped:
            self.grad_norms.append(grad_norm)
        else:
            self.skipped += 1

    def report(self, lr: float) -> dict:
        """The dictionary that `PolicyActor.update` returns; collective."""
        packed = torch.tensor([self.packed_tokens, self.row_tokens], dtype=torch.float64, device=self.device)
        dist.all_reduce(packed)
        steps = len(self.grad_norms) + self.skipped
        agents = {}
        for agent in (self.sums[SUMS.index("tokens")] > 0).nonzero().flatten().tolist():
            agents[agent] = self._means(self.sums[:, agent], steps)
            agents[agent]["logprob_diff_max"] = float(self.largest_mismatch[agent])
        return {
            **self._means(self.sums.sum(1), steps),
            "logprob_diff_max": float(self.largest_mismatch.max()) if len(self.largest_mismatch) else 0.0,
            "grad_norm": sum(self.grad_norms) / len(self.grad_norms) if self.grad_norms else math.nan,
            "grad_norm_max": max(self.grad_norms, default=math.nan),
            "lr": lr,
            "optimizer_steps": len(self.grad_norms),
            "skipped": self.skipped,
            "shared_tokens": max(0.0, 1 - float(packed[0] / packed[1])) if packed[1] else 0.0,
            "nonfinite_agents": sorted(self.nonfinite_agents),
            "agents": agents,
        }

    def _means(self, sums: Tensor, steps: int) -> dict:
        value = dict(zip(SUMS, sums.tolist(), strict=True))
        over = {Reduction.TOKEN_MEAN: max(value["tokens"], 1.0), Reduction.TOKEN_SUM: max(steps, 1)}
        return {"tokens": int(value["tokens"])} | {name: value[name] / over[UPDATE_REDUCTIONS[name]] for name in self.names}
