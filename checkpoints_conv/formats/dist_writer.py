"""A Megatron distributed checkpoint (`torch_dist`), copied into place while torch is still being imported.

One file per unit, named as by `torch.distributed.checkpoint`'s FileSystemWriter, which is as fast at 2.8 times the memory
(`tools/bench/dist_checkpoint.py`, 0.5B).
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoints_conv.formats.casting import in_dtype
from checkpoints_conv.formats.dist_plan import Chunk, plan_units
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.hf_folder import HfFolder
from checkpoints_conv.formats.row_blocks import BlockFile
from checkpoints_conv.mapping.dist_keys import extra_state_keys
from checkpoints_conv.mapping.model_mapping import ModelMapping
from checkpoints_conv.progress import run_parallel


class DistWriter:
    """Writes the checkpoint of one model into a folder, where an interrupted run may have left parts of it."""

    def __init__(self, folder: Path, mapping: ModelMapping, dtypes: Mapping[str, Dtype], source: HfFolder):
        """
        Args:
            dtypes: of the Megatron parameters by their global names.
        """
        self.folder = folder
        self.source = source
        self.units = plan_units(mapping, dtypes)
        self.objects = list(extra_state_keys(mapping))

    def write(self, advance: Callable[[int], None]) -> None:
        """Write what is not there yet, two files at a time, then the frames around it and the checkpoint's metadata.

        Args:
            advance: called with the bytes of each chunk, from any thread.
        """
        with ThreadPoolExecutor(1) as background:
            # Importing torch and its checkpoint package takes seconds; the operating system copies gigabytes in that time.
            archive = background.submit(importlib.import_module, "checkpoints_conv.formats.dist_archive")
            run_parallel(self._place, self.units, advance)
            archive.result().complete(self.folder, self.units, self.objects)

    def _place(self, unit: list[Chunk]) -> Iterator[int]:
        """Put the tensors of one file where they belong; yields the bytes of each chunk."""
        with BlockFile(self.folder / unit[0].file) as file:
            for chunk in unit:
                at = chunk.start
                for piece in chunk.pieces:
                    rows = self.source.block(piece.hf_name).rows(piece.first, piece.rows)
                    for block in in_dtype(piece.hf_name, rows, chunk.dtype):
                        if not file.holds(block, at):
                            file.copy(block, at)
                        at += block.bytes
                yield chunk.bytes
