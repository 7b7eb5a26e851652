"""Blocks copied from file to file are those that were asked for, and what is there already is known for it."""

import os

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints_conv.blocks import BlockFile, FileBlock, FileMaps, MemoryBlock
from checkpoints_conv.casting import in_dtype
from checkpoints_conv.dtypes import Dtype
from checkpoints_conv.tensors import block_of, joined, view

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
    maps, expected, at = FileMaps(), bytearray(b"x" * left), 0
    whole = bytes(maps.view(source))
    held = MemoryBlock(SHAPE, Dtype.BF16, memoryview(whole))
    (tmp_path / "copy").write_bytes(expected)
    with BlockFile(tmp_path / "copy", maps) as copy:
        for in_file, first, count in parts:
            rows = (source if in_file else held).rows(first, min(count, ROWS - first))
            copy.copy(rows, at)
            expected[at : at + rows.bytes] = whole[first * WIDTH * 2 :][: rows.bytes]
            at += rows.bytes
    assert (tmp_path / "copy").read_bytes() == expected


@given(flipped=st.none() | st.integers(0, SIZE - 1), missing=st.integers(0, 2), in_file=st.booleans())
@on_one_file
def test_a_block_is_held_if_every_byte_is_there(tmp_path, source, flipped, missing, in_file):
    maps = FileMaps()
    there = bytearray(b"xy" + maps.view(source))
    if flipped is not None:
        there[2 + flipped] ^= 1
    (tmp_path / "copy").write_bytes(there[: len(there) - missing])
    block = source if in_file else MemoryBlock(SHAPE, Dtype.BF16, maps.view(source))
    with BlockFile(tmp_path / "copy", maps) as copy:
        assert copy.holds(block, 2) == (flipped is None and missing == 0)


def test_what_was_written_since_is_not_held(tmp_path, source):
    with BlockFile(tmp_path / "copy", FileMaps()) as copy:
        copy.copy(source, 0)
        assert not copy.holds(source, 0)


def test_blocks_of_files_are_copied_by_the_system(tmp_path, source, monkeypatch):
    sent, send = [], os.sendfile
    monkeypatch.setattr(os, "sendfile", lambda *arguments: sent.append(send(*arguments)) or sent[-1])
    rows, maps = source.rows(10, 20), FileMaps()
    with BlockFile(tmp_path / "copy", maps) as copy:
        copy.copy(rows, 0)
        copy.copy(block_of(view(rows, maps)), rows.bytes)
    assert sum(sent) == rows.bytes
    assert (tmp_path / "copy").read_bytes() == bytes(maps.view(rows)) * 2


def test_a_source_that_was_shortened_meanwhile_is_told(tmp_path, source):
    maps = FileMaps()
    maps.view(source)
    os.truncate(source.path, SIZE // 2)
    with BlockFile(tmp_path / "copy", maps) as copy, pytest.raises(OSError, match="shortened") as error:
        copy.copy(source, 0)
    assert error.value.filename == str(source.path)
    with pytest.raises(OSError, match="shorter than its tensors"):
        maps.view(source)


def test_blocks_are_the_tensors_they_stand_for(tmp_path):
    maps, tensor = FileMaps(), torch.randn(12, 5).bfloat16()
    path = tmp_path / "tensor"
    path.write_bytes(b"...." + block_of(tensor).data)
    block = FileBlock((12, 5), Dtype.BF16, path, 4)
    assert torch.equal(view(block, maps), tensor)
    assert torch.equal(joined([block.rows(0, 7), block_of(tensor[7:])], maps), tensor)
    assert torch.equal(view(in_dtype("name", block, Dtype.F32, maps), maps), tensor.float())
    assert maps.same(block_of(tensor.T).rows(1, 2), block_of(tensor[:, 1:3].T)) and not maps.same(block, block.rows(0, 11))
