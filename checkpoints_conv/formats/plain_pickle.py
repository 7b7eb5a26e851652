"""Pickles read as descriptions: nothing that they name is imported or called, and nothing grows beyond the file.

pickle.Unpickler can be kept from importing, but not from hashing a key that is nested without end, or from making room for
a memo entry of any number.
"""

import pickle
import pickletools
from dataclasses import dataclass, field
from typing import Any

MARK = object()
LONGEST_NAME = 300


@dataclass(frozen=True, eq=False)
class Named:
    """A class or function, by name."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """An object that a pickle would construct: the callable, its arguments, and the state set afterwards."""

    by: Any
    arguments: tuple
    state: Any = None
    items: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the class or function that it is made by; empty where that has none."""
        return self.by.name if isinstance(self.by, Named) else ""


@dataclass(frozen=True, eq=False)
class Persistent:
    """A reference to something outside the pickle."""

    identity: Any


def load(data: bytes) -> Any:
    """The value of a pickle, made of None, bool, numbers, str, bytes, list, tuple, dict, Named, Made and Persistent.

    A dict's keys are str, int, or one of the last three by identity.  Sets are lists.

    Raises:
        pickle.UnpicklingError: it is damaged, or does something else.
    """
    stack: list = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                (value,) = stack
                return value
            _step(name, argument, stack, memo)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise pickle.UnpicklingError(f"it is not a pickle of plain values: {error}") from error
    raise pickle.UnpicklingError("it has no end")


LITERALS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING"),
    *("SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
    *("BINBYTES8", "BYTEARRAY8"),
}
EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": list}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _step(name: str, argument: Any, stack: list, memo: dict) -> None:
    if name in VALUES:
        stack.append(argument)
    elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
        memo[argument] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[argument])
    elif name in LITERALS:
        stack.append(LITERALS[name])
    elif name in EMPTY:
        stack.append(EMPTY[name]())
    elif name in TUPLES:
        stack[-TUPLES[name] :] = [tuple(stack[-TUPLES[name] :])]
    elif name == "MARK":
        stack.append(MARK)
    elif name == "TUPLE":
        values = _marked(stack)
        stack.append(tuple(values))
    elif name in ("LIST", "FROZENSET"):
        values = _marked(stack)
        stack.append(values)
    elif name == "DICT":
        values = _marked(stack)
        stack.append({})
        _set(stack[-1], values)
    elif name in ("SETITEM", "SETITEMS"):
        values = _marked(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
        _set(stack[-1], values)
    elif name in ("APPEND", "APPENDS", "ADDITEMS"):
        values = [stack.pop()] if name == "APPEND" else _marked(stack)
        if isinstance(stack[-1], list):
            stack[-1].extend(values)
    elif name == "GLOBAL":
        stack.append(_named(*argument.split(" ")))
    elif name == "STACK_GLOBAL":
        stack[-2:] = [_named(*stack[-2:])]
    elif name in ("REDUCE", "NEWOBJ"):
        stack[-2:] = [Made(*stack[-2:])]
    elif name == "NEWOBJ_EX":
        stack[-3:] = [Made(*stack[-3:-1])]
    elif name == "BUILD":
        state = stack.pop()
        if isinstance(stack[-1], Made):
            stack[-1].state = state
    elif name == "BINPERSID":
        stack.append(Persistent(stack.pop()))
    elif name == "PERSID":
        stack.append(Persistent(argument))
    elif name not in ("PROTO", "FRAME"):
        raise ValueError(f"it uses {name}")


def _named(module: Any, name: Any) -> Named:
    if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > LONGEST_NAME:
        raise ValueError("a class has no name")
    return Named(module, name)


def _marked(stack: list) -> list:
    """Pop everything above the last mark, and the mark."""
    at = len(stack) - 1
    while stack[at] is not MARK:
        at -= 1
        if at < 0:
            raise ValueError("a mark is missing")
    values = stack[at + 1 :]
    del stack[at:]
    return values


def _set(target: Any, values: list) -> None:
    items = target.items if isinstance(target, Made) else target
    for key, value in zip(values[::2], values[1::2], strict=True):
        if not isinstance(key, (str, int, Named, Made, Persistent)):
            raise ValueError(f"a {type(key).__name__} is a key")
        items[key] = value
