"""Plug-ins: Python files and modules of a user's own, imported for what they register.

A plug-in adds workflows, environments, tools, parsers, estimators, losses, rewards or transports with the decorators of the
registries (see docs/plugins.md).  It is imported before the configuration is checked, and in every process of a run.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_drmas.config.errors import ConfigError

VARIABLE = "MEGATRON_DRMAS_PLUGINS"


def import_plugins(plugins: Sequence[str], folder: Path | None = None) -> list[str]:
    """Import plug-ins, each once in a process.

    Args:
        plugins: paths of Python files, or names of modules that Python finds.
        folder: where a relative path is looked for after the working directory: the configuration's folder.

    Returns:
        The same with absolute paths, for `plugin_environment`.

    Raises:
        ConfigError: a plug-in does not exist, or its import fails; names the file and line.
    """
    resolved = []
    for plugin in plugins:
        name, path = plugin, None
        if plugin.endswith(".py") or os.sep in plugin:
            path = next((p for p in (Path(plugin), (folder or Path()) / plugin) if p.is_file()), None)
            if path is None:
                looked = f"{Path.cwd()}" + (f" and {folder}" if folder else "")
                raise ConfigError(
                    "plugins", plugin, f"no such file in {looked}", "give the path of a Python file, or a module's name"
                )
            path = path.resolve()
            name = path.stem
            if not name.isidentifier():
                raise ConfigError("plugins", plugin, "is not the name of a Python module", "use letters, digits and underscores")
        try:
            _import(name, path)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                "plugins", plugin, f"its import failed: {_where(error, path)}{type(error).__name__}: {error}", "correct it"
            ) from error
        resolved.append(str(path) if path else plugin)
    return resolved


def plugin_environment(plugins: Sequence[str]) -> dict[str, str]:
    """The variable with a process's plug-ins; `import_plugins_of_process` reads it."""
    return {VARIABLE: json.dumps(list(plugins))} if plugins else {}


def import_plugins_of_process() -> None:
    """Import the plug-ins that this process was started with."""
    import_plugins(json.loads(os.environ.get(VARIABLE, "[]")))


def _import(name: str, path: Path | None) -> None:
    if path is None:
        importlib.import_module(name)
        return
    loaded = sys.modules.get(name)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        if file and Path(file).resolve() == path:
            return
        raise ConfigError("plugins", str(path), f"a module named {name!r} is loaded already", "give the file another name")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _where(error: BaseException, path: Path | None) -> str:
    trace, line = error.__traceback__, None
    while trace is not None:
        if path is not None and trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"line {line}: " if line else ""
