"""Make the tiny team: `python -m tools.tiny_team --out DIR`.

Writes DIR/qwen2 and DIR/llama (Hugging Face folders), corpus.jsonl, train.jsonl, dev.jsonl and eval.jsonl.
"""

import argparse
import shutil
from pathlib import Path

from tools.tiny_team.data import write_data
from tools.tiny_team.models import POLICIES, build_model, save_policy

WEIGHTS = Path(__file__).parent / "weights"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_team", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the generated worlds")
    args = parser.parse_args()
    write_data(args.out, args.seed)
    for policy in POLICIES:
        if (WEIGHTS / policy).is_dir():
            shutil.copytree(WEIGHTS / policy, args.out / policy, dirs_exist_ok=True)
        else:
            save_policy(build_model(policy, args.seed), args.out / policy)


if __name__ == "__main__":
    main()
