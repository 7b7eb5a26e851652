"""The length of a schedule, and a layout that the processes are not enough for."""

import pytest

from megatron_drmas.actor.parallel import initialize_groups
from tests.actor.ranks import make_settings


def test_a_schedule_lasts_the_run_unless_told():
    assert make_settings("folder", total_steps=7, updates_per_batch=3).decay_steps == 21
    assert make_settings("folder", optimizer={"decay_steps": 4}, total_steps=7).decay_steps == 4


def test_the_number_of_processes_must_be_the_layouts():
    with pytest.raises(ValueError, match="tensor 2 x pipeline 1 x data 1 = 2 processes, but 3 were started"):
        initialize_groups(make_settings("folder", "tp2"), 0, 3, "127.0.0.1", 1)
