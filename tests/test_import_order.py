"""The order of imports in pyproject.toml holds: every import, also one within a function, goes down the list."""

import tomllib
from pathlib import Path

import pytest

from tools.package_map import imports, modules

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def layer_of(module: str, layers: list[list[str]]) -> int | None:
    """The layer with the longest name that the module lies under."""
    matches = [
        (len(name), level)
        for level, names in enumerate(layers)
        for name in names
        if module == name or module.startswith(f"{name}.")
    ]
    return max(matches)[1] if matches else None


@pytest.mark.parametrize("contract", CONTRACTS, ids=[contract["name"].partition(":")[0] for contract in CONTRACTS])
def test_an_import_goes_down_the_list(contract):
    layers = [[name.strip() for name in line.split("|")] for line in contract["layers"]]
    files = modules("megatron_drmas") | modules("checkpoints_conv")
    seen, wrong = 0, []
    for module, path in files.items():
        own = layer_of(module, layers)
        for other in imports(path, set(files)) if own is not None else ():
            level = layer_of(other, layers)
            seen += level is not None and level != own
            if level is not None and level < own:
                wrong.append(f"{module} imports {other}, which is above it")
    assert not wrong and seen > 20


def test_every_package_has_its_place():
    layers = [[name.strip() for name in line.split("|")] for line in CONTRACTS[0]["layers"]]
    without = [name for name in modules("megatron_drmas") if name != "megatron_drmas" and layer_of(name, layers) is None]
    assert without == []
