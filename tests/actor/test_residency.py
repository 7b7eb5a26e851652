"""An actor that goes to the host and comes back trains as if it had stayed, and what is away is refused, not read."""

import pytest
import torch

from megatron_drmas.actor.residency import NotResident
from tests.actor.ranks import make_settings, make_tree_batch, save
from tests.actor.test_actor_resume import states_of, train, weights_of


def train_with_round_trips(actor, trips, folder):
    reports = []
    for seed in range(3):
        if seed == 2:
            save(actor, folder)
        if trips:
            actor.residency.hold(False, False)
            assert actor.residency.on_device == 0
            actor.residency.hold(True, False)
            assert actor.residency.on_device == actor.residency.bytes.parameters
            actor.residency.hold(True, True)
        reports += train(actor, [seed])
    assert actor.residency.on_device == actor.residency.bytes.total
    return reports, weights_of(actor), states_of(actor)


@pytest.mark.parametrize(
    "layout, precision, distributed",
    [
        ("tp1", "fp32", False),
        ("tp1", "bf16", False),
        ("tp2_sp", "fp32", True),
        ("pp2", "bf16", True),
        ("dp2", "fp32", True),
        ("dp2", "bf16", True),
        ("dp2", "bf16", False),
    ],
)
def test_a_round_trip_before_every_step_changes_no_bit(ranks, models, tmp_path, layout, precision, distributed):
    settings = make_settings(models["llama"], layout, precision, {"distributed": distributed}, updates_per_batch=2)
    stayed = ranks.run(settings, train_with_round_trips, False, str(tmp_path / "checkpoint"))
    moved = ranks.run(settings, train_with_round_trips, True, str(tmp_path / "checkpoint"))
    for of_stayed, of_moved in zip(stayed, moved, strict=True):
        torch.testing.assert_close(of_stayed, of_moved, rtol=0, atol=0)


def bytes_by_kind(actor):
    held = actor.residency.bytes
    return held, sum(parameter.numel() for parameter in actor.model.parameters())


@pytest.mark.parametrize("precision, parameters, optimizer", [("fp32", 4, 8), ("bf16", 2, 12)])
@pytest.mark.parametrize("distributed", [True, False])
def test_every_byte_is_counted_once(ranks, models, precision, parameters, optimizer, distributed):
    settings = make_settings(models["llama"], "tp1", precision, {"distributed": distributed})
    held, count = ranks.run(settings, bytes_by_kind)[0]
    assert held.parameters == pytest.approx(parameters * count, rel=0.01)  # a buffer ends on a boundary
    assert held.gradients == pytest.approx(4 * count, rel=0.01)
    assert held.optimizer == pytest.approx(optimizer * count, rel=0.01)


def use_while_away(actor):
    said = []
    actor.residency.hold(False, False)
    for use in (lambda: actor.residency.require_whole("save"), lambda: actor.residency.require_parameters("export")):
        with pytest.raises(NotResident) as refused:
            use()
        said.append(str(refused.value))
    actor.residency.hold(True, False)
    actor.residency.require_parameters("export")
    with pytest.raises(NotResident):
        actor.residency.require_whole("save")
    actor.residency.hold(True, True)
    actor.update(make_tree_batch(0), 0)
    return said


def test_what_is_away_is_refused_by_name(ranks, models):
    said = ranks.run(make_settings(models["llama"], "tp1"), use_while_away)[0]
    assert said[0].startswith("save needs the whole actor") and said[1].startswith("export needs the actor's parameters")
