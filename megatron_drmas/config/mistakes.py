"""What Hydra and OmegaConf say about a mistake, as one line that names the key and the remedy."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import SequenceMatcher
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import AgentConfig, EnvironmentConfig, PolicyConfig
from megatron_drmas.config.setting import EXTENSIONS

MAX_SUGGESTIONS = 4
MIN_LIKENESS = 0.6
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
NAME_RULE = "use letters, digits, dashes and underscores, a letter first, at most 64"


def check_names(policies: Iterable[object], agents: Iterable[object]) -> None:
    """Names that the command line can address, and that can name files, TensorBoard tags and processes.

    Raises:
        ConfigError: the first that cannot.
    """
    for section, names in (("policies", policies), ("team.agents", agents)):
        for name in names:
            if not isinstance(name, str) or not NAME.fullmatch(name):
                kind = "a policy" if section == "policies" else "an agent"
                problem = f"cannot be the name of {kind}, since the command line and files could not name it"
                raise ConfigError(section, name, problem, NAME_RULE)


def check_written_names(recipe: Any) -> None:
    """The same of a recipe's own YAML, read as it is: composing it may take a name apart, or fail for another reason.

    Raises:
        ConfigError: the first name that cannot be used.
    """

    def section(node: Any, key: str) -> dict:
        found = node.get(key) if isinstance(node, dict) else None
        return found if isinstance(found, dict) else {}

    defaults = recipe.get("defaults") if isinstance(recipe, dict) else None
    keys = [str(key) for entry in (defaults if isinstance(defaults, list) else ()) if isinstance(entry, dict) for key in entry]
    chosen = [key.partition("@policies.")[2] for key in keys if "policy@policies." in key]
    check_names([*chosen, *section(recipe, "policies")], section(section(recipe, "team"), "agents"))


def check_environment(settings: Any) -> None:
    """That the environment is registered, and that no setting is another one's.

    Raises:
        ConfigError: the environment that there is not, or the setting.
    """
    known = {name: {field.name for field in fields(declared)} for name, declared in EXTENSIONS[EnvironmentConfig].items()}
    if not isinstance(settings, DictConfig) or settings._is_none():
        return
    name = settings.get("name")
    if name not in known:
        raise ConfigError("environment.name", name, "unknown", f"choose one of: {', '.join(sorted(known))}")
    for key in map(str, settings):
        owners = [other for other, keys in known.items() if key in keys]
        if owners and name not in owners:
            problem = f"is a setting of environment {' and '.join(owners)}, not of {name}"
            raise ConfigError(f"environment.{key}", None, problem, f"leave it out: '~environment.{key}'")


def refusal(
    error: Exception, overrides: Sequence[str], known: Sequence[str], groups: dict[str, list[str]], where: str
) -> ConfigError:
    """The error of a composition that failed.

    Args:
        error: what Hydra or OmegaConf raised.
        overrides: of the command line.
        known: every key that there is, dotted.
        groups: group -> its options.
        where: the folders in which recipes and groups were looked for.
    """
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = "\n".join(map(str, chain))
    for override in overrides:  # Hydra would take such a name apart, or not read it at all
        added = re.match(r"[+~]*policy@policies\.([^=]*)=", override)
        if added:
            check_names([added[1]], [])
    key, value = _at_fault(text, overrides)
    option = re.search(r"Could not find '([\w/]+)/([^']*)'", text)
    if option:
        return _no_option(option[1], option[2], overrides, groups, where)
    if "OverrideParseException" in {type(link).__name__ for link in chain}:
        return _unreadable(overrides)
    if "looks like a config group override" in text or "your default list" in text or "in the defaults list" in text:
        return _no_default(key, value, groups)
    known = _with_named(known, key)
    policy = re.fullmatch(r"policies\.([^.]+)(\..+)?", key)
    if key == "policies" and "PolicyConfig" in text:
        return _no_policy("NAME", key, value, known, groups)
    if policy and ("is not a subclass of PolicyConfig" in text or f"policies.{policy[1]}" not in known):
        return _no_policy(policy[1], key, value, known, groups)
    agent = re.fullmatch(r"team\.agents\.([^.]+)(\..+)?", key)
    if agent and f"team.agents.{agent[1]}" not in known:
        agents = [name.split(".")[2] for name in known if re.fullmatch(r"team\.agents\.[^.]+", name)]
        problem = f"no such agent (there are {', '.join(agents) or 'none'})"
        return ConfigError(key, value, problem, "correct the name; a team with another agent is a file of team/")
    if re.search(r"Could not override|Could not delete|not in struct|Key '\S*' (is )?not in", text):
        near = nearest(key, known)
        section = key.rpartition(".")[0]
        if section.endswith(".template_options") or (section == "variables" and not near):
            return ConfigError(key, value, f"{section} has no such entry", f"add it: +{key}={value}")
        return ConfigError(key, value, "no such key", f"did you mean {_either(near)}?" if near else "--print lists every key")
    mistyped = _wrong_type(key, value, text, known)
    if mistyped:
        return mistyped
    problem = str(chain[-1]).strip().split("\n")[0]
    return ConfigError(key or "configuration", value, problem, "correct it (--print shows the composed configuration)")


def _wrong_type(key: str, value: str | None, text: str, known: Sequence[str]) -> ConfigError | None:
    """A value of another type than its key's; None: the error is about something else."""
    given = re.search(r"Value '(.*?)' ", text)
    value = given[1] if value is None and given else value
    if "could not be converted to Integer" in text:
        return ConfigError(key, value, "is not a whole number", f"write one, {key}=8")
    if "could not be converted to Float" in text:
        return ConfigError(key, value, "is not a number", f"write one, {key}=0.5 or {key}=1e-6")
    if "is not a valid bool" in text:
        return ConfigError(key, value, "is neither true nor false", f"write {key}=true or {key}=false")
    if "is not a ListConfig, list or tuple" in text:
        return ConfigError(key, value, "is not a list", f"write '{key}=[A,B]', or '{key}=[A]' for one")
    if re.search(r"is not a subclass of \w+Config", text):
        inner = [name for name in known if name.startswith(f"{key}.")][:MAX_SUGGESTIONS]
        return ConfigError(key, value, "is a group of settings, not a value", f"set its keys, such as {', '.join(inner) or key}")
    return None


def nearest(key: str, known: Iterable[str]) -> list[str]:
    """The keys that were probably meant, best first, with their whole paths."""
    candidates = ((_likeness(key, name), name) for name in known if not key.startswith(f"{name}."))
    rated = sorted(candidates, key=lambda pair: (-pair[0], pair[1].count(".")))
    best = rated[0][0] if rated else 0.0
    return [name for likeness, name in rated if likeness >= max(MIN_LIKENESS, best - 0.05)][:MAX_SUGGESTIONS]


def composed_keys(node: DictConfig, prefix: str = "") -> list[str]:
    """Every key of a configuration, sections included, dotted."""
    found = []
    for key in node:
        name = f"{prefix}{key!s}"
        found.append(name)
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            found += composed_keys(child, f"{name}.")
    return found


def _with_named(known: Sequence[str], key: str) -> list[str]:
    """Where a recipe cannot be composed, no policy and no agent is known: those that the key itself names count."""
    for pattern, section in ((r"policies\.[^.]+(?=\.)", PolicyConfig), (r"team\.agents\.[^.]+(?=\.)", AgentConfig)):
        named = re.match(pattern, key)
        if named and not any(re.match(pattern, f"{name}.") for name in known):
            return [*known, named[0], *composed_keys(OmegaConf.structured(section), f"{named[0]}.")]
    return list(known)


def _likeness(given: str, name: str) -> float:
    """1 and more: the given parts are all in the name, in order; below: how alike they are spelled."""
    parts, path = given.lower().split("."), name.lower().split(".")
    rest = iter(path)
    if all(part in rest for part in parts) and parts[-1] == path[-1]:
        return 2.0
    initials = "".join(word[:1] for word in parts[-1].split("_"))
    rest = iter(path[:-1])
    if len(initials) > 1 and initials == path[-1] and all(part in rest for part in parts[:-1]):
        return 1.0  # learning_rate for lr
    alike = [SequenceMatcher(None, given.lower(), end).ratio() for end in (name.lower(), ".".join(path[-len(parts) :]))]
    return max(alike[0], alike[1] - 0.02 * (len(path) > len(parts)))


def _at_fault(text: str, overrides: Sequence[str]) -> tuple[str, str | None]:
    """The override that an error is about, as key and value; the key that it names where it is about none."""
    given = {override: override.lstrip("+~").partition("=")[::2] for override in overrides}
    for override, (key, value) in given.items():
        if f"override {override}" in text or f"override '{override}'" in text or f": {override}\n" in text:
            return key.partition(":=")[0], value
    match = re.search(r"Could not override '([^']+)'|'([^']+)' does not exist|full_key: (\S+)", text)
    named = next((group for group in match.groups() if group), "") if match else ""
    for key, value in given.values():
        related = key == named or key.startswith(f"{named}.") or key.endswith(f".{named}") if named else key in text
        if key and related:
            return key, value
    return named, None


def _unreadable(overrides: Sequence[str]) -> ConfigError:
    parser = OverridesParser.create()
    for override in overrides:
        try:
            parser.parse_overrides([override])
        except HydraException:
            break
    key, _, value = override.lstrip("+~").partition("=")
    problem = "cannot be read as an override" if "=" in override else "is not an override, which has the form key=value"
    return ConfigError(key or "override", value, problem, "put quotes around what holds special characters: 'key=\"value\"'")


def _no_option(group: str, option: str, overrides: Sequence[str], groups: dict[str, list[str]], where: str) -> ConfigError:
    chosen = (re.match(rf"[+~]*({re.escape(group)}(?:@[^=]*)?)=(.*)", override) for override in overrides)
    key = next((match[1] for match in chosen if match and match[2] == option), group)
    if group not in groups:
        return ConfigError(key, option, f"no group of this name in {where}", _meant(nearest(group, groups), groups))
    return ConfigError(key, option, f"no such option in {where}", f"choose one of: {', '.join(groups[group])}")


def _no_default(key: str, value: str | None, groups: dict[str, list[str]]) -> ConfigError:
    group, at, package = key.partition("@")
    if group not in groups:
        return ConfigError(
            key, value, "no such group", _meant([f"{near}{at}{package}" for near in nearest(group, groups)[:1]], groups)
        )
    return ConfigError(key, value, "the recipe chooses nothing there", f"add it: +{key}={value}")


def _no_policy(name: str, key: str, value: str | None, known: Sequence[str], groups: dict[str, list[str]]) -> ConfigError:
    options = groups.get("policy", ["NAME"])
    policies = [path.split(".")[1] for path in known if re.fullmatch(r"policies\.[^.]+", path)]
    if name in policies:
        remedy = f"choose its group, policy@policies.{name}=OPTION ({', '.join(options)}), or set its keys one by one"
        return ConfigError(key, value, "a policy is not a single value", remedy)
    example = next((option for option in ("tiny", *options) if option in options), options[0])
    near = nearest(name, policies)
    meant = f"did you mean policies.{near[0]}? Otherwise " if near else ""
    return ConfigError(
        key,
        value,
        f"no such policy (there are {', '.join(policies) or 'none'})",
        f"{meant}add one with +policy@policies.{name}={example} (options: {', '.join(options)}) and policies.{name}.model=FOLDER",
    )


def _meant(near: Sequence[str], groups: dict[str, list[str]]) -> str:
    return f"did you mean {_either(near)}?" if near else f"choose one of: {', '.join(sorted(groups))}"


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
