"""Megatron checkpoints that are damaged, or say what cannot be: one line that names the file, and no result."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from checkpoints_conv.to_megatron import to_megatron
from tests.checkpoints_conv.commands import run


class TestDamagedMegatronCheckpoints:
    @pytest.fixture
    def megatron(self, folder, tmp_path, small_units) -> Path:
        to_megatron(folder, tmp_path / "megatron")
        return tmp_path / "megatron"

    def error(self, megatron: Path, capsys) -> str:
        assert run("to-hf", "--megatron", megatron, "--out", megatron.with_name("out")) == 2
        assert not megatron.with_name("out").exists()
        return capsys.readouterr().err

    def test_truncated_file(self, megatron, capsys):
        os.truncate(megatron / "__0_0.distcp", 200)
        assert "__0_0.distcp is truncated: it has 200 bytes" in self.error(megatron, capsys)
        assert run("inspect", megatron) == 2

    def test_file_of_other_bytes(self, megatron, capsys):
        file = megatron / "__0_0.distcp"
        file.write_bytes(bytes(file.stat().st_size))
        capsys.readouterr()
        error = self.error(megatron, capsys).strip()
        assert "__0_0.distcp is damaged at" in error and "\n" not in error
        assert not megatron.with_name("out.incomplete").exists()

    def test_missing_file(self, megatron, capsys):
        (megatron / "__1_0.distcp").unlink()
        assert "__1_0.distcp does not exist" in self.error(megatron, capsys)
        assert run("inspect", megatron) == 2

    def test_no_metadata(self, megatron, capsys):
        (megatron / ".metadata").unlink()
        assert "it lacks metadata.json or .metadata" in self.error(megatron, capsys)

    def change_metadata(self, megatron: Path, change) -> None:
        metadata = pickle.loads((megatron / ".metadata").read_bytes())
        (megatron / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))

    def test_metadata_of_something_else(self, megatron, capsys):
        self.change_metadata(megatron, lambda metadata: {"a": torch.float32})
        assert "cannot be read as checkpoint metadata" in self.error(megatron, capsys)

    def test_metadata_without_a_place(self, megatron, capsys):
        self.change_metadata(megatron, lambda metadata: metadata.storage_data.pop(next(iter(metadata.storage_data))) and None)
        assert "does not say where" in self.error(megatron, capsys)

    def test_metadata_of_another_dtype(self, megatron, capsys):
        def integers(metadata):
            for stored in metadata.state_dict_metadata.values():
                if hasattr(stored, "properties"):
                    stored.properties.dtype = torch.int32

        self.change_metadata(megatron, integers)
        assert "is int32; only F32, F16, BF16 are converted" in self.error(megatron, capsys)

    def test_metadata_that_says_chunks_are_where_others_lie(self, megatron, capsys):
        def swapped(metadata):
            places = metadata.storage_data
            keys = [key for key in places if key.fqn.endswith(("word_embeddings.weight", "linear_fc2.weight"))]
            metadata.storage_data = places | {key: places[other] for key, other in zip(keys, keys[::-1])}

        self.change_metadata(megatron, swapped)
        assert "the metadata says float32" in self.error(megatron, capsys)

    def test_metadata_that_would_run_code(self, megatron, capsys, tmp_path):
        class Touch:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path / 'ran'}",)

        (megatron / ".metadata").write_bytes(pickle.dumps(Touch()))
        assert "it holds posix.system where Metadata" in self.error(megatron, capsys)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("columns", [False, True])
    def test_metadata_with_overlapping_chunks(self, megatron, capsys, columns):
        """Of the right number of elements in all, and yet some are missing."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

        boxes = (
            [((0, 0), (131, 32)), ((0, 32), (100, 32)), ((50, 32), (31, 32))]
            if columns
            else [((0, 0), (100, 64)), ((50, 0), (31, 64))]
        )

        def overlapping(metadata):
            key = "embedding.word_embeddings.weight"
            size = metadata.state_dict_metadata[key].size
            assert tuple(size) == (131, 64)
            place = next(at for index, at in metadata.storage_data.items() if index.fqn == key)
            metadata.state_dict_metadata[key].chunks = [ChunkStorageMetadata(*map(torch.Size, box)) for box in boxes]
            metadata.storage_data |= {MetadataIndex(key, torch.Size(offsets)): place for offsets, _ in boxes}

        self.change_metadata(megatron, overlapping)
        assert "overlapping chunks" in self.error(megatron, capsys)

    def test_metadata_nested_without_end(self, megatron, capsys):
        (megatron / "metadata.json").write_text('{"a":' * 200_000)
        assert "metadata.json is not valid JSON" in self.error(megatron, capsys)

    def test_config_of_another_model(self, megatron, models, capsys):
        files = models("qwen2", intermediate_size=128)
        assert run("to-hf", "--megatron", megatron, "--out", megatron.with_name("out"), "--hf-files", files) == 2
        assert "linear_fc1.weight is [4, 192, 64], the config asks for [4, 256, 64]" in capsys.readouterr().err

    def test_config_of_another_family(self, megatron, models, capsys):
        assert run("inspect", megatron, "--hf-files", models("llama")) == 2
        assert "its config does not know: ['decoder.layers.self_attention.linear_qkv.bias']" in capsys.readouterr().err
        assert run("inspect", megatron, "--hf-files", models("qwen3")) == 2

    def test_no_config(self, megatron, capsys):
        shutil.rmtree(megatron / "hf")
        assert "--hf-files" in self.error(megatron, capsys)
