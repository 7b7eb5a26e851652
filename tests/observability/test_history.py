"""Files that a reader never sees half-written, and values that JSON can hold."""

import errno
import json
import math
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.observability.history import History, HistoryError, read_json_lines, write_atomically
from megatron_drmas.observability.records import StepRecord, plain


@pytest.mark.parametrize("broken", ["open", "os.fsync", "os.replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(f"builtins.{broken}" if broken == "open" else broken, fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, "new" * 1000)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_line_that_the_disk_does_not_take_is_named(tmp_path, monkeypatch):
    history = History(tmp_path / "metrics.jsonl")
    history.append({"kind": "step", "step": 1})

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HistoryError, match=r"metrics.jsonl: the line of step 2 could not be written: No space left"):
        history.append({"kind": "step", "step": 2})


def test_a_reader_beside_the_writer_always_sees_a_whole_file(tmp_path):
    path = tmp_path / "summary.json"
    write_atomically(path, json.dumps([0] * 50_000))
    done = threading.Event()

    def write():
        for value in range(30):
            write_atomically(path, json.dumps([value] * 50_000))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        values = json.loads(path.read_text())
        assert len(values) == 50_000
        assert len(set(values)) == 1
        seen.add(values[0])
    writer.join()
    assert json.loads(path.read_text())[0] == 29


def test_a_line_cut_off_anywhere_is_left_out_and_written_over(tmp_path):
    lines = [{"kind": "step", "step": step, "text": "ü\n"} for step in (1, 2)]
    whole = History(tmp_path / "whole.jsonl")
    for line in lines:
        whole.append(line)
    content = whole.path.read_bytes()
    first = content.index(b"\n") + 1
    for end in range(first, len(content)):
        torn = History(tmp_path / "torn.jsonl")
        torn.path.write_bytes(content[:end])
        assert list(torn) == lines[:1]
        torn.cut(5)
        torn.append(lines[1])
        assert torn.path.read_bytes() == content


def test_a_broken_line_inside_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        list(read_json_lines(path))
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1.*not a JSON object"):
        list(read_json_lines(path))


def test_cut_undoes_results_and_keeps_events(tmp_path):
    history = History(tmp_path / "metrics.jsonl")
    for kind, step in (("start", 0), ("evaluation", 0), ("step", 1), ("step", 2), ("restart", 2), ("step", 3), ("end", 3)):
        history.append({"kind": kind, "step": step})
    history.cut(2)
    assert [(line["kind"], line["step"]) for line in history] == [
        ("start", 0),
        ("evaluation", 0),
        ("step", 1),
        ("step", 2),
        ("restart", 2),
    ]


NUMBERS = st.one_of(st.floats(), st.integers(-(2**53), 2**53), st.booleans())
DATA = st.recursive(
    st.one_of(NUMBERS, st.text(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=12,
)


@given(DATA)
def test_plain_data_survives_strict_json(value):
    def finite(item):
        if isinstance(item, dict):
            return {key: finite(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [finite(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    assert json.loads(json.dumps(plain(value), allow_nan=False)) == finite(value)


@pytest.mark.parametrize("make", [np.float32, np.float64, torch.tensor, lambda value: torch.tensor(value, dtype=torch.bfloat16)])
def test_scalars_of_numpy_and_torch_become_numbers(make):
    assert plain({"a": make(0.5), "b": (make(float("nan")),)}) == {"a": 0.5, "b": [None]}
    assert plain(np.int64(3)) == 3 and plain(torch.tensor(3)) == 3 and plain(np.bool_(True)) is True


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.ones(2), b"text"])
def test_other_values_are_refused_by_name(value):
    with pytest.raises(TypeError, match=type(value).__name__):
        plain({"key": value})


def test_a_record_refuses_metrics_that_are_no_numbers():
    with pytest.raises(TypeError, match=r"policies\['judge'\]\['agents'\]"):
        StepRecord(1, 0.0, 0.0, 1, 1, 1, agents={}, policies={"judge": {"agents": {}}})
