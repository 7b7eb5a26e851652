"""The files of a distributed checkpoint, read and framed by ourselves, are what torch reads and writes."""

import dataclasses
import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import family_of
from checkpoints_conv.formats import dist_chunks, dist_reader, plain_pickle
from checkpoints_conv.formats.dist_archive import frame
from checkpoints_conv.formats.dist_chunks import DAMAGE, stored_block
from checkpoints_conv.formats.dist_index import read_index
from checkpoints_conv.formats.dist_plan import Chunk, Piece
from checkpoints_conv.formats.dist_reader import DistReader
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.hf_folder import read_config
from checkpoints_conv.formats.row_blocks import FileBlock, MemoryBlock
from checkpoints_conv.formats.tensors import dtype_of, tensor_of, torch_dtype
from checkpoints_conv.mapping.model_mapping import ModelMapping
from checkpoints_conv.to_megatron import to_megatron

SOURCE = torch.arange(2 * 6 * 5).view(2, 6, 5)
TENSORS = {
    "contiguous": SOURCE.float(),
    "half": SOURCE.half(),
    "brain": SOURCE.bfloat16(),
    "rows of a larger storage": SOURCE.float()[1:],
    "columns of a larger storage": SOURCE.float()[:, :, 1:3],
    "transposed": SOURCE.float().transpose(0, 2),
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "parameter": torch.nn.Parameter(SOURCE.float()),
    "one element": torch.tensor([2.5]),
}
IN_MEMORY = {"columns of a larger storage", "transposed", "expanded"}
on_one_file = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def megatron(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist") / "megatron"
    to_megatron(models("qwen3_moe"), folder)
    return folder


def saved(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def archived(path: Path, pickled: bytes, storage: bytes, compression: int = zipfile.ZIP_STORED) -> int:
    """An archive as torch.save's, of parts of one's own; returns its size."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", storage)
    return path.stat().st_size


@pytest.mark.parametrize("kind", TENSORS)
def test_a_chunk_is_what_torch_loads(tmp_path, kind):
    tensor, archive = TENSORS[kind], saved(TENSORS[kind])
    (tmp_path / "file").write_bytes(b"before" + archive + b"after")
    block = stored_block(tmp_path / "file", 6, len(archive), dtype_of(tensor), tuple(tensor.shape))
    assert isinstance(block, MemoryBlock if kind in IN_MEMORY else FileBlock)
    assert torch.equal(tensor_of(block), tensor)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, dtype=torch.int32),
        [torch.zeros(3)],
        {"a": torch.zeros(3)},
        None,
        torch.Size([3]),
        torch.zeros(3).to_sparse(),
        torch.complex(torch.zeros(3), torch.ones(3)).conj().imag,  # a negated view: its bytes are not its values
        torch.zeros(4),
        torch.zeros(3).half(),
    ],
)
def test_what_is_not_that_tensor_is_damage(tmp_path, value):
    archive = saved(value)
    (tmp_path / "file").write_bytes(archive)
    with pytest.raises(DAMAGE):
        stored_block(tmp_path / "file", 0, len(archive), Dtype.F32, (3,))


def test_an_archive_that_is_compressed_is_damage(tmp_path):
    size = archived(tmp_path / "file", bytes(10**6), bytes(12), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="compressed"):
        stored_block(tmp_path / "file", 0, size, Dtype.F32, (3,))


@given(at=st.integers(0, 3000), value=st.integers(0, 255), cut=st.integers(0, 100))
@on_one_file
def test_a_damaged_chunk_is_damage_or_lies_in_its_window(tmp_path, at, value, cut):
    """No byte of the archive makes a reader leave the window, or fail in another way than those it says."""
    archive = bytearray(saved(TENSORS["contiguous"]))
    archive[at % len(archive)] = value
    (tmp_path / "file").write_bytes(archive + b"after")
    try:
        block = stored_block(tmp_path / "file", 0, len(archive) - cut, Dtype.F32, (2, 6, 5))
    except DAMAGE:
        return
    if isinstance(block, FileBlock):
        assert block.offset >= 0 and block.offset + block.bytes <= len(archive) - cut


def test_an_entry_that_lies_before_its_archive_is_damage(tmp_path):
    """zipfile takes what it finds before the first entry for a prefix, and corrects offsets by it."""
    archive = bytearray(saved(TENSORS["contiguous"]))
    directory = archive.index(b"PK\x01\x02", archive.index(b"data/0"))
    for entry in range(directory, len(archive) - 46):
        if archive[entry : entry + 4] == b"PK\x01\x02":
            archive[entry + 42 : entry + 46] = (2**32 - 2).to_bytes(4, "little")
    (tmp_path / "file").write_bytes(archive)
    with pytest.raises(DAMAGE):
        stored_block(tmp_path / "file", 0, len(archive), Dtype.F32, (2, 6, 5))


def test_a_tensor_that_claims_more_than_its_storage_is_damage(tmp_path):
    with zipfile.ZipFile(io.BytesIO(saved(TENSORS["contiguous"]))) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    size = archived(tmp_path / "file", pickled, bytes(236))
    with pytest.raises(EOFError, match="a storage of 59 elements"):
        stored_block(tmp_path / "file", 0, size, Dtype.F32, (2, 6, 5))


# Pickles that cost a reader which makes what they say time or memory without end, and one that merely uses much of the format.
DOUBLED = b"K\x01\x85" + b"2\x86" * 60  # a tuple of twice the tuple before, sixty times
BOMBS = {
    "a doubled tuple as a key": b"\x80\x02}" + DOUBLED + b"Ns.",
    "text of a doubled tuple": b"\x80\x02cbuiltins\nstr\n" + DOUBLED + b"\x85R.",
    "a tuple nested two million deep": b"\x80\x02}K\x01" + b"\x85" * 2_000_000 + b"Ns.",
    "an entry far up in the memo": b"\x80\x02Nr\x00\x00\x00\x7f.",
    "copies of a list": b"\x80\x02]q\x00(" + b"K\x01" * 20_000 + b"e" + b"0cbuiltins\nlist\nh\x00\x85R" * 5_000 + b".",
    "code": b"\x80\x02cos\nsystem\nX\x0a\x00\x00\x00touch /nowR.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_malicious_pickle_costs_nothing(tmp_path, repository, name):
    """As metadata and in a chunk: within a second of processor time and 200 MiB more memory."""
    (tmp_path / ".metadata").write_bytes(BOMBS[name])
    size = archived(tmp_path / "file", BOMBS[name][: dist_chunks.MAX_DESCRIPTION], bytes(12))
    script = f"""
import resource, sys
from pathlib import Path
from checkpoints_conv.formats.dist_chunks import DAMAGE, stored_block
from checkpoints_conv.formats.dist_index import read_index
from checkpoints_conv.formats.dist_reader import DistReader
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.errors import ConversionError
used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 20, int(used) + 20))
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 2**28,) * 2)
try:
    read_index(Path({str(tmp_path / ".metadata")!r}))
except ConversionError as error:
    assert len(str(error)) < 1000, len(str(error))
    print("metadata refused")
try:
    stored_block(Path({str(tmp_path / "file")!r}), 0, {size}, Dtype.F32, (3,))
except DAMAGE as error:
    assert len(str(error)) < 1000, len(str(error))
    print("chunk refused")
"""
    process = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split("\n")[:2] == ["metadata refused", "chunk refused"]


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


@pytest.mark.parametrize("file", ["../__0_0.distcp", "/etc/passwd", "..", ""])
def test_an_index_names_files_of_its_own_folder_only(megatron, tmp_path, file):
    metadata = pickle.loads((megatron / ".metadata").read_bytes())
    index, at = next((index, at) for index, at in metadata.storage_data.items() if index.offset is not None)
    metadata.storage_data[index] = dataclasses.replace(at, relative_path=file)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConversionError, match="outside its folder"):
        read_index(tmp_path / ".metadata")


@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), dtype=st.sampled_from(Dtype))
@settings(deadline=None)
def test_bytes_in_their_frame_are_what_torch_loads(shape, dtype):
    tensor = torch.randn(shape).to(torch_dtype(dtype))
    chunk = Chunk("key", shape, (0,) * len(shape), shape, dtype, (Piece("name", 0, shape[0]),), "file", 0)
    before, after = frame(chunk)
    assert torch.serialization.get_crc32_options()  # of others' files in this process
    loaded = torch.load(io.BytesIO(before + tensor.view(torch.uint8).numpy().tobytes() + after), weights_only=True)
    assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor)


@pytest.mark.parametrize("command", [("inspect",), ("to-hf", "--out", "{out}", "--megatron")])
def test_what_moves_bytes_only_needs_no_torch(megatron, tmp_path, repository, command):
    """Importing torch would take longer than converting a small model."""
    script = "import sys; sys.modules['torch'] = None\nfrom checkpoints_conv.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    arguments = [part.format(out=tmp_path / "out") for part in command] + [str(megatron)]
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=repository, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def test_metadata_of_another_python_is_read_all_the_same(megatron, tmp_path):
    """Where a path's class lives differs from version to version; it is not looked up."""
    data = (megatron / ".metadata").read_bytes()
    metadata = pickle.loads(data)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, 2).replace(b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath"))
    assert b"pathlib._local" in (tmp_path / ".metadata").read_bytes()
    assert read_index(tmp_path / ".metadata") == read_index(megatron / ".metadata")


def test_plain_values_are_those_of_pickle():
    value = {"a": [1, -5, 2**70, 2.5, None, True, ("x", b"y"), (), {}], 3: {"b": (1, 2, 3, 4)}, "s": "ü" * 300}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        read = plain_pickle.load(pickle.dumps(value, protocol))
        if protocol < 3:  # bytes are made by a function there
            made = read["a"][6][1]
            assert made.name == "encode" and made.arguments[0] == "y"
            read["a"][6] = value["a"][6]
        assert read == value


def test_the_work_of_reading_does_not_grow_with_layers_times_experts(megatron, models, monkeypatch):
    """Each chunk is looked at for the parameter that it holds, not for every parameter under its key."""
    config = read_config(models("qwen3_moe"))
    reader = DistReader(megatron, ModelMapping(family_of(config).model_spec(config)))
    looked, intersection = [], dist_reader._Box.intersection
    monkeypatch.setattr(dist_reader._Box, "intersection", lambda *boxes: looked.append(boxes) or intersection(*boxes))
    for name in reader.mapping.megatron_names():
        assert all(blocks for _, blocks in reader.read(name))
    assert len(looked) == len(reader.mapping.megatron_names())
