"""Seconds of a training step with `algorithm.staleness`, engines generating while actors train, against strict turns.

    python -m tools.bench.overlap [--staleness 1] [--delay-s 2] [--seeds 3] [--steps 16] [--tiny-team FOLDER] [key=value …]

The tiny search team is trained as shipped by both, by turns, from the same models and questions; every search takes `--delay-s`
longer than it does.  The seconds are those that the runs log, without each run's first step.  Printed with them is what the
trained teams answer: exact match on the held-out questions, by seed, since speed bought with learning would be none.  The last
line is JSON: `ratio` is of the medians over seeds.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from tools.ablation.command import count, number
from tools.bench.command import BenchParser
from tools.bench.training_runs import ROOT, steps_of, train

TARGET = 1.6

PLUGIN = '''
import asyncio

from megatron_drmas.environments.base import register_environment
from megatron_drmas.environments.search import SearchEnvironment


@register_environment("slow_search")
class SlowSearch(SearchEnvironment):
    """Search whose every answer is late."""

    async def call_tool(self, name, question, arguments):
        await asyncio.sleep({delay})
        return await super().call_tool(name, question, arguments)
'''


def main() -> None:
    """The command line."""
    parser = BenchParser(__doc__)
    parser.add_argument("--staleness", type=count(1), default=1, help="(default: %(default)s)")
    parser.add_argument("--delay-s", type=number(0, 60), default=2.0, help="of every search (default: %(default)s)")
    parser.add_argument("--seeds", type=count(1), default=3, help="how many, from 0 (default: %(default)s)")
    parser.add_argument("--steps", type=count(2), default=16, help="of a run, the warm-up included (default: %(default)s)")
    parser.add_argument("--tiny-team", type=Path, help="folder that tools/make_tiny_team.sh made (default: made for the bench)")
    parser.add_argument("overrides", nargs="*", help="of configs/search_hetero.yaml")
    args = parser.parse_args()
    if args.tiny_team and not (args.tiny_team / "corpus.jsonl").is_file():
        parser.error(f"--tiny-team {args.tiny_team}: has no corpus.jsonl; give a folder that tools/make_tiny_team.sh made")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "slow_search.py").write_text(PLUGIN.format(delay=args.delay_s))
        if not args.tiny_team:
            from tools.tiny_team.__main__ import copy_team

            copy_team(folder / "team", seed=0)
        team = (args.tiny_team or folder / "team").resolve()
        settings = [f"variables.tiny_team={team}", f"plugins=[{folder / 'slow_search.py'}]", "environment.name=slow_search"]
        settings += [f"steps={args.steps}", "evaluation.before=false", "evaluation.greedy=false", "evaluation.every=0"]
        settings += ["checkpoint.every=0", "checkpoint.export=false", "algorithm.loss.mismatch.correction=truncate"]
        seconds: dict[int, list[float]] = {0: [], args.staleness: []}
        matches: dict[int, list[float]] = {0: [], args.staleness: []}
        for seed in range(args.seeds):
            for staleness in seconds:
                overrides = [f"seed={seed}", f"algorithm.staleness={staleness}", *args.overrides]
                out = folder / f"{seed}_{staleness}"
                lines = train(ROOT, out, [*settings, *overrides])
                steps = steps_of(lines)[1:]
                seconds[staleness].append(sum(sum(step["seconds"].values()) for step in steps) / len(steps))
                summary = json.loads((out / "run" / "summary.json").read_text())
                matches[staleness].append(list(summary["evaluation"]["sampled"]["success"].values())[-1])
    medians = {staleness: statistics.median(values) for staleness, values in seconds.items()}
    for staleness, median in medians.items():
        of_seeds = ", ".join(f"{match:.3f}" for match in matches[staleness])
        print(f"staleness {staleness}: {median:.2f} s a step; exact match after {args.steps} steps: {of_seeds}")
    ratio = medians[0] / medians[args.staleness]
    means = [round(statistics.mean(values), 3) for values in matches.values()]
    print(
        json.dumps({"name": "overlap", "ratio": round(ratio, 2), "target": TARGET, "ok": ratio >= TARGET, "exact_match": means})
    )
    sys.exit(ratio < TARGET)


if __name__ == "__main__":
    main()
