"""The ablation on the tiny team, whose agents are all called about equally often: identical rollouts first, then training runs.

First every variant on identical rollouts of the frozen policies (gradient norm, E[A^2], calls that are alone on their
question), in a team with a role that is rare by design and under the limit of turns that makes the lemma's factor
largest; then training runs, variant x precision x seed.
Writes DIR/ablation.md, DIR/ablation.png and DIR/ablation.json.
"""

import argparse
import asyncio
import json
import sys

from rich.progress import Progress, TaskID

from megatron_drmas.config.load import compose_config
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.observability.history import write_atomically
from megatron_drmas.validate import validate
from tools.ablation.command import PRECISIONS, command_parser, count, prepare, progress_bars, steps_done, train_run
from tools.ablation.report import write_figure, write_table
from tools.ablation.results import Run, read_run, summarize
from tools.ablation.variants import VARIANTS

TURNS = (3, 4)


def frozen_config(args: argparse.Namespace) -> RunConfig:
    """The tiny team with learning rate 0."""
    config = compose_config(
        "search_hetero",
        [
            "name=frozen",
            f"team={args.team}",
            f"output_dir={args.out}",
            f"variables.tiny_team={args.tiny_team}",
            *(
                f"policies.{policy}.{setting}"
                for policy in ("qwen2", "llama")
                for setting in ("optimizer.lr=0", "parallel.tensor=1", "parallel.pipeline=1")
            ),
        ],
    )
    validate(config)
    return config


def frozen_results(args: argparse.Namespace, bars: Progress) -> dict:
    """`frozen_study`'s, or what an earlier command with the same arguments has left.

    Raises:
        SystemExit: DIR is of a command with other arguments.
    """
    saved = args.out / "frozen.json"
    arguments = {name: str(getattr(args, name)) for name in ("tiny_team", "team", "max_turns", "frozen_batches")}
    if not saved.exists():
        write_atomically(saved, json.dumps({"arguments": arguments, **asyncio.run(frozen_study(args, bars))}))
    frozen = json.loads(saved.read_text())
    for name, value in arguments.items():
        if frozen["arguments"][name] != value:
            option = f"--{name.replace('_', '-')}"
            made = frozen["arguments"][name]
            sys.exit(f"reproduce_ablation: {saved} was made with {option} {made}, not {value}; choose another --out")
    return frozen


async def frozen_study(args: argparse.Namespace, bars: Progress) -> dict:
    """Measure the lemma's factor, choose the task's limit of turns, and compare the variants."""
    from megatron_drmas.cluster.cluster import Cluster
    from tools.ablation.frozen import FrozenStudy

    task = bars.add_task("frozen policies", total=args.frozen_batches * len(VARIANTS))
    async with Cluster(frozen_config(args)) as cluster:
        await cluster.sync_weights(0)
        study = FrozenStudy(cluster)
        candidates = [args.max_turns] if args.max_turns else list(TURNS)
        turns, factors = await study.rarest_turns(candidates, args.frozen_batches)
        compared = await study.compare(turns, args.frozen_batches, lambda: bars.advance(task))
    return {"max_turns": turns, "factors": factors[turns], "factors_by_turns": factors, "variants": compared}


def train(
    args: argparse.Namespace, variant: str, precision: str, seed: int, max_turns: int, bars: Progress, task: TaskID, done: int
) -> None:
    """One training run in a process of its own; the bar follows its metrics.jsonl.

    Raises:
        SystemExit: the run failed; names its log.
    """
    settings = [
        f"variables.tiny_team={args.tiny_team}",
        f"seed={seed}",
        f"team={args.team}",
        f"steps={args.steps}",
        f"precision={precision}",
        f"team.workflow.max_turns={max_turns}",
        "evaluation.before=false",
        "checkpoint.keep=1",
        "checkpoint.export=false",
        *VARIANTS[variant].overrides,
        *args.override,
    ]
    bars.update(task, description=f"{precision} {VARIANTS[variant].label} seed {seed}")
    train_run(
        args.out / "runs", f"{precision}_{variant}_{seed}", settings, lambda steps: bars.update(task, completed=done + steps)
    )


def collect_runs(args: argparse.Namespace) -> dict[str, dict[str, list[Run]]]:
    """precision -> variant -> runs over seeds: all in the folder that have made so many steps, also of earlier commands."""
    runs: dict[str, dict[str, list[Run]]] = {}
    for precision in PRECISIONS:
        for variant in VARIANTS:
            for metrics in sorted((args.out / "runs").glob(f"{precision}_{variant}_[0-9]*/metrics.jsonl")):
                if steps_done(metrics.parent) >= args.steps:
                    runs.setdefault(precision, {}).setdefault(variant, []).append(read_run(metrics))
    return runs


def write_results(args: argparse.Namespace, frozen: dict) -> None:
    runs = collect_runs(args)
    trained = {precision: {variant: summarize(of) for variant, of in variants.items()} for precision, variants in runs.items()}
    write_atomically(args.out / "ablation.json", json.dumps({"frozen": frozen, "trained": trained}, indent=1))
    write_table(args.out / "ablation.md", frozen, frozen["variants"], trained)
    if runs:
        write_figure(args.out / "ablation.png", runs)


def main(argv: list[str]) -> None:
    """The frozen comparison, then the training runs, with results written after each."""
    parser = command_parser("", __doc__)
    parser.add_argument(
        "--seeds", type=count(0), default=5, help="training runs of each variant and precision; 0: frozen policies only"
    )
    parser.add_argument("--steps", type=count(1), default=40)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "fp8_emulated"], choices=PRECISIONS)
    parser.add_argument(
        "--variants",
        nargs="+",
        default=list(VARIANTS),
        choices=list(VARIANTS),
        metavar="VARIANT",
        help=f"of {', '.join(VARIANTS)}",
    )
    parser.add_argument("--team", default="search_tiny_rare", choices=["search_tiny", "search_tiny_rare"])
    parser.add_argument("--max-turns", type=count(0), default=0, help="of the workflow; 0: where some agent's calls are rarest")
    parser.add_argument("--frozen-batches", type=count(1), default=4, help="rollouts that the frozen comparison averages over")
    parser.add_argument("--override", nargs="*", default=[], metavar="key=value", help="further settings of the training runs")
    args = parser.parse_args(argv)
    prepare(args)
    with progress_bars() as bars:
        frozen = frozen_results(args, bars)
        write_results(args, frozen)
        plan = [(v, p, s) for s in range(args.seeds) for p in args.precisions for v in args.variants]
        if plan:
            task = bars.add_task("training", total=len(plan) * args.steps)
            for place, (variant, precision, seed) in enumerate(plan):
                train(args, variant, precision, seed, frozen["max_turns"], bars, task, place * args.steps)
                write_results(args, frozen)
    print((args.out / "ablation.md").read_text())
