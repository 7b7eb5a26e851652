"""The place of a parameter in a Megatron distributed checkpoint (`torch_dist`): its key, and its index in the key's tensor.

Megatron stacks the layers of a homogeneous model under one key per parameter, [layers, …] or [layers, experts, …];
`singleton` checkpoints (metadata non_homogeneous_layers) keep one key per layer.  Every linear and every Transformer
Engine norm has an `_extra_state` object next to its weights; without FP8 it is an empty byte tensor.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from checkpoints_conv.mapping.model_mapping import ModelMapping

HF_FILES = "hf"  # folder inside the checkpoint with the HF config, tokenizer and chat template
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Place:
    """A parameter inside a checkpoint: element `index` of `key` in the leading dimensions `leading`."""

    key: str
    index: tuple[int, ...]
    leading: tuple[int, ...]


def place_of(name: str, mapping: ModelMapping, per_layer: bool = False) -> Place:
    """The place of a global Megatron name.

    Args:
        per_layer: the checkpoint keeps one key per layer.
    """
    key, index, leading = name, [], []
    layer = _LAYER.match(name)
    if layer and not per_layer:
        key = _LAYER.sub("decoder.layers.", key)
        index.append(int(layer[1]))
        leading.append(mapping.spec.layers)
    expert = _EXPERT.search(key)
    if expert:
        key = _EXPERT.sub(".experts.", key)
        index.append(int(expert[1]))
        leading.append(mapping.spec.experts)
    return Place(key, tuple(index), tuple(leading))


def local_spec_key(key: str) -> str:
    """The key under which a model of the local layer spec stores a parameter.

    Only the MLP norm of a mixture of experts has another one than under the Transformer Engine spec: that of dense models.
    """
    return key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def extra_state_keys(mapping: ModelMapping) -> Iterator[str]:
    """Keys of the `_extra_state` objects that a model of either layer spec loads from a stacked checkpoint."""
    seen = set()
    for name in mapping.megatron_names():
        module = name.rpartition(".")[0]
        if module in seen or module in ("embedding.word_embeddings", "output_layer") or module.endswith("mlp.router"):
            continue
        seen.add(module)
        place = place_of(f"{module}._extra_state", mapping)
        index, size = place.index or (0,), place.leading or (1,)
        yield f"{place.key}/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, size))}"
