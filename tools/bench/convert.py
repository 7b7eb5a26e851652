"""Rate and memory of checkpoint conversion, both ways, against `cp` of the same bytes in the same run.

    python -m tools.bench.convert --work DIR [--shape qwen2.5-7b] [--repeats 2]

Both are run by turns, each time after all that was written before has reached the disk, and the best of each counts.  A
checkpoint of less than 5 GB mostly measures how long it takes to import torch.  DIR needs room for three copies
of the checkpoint (qwen2.5-7b: 15.2 GB each), which are removed at the end.  The last line is JSON: `ratio` is the lower of
the two directions' rates over cp's (target: 0.5), `peak_anonymous_gib` the converter's (target: below 4), and `identical`
says whether every tensor came back bit for bit.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from checkpoints_conv.formats.hf_folder import HfFolder
from tools.ablation.command import count
from tools.bench.command import BenchParser
from tools.make_random_checkpoint import shapes

TOOLS = Path(__file__).resolve().parents[1]
TARGET_RATIO, TARGET_GIB = 0.5, 4.0


def copy_rate(source: Path, target: Path) -> float:
    """GB/s of `cp -r`; the copy is removed."""
    size = folder_bytes(source)
    os.sync()
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return size / seconds / 1e9


def convert_rate(source: Path, command: list[str]) -> tuple[float, float]:
    """GB/s of a `python -m checkpoints_conv` command, and the peak of its anonymous resident memory in GiB."""
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "checkpoints_conv", *command])
    peak = [0]
    sampler = threading.Thread(target=sample_anonymous, args=(process, peak))
    sampler.start()
    code = process.wait()
    seconds = time.perf_counter() - start
    sampler.join()
    if code:
        sys.exit(f"{' '.join(command)} failed with exit code {code}")
    return folder_bytes(source) / seconds / 1e9, peak[0] / 2**20


def sample_anonymous(process: subprocess.Popen, peak: list[int]) -> None:
    """Keep the largest RssAnon (KiB) of a running process in `peak[0]`."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        try:
            lines = status.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return  # it has just ended
        for line in lines:
            if line.startswith("RssAnon:"):
                peak[0] = max(peak[0], int(line.split()[1]))
        time.sleep(0.02)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def same_tensors(a: Path, b: Path) -> bool:
    left, right = HfFolder(a), HfFolder(b)
    return set(left.names()) == set(right.names()) and all(
        torch.equal(left.tensor(name), right.tensor(name)) for name in left.names()
    )


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--shape", choices=shapes(), default="qwen2.5-7b")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints; they are removed at the end")
    parser.add_argument("--repeats", type=count(1), default=2)
    args = parser.parse_args()
    try:
        args.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--work {args.work}: {error.strerror}")
    hf, megatron, back, copy = (args.work / name for name in ("hf", "megatron", "back", "copy"))
    there = [str(folder) for folder in (hf, megatron, back, copy) if folder.exists()]
    if there:
        sys.exit(f"convert: {', '.join(there)} exist; remove them, or choose another --work")
    make = [sys.executable, TOOLS / "make_random_checkpoint.py", "--shape", args.shape, "--out", hf]
    subprocess.run(make, check=True)
    size = folder_bytes(hf)

    ratios, peaks = [], []
    for source, target, command in (
        (hf, megatron, ["to-megatron", "--hf", str(hf), "--out", str(megatron)]),
        (megatron, back, ["to-hf", "--megatron", str(megatron), "--out", str(back)]),
    ):
        copied, converted = [], []
        for _ in range(args.repeats):
            shutil.rmtree(target, ignore_errors=True)
            copied.append(copy_rate(source, copy))
            rate, peak = convert_rate(source, command)
            converted.append(rate)
            peaks.append(peak)
            print(f"{command[0]}: {rate:.3f} GB/s, cp {copied[-1]:.3f} GB/s, {peak:.2f} GiB anonymous", flush=True)
        ratios.append(max(converted) / max(copied))
        print(f"{command[0]}: best {max(converted):.3f} GB/s, cp {max(copied):.3f} GB/s, ratio {ratios[-1]:.2f}")
    identical = same_tensors(hf, back)
    for folder in (hf, megatron, back):
        shutil.rmtree(folder)
    result = {
        "name": f"convert {args.shape}",
        "ratio": round(min(ratios), 3),
        "target": TARGET_RATIO,
        "peak_anonymous_gib": round(max(peaks), 3),
        "target_gib": TARGET_GIB,
        "gb": round(size / 1e9, 2),
        "identical": identical,
        "ok": min(ratios) >= TARGET_RATIO and max(peaks) < TARGET_GIB and identical,
    }
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
