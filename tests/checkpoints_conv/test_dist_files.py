"""The files of a distributed checkpoint, read and framed by ourselves, are what torch reads and writes."""

import dataclasses
import io
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from checkpoints_conv import dist_chunks
from checkpoints_conv.blocks import FileBlock, MemoryBlock
from checkpoints_conv.dist_archive import frame
from checkpoints_conv.dist_chunks import DAMAGE, ChunkFiles
from checkpoints_conv.dist_index import read_index
from checkpoints_conv.dist_plan import Chunk, Piece
from checkpoints_conv.dtypes import Dtype
from checkpoints_conv.errors import ConversionError
from checkpoints_conv.tensors import torch_dtype, view
from checkpoints_conv.to_megatron import to_megatron

SOURCE = torch.arange(2 * 6 * 5).view(2, 6, 5)
TENSORS = {
    "contiguous": SOURCE.float(),
    "half": SOURCE.half(),
    "brain": SOURCE.bfloat16(),
    "rows of a larger storage": SOURCE.float()[1:],
    "columns of a larger storage": SOURCE.float()[:, :, 1:3],
    "transposed": SOURCE.float().transpose(0, 2),
    "parameter": torch.nn.Parameter(SOURCE.float()),
    "one element": torch.tensor([2.5]),
}
PLAIN = {"contiguous", "half", "brain", "rows of a larger storage", "one element"}
on_one_file = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def megatron(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist") / "megatron"
    to_megatron(models("qwen3_moe"), folder)
    return folder


def saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


@pytest.mark.parametrize("kind", TENSORS)
def test_a_chunk_is_what_torch_loads(tmp_path, kind):
    archive = saved(TENSORS[kind])
    (tmp_path / "file").write_bytes(b"before" + archive + b"after")
    files = ChunkFiles(tmp_path)
    block = files.block("file", 6, len(archive))
    assert isinstance(block, FileBlock if kind in PLAIN else MemoryBlock)
    tensor = view(block, files.maps)
    assert tensor.dtype == TENSORS[kind].dtype and torch.equal(tensor, TENSORS[kind])


@pytest.mark.parametrize("value", [torch.zeros(3, dtype=torch.int32), [torch.zeros(3)], {"a": torch.zeros(3)}, None, torch.Size([2])])
def test_what_is_no_tensor_of_a_model_is_damage(tmp_path, value):
    archive = saved(value)
    (tmp_path / "file").write_bytes(archive)
    with pytest.raises(DAMAGE):
        ChunkFiles(tmp_path).block("file", 0, len(archive))


@given(at=st.integers(0, 3000), value=st.integers(0, 255), cut=st.integers(0, 100))
@on_one_file
def test_a_damaged_chunk_is_damage_or_lies_in_its_window(tmp_path, at, value, cut):
    """No byte of the archive makes a reader leave the window, or fail in another way than those it says."""
    archive = bytearray(saved(TENSORS["contiguous"]))
    archive[at % len(archive)] = value
    (tmp_path / "file").write_bytes(archive + b"after")
    files = ChunkFiles(tmp_path)
    try:
        block = files.block("file", 0, len(archive) - cut)
    except DAMAGE:
        return
    if isinstance(block, FileBlock):
        assert 0 <= block.offset and block.offset + block.bytes <= len(archive) - cut


def test_a_tensor_that_claims_more_than_its_storage_is_damage(tmp_path, monkeypatch):
    archive = saved(TENSORS["contiguous"])
    (tmp_path / "file").write_bytes(archive)
    monkeypatch.setattr(dist_chunks, "_described", lambda *_: (Dtype.F32, 1, (60,), (1,)))
    with pytest.raises(EOFError, match="a storage of 240 bytes"):
        ChunkFiles(tmp_path).block("file", 0, len(archive))


def test_the_index_is_what_torch_reads(megatron):
    ours = read_index(megatron / ".metadata")
    theirs = FileSystemReader(megatron).read_metadata()
    stored = {key: value for key, value in theirs.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)}
    places = {(index.fqn, index.offset): at for index, at in theirs.storage_data.items()}
    assert ours.keys() == stored.keys()
    for key, tensor in ours.items():
        assert (tensor.size, f"torch.{tensor.dtype}") == (stored[key].size, str(stored[key].properties.dtype))
        assert [(c.offsets, c.sizes) for c in tensor.chunks] == [(c.offsets, c.sizes) for c in stored[key].chunks]
        for chunk in tensor.chunks:
            at = places[key, torch.Size(chunk.offsets)]
            assert (chunk.where.file, chunk.where.start, chunk.where.length) == (at.relative_path, at.offset, at.length)


@given(at=st.integers(0, 10**9), value=st.integers(0, 255), cut=st.integers(0, 3))
@on_one_file
def test_a_damaged_index_is_refused_in_one_way(megatron, tmp_path, at, value, cut):
    data = bytearray((megatron / ".metadata").read_bytes())
    data[at % len(data)] = value
    (tmp_path / ".metadata").write_bytes(data[: len(data) - cut])
    try:
        tensors = read_index(tmp_path / ".metadata")
    except ConversionError as error:
        assert str(tmp_path / ".metadata") in str(error)
        return
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            assert len(chunk.offsets) == len(chunk.sizes) == len(tensor.size)
            assert chunk.where is None or "/" not in chunk.where.file


def test_an_index_names_files_of_its_own_folder_only(megatron, tmp_path):
    metadata = pickle.loads((megatron / ".metadata").read_bytes())
    index, at = next((index, at) for index, at in metadata.storage_data.items() if index.offset is not None)
    metadata.storage_data[index] = dataclasses.replace(at, relative_path="../__0_0.distcp")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConversionError, match="none in its folder"):
        read_index(tmp_path / ".metadata")


@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), dtype=st.sampled_from(Dtype))
@settings(deadline=None)
def test_bytes_in_their_frame_are_what_torch_loads(shape, dtype):
    tensor = torch.randn(shape).to(torch_dtype(dtype))
    chunk = Chunk("key", shape, (0,) * len(shape), shape, dtype, (Piece("name", 0, shape[0]),), "file", 0)
    before, after = frame(chunk)
    loaded = torch.load(io.BytesIO(before + tensor.view(torch.uint8).numpy().tobytes() + after), weights_only=True)
    assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor)


@pytest.mark.parametrize("command", [("inspect",), ("to-hf", "--out", "{out}", "--megatron")])
def test_what_moves_bytes_only_needs_no_torch(megatron, tmp_path, repository, command):
    """Importing torch would take longer than converting a small model."""
    script = "import sys; sys.modules['torch'] = None\nfrom checkpoints_conv.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    arguments = [part.format(out=tmp_path / "out") for part in command] + [str(megatron)]
    process = subprocess.run([sys.executable, "-c", script, *arguments], cwd=repository, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
