"""Reads a pickle as plain data: imports nothing, calls nothing, bounded in time and memory.

Python's unpickler runs code that the file names. This one supports only the opcodes of state dicts and their metadata;
an object becomes a `PickledObject` with the names and arguments in the file. Keys of dicts are strings, integers and
`PickledObject`s only: hashing nested tuples can take exponential time. Not supported: protocols 0 and 1.
"""

import io
import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from rowwise.base.errors import CheckpointError

MAX_INSTRUCTIONS = 10_000_000  # about 150,000 chunks of tensors, 20 seconds and a gigabyte
MAX_KEY = 1 << 60  # larger integers can be chosen to collide in a dict
ORDERED = ("collections", "OrderedDict")


class GlobalName(NamedTuple):
    """The module and name of a class or function in a pickle."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object of a pickle as data: its constructor, arguments and state."""

    kind: GlobalName
    args: tuple[Any, ...] = field(default=(), repr=False)
    state: Any = field(default=None, repr=False)


def read_pickle(content: bytes | io.BytesIO, allowed: Collection[tuple[str, str]] | None) -> Any:
    """The content of a pickle; `allowed`: the accepted (module, name) pairs, None for all."""
    machine = _Machine(allowed)
    content = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        for count, (opcode, arg, _) in enumerate(pickletools.genops(content)):
            if count > MAX_INSTRUCTIONS:
                raise CheckpointError(f"it has more than {MAX_INSTRUCTIONS:,} instructions")
            action = ACTIONS.get(opcode.name)
            if action is None:
                raise CheckpointError(f"it has the opcode {opcode.name}, which no state dict has")
            action(machine, arg)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"it is not a pickle, or damaged: {str(error)[:80]!r}") from None
    return machine.result


@final
class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self, allowed: Collection[tuple[str, str]] | None) -> None:
        self._allowed = allowed
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self.stack: list[Any] = []
        self.result: Any = None

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self, _: None) -> None:
        self._marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        at = self._marks.pop()
        values = self.stack[at:]
        del self.stack[at:]
        return values

    def take(self, count: int) -> tuple[Any, ...]:
        if count > len(self.stack) - (self._marks[-1] if self._marks else 0):
            raise IndexError("its stack is empty")
        values = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return values

    def name(self, module: Any, name: Any) -> None:
        global_name = GlobalName(module, name)
        if not (isinstance(module, str) and isinstance(name, str)):
            raise CheckpointError("it has a name that is not text")
        if self._allowed is not None and global_name not in self._allowed:
            raise CheckpointError(f"it names {f'{module}.{name}'[:80]!r}, which is not allowed in such a file")
        self.push(global_name)

    def make(self) -> None:
        kind, args = self.take(2)
        if not isinstance(kind, GlobalName) or type(args) is not tuple:
            raise CheckpointError(f"it calls a {type(kind).__name__}")
        self.push({} if kind == ORDERED and not args else PickledObject(kind, args))

    def build(self) -> None:
        (state,) = self.take(1)
        target = self.stack[-1]
        if isinstance(target, dict):  # attributes of a state dict, such as _metadata: ignored
            return
        if not isinstance(target, PickledObject) or target.state is not None:
            raise CheckpointError(f"it changes a {type(target).__name__}")
        target.state = state

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise CheckpointError(f"it appends to a {type(target).__name__}")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise CheckpointError(f"it sets items of a {type(target).__name__}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | int | PickledObject) or (isinstance(key, int) and abs(key) > MAX_KEY):
                raise CheckpointError(f"a key of a dict is a {type(key).__name__}", "text or a number below 2**60")
            target[key] = value

    def remember(self, index: int | None) -> None:
        if index is None or index == len(self._memo):
            self._memo.append(self.stack[-1])
        elif 0 <= index < len(self._memo):
            self._memo[index] = self.stack[-1]
        else:
            raise IndexError("its memo has holes")

    def recall(self, index: int) -> None:
        self.push(self._memo[index])

    def stop(self, _: None) -> None:
        (self.result,) = self.take(1)


def _constant(value: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(value)


def _tuple(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(machine.take(count))


ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, size: None,
    "STOP": _Machine.stop,
    "MARK": _Machine.mark,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_SET": lambda machine, _: machine.push(
        PickledObject(GlobalName("builtins", "set"))
    ),  # torch pickles empty sets only
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "APPEND": lambda machine, _: machine.append(list(machine.take(1))),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items(list(machine.take(2))),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "MEMOIZE": _Machine.remember,
    "GLOBAL": lambda machine, both: machine.name(*both.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(*machine.take(2)),
    "REDUCE": lambda machine, _: machine.make(),
    "NEWOBJ": lambda machine, _: machine.make(),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": lambda machine, _: machine.push(PickledObject(GlobalName("", "persistent id"), machine.take(1))),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING"), _Machine.push),
}
