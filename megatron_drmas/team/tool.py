"""Tools: what a workflow calls in addition to its agents.

An environment brings its own, as methods:

    class Library(Environment):
        @tool("look_up", timeout_s=30.0)
        async def look_up(self, title: str) -> list[str]:
            \"\"\"The books with a title.\"\"\"

and any environment can use those that are registered by themselves:

    @register_tool("calculator", timeout_s=1.0)
    async def calculator(expression: str) -> str:
        \"\"\"The value of an arithmetic expression.\"\"\"

A workflow names the tools that it needs in `Workflow.tools` and calls one with
`await context.tool("calculator", expression="6 * 7")`.  A function with a parameter `question` is given the trajectory's
question there.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_type_hints

from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import ServiceFailure, TrajectoryFailure

ToolFunction = Callable[..., Awaitable[Any]]
QUESTION = "question"  # the parameter that is filled in


@dataclass(frozen=True)
class Tool:
    """A coroutine function with a name, typed arguments and a time limit.

    Attributes:
        name: what a workflow calls it by.
        function: its docstring's first line describes the tool, its annotations type the arguments.
        timeout_s: seconds after which a call ends its trajectory; None: the function limits itself.
        cause: under which a trajectory that a call ended is counted.
    """

    name: str
    function: ToolFunction
    timeout_s: float | None = 60.0
    cause: str = "tool"

    def __post_init__(self) -> None:
        if not inspect.iscoroutinefunction(self.function):
            raise TypeError(f"tool {self.name!r} is not a coroutine function: define it with async def")

    @property
    def description(self) -> str:
        """The docstring's first line."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The arguments that a workflow gives, by name."""
        return {name: p for name, p in inspect.signature(self.function).parameters.items() if name not in ("self", QUESTION)}

    @cached_property
    def takes_question(self) -> bool:
        """Whether the function is given the trajectory's question."""
        return QUESTION in inspect.signature(self.function).parameters

    @cached_property
    def hints(self) -> dict[str, Any]:
        """The annotated types, by argument; "return" for the result."""
        return get_type_hints(self.function)

    async def call(self, question: Question, arguments: dict[str, Any]) -> Any:
        """Call it for a trajectory.

        Raises:
            TypeError: arguments that it does not take, or of another type than it says: the workflow is at fault.
            TrajectoryFailure: it did not end in time, or raised.
        """
        self._check(arguments)
        if self.takes_question:
            arguments = {**arguments, QUESTION: question}
        try:
            return await asyncio.wait_for(self.function(**arguments), self.timeout_s)
        except (TrajectoryFailure, ServiceFailure):
            raise
        except TimeoutError as error:
            limit = "in time" if self.timeout_s is None else f"in {self.timeout_s:g} s"
            raise TrajectoryFailure(self.cause, f"tool {self.name!r} did not end {limit}") from error
        except Exception as error:  # whatever a user's tool, or a library that it calls, raises
            raise TrajectoryFailure(self.cause, f"tool {self.name!r} failed: {type(error).__name__}: {error}") from error

    def _check(self, arguments: dict[str, Any]) -> None:
        needed = {name for name, parameter in self.parameters.items() if parameter.default is inspect.Parameter.empty}
        if needed - arguments.keys() or arguments.keys() - self.parameters.keys():
            raise TypeError(
                f"tool {self.name!r} takes {', '.join(self.parameters) or 'no arguments'}, not {', '.join(arguments) or 'none'}"
            )
        for name, value in arguments.items():
            wanted = self.hints.get(name)
            if isinstance(wanted, type) and not isinstance(value, (int, float) if wanted is float else wanted):
                raise TypeError(f"tool {self.name!r}: {name} = {value!r} is not of type {wanted.__name__}")


TOOLS: dict[str, Tool] = {}


def register_tool(name: str, timeout_s: float | None = 60.0) -> Callable[[ToolFunction], ToolFunction]:
    """Make a coroutine function available to every environment as a tool."""

    def add(function: ToolFunction) -> ToolFunction:
        if name in TOOLS:
            raise ValueError(f"a tool named {name!r} exists already")
        TOOLS[name] = Tool(name, function, timeout_s)
        return function

    return add


def tool(name: str, timeout_s: float | None = 60.0, cause: str = "tool") -> Callable[[ToolFunction], ToolFunction]:
    """Mark an environment's method as a tool; the arguments are `Tool`'s."""

    def mark(method: ToolFunction) -> ToolFunction:
        method.__dict__["tool"] = Tool(name, method, timeout_s, cause)
        return method

    return mark


def tools_of(owner: type) -> dict[str, Tool]:
    """The tools among a class's methods, unbound, by name."""
    methods = [getattr(owner, attribute) for attribute in dir(owner) if not attribute.startswith("__")]
    return {
        method.__dict__["tool"].name: method.__dict__["tool"] for method in methods if "tool" in getattr(method, "__dict__", {})
    }
