"""Settings that an actor cannot use are refused before it joins a process group."""

import pytest

from megatron_drmas.actor.parallel import initialise_groups
from tests.actor.ranks import make_settings


@pytest.mark.parametrize(
    "optimizer, overrides, named",
    [
        ({"decay": "exponential"}, {}, r"policies\.policy\.optimizer\.decay='exponential'"),
        ({"lr": 1e-5, "min_lr": 1e-4}, {}, r"policies\.policy\.optimizer\.min_lr=0\.0001"),
        ({"warmup_steps": 10}, {"total_steps": 5, "updates_per_batch": 2}, r"policies\.policy\.optimizer\.warmup_steps=10"),
        ({"warmup_steps": 3, "decay_steps": 2}, {}, r"policies\.policy\.optimizer\.warmup_steps=3"),
        ({}, {"micro_batch_tokens": 0}, r"policies\.policy\.micro_batch_tokens=0"),
    ],
)
def test_an_error_names_the_key_and_the_value(optimizer, overrides, named):
    with pytest.raises(ValueError, match=named):
        make_settings("folder", optimizer=optimizer, **overrides)


def test_a_schedule_lasts_the_run_unless_told():
    assert make_settings("folder", total_steps=7, updates_per_batch=3).decay_steps == 21
    assert make_settings("folder", optimizer={"decay_steps": 4}, total_steps=7).decay_steps == 4


def test_the_number_of_processes_must_be_the_layouts():
    with pytest.raises(ValueError, match="tensor 2 x pipeline 1 x data 1 = 2 processes, but 3 were started"):
        initialise_groups(make_settings("folder", "tp2"), 0, 3, "127.0.0.1", 1)
