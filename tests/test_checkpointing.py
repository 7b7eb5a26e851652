"""A run's checkpoint is there whole or not at all, and continues only the run that made it."""

import asyncio
import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_drmas.checkpointing import Checkpoints, Saver
from megatron_drmas.cluster.process import ProcessFailure, ServiceFailure
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config, to_dict
from megatron_drmas.data.sampler import QuestionSampler
from megatron_drmas.environments.grading import GraderError
from megatron_drmas.observability.health import UnhealthyRun


def save(checkpoints, step, config, fail=False, healthy=True):
    async def write(folder):
        (folder / "weights").write_text(str(step))
        if fail:
            raise OSError("disk full")

    return asyncio.run(checkpoints.save(step, {"config": config, "sampler": {"cursor": step}, "healthy": healthy}, write))


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


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 3))
def test_the_newest_healthy_one_outlives_any_number_of_others(tmp_path_factory, healths, keep):
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints", keep)
    for step, healthy in enumerate(healths, 1):
        save(checkpoints, step, {}, healthy=healthy)
    steps = [int(path.name[5:]) for path in checkpoints.complete()]
    newest = max((step for step, healthy in enumerate(healths, 1) if healthy), default=None)
    recent = list(range(max(1, len(healths) - keep + 1), len(healths) + 1))
    assert steps == sorted({*recent} | ({newest} if newest else set()))
    assert checkpoints.latest({})[1]["step"] == len(healths), "a run that was interrupted goes on from where it was"
    assert checkpoints.stop_unhealthy() == checkpoints.latest({})[0]
    went_on = checkpoints.latest({})[1]["step"]
    assert went_on == (newest or len(healths)), "one that stopped itself goes back to when it was well"
    checkpoints.clear(after=went_on)
    assert checkpoints.complete()[-1].name == f"step_{went_on:06d}" and checkpoints.latest({})[1]["step"] == went_on
    save(checkpoints, went_on + 1, {}, healthy=False)
    assert checkpoints.latest({})[1]["step"] == went_on + 1


def test_clearing_leaves_what_a_person_has_put_aside(checkpoints):
    for step in (1, 2):
        save(checkpoints, step, {})
    (checkpoints.complete()[1].parent / "best of them").mkdir()
    checkpoints.clear(after=1)
    assert sorted(path.name for path in checkpoints.complete()[0].parent.iterdir()) == ["best of them", "passed_over_step_000002", "step_000001"]
    checkpoints.clear(after=0)
    assert checkpoints.complete() == []


class Log:
    """Of a run that was ill in step 2."""

    step = 0

    @contextlib.contextmanager
    def phase(self, name):
        yield

    def healthy(self, since):
        return not since < 2 <= self.step


@pytest.mark.parametrize("error, steps, said", [
    (UnhealthyRun("step 4 is not trained on: too many"), [1, 3], "too many; then the same command continues from step_000001"),
    (ServiceFailure("retrieval server: gone"), [1, 3], "^retrieval server: gone$"),
    (GraderError("no memory"), [1, 3], "^no memory$"),
    (ProcessFailure("actor 0: died"), [1], "^actor 0: died$"),
])
def test_a_run_that_stops_between_updates_loses_no_step(checkpoints, error, steps, said):
    sampler = QuestionSampler(10, 0)

    async def run():
        async def write(folder):
            (folder / "weights").touch()

        log = Log()
        async with Saver(checkpoints, write, log, sampler, {}, 0) as saver:
            for log.step in (1, 2, 3):
                sampler.draw(2)
                saver.updating()
                saver.updated(log.step)
                if log.step == 1:
                    await saver.save()
            sampler.draw(2)
            raise error

    with pytest.raises(type(error), match=said):
        asyncio.run(run())
    assert [int(path.name[5:]) for path in checkpoints.complete()] == steps
    states = [json.loads((path / "state.json").read_text()) for path in checkpoints.complete()]
    assert [state["sampler"]["cursor"] for state in states] == [2 * step for step in steps]
    assert [state["healthy"] for state in states] == [state["step"] != 3 for state in states]


def test_a_run_that_stops_within_an_update_saves_nothing(checkpoints):
    async def run():
        async with Saver(checkpoints, None, Log(), QuestionSampler(10, 0), {}, 0) as saver:
            saver.updated(1)
            saver.updating()
            raise UnhealthyRun("step 2 is not trained on")

    with pytest.raises(UnhealthyRun, match="the same command begins again"):
        asyncio.run(run())
    assert checkpoints.complete() == []
