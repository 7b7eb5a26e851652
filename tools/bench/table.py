"""The table of benchmark results in README.md and docs/benchmarks.md.

    python -m tools.bench.table LOG… [--record]

Prints a table of what the benchmarks' logs (NAME.log) found.  --record puts it into docs/benchmarks.jsonl, in place of what
the same benchmarks had found before, and writes the tables of both pages from there.
"""

import ast
import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.bench.command import BenchParser

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks.jsonl"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
PLACE = re.compile(r"(<!-- benchmarks: (?P<names>[\w, ]+) -->\n).*?(<!-- benchmarks end -->)", re.DOTALL)  # names, or all

Result = dict[str, Any]


def machine() -> str:
    """The machine in a few words."""
    import torch

    from megatron_drmas.cluster.machine import usable_cores

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{usable_cores()} cores, {gpu}"


def results_of(log: Path, where: str) -> list[Result]:
    """What a log found, empty if its benchmark failed.

    Args:
        where: the machine.
    """
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith('{"name"'):
            date = time.strftime("%Y-%m-%d", time.localtime(log.stat().st_mtime))
            found.append(json.loads(line) | {"program": log.stem, "date": date, "machine": where})
    return found


def read_results() -> list[Result]:
    """What is recorded."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def compared(program: str) -> str:
    """The first sentence of a benchmark's docstring."""
    doc = ast.get_docstring(ast.parse((Path(__file__).with_name(f"{program}.py")).read_text()))
    return (doc or "").split(".\n")[0].replace("\n", " ")


def table_of(results: Iterable[Result]) -> str:
    """Markdown, a row for each ratio."""
    rows = ["| name | what is compared | ratio | target | met | date | machine |", "|---|---|---|---|---|---|---|"]
    for found in results:
        target = f"{'≤' if found.get('at_most') else '≥'} {found['target']:g}"
        cells = (f"`{found['name']}`", compared(found["program"]), f"{found['ratio']:g}", target, "yes" if found["ok"] else "no")
        rows.append(f"| {' | '.join((*cells, found['date'], found['machine']))} |")
    return "\n".join(rows) + "\n"


def with_tables(page: str, results: list[Result]) -> str:
    """A page with its tables made again."""

    def table(place: re.Match) -> str:
        names = place["names"].split(", ")
        shown = results if names == ["all"] else [found for name in names for found in results if found["name"] == name]
        return f"{place[1]}{table_of(shown)}{place[3]}"

    return PLACE.sub(table, page)


def main() -> None:
    """The command line."""
    parser = BenchParser(__doc__)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="of a benchmark, named as its module")
    parser.add_argument("--record", action="store_true", help="write docs/benchmarks.jsonl and the pages' tables")
    args = parser.parse_args()
    for log in args.logs:
        if not (log.is_file() and Path(__file__).with_name(f"{log.stem}.py").is_file()):
            parser.error(f"{log}: is not the log of a benchmark of this folder")
    where = machine()
    found = {log.stem: results_of(log, where) for log in args.logs}
    for log in args.logs:
        if not found[log.stem]:
            last = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
            print(f"table: {log.stem} found nothing: {last}", file=sys.stderr)
    made = [result for results in found.values() for result in results]
    print(table_of(made), end="")
    if args.record:
        kept = [result for result in read_results() if not found.get(result["program"])]
        results = sorted([*kept, *made], key=lambda result: result["program"])
        RESULTS.write_text("".join(json.dumps(result) + "\n" for result in results))
        for page in PAGES:
            page.write_text(with_tables(page.read_text(), results))
    sys.exit(not all(found.values()))


if __name__ == "__main__":
    main()
