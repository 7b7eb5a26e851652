"""Interrupted conversions: no result under the final name, and none of the work done twice."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats.row_blocks import BlockFile
from checkpoints_conv.to_hf import to_hf
from checkpoints_conv.to_megatron import to_megatron
from tests.checkpoints_conv.commands import contents, run, same


class Interrupt(KeyboardInterrupt):
    pass


def interrupt_after(patch: pytest.MonkeyPatch, owner, method: str, calls: int) -> list:
    """Let `owner.method` work `calls` times, then raise; returns the list of its calls' arguments."""
    original, seen, lock = getattr(owner, method), [], threading.Lock()

    def counted(self, *args):
        with lock:
            if len(seen) == calls:
                raise Interrupt
            seen.append((self, *args))
        return original(self, *args)

    patch.setattr(owner, method, counted)
    return seen


def interrupted(convert, monkeypatch: pytest.MonkeyPatch, calls: int) -> list:
    """Let a conversion copy `calls` blocks, then stop it; returns (file, byte) of each."""
    with monkeypatch.context() as patch:
        seen = interrupt_after(patch, BlockFile, "copy", calls)
        with pytest.raises(Interrupt):
            convert()
    return [(Path(file.name).name.removesuffix(".part"), at) for file, _, at in seen]


def resumed(convert, monkeypatch: pytest.MonkeyPatch) -> list:
    """Let a conversion run to its end; returns (file, byte) of each block that it copied."""
    with monkeypatch.context() as patch:
        seen = interrupt_after(patch, BlockFile, "copy", 10**6)
        convert()
    return [(Path(file.name).name.removesuffix(".part"), at) for file, _, at in seen]


@pytest.mark.parametrize("calls", [0, 1, 7, 40])
def test_to_megatron_goes_on_where_it_stopped(folder, tmp_path, small_units, monkeypatch, calls):
    out, whole = tmp_path / "megatron", tmp_path / "whole"
    every = resumed(lambda: to_megatron(folder, whole), monkeypatch)
    first = interrupted(lambda: to_megatron(folder, out), monkeypatch, calls)
    assert len(first) == calls and not out.exists()
    second = resumed(lambda: to_megatron(folder, out), monkeypatch)
    assert sorted(first + second) == sorted(every)  # none is copied twice
    assert contents(out) == contents(whole)
    to_hf(out, tmp_path / "back")
    assert same(folder, tmp_path / "back")


@pytest.mark.parametrize("calls", [0, 1, 7, 40])
def test_to_hf_goes_on_where_it_stopped(folder, tmp_path, monkeypatch, calls):
    to_megatron(folder, tmp_path / "megatron")
    out, whole = tmp_path / "back", tmp_path / "whole"
    every = resumed(lambda: to_hf(tmp_path / "megatron", whole, max_shard_bytes=100_000), monkeypatch)
    first = interrupted(lambda: to_hf(tmp_path / "megatron", out, max_shard_bytes=100_000), monkeypatch, calls)
    assert len(first) == calls and not out.exists()
    second = resumed(lambda: to_hf(tmp_path / "megatron", out, max_shard_bytes=100_000), monkeypatch)
    assert sorted(first + second) == sorted(every)
    assert contents(out) == contents(whole)
    assert same(folder, out)


def lose(file: Path, damage: str) -> None:
    """What a power failure, or a user, does to a file of an interrupted run."""
    size = file.stat().st_size
    if damage == "zeros":
        file.write_bytes(bytes(size))
    elif damage == "no end":
        os.truncate(file, size // 2)
    elif damage == "longer":
        with file.open("ab") as end:
            end.write(b"x" * 100_000)
    else:
        file.write_bytes(file.read_bytes()[1:] + b"x")


@pytest.mark.parametrize("damage", ["zeros", "no end", "longer", "shifted"])
def test_bytes_that_were_lost_are_written_again(folder, tmp_path, small_units, monkeypatch, damage):
    """The size of a file says nothing: after a power failure its blocks may never have been written."""
    interrupted(lambda: to_megatron(folder, tmp_path / "megatron"), monkeypatch, 40)
    for file in (tmp_path / "megatron.incomplete").glob("*.distcp"):
        lose(file, damage)
    to_megatron(folder, tmp_path / "megatron")
    interrupted(lambda: to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=100_000), monkeypatch, 40)
    for file in (tmp_path / "back.incomplete").glob("*.safetensors*"):
        lose(file, damage)
    to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=100_000)
    assert same(folder, tmp_path / "back")
    to_megatron(folder, tmp_path / "whole")
    assert contents(tmp_path / "megatron") == contents(tmp_path / "whole")


def test_a_killed_conversion_leaves_no_result_and_goes_on(models, tmp_path, repository):
    source = models("llama", True)
    arguments = ["to-megatron", "--hf", str(source), "--out", str(tmp_path / "megatron")]
    script = (
        "import os, signal, sys\nfrom checkpoints_conv.formats import dist_plan, row_blocks\n"
        "from checkpoints_conv.__main__ import main\n"
        "dist_plan.UNIT_BYTES, copy, seen = 50_000, row_blocks.BlockFile.copy, []\n"
        "def killed(*arguments):\n"
        "    seen.append(arguments)\n"
        "    if len(seen) == 40: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return copy(*arguments)\n"
        "row_blocks.BlockFile.copy = killed\nmain(sys.argv[1:])"
    )
    process = subprocess.run([sys.executable, "-c", script, *arguments], cwd=repository, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "megatron").exists()
    assert sum(path.stat().st_size for path in (tmp_path / "megatron.incomplete").glob("*.distcp")) > 100_000
    (tmp_path / "megatron.incomplete").rename(tmp_path / "elsewhere.incomplete")
    shutil.copytree(tmp_path / "elsewhere.incomplete", tmp_path / "megatron.incomplete")
    assert run(*arguments) == 0
    assert run("verify", source, tmp_path / "megatron") == 0


def test_another_source_does_not_go_on_with_it(folder, models, tmp_path, small_units, monkeypatch):
    interrupted(lambda: to_megatron(folder, tmp_path / "megatron"), monkeypatch, 10)
    with pytest.raises(ConversionError, match=r"megatron.incomplete holds an interrupted conversion of another source"):
        to_megatron(models("llama"), tmp_path / "megatron")
