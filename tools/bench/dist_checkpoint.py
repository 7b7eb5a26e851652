"""Conversion by this package's reader and writer of torch_dist files against the same by torch's own, time and memory.

    python -m tools.bench.dist_checkpoint --work DIR [--shape llama-3.2-1b] [--repeats 3]

Only the reader (`formats.dist_reader`) and the writer (`formats.dist_writer`) are exchanged for
torch.distributed.checkpoint's FileSystemReader and FileSystemWriter, which read and write one Megatron parameter at a time
as well; mapping, threads and safetensors are the same.  Both are run by turns, and the best of each counts.  DIR needs room
for four copies of the checkpoint, which are removed at the end.  The last line is JSON: `ratio` is the lower of the two
directions' times by torch over ours (target: 1.2, below which torch's would do), `memory_ratio` the lower one of their peaks.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from checkpoints_conv import to_hf, to_megatron
from checkpoints_conv.formats.dist_plan import Chunk, plan_units
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.hf_folder import HfFolder
from checkpoints_conv.formats.row_blocks import Block
from checkpoints_conv.formats.tensors import block_of, dtype_of, hf_tensors, torch_dtype
from checkpoints_conv.mapping.dist_keys import extra_state_keys, place_of
from checkpoints_conv.mapping.model_mapping import ModelMapping
from checkpoints_conv.progress import THREADS
from tools.ablation.command import count
from tools.bench.command import BenchParser
from tools.bench.convert import TOOLS, folder_bytes, same_tensors, sample_anonymous

TARGET_RATIO = 1.2


class TorchReader(dcp.DefaultLoadPlanner):
    """`DistReader` by torch's FileSystemReader."""

    def __init__(self, folder: Path, mapping: ModelMapping):
        super().__init__()
        self.mapping = mapping
        self._reader = dcp.FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._target = threading.local()

    def dtype(self, name: str) -> Dtype:
        return dtype_of(torch.empty(0, dtype=self._stored(name).properties.dtype))

    def read(self, name: str) -> Iterator[tuple[str, list[Block]]]:
        place, stored = place_of(name, self.mapping), self._stored(name)
        shape = self.mapping.entry(name).rule.megatron_shape(self.mapping.spec)
        offsets, sizes = (*place.index, *[0] * len(shape)), (*[1] * len(place.index), *shape)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        self._target.tensor = torch.empty(sizes, dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(place.key, stored, [wanted])
        self._reader.read_data(LoadPlan(items), self)
        for hf_name, tensor in hf_tensors(self.mapping, name, [self._target.tensor.view(shape)]):
            yield hf_name, [block_of(tensor)]

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target.tensor

    def _stored(self, name: str) -> Any:
        return self._metadata.state_dict_metadata[place_of(name, self.mapping).key]


class TorchWriter(dcp.DefaultSavePlanner):
    """`DistWriter` by torch's FileSystemWriter."""

    def __init__(self, folder: Path, mapping: ModelMapping, dtypes: Mapping[str, Dtype], source: HfFolder):
        super().__init__()
        self.folder, self.source = folder, source
        self.objects = list(extra_state_keys(mapping))
        chunks = [chunk for unit in plan_units(mapping, dtypes) for chunk in unit]
        self.chunks = {MetadataIndex(chunk.key, torch.Size(chunk.offsets)): chunk for chunk in chunks}

    def write(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        torch.serialization.set_crc32_options(False)  # ours leaves them out as well
        writer = dcp.FileSystemWriter(self.folder, single_file_per_rank=True, sync_files=False, thread_count=THREADS)
        dcp.save({}, storage_writer=writer, planner=self, no_dist=True)
        torch.save({}, self.folder / "common.pt")

    def create_local_plan(self) -> SavePlan:
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.objects]
        return SavePlan(objects + [_write_item(index, chunk) for index, chunk in self.chunks.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return create_default_global_save_plan(all_plans, rewrite_index_hints=False)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type is WriteItemType.BYTE_IO:
            torch.save([torch.empty(0, dtype=torch.uint8)], file := io.BytesIO())
            return file
        chunk = self.chunks[write_item.index]
        parts = [self.source.tensor(piece.hf_name)[piece.first : piece.first + piece.rows] for piece in chunk.pieces]
        self._advance(chunk.bytes)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(chunk.sizes)


def _write_item(index: MetadataIndex, chunk: Chunk) -> WriteItem:
    box = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
    data = TensorWriteData(box, TensorProperties(dtype=torch_dtype(chunk.dtype)), torch.Size(chunk.size))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds of a Python command, and the peak of its anonymous resident memory in GiB."""
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", *command])
    peak = [0]
    sampler = threading.Thread(target=sample_anonymous, args=(process, peak))
    sampler.start()
    code = process.wait()
    seconds = time.perf_counter() - start
    sampler.join()
    if code:
        sys.exit(f"{' '.join(command)} failed with exit code {code}")
    return seconds, peak[0] / 2**20


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints; they are removed at the end")
    parser.add_argument("--repeats", type=count(1), default=3)
    parser.add_argument("--by-torch", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="only convert, by torch's")
    args = parser.parse_args()
    if args.by_torch:
        convert_by_torch(*args.by_torch)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    hf, megatron, back = (args.work / name for name in ("hf", "megatron", "back"))
    there = [str(folder) for folder in (hf, megatron, back) if folder.exists()]
    if there:
        sys.exit(f"dist_checkpoint: {', '.join(there)} exist; remove them, or choose another --work")
    subprocess.run([sys.executable, TOOLS / "make_random_checkpoint.py", "--shape", args.shape, "--out", hf], check=True)
    size = folder_bytes(hf)

    times, memory = [], []
    identical = True
    for source, target, command in (
        (hf, megatron, ["to-megatron", "--hf", str(hf), "--out", str(megatron)]),
        (megatron, back, ["to-hf", "--megatron", str(megatron), "--out", str(back)]),
    ):
        by_torch = [__spec__.name, "--work", str(args.work), "--by-torch", str(source), str(target)]
        measured: dict[str, list[tuple[float, float]]] = {"torch": [], "ours": []}
        for _ in range(args.repeats):
            for which, program in (("torch", by_torch), ("ours", ["checkpoints_conv", *command])):
                shutil.rmtree(target, ignore_errors=True)
                measured[which].append(measure(program))
                seconds, peak = measured[which][-1]
                print(f"{command[0]} by {which}: {seconds:.2f} s, {peak:.2f} GiB anonymous", flush=True)
                if target == back:
                    identical = identical and same_tensors(hf, back)
        best = {which: [min(pair[i] for pair in pairs) for i in (0, 1)] for which, pairs in measured.items()}
        times.append(best["torch"][0] / best["ours"][0])
        memory.append(best["torch"][1] / best["ours"][1])
        print(f"{command[0]}: torch takes {times[-1]:.2f} times as long and {memory[-1]:.2f} times the memory")
    for folder in (hf, megatron, back):
        shutil.rmtree(folder)
    result = {
        "name": f"dist_checkpoint {args.shape}",
        "ratio": round(min(times), 3),
        "target": TARGET_RATIO,
        "memory_ratio": round(min(memory), 3),
        "gb": round(size / 1e9, 2),
        "identical": identical,
        "ok": min(times) >= TARGET_RATIO and identical,
    }
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


def convert_by_torch(source: Path, target: Path) -> None:
    to_hf.DistReader = TorchReader  # type: ignore[misc,assignment]
    to_megatron.DistWriter = TorchWriter  # type: ignore[misc,assignment]
    if (source / ".metadata").is_file():
        to_hf.to_hf(source, target)
    else:
        to_megatron.to_megatron(source, target)


if __name__ == "__main__":
    main()
