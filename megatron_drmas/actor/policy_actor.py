"""`PolicyActor`: one rank of the Megatron side of one policy."""

import math
from dataclasses import replace
from functools import partial

import torch
from megatron.core import parallel_state
from torch import Tensor

from checkpoints_conv.families import family_of
from checkpoints_conv.formats.hf_folder import read_config
from checkpoints_conv.mapping.model_mapping import ModelMapping
from checkpoints_conv.megatron.export import export_hf_folder
from checkpoints_conv.megatron.load import load_hf_weights
from megatron_drmas.actor.checkpoint import BackgroundSave, load_checkpoint
from megatron_drmas.actor.forward_backward import CrossEntropyHead, PolicyHead, keep_logprobs, run_micro_batches
from megatron_drmas.actor.metrics import UpdateMetrics
from megatron_drmas.actor.model import build_policy_model, shares_beginnings
from megatron_drmas.actor.optimizer import build_optimizer, build_schedule, optimizer_step
from megatron_drmas.actor.packing import MicroBatch, pack_rows
from megatron_drmas.actor.parallel import destroy_groups, initialize_groups, owns_results, sum_over_ranks
from megatron_drmas.actor.precision import token_multiple
from megatron_drmas.actor.reference import ReferencePolicy
from megatron_drmas.actor.residency import Residency
from megatron_drmas.actor.settings import ActorSettings
from megatron_drmas.actor.trust_region import TrustRegions
from megatron_drmas.algorithm.losses import token_weights
from megatron_drmas.algorithm.minibatch import plan_microbatches, plan_minibatches, plan_shared_microbatches
from megatron_drmas.batch import TokenBatch, TurnBatch, gather_segments
from megatron_drmas.devices import DEVICES


class PolicyActor:
    """A policy's model, optimizer and schedule on one rank; every public method is collective over the ranks.

    Every rank is handed the same batch and trains its data-parallel share of it.  The gradient is a sum over tokens
    with the weights of `algorithm.losses.token_weights`, so it does not depend on the layout or the micro-batches.
    """

    def __init__(self, settings: ActorSettings, rank: int, world_size: int, master_addr: str, master_port: int):
        self.settings = settings
        self.rank = rank
        self.world_size = world_size
        self.master = (master_addr, master_port)

    def initialize(self, weights: str) -> dict:
        """Join the process group and build model, optimizer and schedule.

        Args:
            weights: Hugging Face folder; "" starts random, from the config.json of `settings.policy.model`.

        Returns:
            parameters (of the whole model), local_parameters, tensor_rank, pipeline_rank, data_rank, and bytes: what this rank
            holds on its device, an `ActorBytes`.
        """
        initialize_groups(self.settings, self.rank, self.world_size, *self.master)
        config = read_config(weights or self.settings.policy.model)
        self.spec = family_of(config).model_spec(config)
        self.model = build_policy_model(self.spec, self.settings)
        self.shares_beginnings = shares_beginnings(self.settings)
        if weights:
            load_hf_weights([self.model], weights, self.spec)
        self.model.broadcast_params()
        loss = self.settings.loss
        self.reference = ReferencePolicy(self.model) if loss.kl_coef else None
        self.trust_regions = TrustRegions(loss)
        self.optimizer = build_optimizer(self.model, self.settings)
        self.schedule = build_schedule(self.optimizer, self.settings)
        self.residency = Residency(self.model, self.optimizer, pinned=DEVICES[self.settings.device].accelerated)
        held = self.residency.bytes
        return {
            "parameters": sum(math.prod(shape) for shape in ModelMapping(self.spec).hf_shapes().values()),
            "local_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
            "pipeline_rank": parallel_state.get_pipeline_model_parallel_rank(),
            "data_rank": parallel_state.get_data_parallel_rank(),
            "bytes": {"parameters": held.parameters, "total": held.total},
        }

    def update(self, batch: TurnBatch, step: int) -> dict:
        """Train on a batch: `updates_per_batch` optimizer steps of the policy loss.

        Args:
            batch: the policy's rows, with engine_logprobs and advantages.
            step: of the run; chooses the rows of each mini-batch together with the seed.

        Returns:
            The same on every rank: loss, grad_norm (before clipping, mean over the steps; NaN if no step was made),
            grad_norm_max (the largest of them), clip_fraction, entropy, lr (of the last step), prob_ratio (mean
            exp |log-prob difference to the engine|), logprob_diff_max, logprob_diff_mean, ratio, kl_old, chi_square,
            corrected_fraction, gradient_mass, tokens, optimizer_steps, shared_tokens (share of the rows' tokens that were
            not computed because rows that begin alike share them),
            skipped (steps whose gradient was not finite: weights, optimizer and schedule untouched), nonfinite_agents
            (agents whose loss or whose loss's gradient was not finite), and agents: {agent id: the means of its tokens}.
            With a KL to the reference, the policy that the run began with: kl_reference.
            With the loss teamtr, whose update ends early at `trust_region.delta`, trust_region: message_kl (its estimate at
            the end), beta, message_kl_bound and surrogate (see `teamtr.measure_update`).
        """
        if self.reference:
            logprobs = self.reference.under(self.model, partial(self.token_logprobs, batch))
            batch = replace(batch, reference_logprobs=logprobs)
        generator = torch.Generator().manual_seed(1_000_003 * self.settings.seed + step)
        minibatches = plan_minibatches(batch, self.settings.updates_per_batch, generator, self.settings.minibatches_by)
        bounded = self.settings.loss.name == "teamtr"
        old_logprobs = self.token_logprobs(batch) if len(minibatches) > 1 or bounded else None
        region = self.trust_regions.update(batch, old_logprobs) if bounded and old_logprobs is not None else None

        metrics = UpdateMetrics(len(batch.agents), self.settings.device, self.reference is not None)
        lr = self._lr()
        for rows in minibatches:
            mini = batch.select(rows)
            head = PolicyHead(
                mini,
                token_weights(mini, self.settings.loss),
                None if old_logprobs is None else gather_segments(old_logprobs, batch.response_offsets, rows),
                self.settings.loss,
                region.beta if region else 0.0,
            )
            self._zero_gradients()
            micro_batches = self._micro_batches(mini)
            outputs = run_micro_batches(self.model, micro_batches, head, self.settings.device)
            lr = self._lr()
            metrics.count_packing(micro_batches)
            metrics.add(outputs, *optimizer_step(self.optimizer, self.schedule))
            if region and region.reached(self.token_logprobs):
                break
        return metrics.report(lr) | ({"trust_region": region.metrics} if region else {})

    def token_logprobs(self, batch: TokenBatch) -> Tensor:
        """Log-probs of the response tokens under the current weights at `temperature`, float32 [T'], on every rank."""
        micro_batches = self._micro_batches(batch)
        kept = run_micro_batches(self.model, micro_batches, keep_logprobs, self.settings.device, backward=False)
        result = torch.zeros(int(batch.response_lengths.sum()), dtype=torch.float32)
        places = torch.arange(len(result))
        for rows, logprobs in kept if owns_results() else []:
            result[gather_segments(places, batch.response_offsets, rows)] = logprobs.float()
        return sum_over_ranks(result, self.settings.device)

    def sft_step(self, batch: TokenBatch, step: int, token_weights: Tensor) -> dict:
        """One optimizer step of weighted cross entropy at temperature 1.

        Args:
            batch: the rows.
            step: of the run; the gradient does not depend on it.
            token_weights: float32 [T] over all tokens; position t weighs the prediction of tokens[t].  The first token
                of a row is never predicted.

        Returns:
            The same on every rank: loss (the weighted sum), tokens (with a positive weight), grad_norm, lr,
            optimizer_steps, skipped.
        """
        lr = self._lr()
        self._zero_gradients()
        micro_batches = self._micro_batches(batch, wanted=token_weights > 0)
        head = CrossEntropyHead(batch, token_weights)
        self.model.module.temperature = 1.0
        try:
            kept = run_micro_batches(self.model, micro_batches, head, self.settings.device)
        finally:
            self.model.module.temperature = self.settings.temperature
        norm, stepped = optimizer_step(self.optimizer, self.schedule)
        own = sum(kept) if owns_results() else torch.zeros(2, dtype=torch.float64)
        loss, tokens = sum_over_ranks(own, self.settings.device).tolist()
        return {
            "loss": loss,
            "tokens": int(tokens),
            "grad_norm": norm,
            "lr": lr,
            "optimizer_steps": int(stepped),
            "skipped": int(not stepped),
        }

    def begin_save(self, path: str) -> None:
        """Copy model, optimizer, schedule and random states, and begin to write them as a checkpoint folder.

        It is at `path` (storage shared by all ranks) when `finish_save` returns; what is trained meanwhile does not change it.
        """
        parallel = self.settings.policy.parallel
        self._save = BackgroundSave(path, self.model, self.optimizer, self.schedule, parallel, self.trust_regions.state_dict())

    def checkpoint_written(self) -> bool:
        """Whether this rank's files of the save that has begun are on the disk; not collective.

        Raises:
            OSError: they could not be written.
        """
        return self._save.written()

    def finish_save(self) -> None:
        """Wait for this rank's files, and put the folder in its place when every rank has come here."""
        self._save.finish()
        del self._save

    def load(self, path: str) -> None:
        """Restore a checkpoint, of this or another layout; in this layout training resumes bit-exactly."""
        betas = load_checkpoint(path, self.model, self.optimizer, self.schedule, self.settings.policy.parallel)
        self.trust_regions.load_state_dict(betas)

    def export_hf(self, path: str) -> None:
        """Write the whole policy as a Hugging Face folder (storage shared by all ranks), atomically.

        Tokenizer, chat template and generation config come from `settings.policy.model`.
        """
        export_hf_folder([self.model], self.spec, self.settings.policy.model, path)

    def shutdown(self) -> None:
        """Leave the process group and free the model."""
        del self.optimizer, self.schedule, self.residency, self.model
        destroy_groups()

    def _micro_batches(self, batch: TokenBatch, wanted: "Tensor | None" = None) -> list[MicroBatch]:
        """This data-parallel rank's packed micro-batches; every rank has the same number."""
        parallel = self.settings.policy.parallel
        budget, multiple = self.settings.policy.micro_batch_tokens, token_multiple(self.settings.precision)
        if parallel.sequence:
            multiple *= parallel.tensor
        assert budget is not None, "chosen by `cluster.machine`"
        if self.shares_beginnings:
            plan = plan_shared_microbatches(batch, budget, parallel.data)
        else:
            plan = plan_microbatches(batch, budget, parallel.data)
        own = plan[parallel_state.get_data_parallel_rank()]
        return [pack_rows(batch, rows, multiple, wanted, self.shares_beginnings) for rows in own]

    def _zero_gradients(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]
