"""A resumed actor goes on as if nothing had happened; a step that cannot be made changes nothing."""

import errno
import math
import os
import re
import threading

import pytest
import torch

from tests.actor.ranks import make_batch, make_settings, make_tree_batch, save

KEYS = ("loss", "grad_norm", "entropy", "lr")


def train(actor, seeds):
    return [{key: report[key] for key in KEYS} for report in (actor.update(make_tree_batch(seed), seed) for seed in seeds)]


def weights_of(actor):
    return {name: parameter.detach().clone() for name, parameter in actor.model.named_parameters()}


def states_of(actor):
    """What the optimizer keeps of every parameter, and the steps of the schedule."""
    states = [
        [state[key].clone() for key in ("step", "exp_avg", "exp_avg_sq")]
        for part in actor.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
    ]
    return states, actor.schedule.num_steps


def train_save_train(actor, folder, before, after):
    train(actor, before)
    save(actor, folder)
    return train(actor, after), weights_of(actor), states_of(actor)


def load_train(actor, folder, after):
    actor.load(folder)
    return train(actor, after), weights_of(actor), states_of(actor)


@pytest.mark.parametrize(
    "layout, precision",
    [("tp1", "fp32"), ("tp2_sp", "fp32"), ("pp2", "fp32"), ("dp2", "fp32"), ("tp2_sp", "bf16"), ("pp2", "bf16")],
)
def test_resume_is_bit_exact_in_fresh_processes(fresh_ranks, models, tmp_path, layout, precision):
    settings = make_settings(models["llama"], layout, precision, {"decay": "cosine"}, updates_per_batch=2)
    folder = str(tmp_path / "checkpoint")
    straight = fresh_ranks().run(settings, train_save_train, folder, [0, 1], [2, 3])
    resumed = fresh_ranks().run(settings, load_train, folder, [2, 3])
    for (reports, weights, states), (again, weights_again, states_again) in zip(straight, resumed, strict=True):
        assert reports == again
        torch.testing.assert_close(weights, weights_again, rtol=0, atol=0)
        torch.testing.assert_close(states, states_again, rtol=0, atol=0)


@pytest.mark.parametrize("distributed", [True, False])
def test_another_layout_continues_the_same_training(ranks, models, tmp_path, distributed):
    optimizer = {"decay": "linear", "distributed": distributed}
    folder = str(tmp_path / "checkpoint")
    straight = ranks.run(make_settings(models["llama"], "tp1", "fp32", optimizer), train_save_train, folder, [0], [1, 2])
    for layout in ("tp2", "pp2", "dp2"):
        resumed = ranks.run(make_settings(models["llama"], layout, "fp32", optimizer), load_train, folder, [1, 2])
        for report, expected in zip(resumed[0][0], straight[0][0], strict=True):
            assert report == pytest.approx(expected, rel=1e-4), layout


def test_a_checkpoint_before_the_first_step_is_complete(ranks, models, tmp_path):
    settings = make_settings(models["qwen2"], "tp2")
    straight = ranks.run(settings, train_save_train, str(tmp_path / "checkpoint"), [], [0, 1])
    resumed = ranks.run(settings, load_train, str(tmp_path / "checkpoint"), [0, 1])
    assert straight[0][0] == resumed[0][0]


def train_save_train_beside(actor, folder, before, after):
    """As `train_save_train`, but the files are written after the training that follows."""
    held, fsync = threading.Event(), os.fsync
    os.fsync = lambda file: (held.wait(60), fsync(file))
    try:
        train(actor, before)
        actor.begin_save(folder)
        result = train(actor, after), weights_of(actor), states_of(actor)
        assert not actor.checkpoint_written() and not os.path.exists(folder)
        held.set()
        actor.finish_save()
    finally:
        os.fsync = fsync
    return result


@pytest.mark.parametrize("layout, precision", [("tp1", "fp32"), ("dp2", "bf16")])
@pytest.mark.parametrize("distributed", [True, False])
def test_what_is_trained_while_a_checkpoint_is_written_is_not_in_it(ranks, models, tmp_path, layout, precision, distributed):
    settings = make_settings(models["llama"], layout, precision, {"distributed": distributed})
    folder = str(tmp_path / "checkpoint")
    straight = ranks.run(settings, train_save_train_beside, folder, [0], [1, 2])
    for ours, theirs in zip(ranks.run(settings, load_train, folder, [1, 2]), straight, strict=True):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1:], theirs[1:], rtol=0, atol=0)


def save_on_a_full_disk(actor, folder):
    """What `checkpoint_written` comes to say on each rank; the second has no space."""
    fsync = os.fsync

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = full if actor.rank == 1 else fsync
    try:
        actor.begin_save(folder)
        while True:
            try:
                if actor.checkpoint_written():
                    return "written"
            except OSError as error:
                return str(error)
    finally:
        os.fsync = fsync


def test_a_rank_that_cannot_write_says_which_file_and_leaves_no_checkpoint(ranks, models, tmp_path):
    said = ranks.run(make_settings(models["llama"], "tp2"), save_on_a_full_disk, str(tmp_path / "checkpoint"))
    assert said[0] == "written" and not (tmp_path / "checkpoint").exists()
    file = r"checkpoint\.incomplete/__1_0\.distcp"
    assert re.search(file + r" could not be written, [\d.]+ GiB are free there: .*No space left on device", said[1])


def save_twice_and_name(actor, folder):
    save(actor, folder)
    train(actor, [0])
    save(actor, folder)


def test_saving_over_a_checkpoint_replaces_it(ranks, models, tmp_path):
    settings = make_settings(models["qwen2"])
    ranks.run(settings, save_twice_and_name, str(tmp_path / "checkpoint"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"], "something is left beside the checkpoint"
    resumed = ranks.run(settings, load_train, str(tmp_path / "checkpoint"), [])
    assert resumed[0][2][1] == 1


def test_schedule_counts_optimizer_steps(ranks, models):
    """Two optimizer steps a batch, two of warmup, cosine to min_lr over eight."""
    optimizer = {"lr": 1e-3, "min_lr": 1e-4, "decay": "cosine", "warmup_steps": 2}
    settings = make_settings(models["qwen2"], "tp1", "fp32", optimizer, total_steps=4, updates_per_batch=2)
    reports = ranks.run(settings, train, range(4))[0]

    def rate(step: int) -> float:
        if step <= 2:
            return 1e-3 * (step + 1) / 3
        return 1e-4 + 0.5 * (1e-3 - 1e-4) * (1 + math.cos(math.pi * (step - 2) / 6))

    assert [report["lr"] for report in reports] == pytest.approx([rate(step) for step in (1, 3, 5, 7)])


def train_and_compare(actor, seeds):
    before = weights_of(actor)
    train(actor, seeds)
    return [name for name, value in weights_of(actor).items() if not torch.equal(before[name], value)]


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_learning_rate_zero_leaves_the_weights(ranks, models, layout):
    assert ranks.run(make_settings(models["llama"], layout, optimizer={"lr": 0.0}), train_and_compare, [0, 1]) == [[], []]


def poisoned_between(actor, poison):
    """A good update, a poisoned one, and what the poisoned one changed."""
    actor.update(make_batch(0), 0)
    weights, states = weights_of(actor), states_of(actor)
    batch = make_batch(1)
    poison(batch)
    report = actor.update(batch, 1)
    torch.testing.assert_close(weights_of(actor), weights, rtol=0, atol=0)
    torch.testing.assert_close(states_of(actor), states, rtol=0, atol=0)
    return report, actor.update(make_batch(2), 2)


def nan_advantage_of_agent_1(batch):
    token = int(batch.response_offsets[1])
    batch.advantages[token] = math.nan


def infinite_advantage_of_agent_0(batch):
    batch.advantages[0] = math.inf


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
@pytest.mark.parametrize("poison, agent", [(nan_advantage_of_agent_1, 1), (infinite_advantage_of_agent_0, 0)])
def test_a_gradient_that_is_not_finite_skips_the_step_and_names_the_agent(ranks, models, layout, poison, agent):
    for report, after in ranks.run(make_settings(models["llama"], layout), poisoned_between, poison):
        assert report["skipped"] == 1 and report["optimizer_steps"] == 0
        assert report["nonfinite_agents"] == [agent]
        assert after["skipped"] == 0 and after["nonfinite_agents"] == [] and math.isfinite(after["grad_norm"])


CHANGED = {
    "lr": 2e-3,
    "min_lr": 2e-4,
    "decay": "linear",
    "warmup_steps": 1,
    "weight_decay": 0.3,
    "beta1": 0.8,
    "beta2": 0.95,
    "eps": 1e-3,
    "grad_clip": 0.5,
}


def load_and_tell(actor, folder):
    """What a resumed actor's optimizer is set to, and the learning rates of its next steps."""
    actor.load(folder)
    groups = [{key: group[key] for key in ("betas", "eps", "weight_decay", "lr")} for group in actor.optimizer.param_groups]
    return groups, actor.optimizer.config.clip_grad, [report["lr"] for report in train(actor, [2, 3, 4, 5])]


@pytest.mark.parametrize("distributed", [True, False])
def test_a_changed_optimizer_and_a_longer_run_take_effect_after_a_checkpoint(ranks, models, tmp_path, distributed):
    """Two of ten steps at a constant rate, then the rest of a run of six with a linear decay and other settings."""
    folder = str(tmp_path / "checkpoint")
    before = {"weight_decay": 0.01, "distributed": distributed}
    ranks.run(make_settings(models["llama"], "dp2", optimizer=before), train_save_train, folder, [0, 1], [])
    settings = make_settings(models["llama"], "dp2", optimizer=CHANGED | {"distributed": distributed}, total_steps=6)
    groups, clip, rates = ranks.run(settings, load_and_tell, folder)[0]
    linear = [2e-4 + 1.8e-3 * (1 - (step - 1) / 5) for step in (2, 3, 4, 5)]
    assert rates == pytest.approx(linear) and clip == 0.5
    assert {group["weight_decay"] for group in groups} <= {0.3, 0.0} and 0.3 in [group["weight_decay"] for group in groups]
    for group in groups:
        assert (tuple(group["betas"]), group["eps"], group["lr"]) == ((0.8, 0.95), 1e-3, pytest.approx(linear[0]))


def test_a_longer_run_stretches_the_schedule(ranks, models, tmp_path):
    """The rates of steps 3 and 4 are those of a run that was that long from the start."""
    folder, cosine = str(tmp_path / "checkpoint"), {"decay": "cosine"}
    ranks.run(make_settings(models["llama"], optimizer=cosine, total_steps=2), train_save_train, folder, [0, 1], [])
    longer = make_settings(models["llama"], optimizer=cosine, total_steps=4)
    resumed = ranks.run(longer, load_train, folder, [2, 3])[0][0]
    straight = ranks.run(longer, train, [0, 1, 2, 3])[0]
    assert [report["lr"] for report in resumed] == [report["lr"] for report in straight[2:]]
