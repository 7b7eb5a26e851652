"""Command line → configuration, through Hydra's compose API.

Every command of the package takes `[--config-name NAME] [--config-dir DIR] [--print | --check] [key=value …]`; the
key=value arguments are Hydra overrides.  The recipes and groups of DIR come before the package's own, which stay in reach.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.mistakes import check_environment, check_names, check_written_names, composed_keys, refusal
from megatron_drmas.config.plugins import import_plugins
from megatron_drmas.config.schema import EnvironmentConfig, RunConfig
from megatron_drmas.config.setting import EXTENSIONS

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
SFT_DIR = CONFIG_DIR / "sft"

# What Hydra lets through of YAML that is broken, or is not a configuration.
MALFORMED = (yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, LookupError, AssertionError, RecursionError)

SCHEMA = OmegaConf.structured(RunConfig)
OmegaConf.set_struct(SCHEMA.environment, False)  # which keys there are depends on its name: see `_typed`
ConfigStore.instance().store(name="schema", node=SCHEMA)


class PackageConfigs(SearchPathPlugin):
    """The package's recipes and groups, behind those of the folder that is composed from."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in (CONFIG_DIR, SFT_DIR):
            search_path.append("megatron_drmas", f"file://{folder}")


Plugins.instance().register(PackageConfigs)


def compose_config(
    name: str, overrides: Sequence[str], config_dir: Path | None = None, schema: type = RunConfig, recipes: Path = CONFIG_DIR
) -> Any:
    """Compose a recipe with overrides into an object of the dataclass `schema`.

    Args:
        name: of the recipe, a file <name>.yaml of `config_dir` or `recipes`.
        overrides: key=value, in Hydra's grammar.
        config_dir: a folder with recipes and groups of one's own; where a name is in both, its file counts.
        recipes: the package's own.

    Raises:
        ConfigError: unknown configuration, key or option, or a value of the wrong type.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        remedy = "give a folder of recipes and groups, or leave it out"
        raise ConfigError("--config-dir", str(config_dir), "no such folder", remedy)
    folders = list(dict.fromkeys(Path(folder).resolve() for folder in (config_dir or recipes, recipes)))
    name = name.removesuffix(".yaml")
    paths = [folder / f"{name}.yaml" for folder in folders]
    if not any(path.is_file() for path in paths):
        known = ", ".join(sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})) or "none"
        if name == "sft":
            known = f"{known}; the warm start is python -m megatron_drmas.sft"
        raise ConfigError("--config-name", name, f"no such file in {' or '.join(map(str, folders))}", f"choose one of: {known}")
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if not key:
            raise ConfigError("override", override, "names no key", "write key=value")
        if key.startswith("hydra.") and key != "hydra.searchpath":
            remedy = "leave it out; output_dir and name say where a run writes"
            raise ConfigError(key, value, "Hydra's launcher is not used here", remedy)
    where = " or ".join(map(str, dict.fromkeys([folders[0], CONFIG_DIR])))
    try:
        if schema is RunConfig:
            check_written_names(yaml.safe_load(next(path for path in paths if path.is_file()).read_bytes()))
        node = _compose(folders[0], name, overrides)
        if OmegaConf.get_type(node) is not schema:
            base = "schema" if schema is RunConfig else "sft_schema"
            problem = f"its defaults lack {base}, which says what keys there are"
            raise ConfigError("--config-name", name, problem, f"begin them with `- {base}`")
        check_names(node.get("policies") or (), (node.get("team") or {}).get("agents") or ())
        missing = sorted(OmegaConf.missing_keys(node))
        if missing:
            raise ConfigError(missing[0], None, "has no value", f"set it: {missing[0]}=VALUE")
        plain = OmegaConf.create(OmegaConf.to_container(node, resolve=False))
        if schema is RunConfig:
            plain.plugins = import_plugins(plain.plugins, folders[0])
            check_environment(plain.environment)
        config: Any = OmegaConf.to_object(OmegaConf.merge(_typed(schema, plain), plain))
    except (HydraException, OmegaConfBaseException) as error:
        groups = _groups([folders[0], CONFIG_DIR])
        raise refusal(error, overrides, _known_keys(folders[0], name, overrides, schema, groups), groups, where) from error
    except ConfigError:
        raise
    except MALFORMED as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(
            "--config-name", name, f"cannot be composed ({problem})", f"correct the YAML files in {where}, or the overrides"
        ) from error
    for field in fields(config):
        if getattr(config, field.name) is None and field.default_factory is not dataclasses.MISSING:
            raise ConfigError(field.name, "null", "is not a group of settings", f"leave it out, or choose one: {field.name}=NAME")
    return config


def _compose(folder: Path, name: str, overrides: Sequence[str]) -> Any:
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose(name, list(overrides))


def _groups(folders: list[Path]) -> dict[str, list[str]]:
    """Group -> its options, over all folders."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/**/*.yaml"):
            found.setdefault(path.parent.relative_to(folder).as_posix(), set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}


def _known_keys(folder: Path, name: str, overrides: Sequence[str], schema: type, groups: dict[str, list[str]]) -> list[str]:
    """The keys of the recipe with the chosen groups, or of the schema where those cannot be composed either.

    Raises:
        ConfigError: the recipe has a name that no key can hold.
    """
    choices = [override for override in overrides if override.lstrip("+~").partition("=")[0].partition("@")[0] in groups]
    for chosen in (choices, []):
        try:
            node = _compose(folder, name, chosen)
        except (HydraException, OmegaConfBaseException, *MALFORMED):
            continue
        check_names(node.get("policies") or (), (node.get("team") or {}).get("agents") or ())
        return [key for key in composed_keys(node) if not key.startswith("environment.")] + [
            key for key in composed_keys(_typed(schema, node)) if key.startswith("environment.")
        ]
    return composed_keys(OmegaConf.structured(schema))


def _typed(schema: type, node: Any) -> DictConfig:
    """The schema with the settings of the environment that `node` names."""
    typed = OmegaConf.structured(schema)
    if schema is RunConfig and node.get("environment"):
        typed.environment = OmegaConf.structured(
            EXTENSIONS[EnvironmentConfig].get(node.environment.get("name"), EnvironmentConfig)
        )
    return typed


def to_yaml(config: Any) -> str:
    """The configuration as YAML, interpolations resolved."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain dictionaries, lists and scalars."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(config), resolve=True))
