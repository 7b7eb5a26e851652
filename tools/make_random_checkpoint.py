"""A Hugging Face checkpoint of a real model's shape with random weights, for trying conversion and benchmarks.

    python tools/make_random_checkpoint.py --shape qwen2.5-7b --out DIR [--layers 2]

The shapes are the configs in tools/model_configs/.  One tensor is in memory at a time; there is no tokenizer.
"""

import argparse
import json
from pathlib import Path

import torch

from checkpoints_conv.families import family_of
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.hf_writer import MAX_SHARD_BYTES, plan_shards, shard_names, write_index
from checkpoints_conv.formats.safetensors_file import SafetensorsWriter, TensorEntry
from checkpoints_conv.formats.tensors import block_of, torch_dtype
from checkpoints_conv.mapping.model_mapping import ModelMapping
from checkpoints_conv.progress import byte_progress

CONFIGS = Path(__file__).parent / "model_configs"
DTYPES = {"bf16": Dtype.BF16, "fp32": Dtype.F32}
BLOCK = 2**24  # random values drawn once; a tensor repeats them from a place of its own


def shapes() -> list[str]:
    """Names of the shapes that there are."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def make_random_checkpoint(config: dict, out: Path, dtype: Dtype = Dtype.BF16, seed: int = 0) -> int:
    """Write a checkpoint of this config.

    Returns:
        Bytes of its tensors.
    """
    mapping = ModelMapping(family_of(config).model_spec(config))
    entries = [TensorEntry(name, shape, dtype) for name, shape in mapping.hf_shapes().items()]
    shards = plan_shards(entries, MAX_SHARD_BYTES)
    total = sum(entry.bytes for entry in entries)
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(BLOCK, generator=generator).mul_(0.02).to(torch_dtype(dtype))
    with byte_progress(out.name, total) as advance:
        for file, shard in zip(shard_names(len(shards)), shards, strict=True):
            writer = SafetensorsWriter(out / file, shard)
            for entry in shard:
                start = int(torch.randint(BLOCK, (1,), generator=generator))
                count = torch.Size(entry.shape).numel()
                rolled = torch.cat([block[start:], block[:start]])
                writer.write(entry.name, [block_of(rolled.repeat(-(-count // BLOCK))[:count].view(entry.shape))])
                advance(entry.bytes)
            writer.close()
    write_index(out, shards)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes(), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = json.loads((CONFIGS / f"{args.shape}.json").read_text(encoding="utf-8"))
    if args.layers:
        config["num_hidden_layers"] = args.layers
    config["torch_dtype"] = DTYPES[args.dtype].value
    make_random_checkpoint(config, args.out, DTYPES[args.dtype], args.seed)


if __name__ == "__main__":
    main()
