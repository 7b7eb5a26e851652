"""A policy's Megatron-Core model: from a `ModelSpec` to this rank's wrapped GPTModel."""

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.megatron.model import build_model, transformer_config
from megatron_drmas.actor.fp8_emulation import emulate_fp8
from megatron_drmas.actor.local_layers import ChosenTokensLayer, local_block_spec
from megatron_drmas.actor.precision import DTYPES, fp8_arguments
from megatron_drmas.actor.settings import ActorSettings
from megatron_drmas.devices import DEVICES
from megatron_drmas.kernels.gather import take_rows
from megatron_drmas.kernels.token_logprob import linear_token_logprobs


def policy_config(spec: ModelSpec, settings: ActorSettings) -> TransformerConfig:
    """Megatron's configuration of this model in this layout and precision.

    Parameters always start random, also where a checkpoint replaces them: without initialization Megatron does not
    mark them as tensor-parallel, and the gradient norm would miss the shards of every rank but the first.
    """
    parallel, dtype, accelerated = settings.policy.parallel, DTYPES[settings.precision.mode], DEVICES[settings.device].accelerated
    fused = _with_transformer_engine(settings)
    recompute = {}
    if settings.policy.recompute:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return transformer_config(
        spec,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=parallel.pipeline > 1,
        deallocate_pipeline_outputs=parallel.pipeline > 1,
        deterministic_mode=settings.deterministic and accelerated,
        # The loss carries its own normalization: Megatron scales it neither by micro-batches nor by replicas.
        calculate_per_token_loss=True,
        bias_dropout_fusion=fused,
        bias_activation_fusion=fused,
        apply_rope_fusion=fused,
        persist_layer_norm=fused,
        moe_grouped_gemm=accelerated and bool(spec.experts),
        **recompute,
        **fp8_arguments(settings.precision),
    )


class PolicyModel(GPTModel):
    """GPTModel whose last stage can return log-probs and entropies of chosen tokens instead of logits.

    With the `labels` [e] and `loss_mask` bool [1, t] (`predict`) of a `MicroBatch` it returns float32 [n, 2] for the n
    predicted tokens: the log-prob and the distribution's entropy, both of logits / `temperature` over the `vocab` real ids.
    Logits exist for the e edges only, a chunk at a time.  Without labels it returns logits, as GPTModel does.
    """

    def __init__(self, *args, vocab: int, temperature: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.vocab = vocab
        self.temperature = temperature

    def _preprocess(self, *args, packed_seq_params=None, **kwargs):
        outputs = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if packed_seq_params is None or packed_seq_params.positions is None:
            return outputs
        # One angle a token: Megatron takes them in order, having been shown a single sequence of all tokens.
        return outputs[0], outputs[1][packed_seq_params.positions], *outputs[2:]

    def _postprocess(self, hidden_states: Tensor, *args, labels=None, loss_mask=None, **kwargs):
        if labels is None or not self.post_process:
            return super()._postprocess(hidden_states, *args, labels=labels, loss_mask=loss_mask, **kwargs)
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            # The log-probs' backward sums the gradient over the group, so here each rank only takes its part of it.
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=group
            )
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        hidden_states = hidden_states[:, 0]
        if not isinstance(self.decoder.layers[-1], ChosenTokensLayer):
            hidden_states = hidden_states[loss_mask[0]]
        packed = kwargs["packed_seq_params"]
        if packed.sources is not None:
            hidden_states = take_rows(hidden_states, packed.sources)
        logprobs, entropy = linear_token_logprobs(
            hidden_states,
            weight,
            labels,
            group if group.size() > 1 else None,
            temperature=self.temperature,
            vocab_size=self.vocab,
        )
        outputs = torch.stack([logprobs, entropy], dim=1)
        return outputs if packed.edges is None else take_rows(outputs, packed.edges)


def build_policy_model(spec: ModelSpec, settings: ActorSettings) -> DistributedDataParallel:
    """This rank's part of the model, in Megatron's DistributedDataParallel; call inside initialized groups.

    On CUDA the layers are Transformer Engine's (packed `thd` attention), on a CPU and for emulated FP8 Megatron's local
    ones with `local_layers`.  The CUDA branch follows Megatron's documented interfaces and is untested on CPU machines.

    Raises:
        ConversionError: the layout does not divide the model.
        ValueError: experts with tensor but without sequence parallelism.
    """
    parallel = settings.policy.parallel
    spec.check_layout(parallel.tensor, parallel.pipeline)
    if spec.experts and parallel.tensor > 1 and not parallel.sequence:
        raise ValueError(
            f"policies.{settings.name}.parallel.sequence=false: Megatron trains a mixture of experts under tensor "
            f"parallelism ({parallel.tensor}) only with sequence parallelism; set it to true"
        )
    config = policy_config(spec, settings)
    if _with_transformer_engine(settings):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        layers = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
        )
        if shares_beginnings(settings):
            from megatron_drmas.actor.transformer_engine_layers import BranchAttention

            layers.submodules.self_attention.submodules.core_attention = BranchAttention
    else:
        # FP8's scales are to see all tokens, as they do in Transformer Engine.
        choose_tokens = not config.sequence_parallel and settings.precision.mode != "fp8_emulated"
        layers = local_block_spec(config, choose_tokens)
    (model,) = build_model(spec, config, layers, PolicyModel, vocab=spec.vocab, temperature=settings.temperature)
    if settings.precision.mode == "fp8_emulated":
        emulate_fp8(model, settings.precision.fp8, spec.layers)
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=settings.policy.optimizer.distributed),
        model,
    )
    wrapped.broadcast_params()
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = _sum_gradients
    return wrapped


def shares_beginnings(settings: ActorSettings) -> bool:
    """Whether tokens that rows begin with are packed once (`policies.X.packing`)."""
    return settings.policy.shares_beginnings(DEVICES[settings.device].accelerated)


def _with_transformer_engine(settings: ActorSettings) -> bool:
    return DEVICES[settings.device].accelerated and settings.precision.mode != "fp8_emulated"


def _sum_gradients(model: list, num_tokens, **groups) -> None:
    """Finish a step's gradients as sums over ranks: `num_tokens` would divide them by a count of tokens."""
    finalize_model_grads(model, None, **groups)
