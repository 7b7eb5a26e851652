"""`ModelMapping`: names and shapes of one model on both sides, expanded from its family's table.

Megatron names here are *global* (layer and expert numbers count over all pipeline and expert-parallel ranks) and are
those of the Transformer Engine layer spec; `canonical_name` converts a live module's name to that form.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import FAMILIES
from checkpoints_conv.families.base import EMBEDDING, FINAL_NORM, OUTPUT
from checkpoints_conv.families.rules import Rule
from checkpoints_conv.families.spec import ModelSpec

EMBEDDING_NAME, EMBEDDING_HF = EMBEDDING.megatron, EMBEDDING.hf[0]
OUTPUT_NAME, OUTPUT_HF = OUTPUT.megatron, OUTPUT.hf[0]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter: its rule and the HF names that it is made of."""

    rule: Rule
    hf: tuple[str, ...]


class ModelMapping:
    """Every parameter of the model that `spec` describes, exactly once on each side."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self.entries: dict[str, Entry] = dict(_expand(spec))

    def megatron_names(self) -> list[str]:
        """Global Megatron names, in model order.  A tied model has no output layer of its own."""
        return list(self.entries)

    def hf_names(self) -> list[str]:
        """HF names, in the order of `megatron_names`."""
        return [name for entry in self.entries.values() for name in entry.hf]

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """HF name -> shape."""
        return {
            name: shape
            for entry in self.entries.values()
            for name, shape in zip(entry.hf, entry.rule.shapes(self.spec), strict=True)
        }

    def entry(self, name: str) -> Entry:
        """The entry of a global Megatron name.

        Raises:
            ConversionError: the model has no such parameter.
        """
        if name not in self.entries:
            raise ConversionError(f"{self.spec.architecture} has no Megatron parameter {name!r}")
        return self.entries[name]

    def check_hf(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare a checkpoint's tensors with what its config asks for.

        Args:
            shapes: HF name -> shape of everything that the checkpoint holds.  A tied model may hold lm_head.weight.

        Raises:
            ConversionError: names the first missing, unknown and wrong-shaped tensors.
        """
        expected = self.hf_shapes()
        faults = []
        missing = [name for name in expected if name not in shapes]
        if missing:
            hint = " (is tie_word_embeddings right?)" if OUTPUT_HF in missing else ""
            faults.append(f"missing: {_some(missing)}{hint}")
        allowed = set(expected) | ({OUTPUT_HF} if self.spec.tied else set())
        unknown = [name for name in shapes if name not in allowed]
        if unknown:
            faults.append(f"unknown: {_some(unknown)}")
        wrong = [
            wrong_shape(name, tuple(shapes[name]), shape)
            for name, shape in expected.items()
            if name in shapes and tuple(shapes[name]) != shape
        ]
        if wrong:
            faults.append(f"wrong shape: {_some(wrong)}")
        if faults:
            raise ConversionError(
                f"the weights and the config.json of this {self.spec.architecture} disagree; " + "; ".join(faults)
            )


def canonical_name(name: str, layer_offset: int = 0, expert_offset: int = 0, experts: bool = False) -> str:
    """The global name of a live module's parameter.

    Args:
        name: as in GPTModel.named_parameters(), of the local or the Transformer Engine layer spec.
        layer_offset: global number of the chunk's layer 0.
        expert_offset: global number of the rank's expert 0.
        experts: the model is a mixture of experts, whose MLP norm stays a module of its own under both specs.
    """
    name = re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{int(m[1]) + layer_offset}.", name)
    name = re.sub(r"(?<=\d\.)input_layernorm\.", "self_attention.linear_qkv.layer_norm_", name)
    if not experts:
        name = re.sub(r"(?<=\d\.)pre_mlp_layernorm\.", "mlp.linear_fc1.layer_norm_", name)
    # Transformer Engine's grouped linear names expert e's weight `weight<e>`.
    name = re.sub(r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.local_experts.\2.\1.weight", name)
    return re.sub(r"(?<=\.local_experts\.)(\d+)", lambda m: str(int(m[1]) + expert_offset), name)


def _expand(spec: ModelSpec) -> Iterator[tuple[str, Entry]]:
    yield EMBEDDING.megatron, Entry(EMBEDDING, EMBEDDING.hf)
    for layer in range(spec.layers):
        for rule in FAMILIES[spec.architecture].layer:
            for expert in range(spec.experts) if "{expert}" in rule.megatron else [0]:
                numbers = {"layer": layer, "expert": expert}
                names = tuple(name.format(**numbers) for name in rule.hf)
                yield rule.megatron.format(**numbers), Entry(rule, names)
    yield FINAL_NORM.megatron, Entry(FINAL_NORM, FINAL_NORM.hf)
    if not spec.tied:
        yield OUTPUT.megatron, Entry(OUTPUT, OUTPUT.hf)


def wrong_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """The message for an HF tensor whose shape contradicts the config."""
    return f"{name} is {list(got)}, the config asks for {list(expected)}"


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
