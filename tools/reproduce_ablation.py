"""Dr. MAS's comparison of normalizations, from one command.

    python -m tools.reproduce_ablation --bandit     a bandit with a conditional role, and its sign turned: a minute
    python -m tools.reproduce_ablation --replica    the gated tiny team's training, replicated in plain torch: seconds a run
    python -m tools.reproduce_ablation --gated      the gated tiny team, trained by the project: minutes a run
    python -m tools.reproduce_ablation              the tiny team, whose roles are all called about equally often

Each has options of its own (`--replica --help`), writes a table, a figure and its data, and continues where it was interrupted.
"""

import argparse
import importlib
import signal
import sys

MODES = {"bandit": "bandit_command", "replica": "replica_command", "gated": "gated_command", "ungated": "ungated"}


def main() -> None:
    """Hand the command line to the mode's own command."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    modes = parser.add_mutually_exclusive_group()
    for mode in MODES:
        modes.add_argument(f"--{mode}", action="store_const", dest="mode", const=mode, default="ungated")
    chosen, rest = parser.parse_known_args()
    if chosen.mode == "ungated" and {"-h", "--help"} & set(rest):
        print(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("reproduce_ablation: stopped; the same command continues from here"))
    importlib.import_module(f"tools.ablation.{MODES[chosen.mode]}").main(rest)


if __name__ == "__main__":
    main()
