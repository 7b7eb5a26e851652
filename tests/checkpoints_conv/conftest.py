from pathlib import Path
from typing import Callable, Iterator

import pytest

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
