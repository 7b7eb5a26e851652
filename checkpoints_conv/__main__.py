"""`python -m checkpoints_conv`: convert, verify and inspect checkpoints."""

import argparse
import gc
import io
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # searching the objects that importing torch makes takes half a second, a tenth of converting a small model

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats.dtypes import Dtype

DTYPES = {"fp32": Dtype.F32, "fp16": Dtype.F16, "bf16": Dtype.BF16}


def main(arguments: "list[str] | None" = None) -> int:
    """Run one command; returns the exit code: 0 done (verify: equal), 1 verify found a difference, 2 an error."""
    args = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows ASCII only
    try:
        return args.run(args)
    except ConversionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # of reading, or of standard output: those of writing files are explained by `staging`
        what = f"read {error.filename}" if error.filename else "write the answer"
        print(f"error: cannot {what}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def _positive(kind: type) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < 1e9:
            raise argparse.ArgumentTypeError(f"{text} is not a positive number below 1e9")
        return value

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m checkpoints_conv", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    to_megatron = commands.add_parser("to-megatron", help="Hugging Face folder to Megatron distributed checkpoint")
    to_megatron.add_argument("--hf", type=Path, required=True, help="folder with config.json and safetensors")
    to_megatron.add_argument("--out", type=Path, required=True, help="folder to make")
    to_megatron.add_argument("--dtype", choices=DTYPES, help="of the result; default: as stored")
    to_megatron.add_argument(
        "--allow-pickle", action="store_true", help="read pytorch_model.bin (weights_only) where there are no safetensors"
    )
    to_megatron.set_defaults(run=_to_megatron)

    to_hf = commands.add_parser("to-hf", help="Megatron distributed checkpoint to Hugging Face folder")
    to_hf.add_argument("--megatron", type=Path, required=True, help="checkpoint folder, of any layout")
    to_hf.add_argument("--out", type=Path, required=True, help="folder to make")
    to_hf.add_argument(
        "--hf-files", type=Path, help="folder with config.json and tokenizer, for a checkpoint that to-megatron did not make"
    )
    to_hf.add_argument("--dtype", choices=DTYPES, help="of the result; default: as stored")
    to_hf.add_argument("--max-shard-gb", type=_positive(float), default=5.0, help="largest safetensors file (default: 5)")
    to_hf.set_defaults(run=_to_hf)

    verify = commands.add_parser("verify", help="compare two checkpoints, of either kind, tensor by tensor")
    verify.add_argument("a", type=Path, help="Hugging Face folder or Megatron checkpoint")
    verify.add_argument("b", type=Path, help="the other")
    verify.add_argument("--hf-files", type=Path, help="as for to-hf")
    verify.add_argument("--logits", action="store_true", help="compare a forward pass in fp32 too")
    verify.add_argument(
        "--tokens", type=_positive(int), help="length of that pass (default: 4352, down to 64 for large models or little memory)"
    )
    verify.add_argument(
        "--tolerance",
        type=_positive(float),
        help="largest log-prob difference of that pass (default: ten times the model's own rounding noise, at least 1e-5)",
    )
    verify.set_defaults(run=_verify)

    inspect = commands.add_parser("inspect", help="family, sizes, parameters and fitting layouts of a checkpoint")
    inspect.add_argument("folder", type=Path)
    inspect.add_argument("--hf-files", type=Path, help="as for to-hf")
    inspect.set_defaults(run=_inspect)
    return parser


# Each command imports what it needs: conversion takes torch's checkpoint package, a forward pass takes Megatron.
def _to_megatron(args: argparse.Namespace) -> int:
    from checkpoints_conv.to_megatron import to_megatron

    to_megatron(args.hf, args.out, DTYPES.get(args.dtype), args.allow_pickle)
    return 0


def _to_hf(args: argparse.Namespace) -> int:
    from checkpoints_conv.to_hf import to_hf

    to_hf(args.megatron, args.out, args.hf_files, DTYPES.get(args.dtype), int(args.max_shard_gb * 1e9))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from checkpoints_conv.verify import verify

    gc.enable()  # a model of the forward pass is garbage in cycles

    return verify(args.a, args.b, args.hf_files, args.logits, args.tokens, args.tolerance)


def _inspect(args: argparse.Namespace) -> int:
    from checkpoints_conv.checkpoint import inspect

    print(inspect(args.folder, args.hf_files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
