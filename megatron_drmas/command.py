"""What every command shares: its arguments, its checks, and errors in one line."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.explain import explain
from megatron_drmas.config.load import CONFIG_DIR, compose_config, to_yaml
from megatron_drmas.config.schema import RunConfig


def command_parser(prog: str, name: str) -> argparse.ArgumentParser:
    """What every command takes.

    Args:
        prog: as a person calls it.
        name: of the recipe that is composed by default.
    """
    parser = argparse.ArgumentParser(prog=prog, description="Arguments of the form key=value override the configuration (Hydra).")
    parser.add_argument(
        "--config-name", default=name, help=f"a recipe: a file of the configuration folder, without .yaml (default: {name})"
    )
    parser.add_argument(
        "--config-dir", type=Path, help="a folder with recipes and groups of one's own, before the package's configs/"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--print", action="store_true", dest="show", help="compose, check the settings, print them, and stop; looks at no file"
    )
    mode.add_argument(
        "--check",
        action="store_true",
        help="also check the models, the data and the folders that they name, and stop; starts nothing",
    )
    mode.add_argument("--explain", metavar="KEY", help="print the meaning of a key, or of every key of a section, and exit")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


def run_command(
    prog: str,
    command: Callable[[Any], Any],
    validate: Callable[..., list[str]],
    before: Callable[[Any], Any] = lambda config: None,
    name: str = "search_hetero",
    schema: type = RunConfig,
    recipes: Path = CONFIG_DIR,
) -> int:
    """Compose and validate a command's configuration, then run it; the command's exit code.

    A `ConfigError`, also one that the command raises, becomes one line on standard error and exit code 2.

    Args:
        prog: as a person calls it.
        command: what runs.
        validate: validate(config, files=…, machine=…), whether to look at files and at this machine; what it returns is
            said as warnings.
        before: the checks that the command itself makes first; --check makes them too.
        name, schema, recipes: of `compose_config`.
    """
    short = prog.split(".")[-1]
    try:
        args = command_parser(prog, name).parse_intermixed_args()
        if args.explain is not None:
            print(explain(schema, args.explain, registries()))
            return 0
        config = compose_config(args.config_name, args.overrides, args.config_dir, schema, recipes)
        for warning in validate(config, files=not args.show, machine=not args.show and not args.check):
            print(f"{short}: warning: {warning}", file=sys.stderr)
        if args.show:
            print(f"# {short}: the settings go together; files, models and this machine were not looked at (--check does)")
            print(to_yaml(config), end="")
        elif args.check:
            before(config)
            print(f"{short}: settings, models, data and folders are in order; nothing was started, and no server was asked")
        else:
            command(config)
    except ConfigError as error:
        print(f"{short}: {error}", file=sys.stderr)
        return 2
    return 0


def registries() -> dict[str, list[str]]:
    """The names that are registered, by the registry that a setting names."""
    import megatron_drmas.environments
    import megatron_drmas.weight_sync
    import megatron_drmas.workflows  # noqa: F401  registers
    from megatron_drmas.algorithm.estimators import ESTIMATORS
    from megatron_drmas.algorithm.losses import LOSSES
    from megatron_drmas.environments.base import ENVIRONMENTS
    from megatron_drmas.team.parsing import PARSERS
    from megatron_drmas.team.workflow import WORKFLOWS
    from megatron_drmas.weight_sync.transport import TRANSPORTS

    found: dict[str, dict[str, Any]] = {
        "estimator": ESTIMATORS,
        "loss": LOSSES,
        "environment": ENVIRONMENTS,
        "parser": PARSERS,
        "workflow": WORKFLOWS,
        "transport": {"auto": None, **TRANSPORTS},
    }
    return {registry: list(names) for registry, names in found.items()}
