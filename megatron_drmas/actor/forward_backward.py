"""Micro-batches through Megatron's pipeline schedule, with the policy loss, cross entropy, or no loss at the end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_drmas.actor.packing import MicroBatch, response_column
from megatron_drmas.algorithm.losses import LossInputs, LossOutputs, policy_loss
from megatron_drmas.batch import TokenBatch, TurnBatch
from megatron_drmas.config.algorithm import LossConfig

# (log-probs [n], entropies [n], the micro-batch) -> loss to differentiate, what to keep of this micro-batch
Head = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, object]]


def run_micro_batches(
    model: DistributedDataParallel, micro_batches: list[MicroBatch], head: Head, device: str, backward: bool = True
) -> list:
    """Forward (and backward) passes of one optimizer step's micro-batches; gradients are summed into the model's buffers.

    Collective: every rank passes the same number of micro-batches, those of one data-parallel rank the same ones.

    Returns:
        What `head` kept of each micro-batch, on the last pipeline stage; elsewhere nothing.
    """

    def forward_step(iterator: Iterator[MicroBatch], chunk: DistributedDataParallel) -> tuple[Tensor, Callable]:
        micro = next(iterator).to(device)
        output = chunk(
            micro.tokens, micro.positions, None, labels=micro.labels, loss_mask=micro.predict, packed_seq_params=micro.packed
        )
        return output, partial(_finish, head=head, micro=micro)

    with torch.set_grad_enabled(backward):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[model],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].tokens.shape[1],  # not used: micro-batches exchange their own shapes
            micro_batch_size=1,
            forward_only=not backward,
        )


def _finish(output: Tensor, head: Head, micro: MicroBatch) -> tuple[Tensor, Tensor, object]:
    loss, kept = head(output[:, 0], output[:, 1], micro)
    return loss, torch.tensor(len(output), dtype=torch.int), kept


@dataclass
class PolicyHead:
    """The policy loss of a mini-batch's micro-batches."""

    batch: TurnBatch  # the mini-batch, with its advantages and engine log-probs
    token_weights: Tensor  # float32 [T']
    old_logprobs: "Tensor | None"  # float32 [T']; None: those of this pass
    config: LossConfig
    beta: float = 0.0  # of the loss teamtr

    def __call__(self, logprobs: Tensor, entropy: Tensor, micro: MicroBatch) -> tuple[Tensor, LossOutputs]:
        column = partial(self._column, rows=micro.rows, device=logprobs.device)
        sequence = torch.repeat_interleave(torch.arange(len(micro.rows)), micro.lengths)
        reference = self.batch.reference_logprobs
        outputs = policy_loss(
            LossInputs(
                logprobs=logprobs,
                engine_logprobs=column(self.batch.engine_logprobs),
                advantages=column(self.batch.filled("advantages")),
                token_weights=column(self.token_weights),
                sequence=sequence.to(logprobs.device),
                sequences=len(micro.rows),
                old_logprobs=None if self.old_logprobs is None else column(self.old_logprobs),
                entropy=entropy,
                reference_logprobs=None if reference is None else column(reference),
                agent=self.batch.agent[micro.rows][sequence].to(logprobs.device),
                agents=len(self.batch.agents),
                beta=self.beta,
            ),
            self.config,
        )
        return outputs.loss, outputs

    def _column(self, column: Tensor, rows: Tensor, device: torch.device) -> Tensor:
        return response_column(self.batch, column, rows).to(device)


@dataclass
class CrossEntropyHead:
    """-sum of token_weights · log-prob over the predicted tokens, kept as float64 [weighted loss, tokens]."""

    batch: TokenBatch
    token_weights: Tensor  # float32 [T]

    def __call__(self, logprobs: Tensor, entropy: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        weights = self.token_weights[micro.places].to(logprobs.device)
        loss = -(weights * logprobs).sum()
        return loss, torch.tensor([loss.item(), len(logprobs)], dtype=torch.float64)


def keep_logprobs(logprobs: Tensor, entropy: Tensor, micro: MicroBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A head without a loss, which keeps the log-probs and the rows they belong to."""
    return logprobs.sum(), (micro.rows, logprobs.detach().cpu())
