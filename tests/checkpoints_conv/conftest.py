import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoints_conv.formats import dist_plan
from tests.checkpoints_conv.commands import SIDE
from tests.checkpoints_conv.family_models import make_model
from tests.checkpoints_conv.ranks import Ranks


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """models(family, tied, …): the folder of a tiny model, made once; see `family_models.make_model`."""
    made: dict[tuple, Path] = {}

    def model(family: str, tied: bool = False, **overrides) -> Path:
        key = (family, tied, str(overrides))
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(family), family, tied, **overrides)
        return made[key]

    return model


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Four processes, for every layout of at most four ranks.  Not kept for longer: gloo's threads wake even when idle."""
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture
def folder(models, tmp_path) -> Path:
    """A copy of the tiny Qwen2 with tokenizer, chat template, and a file that is none of a model's."""
    copy = Path(shutil.copytree(models("qwen2"), tmp_path / "hf"))
    for name, text in SIDE.items():
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(text)
    (copy / "notes.txt").write_text("mine")
    return copy


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units and chunks, so that a tiny model has what a large one has."""
    monkeypatch.setattr(dist_plan, "UNIT_BYTES", 50_000)
    monkeypatch.setattr(dist_plan, "CHUNK_BYTES", 10_000)
