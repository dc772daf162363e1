"""Interprets the opcodes of a pickle as data, without unpickling.

Unpickling can run any code. This interpreter imports, looks up and calls nothing. Where unpickling
would import a name or call something, the result has a ``Name`` or a ``PickledCall``, and the
callers (``torch_archive.py``, ``importer.py``) decide which of them they accept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pickletools import genops
from typing import Any

# The exceptions that malformed opcodes cause in `genops` and in the methods below.
MALFORMED = (ValueError, TypeError, LookupError, OverflowError, MemoryError)


@dataclass(frozen=True, slots=True)
class Name:
    """A name that the pickle would import from a module."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Pairs:
    """A dict, as the list of pairs that the pickle sets in it."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Members:
    """A set or frozenset, as the list of items that the pickle adds."""

    frozen: bool
    items: list[Any] = field(default_factory=list)


@dataclass(eq=False, slots=True, kw_only=True)
class PickledCall:
    """The result of ``call(*args)``, with what the pickle puts into it afterwards.

    ``state`` is set by ``__setstate__``, ``items`` are appended, ``pairs`` are set.
    """

    call: Any
    args: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outside:
    """A persistent id: an object outside the pickle, such as a storage."""

    id: Any


def read_opcodes(data: bytes) -> Any:
    """Return what a pickle describes: scalars, text, bytes, lists, tuples, and the classes above.

    The memory that it allocates is bounded by the length of ``data``. Parts of the result may be
    shared, or contain themselves.

    Raises:
        ValueError: the bytes are not a pickle, or have opcodes that plain data and instances of
            classes do not need.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in genops(data):
            if opcode.name == "STOP":
                return machine.pop()
            machine.execute(opcode.name, argument)
    except MALFORMED as error:
        raise ValueError(f"the pickle cannot be read: {error!r:.120}") from error
    raise ValueError("the pickle has no end")


class _Mark:
    """The value on the stack that marks where a list of arguments begins."""


_MARK = _Mark()


class _Machine:
    """The stack machine of pickle: a stack, and a memo of values that are used again."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self._push(_CONSTANTS[name])
        elif name in _ARGUMENTS:
            self._push(argument)
        elif name in _ACTS:
            _ACTS[name](self, argument)
        elif name not in _IGNORED:
            raise ValueError(f"opcode {name}")

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a mark in the place of a value")
        return value

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop_to_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark")
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _top(self) -> Any:
        value = self.pop()
        self._push(value)
        return value

    # -- containers -------------------------------------------------------------------------------

    def mark(self, _: Any) -> None:
        self._push(_MARK)

    def marked_tuple(self, _: Any) -> None:
        self._push(tuple(self._pop_to_mark()))

    def marked_list(self, _: Any) -> None:
        self._push(self._pop_to_mark())

    def marked_dict(self, _: Any) -> None:
        self._push(Pairs(_paired(self._pop_to_mark())))

    def frozen(self, _: Any) -> None:
        self._push(Members(frozen=True, items=self._pop_to_mark()))

    def short_tuple(self, length: int) -> None:
        self._push(tuple(reversed([self.pop() for _ in range(length)])))

    def append(self, values: list[Any]) -> None:
        target = self._top()
        if isinstance(target, PickledCall | Members):
            target = target.items
        if not isinstance(target, list):
            raise TypeError("items are added to something that is not a list")
        target += values

    def set_pairs(self, values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, Pairs | PickledCall):
            raise TypeError("pairs are set in something that is not a dict")
        target.pairs += _paired(values)

    def one_pair(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        self.set_pairs([key, value])

    # -- names and calls --------------------------------------------------------------------------

    def named(self, argument: str) -> None:
        module, name = argument.split(" ")
        self._push(Name(module, name))

    def named_from_stack(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("a name is not a text")
        self._push(Name(module, name))

    def called(self, _: Any) -> None:
        args, call = self.pop(), self.pop()
        self._push(PickledCall(call=call, args=args))

    def built(self, _: Any) -> None:
        state, target = self.pop(), self._top()
        if not isinstance(target, PickledCall):
            raise TypeError("a state is set on something that is not an instance")
        target.state = state

    def outside(self, _: Any) -> None:
        self._push(Outside(self.pop()))

    # -- memo -------------------------------------------------------------------------------------

    def remember(self, number: int | None) -> None:
        self._memo[len(self._memo) if number is None else number] = self._top()

    def recall(self, number: int) -> None:
        self._push(self._memo[number])


def _paired(values: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_ARGUMENTS = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
_IGNORED = frozenset({"PROTO", "FRAME"})
_ACTS: dict[str, Callable[[_Machine, Any], object]] = {
    "MARK": _Machine.mark,
    "POP": lambda machine, _: machine.pop(),
    "TUPLE": _Machine.marked_tuple,
    "TUPLE1": lambda machine, _: machine.short_tuple(1),
    "TUPLE2": lambda machine, _: machine.short_tuple(2),
    "TUPLE3": lambda machine, _: machine.short_tuple(3),
    "EMPTY_LIST": lambda machine, _: machine._push([]),
    "LIST": _Machine.marked_list,
    "EMPTY_DICT": lambda machine, _: machine._push(Pairs()),
    "DICT": _Machine.marked_dict,
    "EMPTY_SET": lambda machine, _: machine._push(Members(frozen=False)),
    "FROZENSET": _Machine.frozen,
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine._pop_to_mark()),
    "ADDITEMS": lambda machine, _: machine.append(machine._pop_to_mark()),
    "SETITEM": _Machine.one_pair,
    "SETITEMS": lambda machine, _: machine.set_pairs(machine._pop_to_mark()),
    "GLOBAL": _Machine.named,
    "STACK_GLOBAL": _Machine.named_from_stack,
    "REDUCE": _Machine.called,
    "NEWOBJ": _Machine.called,
    "BUILD": _Machine.built,
    "BINPERSID": _Machine.outside,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
}
