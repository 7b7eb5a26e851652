"""Writing Hugging Face folders: shards of bounded size, their index, and the files next to the weights."""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.hf_folder import INDEX, WEIGHTS, read_config
from checkpoints_conv.formats.safetensors_file import TensorEntry

MAX_SHARD_BYTES = 5 * 10**9
# What a folder holds next to its weights, by file name in lower case: config, generation config, tokenizer, chat templates,
# model card and license.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "tekken.json",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "chat_template*",
    "licen[sc]e*",
    "notice*",
    "copying*",
    "use_policy*",
    "readme*",
    "citation*",
)
TEMPLATES = "additional_chat_templates"  # a folder of .jinja files
REPLACED = ("model.safetensors*", "model-*-of-*.safetensors", "pytorch_model.bin*", "pytorch_model-*-of-*.bin")  # the weights


def plan_shards(entries: Iterable[TensorEntry], max_bytes: int = MAX_SHARD_BYTES) -> list[list[TensorEntry]]:
    """Consecutive tensors in shards of at most `max_bytes`; a larger tensor has a shard of its own."""
    shards: list[list[TensorEntry]] = []
    room = 0
    for entry in entries:
        if not shards or entry.bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(entry)
        room -= entry.bytes
    return shards


def shard_names(count: int) -> list[str]:
    """File names of a folder of `count` shards, as transformers names them."""
    if count == 1:
        return [WEIGHTS]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path, shards: Sequence[Sequence[TensorEntry]]) -> None:
    """Write model.safetensors.index.json; a folder of one shard has none."""
    if len(shards) == 1:
        return
    index = {
        "metadata": {"total_size": sum(entry.bytes for shard in shards for entry in shard)},
        "weight_map": {entry.name: file for file, shard in zip(shard_names(len(shards)), shards, strict=True) for entry in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_side_files(source: Path, target: Path, dtype: Dtype | None = None) -> None:
    """Copy config, generation config, tokenizer, chat templates and license; print the names of files that are left out.

    Args:
        dtype: of the weights next to them; config.json is rewritten if it names another.
    """
    left_out = []
    for path in sorted(source.iterdir()):
        if path.name == TEMPLATES and path.is_dir():
            (target / TEMPLATES).mkdir(exist_ok=True)
            for template in sorted(path.iterdir()):
                if template.is_file():
                    shutil.copyfile(template, target / TEMPLATES / template.name)
                else:
                    left_out.append(f"{TEMPLATES}/{template.name}/")
        elif path.is_file() and _matches(path.name, SIDE_FILES):
            shutil.copyfile(path, target / path.name)
        elif not _matches(path.name, REPLACED):
            left_out.append(path.name + "/" * path.is_dir())
    if left_out:
        print(f"not copied from {source}: {', '.join(left_out)}", file=sys.stderr)
    if dtype is None:
        return
    config = read_config(target)
    keys = [key for key in ("torch_dtype", "dtype") if key in config]
    if any(config[key] != dtype.value for key in keys):
        text = json.dumps(config | dict.fromkeys(keys, dtype.value), indent=2, ensure_ascii=False) + "\n"
        (target / "config.json").write_text(text, encoding="utf-8")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name.lower(), pattern) for pattern in patterns)


def replace_folder(temp_path: Path, folder: Path) -> None:
    """Give a finished folder its name; a folder that has it already is moved away first and then removed."""
    if folder.exists():
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
        os.replace(temp_path, folder)
        shutil.rmtree(old)
    else:
        os.replace(temp_path, folder)
