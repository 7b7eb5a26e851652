"""Whether two checkpoints, of either kind, are the same model: configs, names, shapes, dtypes and digests."""

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import filesize
from torch import Tensor

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats.tensors import joined
from checkpoints_conv.megatron.forward import affordable_tokens, logprobs, sample_positions, sample_tokens
from checkpoints_conv.progress import byte_progress

SHOWN = 20  # differences that are printed
FLOOR = 1e-5  # nats; rounding of a small model
TIMES_NOISE = 10


def verify(
    a: Path,
    b: Path,
    hf_files: Path | None = None,
    logits: bool = False,
    tokens: int | None = None,
    tolerance: float | None = None,
) -> int:
    """Compare and print the verdict.

    Args:
        hf_files: folder with the config of Megatron checkpoints that `to_megatron` did not make.
        logits: compare a forward pass in fp32 too.
        tokens: its length; None: `affordable_tokens`.
        tolerance: largest difference of its log-probs; None: `noise_tolerance`.

    Returns:
        0: equal (and within the tolerance); 1: not.

    Raises:
        ConversionError: more tokens than the model has positions; and see `Checkpoint`.
    """
    left, right = Checkpoint(a, hf_files), Checkpoint(b, hf_files)
    if tokens is not None and tokens > left.spec.max_position:
        raise ConversionError(f"--tokens {tokens}: {a} has {left.spec.max_position} positions")
    total = hashlib.sha256()
    differences = list(_config_differences(left, right))
    with byte_progress("comparing", left.bytes) as advance:
        for difference, size in _tensor_differences(left, right, total):
            advance(size)
            if difference:
                differences.append(difference)
    for line in differences[:SHOWN]:
        print(line)
    if len(differences) > SHOWN:
        print(f"… and {len(differences) - SHOWN} more differences")
    if not differences:
        print(f"equal: {len(left.shapes)} tensors, {filesize.decimal(left.bytes)}, sha256 {total.hexdigest()}")
    within = True
    if logits and left.spec.vocab == right.spec.vocab:
        within = _compare_logits(left, right, tokens or affordable_tokens(left.spec, left.parameters), tolerance)
    return 0 if not differences and within else 1


def noise_tolerance(*passes: Tensor) -> float:
    """What fp32 rounding explains: a multiple of what one model's log-probs differ by between two ways of computing them.

    Rounding grows with depth and with the size of the logits, so that no constant fits a small and a large model.

    Args:
        passes: results of `logprobs`, float32 [ways, n, vocab].
    """
    return max(FLOOR, *(TIMES_NOISE * float((ways[0] - ways[-1]).abs().max()) for ways in passes))


def _compare_logits(left: Checkpoint, right: Checkpoint, tokens: int, tolerance: float | None) -> bool:
    """Print how far a forward pass of the two is apart; returns whether that is within the tolerance."""
    ids, positions = sample_tokens(left.spec.vocab, tokens), sample_positions(tokens)
    passes = []
    for each in (left, right):
        print(f"forward pass of {each.folder} over {tokens} tokens …", file=sys.stderr)
        passes.append(logprobs(each.folder, each.config_folder, ids, positions))
    largest = float((passes[0][-1] - passes[1][-1]).abs().max())
    allowed, why = tolerance, ""
    if allowed is None:
        allowed = noise_tolerance(*passes)
        why = f" ({TIMES_NOISE} times what transformers' attention implementations differ by)" if allowed > FLOOR else ""
    within = largest <= allowed
    print(
        f"logits: max |Δ log-prob| {largest:.3g} at {len(positions)} of {tokens} tokens, {'within' if within else 'above'} the "
        f"tolerance {allowed:.3g}{why}"
    )
    if tokens < left.spec.max_position:
        print(
            f"positions from {tokens} to {left.spec.max_position} were not compared; --tokens takes a greater length",
            file=sys.stderr,
        )
    return within


def _config_differences(left: Checkpoint, right: Checkpoint) -> Iterator[str]:
    ours, theirs = asdict(left.spec), asdict(right.spec)
    for key in ours:
        if ours[key] != theirs[key]:
            yield f"config: {key} is {ours[key]} in {left.folder}, {theirs[key]} in {right.folder}"


def _tensor_differences(left: Checkpoint, right: Checkpoint, total: Any) -> "Iterator[tuple[str | None, int]]":
    """(What differs or None, bytes compared); `total` takes in every tensor of the left side."""
    for name in sorted(left.shapes.keys() ^ right.shapes.keys()):
        yield f"{name}: only in {(left if name in left.shapes else right).folder}", 0
    for megatron_name in left.mapping.megatron_names():
        if megatron_name not in right.mapping.entries:
            continue
        theirs = dict(right.read(megatron_name))
        for name, blocks in left.read(megatron_name):
            tensor = joined(blocks)
            digest = _digest(tensor)
            total.update(f"{name} {list(tensor.shape)} {tensor.dtype} {digest}\n".encode())
            other = joined(theirs[name]) if name in theirs else None
            yield _difference(name, tensor, other, digest), tensor.nbytes


def _difference(name: str, ours: Tensor, theirs: Tensor | None, digest: str) -> str | None:
    if theirs is None:
        return None  # reported by name
    if ours.shape != theirs.shape:
        return f"{name}: shape {list(ours.shape)}, {list(theirs.shape)}"
    if ours.dtype != theirs.dtype:
        return f"{name}: dtype {ours.dtype}, {theirs.dtype}"
    other = _digest(theirs)
    if digest != other:
        largest = float((ours.float() - theirs.float()).abs().max())
        return f"{name}: sha256 {digest[:16]}…, {other[:16]}…; max |Δ| {largest:.3g}"
    return None


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()
