"""Blocks copied from file to file are those that were asked for, and what is there already is known for it."""

import errno
import math
import os

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats import casting
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.row_blocks import COMPARED_BYTES, BlockFile, FileBlock, MemoryBlock, same_bytes
from checkpoints_conv.formats.tensors import block_of, joined, mapped_tensor, tensor_of

ROWS, WIDTH = 90, 3001
SHAPE = (ROWS, WIDTH)
SIZE = ROWS * WIDTH * 2
OFFSET = 17
PARTS = st.lists(st.tuples(st.booleans(), st.integers(0, ROWS - 1), st.integers(1, ROWS)), max_size=6)
on_one_file = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def source(tmp_path) -> FileBlock:
    """A bf16 tensor at an odd place of a file."""
    path = tmp_path / "source"
    path.write_bytes(numpy.random.default_rng(0).bytes(OFFSET + SIZE))
    return FileBlock(SHAPE, Dtype.BF16, path, OFFSET)


@given(parts=PARTS, left=st.integers(0, SIZE))
@on_one_file
def test_a_file_holds_the_rows_that_were_copied(tmp_path, source, parts, left):
    expected, at = bytearray(b"x" * left), 0
    whole = bytes(source.read())
    held = MemoryBlock(SHAPE, Dtype.BF16, memoryview(whole))
    (tmp_path / "copy").write_bytes(expected)
    with BlockFile(tmp_path / "copy") as copy:
        for in_file, first, count in parts:
            rows = (source if in_file else held).rows(first, min(count, ROWS - first))
            copy.copy(rows, at)
            expected[at : at + rows.bytes] = whole[first * WIDTH * 2 :][: rows.bytes]
            at += rows.bytes
    assert (tmp_path / "copy").read_bytes() == expected


@given(flipped=st.none() | st.integers(0, SIZE - 1), missing=st.integers(0, 2), in_file=st.booleans())
@on_one_file
def test_a_block_is_held_if_every_byte_is_there(tmp_path, source, flipped, missing, in_file):
    there = bytearray(b"xy" + source.read())
    if flipped is not None:
        there[2 + flipped] ^= 1
    (tmp_path / "copy").write_bytes(there[: len(there) - missing])
    block = source if in_file else MemoryBlock(SHAPE, Dtype.BF16, memoryview(source.read()))
    with BlockFile(tmp_path / "copy") as copy:
        assert copy.holds(block, 2) == (flipped is None and missing == 0)


def test_what_was_written_since_is_not_held(tmp_path, source):
    with BlockFile(tmp_path / "copy") as copy:
        copy.copy(source, 0)
        assert not copy.holds(source, 0)


def test_blocks_of_files_are_copied_by_the_system(tmp_path, source, monkeypatch):
    sent, send = [], os.sendfile
    monkeypatch.setattr(os, "sendfile", lambda *arguments: sent.append(send(*arguments)) or sent[-1])
    rows = source.rows(10, 20)
    with BlockFile(tmp_path / "copy") as copy:
        copy.copy(rows, 0)
        copy.copy(block_of(tensor_of(rows)), rows.bytes)
    assert sum(sent) == rows.bytes
    assert (tmp_path / "copy").read_bytes() == bytes(rows.read()) * 2


def test_file_systems_without_sendfile_are_copied_to_all_the_same(tmp_path, source, monkeypatch):
    def refused(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sendfile", refused)
    large = FileBlock((3 * COMPARED_BYTES,), Dtype.BF16, tmp_path / "large", 1)
    large.path.write_bytes(numpy.random.default_rng(1).bytes(1 + large.bytes))
    with BlockFile(tmp_path / "copy") as copy:
        copy.copy(large, 5)
    assert (tmp_path / "copy").read_bytes()[5:] == large.path.read_bytes()[1:]


@pytest.mark.parametrize("use", [FileBlock.read, FileBlock.mapped, lambda block: same_bytes(block, block)])
def test_a_source_that_was_shortened_meanwhile_is_told(source, use):
    os.truncate(source.path, SIZE // 2)
    with pytest.raises(ConversionError, match=f"{source.path} is shorter than its tensors"):
        use(source)


def test_a_source_that_is_shortened_under_the_copy_is_told(tmp_path, source):
    os.truncate(source.path, SIZE // 2)
    with BlockFile(tmp_path / "copy") as copy, pytest.raises(ConversionError, match=f"{source.path} is shorter"):
        copy.copy(source, 0)


def test_blocks_are_the_tensors_they_stand_for(tmp_path, monkeypatch):
    tensor = torch.randn(12, 5).bfloat16()
    path = tmp_path / "tensor"
    path.write_bytes(b"...." + block_of(tensor).data)
    block = FileBlock((12, 5), Dtype.BF16, path, 4)
    assert torch.equal(tensor_of(block), tensor) and torch.equal(mapped_tensor(block), tensor)
    assert torch.equal(joined([block.rows(0, 7), block_of(tensor[7:])]), tensor)
    monkeypatch.setattr(casting, "CAST_BYTES", 50)
    parts = list(casting.in_dtype("name", block, Dtype.F32))
    assert len(parts) == 3 and torch.equal(joined(parts), tensor.float())
    assert list(casting.in_dtype("name", block, None)) == list(casting.in_dtype("name", block, Dtype.BF16)) == [block]
    assert same_bytes(block_of(tensor.T).rows(1, 2), block_of(tensor[:, 1:3].T)) and not same_bytes(block, block.rows(0, 11))


@pytest.mark.parametrize("dtype", [Dtype.F16, Dtype.BF16])
def test_a_number_that_a_dtype_cannot_hold_is_refused(dtype):
    """float32's largest numbers round to infinity in bfloat16 too."""
    fine = block_of(torch.tensor([1.0, math.inf, math.nan]))
    assert tensor_of(next(casting.in_dtype("name", fine, dtype)))[1] == math.inf
    with pytest.raises(ConversionError, match=f"name holds values that {dtype} cannot"):
        list(casting.in_dtype("name", block_of(torch.tensor([1.0, 3.4028e38])), dtype))


def test_files_are_open_only_while_they_are_read(source):
    before = len(os.listdir("/proc/self/fd"))
    held = [source.read(), source.rows(1, 2)]
    assert same_bytes(source, source) and len(held) == 2
    assert len(os.listdir("/proc/self/fd")) == before
