"""Bytes copied from file to file are those that were asked for."""

import os

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints_conv.file_maps import COPY_BYTES, CopyingFile, FileMaps

SIZE = 5 * COPY_BYTES
PARTS = st.lists(st.tuples(st.booleans(), st.integers(0, SIZE), st.integers(0, SIZE)), max_size=6)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(numpy.random.default_rng(0).bytes(SIZE))
    return path


@given(parts=PARTS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_holds_what_was_written_mapped_or_not(tmp_path, source, parts):
    maps, expected = FileMaps(), b""
    view = memoryview(maps.buffer(source))
    with CopyingFile(tmp_path / "copy", maps) as copy:
        for mapped, start, end in parts:
            data = view[start:end] if mapped else bytes(view[start:end])
            assert copy.write(data) == len(data)
            expected += bytes(data)
            assert copy.tell() == len(expected)
    assert (tmp_path / "copy").read_bytes() == expected


def test_views_of_a_mapped_tensor_are_copied_by_the_system(tmp_path, source, monkeypatch):
    maps, sent, send = FileMaps(), [], os.sendfile
    monkeypatch.setattr(os, "sendfile", lambda *arguments: sent.append(send(*arguments)) or sent[-1])
    tensor = maps.tensor(source, torch.bfloat16, (SIZE // 4, 2), 0)
    part = tensor.narrow(0, 10, SIZE // 8)
    with CopyingFile(tmp_path / "copy", maps) as copy:
        copy.write(part.view(torch.uint8).numpy())
        copy.write(part.clone().view(torch.uint8).numpy())
    assert sent == [part.nbytes]
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()[40 : 40 + part.nbytes] * 2


def test_a_source_that_was_shortened_meanwhile_is_told(tmp_path, source):
    maps = FileMaps()
    view = memoryview(maps.buffer(source))
    os.truncate(source, COPY_BYTES)
    with CopyingFile(tmp_path / "copy", maps) as copy, pytest.raises(OSError, match="shortened"):
        copy.write(view)
