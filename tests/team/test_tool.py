"""Whatever a tool does wrong costs its trajectory; a service that is gone ends the run."""

import asyncio

import pytest

from megatron_drmas.data.questions import Question
from megatron_drmas.team.tool import Tool
from megatron_drmas.team.trajectory import ServiceFailure, TrajectoryFailure


class LibraryError(Exception):
    """What a library of a user's may raise."""


def call(error, timeout_s=None):
    async def fails():
        raise error

    return asyncio.run(Tool("broken", fails, timeout_s).call(Question("1", "q", ("a",)), {}))


@pytest.mark.parametrize(
    "error", [LibraryError("no"), RuntimeError("no"), EOFError("no"), AssertionError("no"), ValueError("no"), TimeoutError()]
)
@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_an_error_of_any_kind_costs_the_trajectory_and_names_the_tool(error, timeout_s):
    with pytest.raises(TrajectoryFailure, match="'broken'"):
        call(error, timeout_s)


def test_a_service_that_is_gone_ends_the_run():
    with pytest.raises(ServiceFailure):
        call(ServiceFailure("gone"))
