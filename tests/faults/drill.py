"""Every fault, several times: `bash tools/fault_drill.sh [--times 20] [--only WORDS]`."""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.faults import FAULTS, problems, train
from tools.tiny_team.__main__ import copy_team

TARGET = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/fault_drill.sh", description="Survive every fault, or stop by name, every time.")
    parser.add_argument("--times", type=int, default=1, help="how often each (default: 1)")
    parser.add_argument("--only", default="", help="only faults whose name has these words")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if args.only in fault.name]
    if not chosen or args.times < 1:
        parser.error(
            f"--only {args.only!r} --times {args.times}: no fault to drill; there are: {', '.join(f.name for f in FAULTS)}"
        )
    passed, states = dict.fromkeys((fault.name for fault in chosen), 0), {}
    seconds = dict.fromkeys(passed, 0.0)
    with tempfile.TemporaryDirectory(prefix="drill_") as folder:
        root, repository = Path(folder), Path(__file__).resolve().parents[2]
        copy_team(root / "team", 0)
        for fault in chosen:
            overrides = fault.undisturbed
            if overrides not in states:
                undisturbed = train(root / f"undisturbed_{len(states)}", root / "team", repository, *overrides)
                if undisturbed.code:
                    sys.exit(f"a run without a fault failed:\n{undisturbed.said}")
                states[overrides] = undisturbed.state()
        for turn in range(args.times):
            for fault in chosen:
                began = time.monotonic()
                place = root / "runs"
                found = problems(fault, place / "faulty", root / "team", repository, states[fault.undisturbed])
                took = time.monotonic() - began
                seconds[fault.name] += took
                passed[fault.name] += not found
                shutil.rmtree(place)
                print(f"{turn + 1}/{args.times} {fault.name}: {'FAILED' if found else 'passed'}, {took:.0f} s", flush=True)
                if found:
                    print(*found, sep="\n    ", file=sys.stderr, flush=True)
    print(f"{'fault':<70}{'passed':>10}{'seconds':>10}")
    for name, count in passed.items():
        print(f"{name:<70}{f'{count} of {args.times}':>10}{seconds[name] / args.times:>10.0f}")
    ratio = sum(passed.values()) / (len(chosen) * args.times)
    print(json.dumps({"name": "fault_drill", "ratio": ratio, "target": TARGET, "ok": ratio >= TARGET, "times": args.times}))
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
