"""Keys of a config.json that no family reads: which cannot change what a model computes, and which would."""

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families.values import shown

logger = logging.getLogger(__name__)

# Read from transformers' config object, or checked by `Family`, for every family.
READ = {
    "architectures",
    "model_type",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "original_max_position_embeddings",
    "layer_types",
}

# Training, generation, book-keeping: no effect on the log-probs of given tokens.
HARMLESS = {
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
    "_model_name_or_path",
    "name_or_path",
    "_commit_hash",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "unk_token_id",
    "decoder_start_token_id",
    "initializer_range",
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "output_router_logits",
    "router_aux_loss_coef",
    "chunk_size_feed_forward",
    "pretraining_tp",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "finetuning_task",
    "task_specific_params",
    "tokenizer_class",
    "prefix",
    "torchscript",
    "tf_legacy_loss",
    "use_bfloat16",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "max_length",
    "min_length",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "num_return_sequences",
    "output_scores",
    "return_dict_in_generate",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "remove_invalid_values",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "is_decoder",
    "is_llama_config",
    "transformers.js_config",
    "unsloth_fixed",
    "unsloth_version",
    "model_max_length",
}

# Switches and factors of other families, or of vLLM's readers of these: with the values that leave the computation as it is.
NEUTRAL: dict[str, tuple] = {
    # factors of embeddings, residuals, attention and logits
    "embedding_multiplier": (1,),
    "scale_emb": (1,),
    "residual_multiplier": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "mup_enabled": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attn_temperature_tuning": (False, 0),
    "llama_4_scaling": (),
    "routed_scaling_factor": (1,),
    # who attends to whom
    "sliding_window": (),
    "use_sliding_window": (False,),
    "sliding_window_pattern": (),
    "window_size": (),
    "local_window_size": (),
    "attention_chunk_size": (),
    "dual_chunk_attention_config": (),
    "is_causal": (True,),
    "is_prefix_lm": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "target_layer_count": (),
    # positions
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rotary_emb_fraction": (1,),
    "rotary_emb_base": (),
    "rotary_dim": (),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (),
    "rope_ratio": (1,),
    "no_rope_layers": (),
    "no_rope_layer_interval": (),
    "nope_layer_interval": (),
    "use_mrope": (False,),
    "mrope_section": (),
    "xdrope_section": (),
    "alibi": (False,),
    "position_embedding_type": ("rope",),
    # biases, norms, activations
    "attention_bias": (False,),
    "attention_out_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "bias": (False,),
    "use_bias": (False,),
    "no_bias": (True,),
    "lm_head_bias": (False,),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "ada_rms_norm_t_cond": (False,),
    "clip_qkv": (),
    "hidden_activation": ("silu",),
    "parallel_residual": (False,),
    # experts
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "moe_num_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "scoring_func": ("softmax",),
    # layers that differ from each other, parts that are missing
    "per_layer_config": ({},),
    "pruned_heads": ({},),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (),
    "num_nextn_predict_layers": (0,),
}


def check_unread_keys(
    config: dict, architecture: str, read: Iterable[str], neutral: Mapping[str, tuple], defaults: Mapping[str, Any]
) -> None:
    """Refuse keys that would change the computation, and name those that nobody knows.

    Args:
        config: the contents of config.json.
        read: keys that the family reads in addition to `READ`.
        neutral: the family's own exceptions from `NEUTRAL`.
        defaults: fields of transformers' config class with their defaults.

    Raises:
        ConversionError: names the key and the value at which it would do.
    """
    known, neutral = {*READ, *HARMLESS, *read}, {**NEUTRAL, **neutral}
    unknown = []
    for key, value in config.items():
        if key in known or value is None:
            continue
        if key in neutral:
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral[key]):
                would_do = " or ".join(["null", *(shown(each) for each in neutral[key])])
                raise ConversionError(
                    f"config.json has {key}={shown(value)}, which {architecture} is not converted with; it must be {would_do}, "
                    "or absent"
                )
        elif key in defaults:
            if value != defaults[key]:
                raise ConversionError(
                    f"config.json has {key}={shown(value)}: what it does to {architecture} is not known here; only its default "
                    f"{shown(defaults[key])} is converted"
                )
        else:
            unknown.append(key)
    if unknown:
        _say(architecture, tuple(sorted(map(shown, unknown))))


@functools.cache  # once per process: several steps read the same config
def _say(architecture: str, keys: tuple[str, ...]) -> None:
    logger.warning(
        "config.json of this %s has keys that transformers ignores for it; they are ignored here too: %s",
        architecture,
        ", ".join(keys),
    )
