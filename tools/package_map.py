"""Draw the packages and their imports into docs/architecture.md.

python -m tools.package_map [--page docs/architecture.md]

A box holds packages; an arrow is an import that the code has, unless a longer way through other boxes says the same.
"""

import argparse
import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- drawn by python -m tools.package_map -->\n", "<!-- end of the drawing -->\n"
BOXES = {
    "commands": ("train", "sft", "doctor"),
    "a run": ("training_run", "evaluate", "command", "validate", "validate_templates", "checkpointing", "step_record"),
    "processes": ("cluster",),
    "trainer": ("actor",),
    "generation": ("rollout",),
    "weights to engines": ("weight_sync",),
    "what a run shows": ("observability",),
    "team and task": ("workflows", "environments", "sandbox", "team", "data", "answers"),
    "algorithm": ("algorithm", "kernels", "batch"),
    "devices": ("devices",),
    "ground": ("run_lock", "config", "concurrency"),
    "models and formats": ("checkpoints_conv",),
}


def layers() -> list[list[str]]:
    """The packages of each layer of the import order, as dotted names, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [[name.strip() for name in layer.split("|")] for layer in contracts[0]["layers"]]


def modules(package: str) -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: set[str]) -> set[str]:
    """The modules of this repository that a file imports, by their longest known name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {next((n for n in (name, name.rpartition(".")[0]) if n in known), "") for name in names} - {""}


def box_of(module: str) -> str | None:
    """The box of a module; None: it is in no package, as `megatron_drmas` itself."""
    name = module.removeprefix("megatron_drmas.").partition(".")[0]
    return next((box for box, packages in BOXES.items() if name in packages), None)


def arrows() -> dict[str, set[str]]:
    """Box -> the boxes that it imports, less those that are reached through another of them."""
    files = modules("megatron_drmas") | modules("checkpoints_conv")
    found: dict[str, set[str]] = {box: set() for box in BOXES}
    for module, path in files.items():
        own = box_of(module)
        for other in map(box_of, imports(path, set(files))):
            if own and other and own != other:
                found[own].add(other)

    def reached(box: str) -> set[str]:
        return found[box].union(*map(reached, found[box]))

    return {box: {to for to in direct if not any(to in reached(via) for via in direct)} for box, direct in found.items()}


def drawing() -> str:
    """The block of Mermaid."""
    number = {box: f"b{index}" for index, box in enumerate(BOXES)}
    lines = ["```mermaid", "flowchart TB"]
    for box, packages in BOXES.items():
        lines.append(f'    {number[box]}["<b>{box}</b><br>{", ".join(packages)}"]')
    for box, below in arrows().items():
        lines += [f"    {number[box]} --> {number[to]}" for to in BOXES if to in below]
    return "\n".join([*lines, "```"]) + "\n"


def with_drawing(page: str) -> str:
    """A page with the drawing as it should be between its two marks."""
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        sys.exit(f"the page has no place for the drawing: {BEGIN.strip()} … {END.strip()}")
    return before + mark + drawing() + end + after


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.package_map", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "architecture.md")
    page = parser.parse_args().page
    page.write_text(with_drawing(page.read_text()))


if __name__ == "__main__":
    main()
