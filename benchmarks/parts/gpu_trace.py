"""What a kernel touches, recorded in Triton's interpreter: sectors, places outside of its tensors, races, atomics.

Import it after TRITON_INTERPRET=1 is set. `with watch() as seen:` around launches; `seen.launches` has one `Launch` for
each. It also makes the interpreter faster, which by itself patches `triton.language` at every call of a helper.
"""

import contextlib
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from triton.runtime import interpreter

SECTOR = 32
FIRST_LEVEL_SECTORS = 256  # 8 KB: what 32 programs of a multiprocessor have of its 256 KB
ATOMICS = ("create_atomic_rmw", "create_atomic_cas")
KEPT = ("create_masked_load", "create_masked_store", *ATOMICS, "set_grid_idx")


class _PatchOnce:
    """Stands in for the interpreter's patching of a function's `tl`: once in a launch instead of at each call."""

    def __init__(self) -> None:
        self.patch = interpreter._patch_lang
        self.scopes: list[Any] = []
        self.done: set[str] = set()
        self.depth = 0

    def __call__(self, fn: Any) -> "_PatchOnce | _Inner":
        kinds = {
            "core" if value is interpreter.tl.core else "tl"
            for value in fn.__globals__.values()
            if value is interpreter.tl or value is interpreter.tl.core
        }
        outer = not self.depth
        if outer:
            self.done = set()
        if kinds - self.done or outer:
            self.scopes.append(self.patch(fn))
            self.done |= kinds
        self.depth += outer
        return self if outer else _Inner()

    def restore(self) -> None:
        self.depth = 0
        while self.scopes:
            self.scopes.pop().restore()


class _Inner:
    def restore(self) -> None:
        pass


if not isinstance(interpreter._patch_lang, _PatchOnce):
    interpreter._patch_lang = _PatchOnce()


@dataclass
class Traffic:
    """Sectors of one tensor in one launch."""

    read: int = 0
    missed: int = 0  # of those read: not in the program's share of the first-level cache
    written: int = 0
    distinct: set[int] = field(default_factory=set)


@dataclass
class Launch:
    name: str
    programs: int
    atomics: int = 0
    by_tensor: dict[str, Traffic] = field(default_factory=dict)
    races: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)  # load, store: of places in none of the launch's tensors

    @property
    def moved_bytes(self) -> int:
        return sum(t.missed + t.written for t in self.by_tensor.values()) * SECTOR


class Seen:
    """The launches inside a `watch`."""

    def __init__(self, shuffle: int | None) -> None:
        self.launches: list[Launch] = []
        self.random = None if shuffle is None else random.Random(shuffle)
        self.order: list[int] = []
        self.program = 0
        self.names: list[tuple[int, int, str]] = []
        self.writers: dict[int, tuple[int, Any]] = {}
        self.readers: dict[int, int] = {}
        self.caches: dict[int, OrderedDict[int, None]] = {}

    def start(self, name: str, programs: int, tensors: dict[str, Any]) -> None:
        self.launches.append(Launch(name, programs))
        self.readers, self.writers, self.caches = {}, {}, {}
        self.names = []
        for key, value in tensors.items():
            if hasattr(value, "data_ptr") and value.numel():
                storage = value.untyped_storage()
                self.names.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), key))
        self.order = list(range(programs))
        if self.random is not None:
            self.random.shuffle(self.order)

    def note(self, addresses: np.ndarray, size: int, values: np.ndarray | None) -> None:
        """A load, or a store of values."""
        inside = np.zeros(len(addresses), bool)
        for begin, end, name in self.names:
            here = ~inside & (begin <= addresses) & (addresses + size <= end)
            if here.any():
                self.note_of_tensor(name, addresses[here], size, None if values is None else values[here])
                inside |= here
        if not inside.all():
            self.launches[-1].outside.add("load" if values is None else "store")

    def note_of_tensor(self, name: str, addresses: np.ndarray, size: int, values: np.ndarray | None) -> None:
        launch, found = self.launches[-1], np.unique(addresses)
        sectors = np.unique(np.concatenate([found // SECTOR, (found + size - 1) // SECTOR])).tolist()
        traffic = launch.by_tensor.setdefault(name, Traffic())
        traffic.distinct.update(sectors)
        if values is None:
            traffic.read += len(sectors)
            traffic.missed += self.missed(sectors)
            shared = [self.written_by_another(a) for a in found.tolist()]
            for a in found.tolist():
                self.readers[a] = self.program if self.readers.get(a) in (None, self.program) else -1
        else:
            traffic.written += len(sectors)
            shared = [self.stored(a, v) for a, v in zip(addresses.tolist(), values.tolist(), strict=True)]
        if any(shared):
            launch.races.add(name)

    def written_by_another(self, address: int) -> bool:
        return self.writers.get(address, (self.program,))[0] != self.program

    def stored(self, address: int, value: Any) -> bool:
        """Whether another program reads the element, or stores another value there."""
        writer, stored = self.writers.get(address, (self.program, value))
        self.writers[address] = (self.program, value)
        return (writer != self.program and stored != value) or self.readers.get(address) not in (None, self.program)

    def missed(self, sectors: list[int]) -> int:
        """The sectors that are not among the last that this program read."""
        cache, missed = self.caches.setdefault(self.program, OrderedDict()), 0
        for sector in sectors:
            missed += sector not in cache
            cache[sector] = None
            cache.move_to_end(sector)
        while len(cache) > FIRST_LEVEL_SECTORS:
            cache.popitem(last=False)
        return missed


def _recording(seen: Seen, keep: dict[str, Any]) -> dict[str, Any]:
    """Methods of the interpreter's builder that record, then do what those they replace do."""

    def note(ptrs: Any, mask: Any, value: Any) -> None:
        chosen = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
        where = ptrs.data[chosen].reshape(-1).astype(np.int64)
        if where.size:
            values = None if value is None else np.broadcast_to(value.data, ptrs.data.shape)[chosen].reshape(-1)
            seen.note(where, max(1, ptrs.get_element_ty().primitive_bitwidth // 8), values)

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        note(ptrs, mask, None)
        return keep["create_masked_load"](self, ptrs, mask, *rest)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(ptrs, mask, value)
        return keep["create_masked_store"](self, ptrs, value, mask, *rest)

    def counted(name: str) -> Any:
        def atomic(self: Any, *args: Any) -> Any:
            seen.launches[-1].atomics += 1
            return keep[name](self, *args)

        return atomic

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        _, ny, nz = self.grid_dim
        seen.program = seen.order[(x * ny + y) * nz + z]
        keep["set_grid_idx"](self, seen.program // (ny * nz), seen.program // nz % ny, seen.program % nz)

    return {
        "create_masked_load": load,
        "create_masked_store": store,
        "set_grid_idx": set_grid_idx,
        **{name: counted(name) for name in ATOMICS},
    }


@contextlib.contextmanager
def watch(shuffle: int | None = None) -> Iterator[Seen]:
    """Record all launches; `shuffle`: a seed, and programs run in a random order."""
    seen, kind, call = Seen(shuffle), type(interpreter.interpreter_builder), interpreter.GridExecutor.__call__
    keep = {name: getattr(kind, name) for name in KEPT}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        grid = self.grid(kwargs) if callable(self.grid) else self.grid
        seen.start(self.fn.__name__, int(np.prod(grid)), dict(zip(self.arg_names, args, strict=False)) | kwargs)
        return call(self, *args, **kwargs)

    for name, replaced in _recording(seen, keep).items():
        setattr(kind, name, replaced)
    interpreter.GridExecutor.__call__ = run
    try:
        yield seen
    finally:
        for name, kept in keep.items():
            setattr(kind, name, kept)
        interpreter.GridExecutor.__call__ = call
