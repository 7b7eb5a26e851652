"""Seconds of the default run's steps and updates, of this tree against an old commit.

    python -m tools.bench.default_run [--commit 4ab5158] [--tiny-team FOLDER] [--steps 8] [--turns 2]

The tiny search team is trained as shipped by both, by turns, with this environment's packages and the same models and
questions; the seconds are those that the runs log, medians over all steps but each run's first, which is the warm-up.  A
step is everything between two lines of the log, evaluations and checkpoints left out.  The last two lines are JSON.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from tools.ablation.command import count
from tools.bench.command import BenchParser
from tools.bench.training_runs import ROOT, source_of, steps_of, train

STEP_TARGET = 0.5  # of the old commit's seconds, at most
UPDATE_TARGET = 4.0  # times the old commit's speed, at least


def main() -> None:
    """The command line."""
    parser = BenchParser(__doc__)
    parser.add_argument("--commit", default="4ab5158", help="to compare with (default: %(default)s)")
    parser.add_argument("--tiny-team", type=Path, help="folder that tools/make_tiny_team.sh made (default: made for the bench)")
    parser.add_argument("--steps", type=count(2), default=8, help="of a run, the warm-up included (default: %(default)s)")
    parser.add_argument("--turns", type=count(1), default=2, help="runs of each (default: %(default)s)")
    args = parser.parse_args()
    if args.tiny_team and not (args.tiny_team / "corpus.jsonl").is_file():
        parser.error(f"--tiny-team {args.tiny_team}: has no corpus.jsonl; give a folder that tools/make_tiny_team.sh made")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            old = source_of(args.commit, folder / "old")
        except ValueError as error:
            parser.error(f"--commit {error}")
        if not args.tiny_team:
            from tools.tiny_team.__main__ import copy_team

            copy_team(folder / "team", seed=0)
        team = (args.tiny_team or folder / "team").resolve()
        settings = [f"variables.tiny_team={team}", f"steps={args.steps}", "evaluation.before=false", "evaluation.after=false"]
        settings += ["evaluation.every=0", "checkpoint.every=0"]
        seconds: dict[str, list[tuple[float, float]]] = {"old": [], "new": []}
        tokens: dict[str, list[int]] = {"old": [], "new": []}
        for turn in range(args.turns):
            for name, source in (("old", old), ("new", ROOT)):
                steps = steps_of(train(source, folder / f"{name}{turn}", settings))[1:]
                seconds[name] += [(sum(step["seconds"].values()), step["seconds"]["update"]) for step in steps]
                tokens[name] += [step["tokens_trained"] for step in steps]
    medians = {}
    for name, pairs in seconds.items():
        medians[name] = [statistics.median(column) for column in zip(*pairs)]
        mean = statistics.mean(tokens[name])
        print(f"{name}: step {medians[name][0]:.3f} s, update {medians[name][1]:.3f} s, {mean:.0f} tokens trained in a step")
    step, update = medians["new"][0] / medians["old"][0], medians["old"][1] / medians["new"][1]
    for name, ratio, target, ok in (
        ("default_run_step", step, STEP_TARGET, step <= STEP_TARGET),
        ("default_run_update", update, UPDATE_TARGET, update >= UPDATE_TARGET),
    ):
        print(json.dumps({"name": name, "ratio": round(ratio, 3), "target": target, "ok": ok, "commit": args.commit}))
    sys.exit(step > STEP_TARGET or update < UPDATE_TARGET)


if __name__ == "__main__":
    main()
