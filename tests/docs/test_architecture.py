"""docs/architecture.md shows the packages and imports that there are."""

import re

from tools.package_map import BOXES, arrows, layers, with_drawing


def test_the_drawing_holds_every_package_once_and_the_imports_that_there_are(repository):
    drawn = [package for packages in BOXES.values() for package in packages]
    assert sorted(drawn) == sorted(name.removeprefix("megatron_drmas.") for layer in layers() for name in layer)
    assert sum(map(len, arrows().values())) >= len(BOXES) - 1
    page = (repository / "docs" / "architecture.md").read_text()
    assert page == with_drawing(page), "run python -m tools.package_map"


def test_the_table_is_the_import_order(repository):
    order = [{name.removeprefix("megatron_drmas.") for name in layer} for layer in layers()]
    text = (repository / "docs" / "architecture.md").read_text().partition("## Packages")[2]
    rows = [set(re.findall(r"`(\w+)`", cell)) for cell in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)]
    flat = [name for row in rows for name in sorted(row)]
    assert sorted(flat) == sorted(name for layer in order for name in layer)
    place = {name: number for number, layer in enumerate(order) for name in layer}
    assert [place[name] for name in flat] == sorted(place[name] for name in flat)
