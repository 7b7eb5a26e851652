"""Blocks as torch tensors, and Megatron parameters made of Hugging Face tensors under tensor parallelism."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families.rules import Rule
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.row_blocks import Block, FileBlock, MemoryBlock
from checkpoints_conv.mapping.model_mapping import ModelMapping, wrong_shape


def torch_dtype(dtype: Dtype) -> torch.dtype:
    return getattr(torch, dtype.value)


def dtype_of(tensor: Tensor) -> Dtype:
    """Raises:
    ValueError: a dtype that is not converted.
    """
    return Dtype(str(tensor.dtype).removeprefix("torch."))


def tensor_of(block: Block) -> Tensor:
    """A block as a tensor in memory.

    Raises:
        OSError, ConversionError: see `Block.read`.
    """
    return _shaped(block.read(), block)


def mapped_tensor(block: Block) -> Tensor:
    """A block as a tensor that is backed by its mapped file, if it is in one: only pages that are used are read.

    If the file is shortened while the tensor is in use, the process is killed (SIGBUS).

    Raises:
        OSError, ConversionError: see `FileBlock.mapped`.
    """
    return _shaped(block.mapped() if isinstance(block, FileBlock) else block.read(), block)


def joined(blocks: Sequence[Block]) -> Tensor:
    """Blocks of one tensor's rows as that tensor, in memory."""
    parts = [tensor_of(block) for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _shaped(data: "bytearray | memoryview", block: Block) -> Tensor:
    if not block.bytes:
        return torch.empty(block.shape, dtype=torch_dtype(block.dtype))
    return torch.frombuffer(data, dtype=torch_dtype(block.dtype)).view(block.shape)


def block_of(tensor: Tensor) -> MemoryBlock:
    """A tensor in CPU memory as a block; in the same memory if it is contiguous."""
    data = tensor.detach().contiguous().view(torch.uint8).numpy().data.cast("B")
    return MemoryBlock(tuple(tensor.shape), dtype_of(tensor), data)


def merge(parts: Sequence[Tensor], rule: Rule, spec: ModelSpec) -> Tensor:
    """HF tensors, or their r-th pieces, to the Megatron parameter or its r-th shard.

    Returns:
        The result; where the parameter is one HF tensor, that tensor itself.
    """
    if len(parts) == 1:
        return parts[0]
    groups = rule.groups(spec)
    if groups > 1:
        groups = parts[-1].shape[0] * groups // rule.shapes(spec)[-1][0]
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def split(tensor: Tensor, rule: Rule, spec: ModelSpec) -> list[Tensor]:
    """The inverse of `merge`."""
    shapes = rule.shapes(spec)
    if len(shapes) == 1:
        return [tensor]
    whole = rule.megatron_shape(spec)[0]
    groups = rule.groups(spec)
    if groups > 1:
        groups = tensor.shape[0] * groups // whole
    grouped = tensor.unflatten(0, (groups, -1))
    parts = grouped.split([grouped.shape[1] * shape[0] // whole for shape in shapes], dim=1)
    return [part.flatten(0, 1) for part in parts]


def megatron_shard(
    mapping: ModelMapping,
    name: str,
    get_hf: Callable[[str], Tensor],
    tp_rank: int = 0,
    tp_size: int = 1,
    padded_vocab: int | None = None,
) -> Tensor:
    """One tensor-parallel shard of a Megatron parameter.

    Args:
        name: global Megatron name.
        get_hf: returns a whole HF tensor by name.
        padded_vocab: rows of the whole embedding, over all ranks; default: `spec.padded_vocab(tp_size)`.

    Returns:
        The shard; it may share memory with what `get_hf` returned.

    Raises:
        ConversionError: an HF tensor has another shape than the config asks for, or cannot be cut into `tp_size`.
    """
    entry, spec = mapping.entry(name), mapping.spec
    pieces = []
    for hf_name, shape in zip(entry.hf, entry.rule.shapes(spec), strict=True):
        tensor = get_hf(hf_name)
        if tuple(tensor.shape) != shape:
            raise ConversionError(wrong_shape(hf_name, tuple(tensor.shape), shape))
        if entry.rule.vocab:
            tensor = _pad_rows(tensor, padded_vocab or spec.padded_vocab(tp_size))
        if entry.rule.tp_dim is not None:
            tensor = _cut(tensor, entry.rule.tp_dim, tp_rank, tp_size, hf_name)
        pieces.append(tensor)
    return merge(pieces, entry.rule, spec)


def hf_tensors(mapping: ModelMapping, name: str, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """The HF tensors of a Megatron parameter.

    Args:
        name: global Megatron name.
        shards: the parameter's shards in tensor-parallel order (one shard: the whole parameter).

    Returns:
        (HF name, tensor) pairs; vocabulary padding is cut off.

    Raises:
        ConversionError: the result has another shape than the config asks for.
    """
    entry, spec = mapping.entry(name), mapping.spec
    dim = entry.rule.tp_dim
    parts = [split(shard, entry.rule, spec) for shard in (shards if dim is not None else shards[:1])]
    result = []
    for hf_name, shape, pieces in zip(entry.hf, entry.rule.shapes(spec), zip(*parts), strict=True):
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim or 0)
        if entry.rule.vocab:
            tensor = tensor[: spec.vocab]
        if tuple(tensor.shape) != shape:
            raise ConversionError(f"{name}: {wrong_shape(hf_name, tuple(tensor.shape), shape)}")
        result.append((hf_name, tensor))
    return result


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    if rows < tensor.shape[0]:
        raise ConversionError(f"a padded vocabulary of {rows} is smaller than the vocabulary {tensor.shape[0]}")
    if rows == tensor.shape[0]:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def _cut(tensor: Tensor, dim: int, rank: int, size: int, name: str) -> Tensor:
    if tensor.shape[dim] % size:
        raise ConversionError(f"{name}: dimension {dim} of {tuple(tensor.shape)} cannot be cut into {size} equal pieces")
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * length, length)
