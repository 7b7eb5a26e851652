"""Broken and foreign folders: every fault is an error that names it."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import family_of
from checkpoints_conv.formats.hf_folder import INDEX, HfFolder, read_config
from checkpoints_conv.mapping.model_mapping import ModelMapping


@pytest.fixture
def folder(models, tmp_path) -> Path:
    """A copy of the tiny Llama, in several shards."""
    return Path(shutil.copytree(models("llama"), tmp_path / "llama"))


def check(folder: Path) -> None:
    config = read_config(folder)
    HfFolder(folder).check(ModelMapping(family_of(config).model_spec(config)))


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit_shard(path: Path, edit) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_index(folder: Path, edit) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_config(folder: Path, **changes) -> None:
    config = read_config(folder)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


NORM = "model.norm.weight"
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def test_an_intact_folder_passes(folder):
    check(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_truncated_shard(folder, left):
    shard = shard_of(folder, NORM)
    os.truncate(shard, left if left >= 0 else shard.stat().st_size + left)
    with pytest.raises(ConversionError, match=f"{shard.name}.*truncated or damaged"):
        check(folder)


def test_shard_that_the_index_names_is_missing(folder):
    shard_of(folder, NORM).unlink()
    with pytest.raises(ConversionError, match="which is not in the same folder"):
        check(folder)


def test_index_outside_the_folder(folder):
    edit_index(folder, lambda names: names.update({NORM: "../elsewhere.safetensors"}))
    with pytest.raises(ConversionError, match="elsewhere"):
        check(folder)


def test_index_names_the_wrong_shard(folder):
    other = next(path.name for path in folder.glob("*.safetensors") if path != shard_of(folder, NORM))
    edit_index(folder, lambda names: names.update({NORM: other}))
    with pytest.raises(ConversionError, match=f"wrong about '{NORM}'"):
        check(folder)


def test_index_leaves_a_tensor_out(folder):
    edit_index(folder, lambda names: names.pop(NORM))
    with pytest.raises(ConversionError, match=f"wrong about '{NORM}': it says None"):
        check(folder)


def test_missing_tensor(folder):
    edit_shard(shard_of(folder, NORM), lambda tensors: tensors.pop(NORM))
    edit_index(folder, lambda names: names.pop(NORM))
    with pytest.raises(ConversionError, match=f"missing: {NORM}"):
        check(folder)


def test_unknown_tensor(folder):
    name = "model.layers.0.self_attn.q_proj.bias"
    shard = shard_of(folder, NORM)
    edit_shard(shard, lambda tensors: tensors.update({name: torch.zeros(64)}))
    edit_index(folder, lambda names: names.update({name: shard.name}))
    with pytest.raises(ConversionError, match=f"unknown: {name}"):
        check(folder)


def test_wrong_shape(folder):
    edit_shard(shard_of(folder, NORM), lambda tensors: tensors.update({NORM: torch.zeros(63)}))
    with pytest.raises(ConversionError, match=rf"{NORM} is \[63\], the config asks for \[64\]"):
        check(folder)


def test_quantized_tensor(folder):
    edit_shard(shard_of(folder, NORM), lambda tensors: tensors.update({NORM: torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(ConversionError, match=f"'{NORM}' has dtype I8"):
        check(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 128, "head_dim": 8}, "the config asks for"),
        ({"intermediate_size": 97}, r"gate_proj.weight is \[96, 64\], the config asks for \[97, 64\]"),
        ({"num_hidden_layers": 5}, "missing: model.layers.4."),
        ({"num_hidden_layers": 3}, "unknown: model.layers.3."),
        ({"num_attention_heads": 16}, "q_proj.weight"),
        ({"num_key_value_heads": 8}, "k_proj.weight"),
        ({"head_dim": 16}, "q_proj.weight"),
        ({"vocab_size": 132}, r"embed_tokens.weight is \[131, 64\], the config asks for \[132, 64\]"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
        (QWEN2, "attention_bias=False"),
        ({**QWEN2, "attention_bias": None}, "q_proj.bias"),
    ],
)
def test_one_changed_field_of_the_config_is_noticed(folder, change, named):
    edit_config(folder, **change)
    with pytest.raises(ConversionError, match=named):
        check(folder)


def test_untied_config_over_tied_weights(models, tmp_path):
    folder = Path(shutil.copytree(models("llama", True), tmp_path / "tied"))
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(ConversionError, match=r"missing: lm_head.weight \(is tie_word_embeddings right\?\)"):
        check(folder)


def test_tied_checkpoint_may_repeat_its_embedding(models, tmp_path):
    folder = Path(shutil.copytree(models("llama", True, max_shard_size="1GB"), tmp_path / "tied"))
    embedding = HfFolder(folder).tensor("model.embed_tokens.weight").clone()
    edit_shard(folder / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": embedding}))
    check(folder)  # raises where the two differ
    assert "lm_head.weight" in HfFolder(folder)


def test_two_sets_of_weights(folder):
    save_file({NORM: torch.zeros(64)}, folder / "model.safetensors")
    with pytest.raises(ConversionError, match=r"has both model.safetensors and model.safetensors.index.json"):
        HfFolder(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 200_000])
def test_broken_config(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ConversionError, match=r"config.json"):
        read_config(folder)


class TestPickledWeights:
    @pytest.fixture
    def pickled(self, folder) -> Path:
        source = HfFolder(folder)
        torch.save({name: source.tensor(name).clone() for name in source.names()}, folder / "pytorch_model.bin")
        for path in [*folder.glob("*.safetensors"), folder / INDEX]:
            path.unlink()
        return folder

    def test_only_on_request(self, pickled):
        with pytest.raises(ConversionError, match=r"pytorch_model.bin is read only on request"):
            HfFolder(pickled)

    def test_same_tensors(self, pickled, models):
        ours, original = HfFolder(pickled, allow_pickle=True), HfFolder(models("llama"))
        assert sorted(ours.names()) == sorted(original.names())
        assert all(torch.equal(ours.tensor(name), original.tensor(name)) for name in ours.names())

    def test_code_in_it_is_not_run(self, pickled, tmp_path):
        class Touch:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path / 'ran'}",)

        torch.save({"model.norm.weight": Touch()}, pickled / "pytorch_model.bin", pickle_module=pickle)
        with pytest.raises(ConversionError, match="holds more than tensors"):
            HfFolder(pickled, allow_pickle=True)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        ("value", "match"),
        [
            ({1: torch.zeros(3)}, "must hold tensors by name"),
            ({("a", "b"): torch.zeros(3)}, "must hold tensors by name"),
            ([torch.zeros(3)], "must hold tensors by name"),
            ({NORM: torch.zeros(3).to_sparse()}, "only dense ones are read"),
            ({NORM: torch.zeros(3, device="meta")}, "only dense ones are read"),
        ],
    )
    def test_what_is_no_state_dict_is_refused_in_one_line(self, pickled, value, match):
        torch.save(value, pickled / "pytorch_model.bin")
        with pytest.raises(ConversionError, match=match) as error:
            HfFolder(pickled, allow_pickle=True)
        assert "\n" not in str(error.value) and "pytorch_model.bin" in str(error.value)

    @pytest.mark.parametrize("left", [0, 7, 5000, -1])
    def test_truncated(self, pickled, left):
        file = pickled / "pytorch_model.bin"
        os.truncate(file, left if left >= 0 else file.stat().st_size - 1)
        with pytest.raises(ConversionError, match=r"_model.bin (is truncated or damaged|holds more than tensors)") as error:
            HfFolder(pickled, allow_pickle=True)
        assert "\n" not in str(error.value) and "weights_only=False" not in str(error.value)

    @pytest.mark.parametrize("junk", [b"junk", b"\x80\x02h\x05.", b"PK\x03\x04 and no archive", b"\x80\x02}q\x00."])
    def test_other_bytes(self, pickled, junk):
        (pickled / "pytorch_model.bin").write_bytes(junk)
        with pytest.raises(ConversionError, match=r"pytorch_model.bin") as error:
            HfFolder(pickled, allow_pickle=True).check(
                ModelMapping(family_of(read_config(pickled)).model_spec(read_config(pickled)))
            )
        assert "\n" not in str(error.value)

    def test_views_and_old_formats_are_their_values(self, pickled, models):
        original = HfFolder(models("llama"))
        tensors = {name: original.tensor(name) for name in original.names()}
        tensors[NORM] = torch.complex(torch.zeros(64), -tensors[NORM]).conj().imag  # a negated view
        name = next(name for name in tensors if name.endswith("down_proj.weight"))
        tensors[name] = tensors[name].T.contiguous().T
        for zipped in (True, False):
            torch.save(tensors, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
            ours = HfFolder(pickled, allow_pickle=True)
            assert all(torch.equal(ours.tensor(name), original.tensor(name)) for name in original.names())
