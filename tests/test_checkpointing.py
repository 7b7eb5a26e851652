"""A run's checkpoint is there whole or not at all, and continues only the run that made it."""

import asyncio
import json

import pytest

from megatron_drmas.checkpointing import Checkpoints
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config, to_dict


def save(checkpoints, step, config, fail=False):
    async def write(folder):
        (folder / "weights").write_text(str(step))
        if fail:
            raise OSError("disk full")

    return asyncio.run(checkpoints.save(step, {"config": config, "sampler": {"cursor": step}}, write))


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def test_the_newest_complete_one_is_found_and_old_ones_go(checkpoints):
    for step in (1, 2, 10):
        save(checkpoints, step, {"seed": 0})
    folder, state = checkpoints.latest({"seed": 0})
    assert state["step"] == 10 and (folder / "weights").read_text() == "10"
    assert [path.name for path in checkpoints.complete()] == ["step_000002", "step_000010"]


def test_a_write_that_fails_leaves_the_one_before(checkpoints):
    save(checkpoints, 1, {"seed": 0})
    with pytest.raises(OSError):
        save(checkpoints, 2, {"seed": 0}, fail=True)
    assert checkpoints.latest({"seed": 0})[1]["step"] == 1
    save(checkpoints, 2, {"seed": 0})
    assert checkpoints.latest({"seed": 0})[1]["step"] == 2


def test_a_step_can_be_saved_again(checkpoints):
    save(checkpoints, 1, {"seed": 0})
    save(checkpoints, 1, {"seed": 0})
    assert len(checkpoints.complete()) == 1


def test_no_checkpoint_is_no_error(checkpoints):
    assert checkpoints.latest({}) is None


@pytest.mark.parametrize("override, free", [
    ("seed=1", False), ("algorithm.advantage.mean=group", False), ("policies.qwen2.optimizer.lr=1", False), ("rollout.temperature=1", False),
    ("steps=99", True), ("policies.qwen2.parallel.tensor=1", True), ("cluster.sync_timeout_s=1", True), ("evaluation.every=3", True),
])
def test_another_configuration_is_refused_by_its_key(checkpoints, override, free):
    saved = json.loads(json.dumps(to_dict(compose_config("search_hetero", []))))
    save(checkpoints, 1, saved)
    wanted = to_dict(compose_config("search_hetero", [override]))
    if free:
        assert checkpoints.latest(wanted)[1]["step"] == 1
    else:
        with pytest.raises(ConfigError, match=override.split("=")[0]):
            checkpoints.latest(wanted)
