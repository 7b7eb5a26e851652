"""Command line → `RunConfig`, through Hydra's compose API.

Every command of the package takes `[--config-name NAME] [--config-dir DIR] [--print] [key=value …]`; the
key=value arguments are Hydra overrides.
"""

import argparse
import dataclasses
import difflib
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Callable, Optional

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import RunConfig

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"

# What Hydra lets through of YAML that is broken, or is no configuration.
MALFORMED = (YAMLError, OSError, ValueError, TypeError, AttributeError, LookupError, AssertionError, RecursionError)

ConfigStore.instance().store(name="schema", node=RunConfig)


def compose_config(name: str, overrides: list[str], config_dir: Optional[Path] = None, schema: type = RunConfig) -> Any:
    """Compose configs/<name>.yaml with overrides into an object of the dataclass `schema`.

    Raises:
        ConfigError: unknown configuration, key or option, or a value of the wrong type.
    """
    folder = Path(config_dir or CONFIG_DIR).resolve()
    if not (folder / f"{name}.yaml").is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
        if name == "sft":
            known = f"{known}; the warm start is python -m megatron_drmas.sft"
        raise ConfigError("--config-name", name, f"no such file in {folder}", f"choose one of: {known}")
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            node = compose(name, overrides)
        missing = sorted(OmegaConf.missing_keys(node))
        if missing:
            raise ConfigError(missing[0], None, "has no value", f"set it: {missing[0]}=VALUE")
        plain = OmegaConf.create(OmegaConf.to_container(node, resolve=False))
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain))
    except (HydraException, OmegaConfBaseException) as error:
        raise _readable(error, overrides, schema) from error
    except ConfigError:
        raise
    except MALFORMED as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError("--config-name", name, f"cannot be composed ({problem})", f"correct the YAML files in {folder}, or the overrides") from error
    for field in fields(config):
        if getattr(config, field.name) is None and field.default_factory is not dataclasses.MISSING:
            raise ConfigError(field.name, "null", "is no group of settings", f"leave it out, or choose one: {field.name}=NAME")
    return config


def parse_command_line(prog: str, argv: list[str]) -> tuple[RunConfig, bool]:
    """Parse a command's arguments and compose its configuration.

    Returns:
        The configuration, and whether it is only to be printed.
    """
    parser = argparse.ArgumentParser(prog=prog, description="Arguments of the form key=value override the configuration (Hydra).")
    parser.add_argument("--config-name", default="search_hetero", help="a file of the configuration folder, without .yaml")
    parser.add_argument("--config-dir", type=Path, default=None, help="default: the repository's configs/")
    parser.add_argument("--print", action="store_true", dest="show", help="check and print the composed configuration, and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    return compose_config(args.config_name, args.overrides, args.config_dir), args.show


def run_command(prog: str, command: Callable[[RunConfig], Any]) -> int:
    """Compose and validate a command's configuration, then run it; the command's exit code.

    A `ConfigError`, also one that the command raises, becomes one line on standard error and exit code 2.
    """
    from megatron_drmas.validate import validate

    try:
        config, show = parse_command_line(prog, sys.argv[1:])
        validate(config, files=not show)
        if show:
            print(to_yaml(config), end="")
        else:
            command(config)
    except ConfigError as error:
        print(f"{prog.split('.')[-1]}: {error}", file=sys.stderr)
        return 2
    return 0


def to_yaml(config: Any) -> str:
    """The configuration as YAML, interpolations resolved."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain dictionaries, lists and scalars."""
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=True)


def _readable(error: Exception, overrides: list[str], schema: type) -> ConfigError:
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = "\n".join(map(str, chain))
    given = dict(override.lstrip("+~").partition("=")[::2] for override in overrides)
    match = re.search(r"Could not override '([^']+)'|full_key: (\S+)", text)
    key = next((group for group in match.groups() if group), "") if match else ""
    key = key if key in given else next((name for name in given if name and (not key or key.startswith(name)) and name in text), key)
    if "Could not override" in text or f"not in '{schema.__name__}'" in text or "not in struct" in text or re.search(r"Key '\S+' not in", text):
        near = difflib.get_close_matches(key, _known_keys(schema), n=1)
        return ConfigError(key, given.get(key), "no such key", f"did you mean {near[0]}?" if near else "--print lists every key")
    option = re.search(r"Could not find '(\w+)/([^']*)'", text)
    if option and (CONFIG_DIR / option[1]).is_dir():
        choices = ", ".join(sorted(path.stem for path in (CONFIG_DIR / option[1]).glob("*.yaml")))
        return ConfigError(option[1], option[2], "no such option", f"choose one of: {choices}")
    problem = str(chain[-1]).strip().split("\n")[0]
    return ConfigError(key or "configuration", given.get(key), problem, "correct it (--print shows the composed configuration)")


def _known_keys(schema: type) -> list[str]:
    def walk(node: DictConfig, prefix: str) -> list[str]:
        found = []
        for key in node:
            name = f"{prefix}{key}"
            found.append(name)
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
                found += walk(child, f"{name}.")
        return found

    return walk(OmegaConf.structured(schema), "")
