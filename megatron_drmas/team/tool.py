"""Tools: what a workflow can call beside its agents, and the registry of those that any environment may use.

    @register_tool("calculator", timeout_s=1.0)
    async def calculator(expression: str) -> str:
        \"\"\"The value of an arithmetic expression.\"\"\"

A workflow calls it with `await context.tool("calculator", expression="6 * 7")`.
"""

import asyncio
import inspect
import time
from dataclasses import dataclass
from typing import Any, Awaitable, Callable, Optional, get_type_hints

from megatron_drmas.team.trajectory import TrajectoryFailure

ToolFunction = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Tool:
    """A coroutine with a name, typed arguments, a time limit and a cost.

    Attributes:
        name: what a workflow calls it by.
        function: an async function; its docstring's first line describes the tool, its annotations type the arguments.
        timeout_s: seconds after which a call ends its trajectory; None: the function limits itself.
        cost: of one call, in whatever unit the team is charged in; logged, never taken from a reward by itself.
        cause: under which a trajectory that a call ended is counted.
    """

    name: str
    function: ToolFunction
    timeout_s: Optional[float] = 60.0
    cost: float = 0.0
    cause: str = "tool"

    def __post_init__(self):
        if not inspect.iscoroutinefunction(self.function):
            raise TypeError(f"tool {self.name!r} is not a coroutine function: define it with async def")

    @property
    def description(self) -> str:
        """The docstring's first line."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The arguments by name."""
        return dict(inspect.signature(self.function).parameters)

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        """Call it.

        Raises:
            TypeError: arguments that it does not take, or of another type than it says: the workflow is at fault.
            TrajectoryFailure: it did not end in time, or raised: the trajectory is masked out.
        """
        self._check(arguments)
        began = time.monotonic()
        try:
            return await asyncio.wait_for(self.function(**arguments), self.timeout_s)
        except TrajectoryFailure:
            raise
        except asyncio.TimeoutError as error:
            raise TrajectoryFailure(self.cause, f"tool {self.name!r} did not end in {time.monotonic() - began:.1f} s") from error
        except Exception as error:
            raise TrajectoryFailure(self.cause, f"tool {self.name!r} failed: {type(error).__name__}: {error}") from error

    def _check(self, arguments: dict[str, Any]) -> None:
        try:
            inspect.signature(self.function).bind(**arguments)
        except TypeError as error:
            raise TypeError(f"tool {self.name!r}: {error}; it takes {', '.join(self.parameters) or 'no arguments'}") from error
        hints = get_type_hints(self.function)
        for name, value in arguments.items():
            wanted = hints.get(name)
            if isinstance(wanted, type) and not isinstance(value, (int, float) if wanted is float else wanted):
                raise TypeError(f"tool {self.name!r}: {name} = {value!r} is not of type {wanted.__name__}")


TOOLS: dict[str, Tool] = {}


def register_tool(name: str, timeout_s: Optional[float] = 60.0, cost: float = 0.0) -> Callable[[ToolFunction], ToolFunction]:
    """Make a coroutine function available as a tool to every environment; the arguments are `Tool`'s."""

    def add(function: ToolFunction) -> ToolFunction:
        if name in TOOLS:
            raise ValueError(f"a tool named {name!r} exists already")
        TOOLS[name] = Tool(name, function, timeout_s, cost)
        return function

    return add
