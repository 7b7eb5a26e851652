"""The converter's command, and what a folder holds, as the tests ask for them."""

import re
from pathlib import Path

import torch

from checkpoints_conv.__main__ import main
from checkpoints_conv.hf_folder import HfFolder

SIDE = {
    "generation_config.json": '{"temperature": 0.6}',
    "tokenizer.json": '{"made": "up"}',
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "tekken.json": "{}",
    "tokenizer.model": "sentences",
    "LICENSE": "free",
    "Notice.txt": "noted",
    "README.md": "# Tiny",
}


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
