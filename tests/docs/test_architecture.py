"""The packages in docs/architecture.md are those of the import order, in that order."""

import re
import tomllib


def test_the_table_is_the_import_order(repository):
    contract = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [{name.strip().removeprefix("megatron_drmas.") for name in layer.split("|")} for layer in contract["layers"]]
    text = (repository / "docs" / "architecture.md").read_text().partition("## Packages")[2]
    rows = [set(re.findall(r"`(\w+)`", cell)) for cell in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)]
    flat = [name for row in rows for name in sorted(row)]
    assert sorted(flat) == sorted(name for layer in layers for name in layer if name != "checkpoints_conv")
    place = {name: number for number, layer in enumerate(layers) for name in layer}
    assert [place[name] for name in flat] == sorted(place[name] for name in flat)
