"""A run's checkpoint is there whole or not at all, and continues only the run that made it."""

import asyncio
import contextlib
import json
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_drmas.checkpointing import MAY_CHANGE, OF_A_POLICY, CheckpointError, Checkpoints, Saver
from megatron_drmas.cluster.process import ProcessFailure
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config, to_dict
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.config.setting import keys_of
from megatron_drmas.data.sampler import QuestionSampler
from megatron_drmas.environments.base import ServiceFailure
from megatron_drmas.environments.grading import GraderError
from megatron_drmas.observability.health import UnhealthyRun
from megatron_drmas.run_lock import RunLockLost


def save(checkpoints, step, config, healthy=True):
    (checkpoints.begin(step) / "weights").write_text(str(step))
    checkpoints.commit(step, {"config": config, "sampler": {"cursor": step}, "healthy": healthy})
    checkpoints.rotate()


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def test_the_newest_complete_one_is_found_and_old_ones_go(checkpoints):
    for step in (1, 2, 10):
        save(checkpoints, step, {"seed": 0})
    folder, state, changes = checkpoints.latest({"seed": 0})
    assert changes == {} and state["step"] == 10 and (folder / "weights").read_text() == "10"
    assert [path.name for path in checkpoints.complete()] == ["step_000002", "step_000010"]


def test_a_step_can_be_saved_again(checkpoints):
    save(checkpoints, 1, {"seed": 0})
    save(checkpoints, 1, {"seed": 0})
    assert len(checkpoints.complete()) == 1


def test_a_damaged_state_is_passed_over_and_refused_only_where_there_is_no_other(checkpoints):
    for step in (1, 2):
        save(checkpoints, step, {"seed": 0})
    (checkpoints.complete()[1] / "state.json").write_text("{")
    folder, state, _ = checkpoints.latest({"seed": 0})
    assert folder.name == "step_000001" and state["step"] == 1
    (folder / "state.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"step_000001/state.json, .*step_000002/state.json is damaged; .*resume=never"):
        checkpoints.latest({"seed": 0})


def test_no_checkpoint_is_no_error(checkpoints):
    assert checkpoints.latest({}) is None


POLICY = "policies.qwen2."
ALLOWED = {  # override -> (old, new)
    "steps=99": (32, 99),
    "output_dir=/elsewhere": ("outputs", "/elsewhere"),
    "name=copy": ("search_hetero", "copy"),
    "evaluation.every=3": (0, 3),
    "checkpoint.keep=9": (2, 9),
    "cluster.sync_timeout_s=1": (120.0, 1.0),
    "cluster.actor_threads=2": (None, 2),
    "rollout.max_in_flight=7": (1024, 7),
    "environment.retrieval.timeout_s=1": (60.0, 1.0),
    "logging.trajectories_per_step=3": (8, 3),
    POLICY + "parallel.tensor=1": (2, 1),
    POLICY + "engine.max_num_seqs=1": (128, 1),
    POLICY + "recompute=true": (None, True),
    POLICY + "optimizer.lr=0.1": (5e-4, 0.1),
    POLICY + "optimizer.decay=linear": ("constant", "linear"),
    POLICY + "optimizer.eps=1e-5": (1e-8, 1e-5),
    POLICY + "optimizer.warmup_steps=1": (0, 1),
    POLICY + "optimizer.weight_decay=1": (0.0, 1.0),
    POLICY + "optimizer.grad_clip=2": (1.0, 2.0),
}
REFUSED = (
    "seed=1",
    "questions_per_step=3",
    "group_size=2",
    "deterministic=true",
    "algorithm.advantage.mean=group",
    "algorithm.updates_per_batch=2",
    "rollout.temperature=1",
    "rollout.max_response_tokens=9",
    "data.train=other.jsonl",
    "data.shuffle=false",
    "precision.mode=bf16",
    "environment.retrieval.topk=1",
    "team.workflow.max_turns=1",
    "team.agents.search.prompt=x",
    POLICY + "model=other",
    POLICY + "trainable=false",
    POLICY + "optimizer.distributed=false",
    "+" + POLICY + "template_options.enable_thinking=false",
)


@pytest.fixture(scope="module")
def configured():
    """The default recipe with overrides, as a checkpoint keeps it."""
    text = cache(lambda *overrides: json.dumps(to_dict(compose_config("search_hetero", list(overrides)))))
    return lambda *overrides: json.loads(text(*overrides))


@pytest.mark.parametrize("override", ALLOWED)
def test_what_may_change_is_told_with_both_values(checkpoints, configured, override):
    save(checkpoints, 1, configured())
    _, state, changes = checkpoints.latest(configured(override))
    assert state["step"] == 1 and changes == {override.split("=")[0]: ALLOWED[override]}


@pytest.mark.parametrize("override", REFUSED)
def test_what_may_not_change_is_refused_by_its_key_and_both_values(checkpoints, configured, override):
    save(checkpoints, 1, configured())
    with pytest.raises(ConfigError) as caught:
        checkpoints.latest(configured(override))
    key, _new = override.lstrip("+").split("=")
    assert (
        key in str(caught.value)
        and "was made with" in str(caught.value)
        and "resume=never" in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_every_key_that_may_change_exists():
    """A misspelled entry would refuse forever what it names."""
    keys = {key.path for key in keys_of(RunConfig)}
    assert {entry.rstrip(".") for entry in MAY_CHANGE} <= keys
    assert {f"policies.NAME.{entry.rstrip('.')}" for entry in OF_A_POLICY} <= keys


def test_a_policy_named_like_a_section_is_still_a_policy(checkpoints):
    old = {"policies": {"steps": {"model": "a", "optimizer": {"lr": 1.0}}}}
    save(checkpoints, 1, old)
    assert checkpoints.latest({"policies": {"steps": {"model": "a", "optimizer": {"lr": 2.0}}}})[2] == {
        "policies.steps.optimizer.lr": (1.0, 2.0)
    }
    with pytest.raises(ConfigError, match=r"policies.steps.model"):
        checkpoints.latest({"policies": {"steps": {"model": "b", "optimizer": {"lr": 1.0}}}})


def test_a_prefix_of_an_allowed_key_allows_nothing(checkpoints):
    save(checkpoints, 1, {"steps_of_something": 1, "name2": "a"})
    with pytest.raises(ConfigError, match="steps_of_something"):
        checkpoints.latest({"steps_of_something": 2, "name2": "a"})


def test_values_that_a_recipe_interpolates_are_no_settings_of_their_own(checkpoints):
    save(checkpoints, 1, {"variables": {"data": "/a"}, "resume": "never"})
    assert checkpoints.latest({"variables": {"data": "/b", "more": 1}, "resume": "auto"})[2] == {}


def test_fewer_steps_than_were_done_are_refused(checkpoints):
    save(checkpoints, 10, {"steps": 32})
    with pytest.raises(ConfigError, match=r"steps = 8: .* has 10 already"):
        checkpoints.latest({"steps": 8})
    assert checkpoints.latest({"steps": 10})[2] == {"steps": (32, 10)}


def test_what_a_killed_save_left_is_discarded(checkpoints, tmp_path):
    save(checkpoints, 1, {})
    (tmp_path / "checkpoints" / ".partial_step_000002" / "qwen2").mkdir(parents=True)
    checkpoints.discard_partial()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


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
    assert checkpoints.latest({})[1]["step"] == len(healths), "a run that was interrupted continues from where it was"
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
    assert sorted(path.name for path in checkpoints.complete()[0].parent.iterdir()) == [
        "best of them",
        "passed_over_step_000002",
        "step_000001",
    ]
    checkpoints.clear(after=0)
    assert checkpoints.complete() == []


class Log:
    """Of a run that was ill in step 2."""

    step = 0

    @contextlib.contextmanager
    def phase(self, name):
        yield

    background = phase

    def healthy(self, since):
        return not since < 2 <= self.step


class Policies:
    """Copy at once, and write until `go` is set."""

    def __init__(self, go=True, fails=None):
        self.go, self.fails, self.begun, self.value = asyncio.Event(), fails, [], 0
        if go:
            self.go.set()

    async def begin_save(self, folder):
        self.begun.append(folder)
        self.copy = self.value

    async def finish_save(self):
        copy = self.copy
        (self.begun[-1] / "half").touch()
        await self.go.wait()
        if self.fails:
            raise self.fails
        (self.begun[-1] / "weights").write_text(str(copy))


def saver_of(checkpoints, policies, log=None, sampler=None, confirm=lambda: None):
    return Saver(checkpoints, policies, log or Log(), sampler or QuestionSampler(10, 0), {}, 0, confirm)


@pytest.mark.parametrize(
    "error, steps, said",
    [
        (
            UnhealthyRun("step 4 is not trained on: too many"),
            [1, 3],
            "too many; then the same command continues from step_000001",
        ),
        (ServiceFailure("retrieval server: gone"), [1, 3], "^retrieval server: gone$"),
        (GraderError("no memory"), [1, 3], "^no memory$"),
        (ProcessFailure("actor 0: died"), [1], "^actor 0: died$"),
    ],
)
def test_a_run_that_stops_between_updates_loses_no_step(checkpoints, error, steps, said):
    sampler = QuestionSampler(10, 0)

    async def run():
        log = Log()
        async with saver_of(checkpoints, Policies(), log, sampler) as saver:
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
        async with saver_of(checkpoints, None) as saver:
            saver.updated(1)
            saver.updating()
            raise UnhealthyRun("step 2 is not trained on")

    with pytest.raises(UnhealthyRun, match="the same command begins again"):
        asyncio.run(run())
    assert checkpoints.complete() == []


def test_a_step_is_saved_once(checkpoints):
    """A stop that was asked for saves its step, unless it was due anyhow."""
    policies = Policies()

    async def run():
        async with saver_of(checkpoints, policies) as saver:
            for step in (1, 1, 2):
                saver.updated(step)
                await saver.save()

    asyncio.run(run())
    assert len(policies.begun) == 2 and checkpoints.latest({})[1]["step"] == 2


def test_the_next_step_goes_on_while_a_copy_is_written(checkpoints):
    policies, sampler = Policies(go=False), QuestionSampler(10, 0)

    async def run():
        async with saver_of(checkpoints, policies, sampler=sampler) as saver:
            sampler.draw(2)
            saver.updated(1)
            await saver.save()
            sampler.draw(2)
            saver.updating()
            policies.value = 1
            saver.updated(2)
            await asyncio.sleep(0.01)
            assert checkpoints.complete() == [] and (policies.begun[0] / "half").exists()
            saver.check()
            policies.go.set()
            await asyncio.wait_for(saver.settle(), 5)
            assert [path.name for path in checkpoints.complete()] == ["step_000001"]

    asyncio.run(run())
    folder, state, _ = checkpoints.latest({})
    assert (folder / "weights").read_text() == "0" and state["sampler"]["cursor"] == 2


@pytest.mark.parametrize("where", ["check", "settle", "save", "exit"])
@pytest.mark.parametrize("fails", [OSError("no space left"), ProcessFailure("actor 0: no space left")])
def test_a_write_that_fails_is_said_at_the_next_occasion_and_leaves_the_one_before(checkpoints, fails, where):
    save(checkpoints, 1, {})

    async def run():
        async with saver_of(checkpoints, Policies(fails=fails)) as saver:
            saver.updated(2)
            await saver.save()
            if where == "exit":
                return
            saver.updated(3)
            await asyncio.sleep(0.01)
            await saver.settle() if where == "settle" else saver.check() if where == "check" else await saver.save()

    with pytest.raises(CheckpointError, match="after step 2 could not be written: .*no space left"):
        asyncio.run(run())
    assert [path.name for path in checkpoints.complete()] == ["step_000001"]
    checkpoints.discard_partial()
    assert [path.name for path in checkpoints.complete()[0].parent.iterdir()] == ["step_000001"]


@pytest.mark.parametrize(
    "error, saved",
    [
        (SystemExit(), False),
        (asyncio.CancelledError(), False),
        (RunLockLost(), False),
        (ProcessFailure("engine 0: died"), True),
        (CheckpointError("of another"), True),
    ],
)
def test_a_run_that_ends_early_leaves_a_whole_checkpoint_or_none(checkpoints, error, saved):
    """A failure lets what is being written come to its end; a stop at once does not."""
    policies = Policies(go=False)

    async def run():
        async with saver_of(checkpoints, policies) as saver:
            saver.updated(1)
            await saver.save()
            asyncio.get_running_loop().call_later(0.05, policies.go.set)
            raise error

    with pytest.raises(type(error)):
        asyncio.run(run())
    assert [path.name for path in checkpoints.complete()] == ["step_000001"] * saved


def test_a_folder_that_another_run_has_taken_gets_no_checkpoint(checkpoints):
    lost = []

    def confirm():
        if lost:
            raise RunLockLost("taken")

    async def run(error=None):
        async with saver_of(checkpoints, Policies(), confirm=confirm) as saver:
            saver.updated(1)
            await saver.save()
            lost.append(True)
            if error:
                raise error

    for error in (None, UnhealthyRun("ill")):
        with pytest.raises(RunLockLost):
            asyncio.run(run(error))
        assert checkpoints.complete() == [] and not (checkpoints.begin(9).parent / "stopped_unhealthy").exists()
        lost.clear()
