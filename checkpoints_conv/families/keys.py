"""Keys of a config.json that no family reads: which cannot change what a model computes, and which would."""

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families.values import shown

logger = logging.getLogger(__name__)

# Read from transformers' config object, or checked by `Family`, for every family, in addition to sizes.
READ = set(
    """
    architectures model_type head_dim tie_word_embeddings rms_norm_eps hidden_act rope_parameters rope_scaling rope_theta
    original_max_position_embeddings layer_types
    """.split()
)

# No effect on the log-probs of given tokens: storage and tools; tokenizer; execution; training; classification; generation.
HARMLESS = set(
    """
    dtype torch_dtype use_bfloat16 transformers_version _name_or_path _model_name_or_path name_or_path _commit_hash
    torchscript transformers.js_config unsloth_fixed unsloth_version is_llama_config

    tokenizer_class prefix model_max_length bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    decoder_start_token_id

    use_cache pretraining_tp chunk_size_feed_forward _attn_implementation _attn_implementation_autoset attn_implementation
    is_decoder output_hidden_states output_attentions output_router_logits return_dict

    initializer_range attention_dropout hidden_dropout resid_pdrop router_aux_loss_coef tf_legacy_loss

    id2label label2id num_labels problem_type finetuning_task task_specific_params

    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()
)

# Switches and factors of other families, or of vLLM's readers of these, by the values that leave the computation as it is.
NEUTRAL: dict[str, tuple] = {
    key: values
    for values, names in (
        # factors of embeddings, residuals, attention and logits
        ((1,), "embedding_multiplier scale_emb residual_multiplier logits_scaling logit_scale routed_scaling_factor"),
        (
            (),
            "scale_depth dim_model_base attention_multiplier query_pre_attn_scalar attn_logit_softcapping "
            "final_logit_softcapping llama_4_scaling",
        ),
        ((False,), "mup_enabled"),
        ((False, 0), "attn_temperature_tuning"),
        # who attends to whom
        (
            (),
            "sliding_window sliding_window_pattern window_size local_window_size attention_chunk_size "
            "dual_chunk_attention_config target_layer_count",
        ),
        ((False,), "use_sliding_window is_prefix_lm add_cross_attention is_encoder_decoder"),
        ((True,), "is_causal"),
        # positions
        ((1,), "partial_rotary_factor rotary_pct rotary_emb_fraction rope_ratio"),
        (
            (),
            "rotary_emb_base rotary_dim rope_local_base_freq no_rope_layers no_rope_layer_interval "
            "nope_layer_interval mrope_section xdrope_section",
        ),
        ((False,), "rope_interleaved use_mrope alibi"),
        (("rope",), "position_embedding_type"),
        # biases, norms, activations
        (
            (False,),
            "attention_bias attention_out_bias qkv_bias mlp_bias bias use_bias lm_head_bias qk_norm "
            "use_qk_norm qk_layernorm ada_rms_norm_t_cond parallel_residual",
        ),
        ((True,), "no_bias"),
        ((), "clip_qkv"),
        (("silu",), "hidden_activation"),
        # experts
        (
            (0,),
            "num_experts num_local_experts n_routed_experts n_shared_experts moe_num_experts "
            "shared_expert_intermediate_size first_k_dense_replace",
        ),
        ((1,), "moe_layer_freq decoder_sparse_step"),
        (([],), "mlp_only_layers"),
        (("softmax",), "scoring_func"),
        # layers that differ from each other, parts that are missing
        (({},), "per_layer_config pruned_heads"),
        ((False,), "tie_encoder_decoder"),
        ((), "cross_attention_hidden_size"),
        ((0,), "num_nextn_predict_layers"),
    )
    for key in names.split()
}


def check_unread_keys(
    config: dict, architecture: str, read: Iterable[str], neutral: Mapping[str, tuple], defaults: Mapping[str, Any]
) -> None:
    """Refuse keys that would change the computation, and name unknown ones.

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
