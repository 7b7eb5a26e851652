"""What a checkpoint makes an actor wait, against torch.save of the same tensors, which it would wait for to its end.

    python -m tools.bench.background_save --model FOLDER --out FOLDER [--rounds 3]

A single rank makes an optimizer step, so that there are moments, and saves by turns: in the background, as a run does, and
with torch.save and fsync.  Prints the medians, and the memory that a save adds at most, against the size of its files.  The
last line is JSON; `ratio` is torch.save's seconds over those waited.
"""

import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import psutil
import torch

from megatron_drmas.actor.policy_actor import PolicyActor
from tools.ablation.command import count
from tools.bench.command import BenchParser
from tools.bench.train_step import make_batch, random_rows, start_actor

TARGET = 2.0
MEMORY_LIMIT = 1.2  # of the files' size


def save_beside(actor: PolicyActor, folder: Path) -> dict[str, float]:
    """Seconds waited and in all, and bytes added at most and afterwards."""
    process = psutil.Process()
    before = most = process.memory_info().rss
    began = time.perf_counter()
    actor.begin_save(str(folder))
    waited = time.perf_counter() - began
    while not actor.checkpoint_written():
        most = max(most, process.memory_info().rss)
        time.sleep(0.005)
    actor.finish_save()
    after = process.memory_info().rss
    return {"waited": waited, "all": time.perf_counter() - began, "added": most - before, "left": after - before}


def save_at_once(actor: PolicyActor, file: Path) -> float:
    """Seconds of torch.save."""
    began = time.perf_counter()
    with open(file, "wb") as stream:
        torch.save((actor.model.state_dict(), actor.optimizer.state_dict()), stream)
        stream.flush()
        os.fsync(stream.fileno())
    return time.perf_counter() - began


def main() -> None:
    """The command line."""
    parser = BenchParser(__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--out", required=True, type=Path, help="folder for the checkpoints, on the disk that is measured; made")
    parser.add_argument("--rounds", type=count(1), default=3, help="(default: 3)")
    args = parser.parse_args()
    if not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model {args.model}: has no config.json; give a Hugging Face folder")
    if args.out.exists():
        parser.error(f"--out {args.out}: is there already; name a new folder")
    args.out.mkdir(parents=True)
    actor = start_actor(args.model, 4096)
    vocabulary = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    actor.update(make_batch(random_rows(vocabulary, 2, 2, 32, 16)), 0)
    ours: list[dict[str, float]] = []
    theirs = []
    try:
        for number in range(args.rounds + 1):  # the first warms up
            measured = save_beside(actor, args.out / "checkpoint"), save_at_once(actor, args.out / "state.pt")
            if number:
                ours.append(measured[0])
                theirs.append(measured[1])
        size = sum(file.stat().st_size for file in (args.out / "checkpoint").iterdir())
    finally:
        shutil.rmtree(args.out)
    medians = {key: statistics.median(save[key] for save in ours) for key in ours[0]}
    ratio = statistics.median(theirs) / medians["waited"]
    memory = max(save["added"] for save in ours) / size
    print(
        f"{size / 2**30:.2f} GiB: waited {medians['waited']:.2f} s of {medians['all']:.2f} s; "
        f"torch.save {statistics.median(theirs):.2f} s"
    )
    print(f"memory: at most {memory:.2f} of the files' size is added, {medians['left'] / size:.2f} is left")
    ok = ratio >= TARGET and memory <= MEMORY_LIMIT
    print(
        json.dumps({"name": "background_save", "ratio": round(ratio, 2), "target": TARGET, "ok": ok, "memory": round(memory, 2)})
    )
    sys.exit(not ok)


if __name__ == "__main__":
    main()
