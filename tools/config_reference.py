"""Write docs/configuration.md, the reference of every key, from the configuration's own classes.

python -m tools.config_reference [--out docs/configuration.md]
"""

import argparse
import inspect
from pathlib import Path

from omegaconf import MISSING

from megatron_drmas.command import registries
from megatron_drmas.config.explain import default_text, type_name
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.config.setting import Key, keys_of

HEAD = """# Configuration

Every key of a run, from the classes in `megatron_drmas/config/`. `NAME` is a policy's or an agent's name.
`python -m megatron_drmas.train --explain KEY` prints the same. Made by `python -m tools.config_reference`.
"""


def reference() -> str:
    """The page's text."""
    names = registries()
    lines, section = [HEAD], None
    for key in keys_of(RunConfig):
        if key.setting is None or key.section:
            continue
        own = key.path.rpartition(".")[0] + (f" ({key.owner})" if key.owner else "")
        if own != section:
            section = own
            lines += [f"\n## {own or 'The run'}\n", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines.append(row(key, names))
    return "\n".join(lines) + "\n"


def row(key: Key, names: dict[str, list[str]]) -> str:
    """One key as a line of a table."""
    known = key.setting
    assert known is not None, f"{key.path} is declared without setting(...)"
    default = "required" if key.default == MISSING else f"`{default_text(key.default)}`"
    meaning = [inspect.cleandoc(known.meaning)]
    if known.bounds:
        meaning.append(f"In {known.bounds}.")
    if known.choices:
        meaning.append(
            "; ".join(f"`{choice}`: {text}" if text else f"`{choice}`" for choice, text in known.choices.items()) + "."
        )
    if known.registry:
        meaning.append("One of " + ", ".join(f"`{name}`" for name in sorted(names[known.registry])) + ".")
    text = ". ".join(part.rstrip(".") for part in meaning).replace("|", "\\|")
    return f"| `{key.path.rpartition('.')[2]}` | {type_name(key.type)} | {default} | {text} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.config_reference", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/configuration.md"))
    args = parser.parse_args()
    args.out.write_text(reference())


if __name__ == "__main__":
    main()
