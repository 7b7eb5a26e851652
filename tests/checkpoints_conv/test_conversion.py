"""The command: round trips, resuming, atomic results, damaged checkpoints, verify and inspect."""

import errno
import fcntl
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_conv import dist_plan, dist_writer
from checkpoints_conv.__main__ import main
from checkpoints_conv.blocks import BlockFile
from checkpoints_conv.dtypes import Dtype
from checkpoints_conv.errors import ConversionError
from checkpoints_conv.hf_folder import HfFolder, read_config
from checkpoints_conv.to_hf import to_hf
from checkpoints_conv.to_megatron import to_megatron
from tests.checkpoints_conv.family_models import VARIANTS, config_json
from tools.make_random_checkpoint import make_random_checkpoint

SIDE = {
    "generation_config.json": '{"temperature": 0.6}',
    "tokenizer.json": '{"made": "up"}',
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
}


@pytest.fixture
def folder(models, tmp_path) -> Path:
    """A copy of the tiny Qwen2 with tokenizer, chat template, and a file that is none of a model's."""
    copy = Path(shutil.copytree(models("qwen2"), tmp_path / "hf"))
    for name, text in SIDE.items():
        (copy / name).write_text(text)
    (copy / "notes.txt").write_text("mine")
    return copy


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units and chunks, so that a tiny model has what a large one has."""
    monkeypatch.setattr(dist_plan, "UNIT_BYTES", 50_000)
    monkeypatch.setattr(dist_plan, "CHUNK_BYTES", 10_000)


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    source = HfFolder(folder)
    return {name: source.tensor(name) for name in sorted(source.names())}


def same(a: Path, b: Path) -> bool:
    ours, theirs = tensors(a), tensors(b)
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint, without the number that torch gives every archive: it varies where checksums are left out."""
    files = (path for path in folder.iterdir() if path.is_file() and path.name != ".metadata")
    return {path.name: re.sub(rb"Z\d{40}PK", b"Z" + b"0" * 40 + b"PK", path.read_bytes()) for path in files}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_round_trip_is_bit_exact(models, tmp_path, small_units, family, tied, dtype):
    source = models(family, tied, dtype=dtype)
    assert run("to-megatron", "--hf", source, "--out", tmp_path / "megatron") == 0
    assert run("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back", "--max-shard-gb", "0.0002") == 0
    assert same(source, tmp_path / "back")
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) > 1
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert run("verify", source, tmp_path / "back") == run("verify", source, tmp_path / "megatron") == 0


def test_what_lies_beside_the_weights_comes_back_byte_for_byte(folder, tmp_path):
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    for name in [*SIDE, "config.json"]:
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert not (tmp_path / "back" / "notes.txt").exists()


def test_dtype_is_cast_and_told_in_the_config(folder, tmp_path):
    assert run("to-megatron", "--hf", folder, "--out", tmp_path / "megatron", "--dtype", "bf16") == 0
    assert run("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back") == 0
    assert read_config(tmp_path / "back")["dtype"] == "bfloat16"
    back = tensors(tmp_path / "back")
    assert all(torch.equal(back[name], tensor.bfloat16()) for name, tensor in tensors(folder).items())


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.layers.2.input_layernorm.weight"])
def test_mixed_dtypes_in_one_megatron_tensor_need_a_choice(folder, tmp_path, name):
    """Within one parameter, or from layer to layer: Megatron stacks the layers."""
    shard = folder / HfFolder(folder).file_of[name]
    held = load_file(shard)
    save_file({**held, name: held[name].bfloat16()}, shard, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=f"{name} is bfloat16.*--dtype"):
        to_megatron(folder, tmp_path / "megatron")
    to_megatron(folder, tmp_path / "megatron", Dtype.F32)
    assert run("verify", folder, tmp_path / "megatron") == 1


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


@pytest.mark.parametrize("changed", ["config.json", "model-00001-of-*.safetensors", "new.txt"])
def test_a_source_that_changes_meanwhile_gives_no_result(folder, tmp_path, monkeypatch, changed):
    write, path = dist_writer.DistWriter.write, next(folder.glob(changed), folder / changed)

    def changing(self, advance):
        write(self, advance)
        with path.open("ab") as file:
            file.write(b" ")

    monkeypatch.setattr(dist_writer.DistWriter, "write", changing)
    with pytest.raises(ConversionError, match=rf"has changed during the conversion \({path.name}\)"):
        to_megatron(folder, tmp_path / "megatron")
    assert not list(tmp_path.glob("megatron*"))


def test_a_shard_that_vanishes_meanwhile_is_named_as_what_cannot_be_read(folder, tmp_path, monkeypatch):
    write, shard = dist_writer.DistWriter.write, next(folder.glob("model-00001-of-*.safetensors"))

    def removing(self, advance):
        shard.unlink()
        write(self, advance)

    monkeypatch.setattr(dist_writer.DistWriter, "write", removing)
    with pytest.raises(ConversionError, match=f"cannot read {shard}"):
        to_megatron(folder, tmp_path / "megatron")


def test_a_dtype_that_cannot_hold_the_weights_is_refused(folder, tmp_path):
    shard = folder / HfFolder(folder).file_of["model.norm.weight"]
    held = load_file(shard)
    held["model.norm.weight"][0] = 1e6
    save_file(held, shard, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match="model.norm.weight holds values that float16 cannot"):
        to_megatron(folder, tmp_path / "half", Dtype.F16)
    to_megatron(folder, tmp_path / "megatron")
    with pytest.raises(ConversionError, match="model.norm.weight holds values that float16 cannot"):
        to_hf(tmp_path / "megatron", tmp_path / "back", dtype=Dtype.F16)


def test_another_source_does_not_go_on_with_it(folder, models, tmp_path, small_units, monkeypatch):
    interrupted(lambda: to_megatron(folder, tmp_path / "megatron"), monkeypatch, 10)
    with pytest.raises(ConversionError, match="megatron.incomplete holds an interrupted conversion of another source"):
        to_megatron(models("llama"), tmp_path / "megatron")


def test_an_existing_result_is_left_alone(folder, tmp_path, capsys):
    (tmp_path / "megatron").mkdir()
    assert run("to-megatron", "--hf", folder, "--out", tmp_path / "megatron") == 2
    assert "exists" in capsys.readouterr().err


def test_too_little_space_is_told_before_anything_is_written(folder, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(ConversionError, match="needs 0.00 GB, but only 0.00 GB are free"):
        to_megatron(folder, tmp_path / "megatron")
    assert not list(tmp_path.glob("megatron*"))


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from checkpoints_conv.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_hugging_face_folder_is_no_megatron_checkpoint(folder, tmp_path):
    with pytest.raises(ConversionError, match="it is a Hugging Face folder"):
        to_hf(folder, tmp_path / "back")


def test_two_conversions_never_write_to_one_folder(folder, tmp_path):
    (tmp_path / "megatron.incomplete").mkdir()
    with open(tmp_path / "megatron.incomplete" / "conversion.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConversionError, match="another process is writing"):
            to_megatron(folder, tmp_path / "megatron")
    to_megatron(folder, tmp_path / "megatron")


def test_a_place_that_cannot_be_written_is_named(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match=r"cannot write .*file/megatron.incomplete: Not a directory$"):
        to_megatron(folder, tmp_path / "file" / "megatron")


@pytest.mark.parametrize("out", ["/", ".", ".."])
def test_a_target_without_a_name_exists_already(folder, out):
    with pytest.raises(ConversionError, match="exists"):
        to_megatron(folder, Path(out))


def test_a_source_that_turns_out_damaged_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    """A mended source is another source: what was written could not be used again."""

    def damaged(self, name):
        raise ConversionError(f"{name} cannot be read")

    monkeypatch.setattr(HfFolder, "block", damaged)
    before = sorted(tmp_path.iterdir())
    assert run("to-megatron", "--hf", folder, "--out", tmp_path / "megatron") == 2
    assert sorted(tmp_path.iterdir()) == before
    assert capsys.readouterr().err.strip().count("\n") == 0, "the progress bar is left beside the error"


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Both ways, a checkpoint of 130 MB takes the anonymous memory of a few of its tensors (8 MB) only."""
    config = config_json("qwen2", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=1000)
    size = make_random_checkpoint(config, tmp_path / "hf")
    with AnonymousMemory() as memory:
        to_megatron(tmp_path / "hf", tmp_path / "megatron")
        to_hf(tmp_path / "megatron", tmp_path / "back")
    assert same(tmp_path / "hf", tmp_path / "back")
    assert memory.growth < size / 2


class AnonymousMemory:
    """Samples this process's anonymous resident memory; `growth` is its peak, in bytes, over that at the start."""

    growth = 0

    def __enter__(self) -> "AnonymousMemory":
        self._start, self._done = self._now(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.growth = max(self.growth, self._now() - self._start)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@pytest.mark.parametrize("command", ["to-megatron", "to-hf"])
def test_a_full_disk_is_explained_and_leaves_no_result(folder, tmp_path, repository, command):
    """A file size limit stands for the full disk: write() fails half-way in both."""
    to_megatron(folder, tmp_path / "megatron")
    source = ["--hf", folder] if command == "to-megatron" else ["--megatron", tmp_path / "megatron"]
    arguments = [command, *map(str, source), "--out", str(tmp_path / "out")]
    process = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments], cwd=repository, capture_output=True, text=True, check=False
    )
    assert process.returncode == 2
    assert "cannot write" in process.stderr and "run the same command again" in process.stderr
    assert not (tmp_path / "out").exists()
    assert run(*arguments) == 0


def test_a_disk_that_fills_up_with_the_tokenizer_is_not_laid_on_the_source(folder, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(ConversionError, match=rf"cannot write {tmp_path}/megatron.incomplete/hf/.*: No space left on device"):
        to_megatron(folder, tmp_path / "megatron")


def test_a_killed_conversion_leaves_no_result_and_goes_on(models, tmp_path, repository):
    source = models("llama", True)
    arguments = ["to-megatron", "--hf", str(source), "--out", str(tmp_path / "megatron")]
    script = (
        "import os, signal, sys\nfrom checkpoints_conv import blocks, dist_plan\nfrom checkpoints_conv.__main__ import main\n"
        "dist_plan.UNIT_BYTES, copy, seen = 50_000, blocks.BlockFile.copy, []\n"
        "def killed(*arguments):\n"
        "    seen.append(arguments)\n"
        "    if len(seen) == 40: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return copy(*arguments)\n"
        "blocks.BlockFile.copy = killed\nmain(sys.argv[1:])"
    )
    process = subprocess.run([sys.executable, "-c", script, *arguments], cwd=repository, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "megatron").exists()
    assert sum(path.stat().st_size for path in (tmp_path / "megatron.incomplete").glob("*.distcp")) > 100_000
    (tmp_path / "megatron.incomplete").rename(tmp_path / "elsewhere.incomplete")
    shutil.copytree(tmp_path / "elsewhere.incomplete", tmp_path / "megatron.incomplete")
    assert run(*arguments) == 0
    assert run("verify", source, tmp_path / "megatron") == 0


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


class TestVerify:
    def test_names_the_tensor_that_differs(self, folder, tmp_path, capsys):
        to_megatron(folder, tmp_path / "megatron")
        shard = next(folder.glob("*.safetensors"))
        held = load_file(shard)
        name = sorted(held)[0]
        held[name].view(-1)[0] += 1
        save_file(held, shard, metadata={"format": "pt"})
        assert run("verify", folder, tmp_path / "megatron") == 1
        out = capsys.readouterr().out
        assert f"{name}: sha256" in out and len(out.splitlines()) == 1

    def test_names_the_config_field_that_differs(self, models, tmp_path, capsys):
        other = Path(shutil.copytree(models("llama"), tmp_path / "other"))
        text = (other / "config.json").read_text()
        (other / "config.json").write_text(text.replace('"factor": 32.0', '"factor": 8.0'))
        assert run("verify", models("llama"), other) == 1
        assert "rope_scaling_factor is 32.0" in capsys.readouterr().out

    def test_names_dtypes(self, models, capsys):
        assert run("verify", models("llama"), models("llama", dtype=torch.bfloat16)) == 1
        assert "dtype torch.float32, torch.bfloat16" in capsys.readouterr().out

    def test_neither_kind(self, tmp_path, models, capsys):
        assert run("verify", models("llama"), tmp_path) == 2
        assert "is neither a Hugging Face folder" in capsys.readouterr().err


def test_inspect_says_what_a_checkpoint_is(models, tmp_path, capsys):
    to_megatron(models("qwen3_moe"), tmp_path / "megatron")
    for folder in (models("qwen3_moe"), tmp_path / "megatron"):
        assert run("inspect", folder) == 0
        out = capsys.readouterr().out
        count = sum(tensor.numel() for tensor in tensors(models("qwen3_moe")).values())
        assert "Qwen3MoeForCausalLM" in out and f"{count:,}" in out and "q/k norms" in out
        assert "tensor parallel  1, 2, 4" in out and "expert parallel  1, 2, 4" in out


def test_pickled_weights_convert_on_request(models, tmp_path):
    folder = tmp_path / "pickled"
    folder.mkdir()
    shutil.copy(models("llama") / "config.json", folder)
    torch.save({name: tensor.clone() for name, tensor in tensors(models("llama")).items()}, folder / "pytorch_model.bin")
    assert run("to-megatron", "--hf", folder, "--out", tmp_path / "megatron") == 2
    assert run("to-megatron", "--hf", folder, "--out", tmp_path / "megatron", "--allow-pickle") == 0
    assert run("verify", models("llama"), tmp_path / "megatron") == 0
