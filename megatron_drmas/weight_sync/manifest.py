"""Which tensors an update must bring: the receiving side's own list, read from the engine's model folder."""

import math

from checkpoints_conv.families import family_of
from checkpoints_conv.formats.hf_folder import HfFolder, read_config
from megatron_drmas.weight_sync.errors import WeightSyncError

TIED = "lm_head.weight"  # not sent when it is the embedding
COMPUTED = "rotary_emb.inv_freq"  # in some old checkpoints; no engine loads it


class Manifest:
    """Ticks off the tensors of one update: every name exactly once, in the right shape and dtype.

    Args:
        shapes: HF name -> shape.
        dtype: the engine's, such as "float32"; senders cast.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: str):
        self._shapes = shapes
        self._dtype = dtype
        self._seen: set[str] = set()

    @classmethod
    def of_folder(cls, folder: str, dtype: str) -> "Manifest":
        """The tensors of a Hugging Face folder, less those that an engine derives from others."""
        config = read_config(folder)
        tied = family_of(config).model_spec(config).tied
        shapes = HfFolder(folder).shapes
        return cls({n: s for n, s in shapes.items() if COMPUTED not in n and not (tied and n == TIED)}, dtype)

    @property
    def bytes(self) -> int:
        """Of all tensors together."""
        import torch

        return sum(map(math.prod, self._shapes.values())) * getattr(torch, self._dtype).itemsize

    @property
    def started(self) -> bool:
        """Whether a bucket has been admitted since `restart`."""
        return bool(self._seen)

    def restart(self) -> None:
        """Expect everything again."""
        self._seen.clear()

    def admit(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        """Tick off a bucket, before anything of it is loaded.

        Raises:
            WeightSyncError: names the first tensor that is unknown, came before, or has another shape or dtype; none of
                the bucket is ticked off then.
        """
        seen = set(self._seen)
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            if name not in self._shapes:
                raise WeightSyncError(f"{name!r} is not a tensor of the engine's model")
            if name in seen:
                raise WeightSyncError(f"{name!r} came twice in one update")
            if tuple(shape) != self._shapes[name]:
                raise WeightSyncError(f"{name!r} has shape {tuple(shape)}; the engine's model has {self._shapes[name]}")
            if dtype != self._dtype:
                raise WeightSyncError(f"{name!r} has dtype {dtype}; the engine holds {self._dtype}: let the sender cast")
            seen.add(name)
        self._seen = seen

    def missing(self) -> list[str]:
        """Names that no bucket has brought."""
        return [name for name in self._shapes if name not in self._seen]
