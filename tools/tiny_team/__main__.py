"""Make the tiny team: `python -m tools.tiny_team --out DIR`.

Writes DIR/qwen2 and DIR/llama, the warm-started policies as Hugging Face folders, and corpus.jsonl, train.jsonl,
dev.jsonl and eval.jsonl.  The policies are those shipped in tools/tiny_team/weights, which `--retrain` makes anew.
"""

import argparse
import shutil
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tools.tiny_team.data import write_data
from tools.tiny_team.warm_start import RECIPES, make_policies

WEIGHTS = Path(__file__).parent / "weights"


def retrain(out: Path) -> None:
    """Make the policies anew, with a progress bar for each."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bars:
        tasks = {policy: bars.add_task(policy, total=recipe.steps) for policy, recipe in RECIPES.items()}
        for report in make_policies(out):
            description = f"{report['policy']} loss {report['loss']:.3f}"
            bars.update(tasks[report["policy"]], completed=report["step"], description=description)


def copy_team(out: Path, seed: int) -> None:
    """Write the data and copy the shipped policies."""
    write_data(out, seed)
    for policy in RECIPES:
        shutil.copytree(WEIGHTS / policy, out / policy, dirs_exist_ok=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_team", description="Make the tiny search team and its world.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the generated worlds (default: 0)")
    parser.add_argument(
        "--retrain", action="store_true", help="make the warm-started policies anew instead of copying the shipped ones"
    )
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}; name a folder")
    if args.retrain:
        write_data(args.out, args.seed)
        retrain(args.out)
    else:
        copy_team(args.out, args.seed)
    print(f"tiny team: {args.out}")


if __name__ == "__main__":
    main()
