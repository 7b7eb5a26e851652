"""Waiting for several things at once."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any


async def together(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    """Their results, in order; the first failure is raised at once, and the others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
