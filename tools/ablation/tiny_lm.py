"""A Llama-architecture model in plain torch, for many responses to few prompts: what they share is computed once.

A batch of calls has few distinct prompts, and of a prompt's responses few are distinct.  `prefill` runs every distinct prompt
once, up to its last token, in one packed batch; the last layer needs no more of it than keys and values.  `extend` runs the
rest: the last prompt token and the response, one row for each distinct response.  Both are differentiable, so that the
gradient of many calls costs one pass over their distinct prompts.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

KeyValue = tuple[Tensor, Tensor]  # keys and values of one layer, [rows, tokens, key-value heads, head size]


@dataclass
class Prefix:
    """What the distinct prompts left behind, without their last tokens.

    layers: keys and values, [prompts, longest, key-value heads, head size] each; rows are padded at the end.
    lengths: int64 [prompts], tokens that count.
    """

    layers: list[KeyValue]
    lengths: Tensor


class TinyLlama:
    """Weights as a dictionary of Hugging Face's names, float32, each a leaf that can require a gradient.

    Args:
        folder: of a Llama-architecture model with tied embeddings and no biases.

    Raises:
        ValueError: another architecture.
    """

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        if (
            config["model_type"] != "llama"
            or not config["tie_word_embeddings"]
            or config.get("attention_bias")
            or config.get("mlp_bias")
        ):
            raise ValueError(f"{folder}: the replica runs Llama architectures with tied embeddings and no biases")
        self.layers, self.heads, self.groups = (
            config[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads")
        )
        self.size, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.weights = {
            name.removeprefix("model."): value.float() for name, value in load_file(folder / "model.safetensors").items()
        }
        self.weights.pop("lm_head.weight", None)
        hf = AutoConfig.from_pretrained(folder, local_files_only=True)
        rope = hf.rope_parameters["rope_type"]
        if rope == "default":
            self.frequencies = hf.rope_parameters["rope_theta"] ** (-torch.arange(0, self.size, 2) / self.size)
        else:
            self.frequencies, _ = ROPE_INIT_FUNCTIONS[rope](hf, "cpu")

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    def prefill(self, prompts: list[list[int]]) -> Prefix:
        """Run distinct prompts up to their last tokens."""
        lengths = torch.tensor([len(prompt) - 1 for prompt in prompts])
        longest = int(lengths.max())
        tokens = torch.tensor([token for prompt in prompts for token in prompt[:-1]])
        position = torch.cat([torch.arange(length) for length in lengths.tolist()])
        place = torch.repeat_interleave(torch.arange(len(prompts)) * longest, lengths) + position
        turn = self._rotation(position)

        def padded(packed: Tensor) -> Tensor:
            rows = packed.new_zeros(len(prompts) * longest, *packed.shape[1:])
            return rows.index_copy(0, place, packed).view(len(prompts), longest, *packed.shape[1:])

        hidden, cache = self.weights["embed_tokens.weight"][tokens], []
        for layer in range(self.layers):
            normed = self._norm(hidden, f"layers.{layer}.input_layernorm")
            key, value = (padded(part) for part in self._keys_and_values(layer, normed, turn))
            cache.append((key, value))
            if layer < self.layers - 1:
                # Padding follows every token that counts, so the causal mask hides it.
                mixed = self._attend(padded(self._queries(layer, normed, turn)), key, value, None)
                hidden = self._rest(layer, hidden, mixed.flatten(0, 1).index_select(0, place))
        return Prefix(cache, lengths)

    def extend(
        self, prefix: Prefix, which: Tensor, tokens: Tensor, own: "list[KeyValue] | None" = None
    ) -> tuple[Tensor, list[KeyValue]]:
        """Run tokens that follow a prompt.

        Args:
            which: int64 [rows], each row's prompt.
            tokens: int64 [rows, n], all rows of equal length (padded at the end).
            own: keys and values of the row's tokens before these, as an earlier call returned them.

        Returns:
            Logits [rows, n, vocabulary], and the keys and values of all tokens that follow the prompt.
        """
        rows, new = tokens.shape
        before = own[0][0].shape[1] if own else 0
        position = prefix.lengths[which, None] + before + torch.arange(new)
        turn = self._rotation(position)
        longest = prefix.layers[0][0].shape[1]
        seen = torch.arange(longest) < prefix.lengths[which, None, None]
        causal = torch.arange(before + new) <= before + torch.arange(new)[:, None]
        mask = torch.cat([seen.expand(rows, new, longest), causal.expand(rows, new, before + new)], 2)[:, None]
        hidden, kept = self.weights["embed_tokens.weight"][tokens], []
        for layer in range(self.layers):
            normed = self._norm(hidden, f"layers.{layer}.input_layernorm")
            key, value = self._keys_and_values(layer, normed, turn)
            if own:
                key, value = torch.cat([own[layer][0], key], 1), torch.cat([own[layer][1], value], 1)
            kept.append((key, value))
            keys, values = (
                torch.cat([shared.index_select(0, which), mine], 1) for shared, mine in zip(prefix.layers[layer], (key, value))
            )
            mixed = self._attend(self._queries(layer, normed, turn), keys, values, mask)
            hidden = self._rest(layer, hidden, mixed)
        return self._norm(hidden, "norm") @ self.weights["embed_tokens.weight"].T, kept

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def _rotation(self, position: Tensor) -> tuple[Tensor, Tensor]:
        angles = position[..., None, None] * self.frequencies
        return angles.cos(), angles.sin()

    def _rotate(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        (cos, sin), (first, second) = rotation, states.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _project(self, layer: int, normed: Tensor, part: str) -> Tensor:
        return F.linear(normed, self.weights[f"layers.{layer}.self_attn.{part}_proj.weight"]).unflatten(-1, (-1, self.size))

    def _queries(self, layer: int, normed: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        return self._rotate(self._project(layer, normed, "q"), rotation)

    def _keys_and_values(self, layer: int, normed: Tensor, rotation: tuple[Tensor, Tensor]) -> KeyValue:
        return self._rotate(self._project(layer, normed, "k"), rotation), self._project(layer, normed, "v")

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: "Tensor | None") -> Tensor:
        """[rows, tokens, heads, size] each -> [rows, tokens, heads x size]; causal without a mask."""
        shared, tokens = self.heads // self.groups, query.shape[1]
        if mask is None:
            mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
        # Heads that share keys follow one another as further queries, so that keys are not copied for them.
        query = query.unflatten(2, (self.groups, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.repeat(1, 1, shared, 1))
        return mixed.unflatten(2, (shared, tokens)).permute(0, 3, 1, 2, 4).flatten(2)

    def _rest(self, layer: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        name = f"layers.{layer}"
        hidden = hidden + F.linear(mixed, self.weights[f"{name}.self_attn.o_proj.weight"])
        normed = self._norm(hidden, f"{name}.post_attention_layernorm")
        gate, up = (F.linear(normed, self.weights[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        return hidden + F.linear(F.silu(gate) * up, self.weights[f"{name}.mlp.down_proj.weight"])
