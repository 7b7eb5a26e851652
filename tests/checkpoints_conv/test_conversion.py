"""The command: round trips, atomic results, verify and inspect."""

import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats import dist_writer
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.hf_folder import HfFolder, read_config
from checkpoints_conv.to_hf import to_hf
from checkpoints_conv.to_megatron import to_megatron
from tests.checkpoints_conv.commands import SIDE, run, same, tensors
from tests.checkpoints_conv.family_models import VARIANTS, config_json
from tools.make_random_checkpoint import make_random_checkpoint


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


def test_what_lies_beside_the_weights_comes_back_byte_for_byte_or_is_named(folder, tmp_path, capsys):
    (folder / "original").mkdir()
    (folder / "consolidated.safetensors").write_text("weights of another format")
    to_megatron(folder, tmp_path / "megatron")
    assert f"not copied from {folder}: consolidated.safetensors, notes.txt, original/\n" in capsys.readouterr().err
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert "not copied" not in capsys.readouterr().err
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
    with pytest.raises(ConversionError, match=r"model.norm.weight holds values that float16 cannot"):
        to_megatron(folder, tmp_path / "half", Dtype.F16)
    to_megatron(folder, tmp_path / "megatron")
    with pytest.raises(ConversionError, match=r"model.norm.weight holds values that float16 cannot"):
        to_hf(tmp_path / "megatron", tmp_path / "back", dtype=Dtype.F16)


def test_an_existing_result_is_left_alone(folder, tmp_path, capsys):
    (tmp_path / "megatron").mkdir()
    assert run("to-megatron", "--hf", folder, "--out", tmp_path / "megatron") == 2
    assert "exists" in capsys.readouterr().err


def test_too_little_space_is_told_before_anything_is_written(folder, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(ConversionError, match=r"needs 0.00 GB, but only 0.00 GB are free"):
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


def test_a_folder_of_that_name_with_something_else_in_it_is_left_alone(folder, tmp_path):
    kept = tmp_path / "megatron.incomplete" / "mine"
    kept.mkdir(parents=True)
    with pytest.raises(ConversionError, match=r"megatron.incomplete holds"):
        to_megatron(folder, tmp_path / "megatron", Dtype.F16)
    assert kept.is_dir()


def test_many_files_need_few_descriptors(folder, tmp_path, small_units):
    """A checkpoint of hundreds of ranks has hundreds of files; the usual limit is 1024 open ones."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    to_megatron(folder, tmp_path / "megatron")
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) > 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=20_000)
        assert run("verify", tmp_path / "back", tmp_path / "megatron") == 0
        to_megatron(tmp_path / "back", tmp_path / "again", Dtype.F32)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 8
    assert same(folder, tmp_path / "back")


def test_every_dtype_that_a_config_names_is_told_anew(folder, tmp_path):
    """transformers 4 wrote torch_dtype, transformers 5 writes dtype; some configs have both."""
    config = read_config(folder)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32", "dtype": "float32"}))
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", dtype=Dtype.BF16)
    back = read_config(tmp_path / "back")
    assert (back["torch_dtype"], back["dtype"]) == ("bfloat16", "bfloat16")


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
