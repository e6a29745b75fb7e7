"""A list of transforms, applied: which columns that takes, which types come out, and the columns themselves.

The same functions in training and in serving: both load the same values and call `apply`. Only `load` reads files; what
it gives is passed to all others, which are pure. Transforms follow one another, so each reads what those before it have
made; only those are run that a wanted column depends on.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, final

import msgspec
import pyarrow as pa

from rowwise.errors import DataError, SpecError
from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.reader import check_columns
from rowwise.ingest.transform.arrays import Mask, plain_kind
from rowwise.ingest.transform.classes import Onehot
from rowwise.ingest.transform.ids import Enumerate, FirstX, NGram, PositiveModulus, SigridHash, first
from rowwise.ingest.transform.mapping import MapId
from rowwise.ingest.transform.numbers import BoxCox, Bucketize, Clamp, Fill, Log1p, Logit
from rowwise.ingest.transform.pairs import Cartesian, ComputeScore, IdListTransform
from rowwise.ingest.transform.select import Sampling
from rowwise.ingest.transform.split import SplitText
from rowwise.ingest.transform.times import GetLocalHour
from rowwise.ingest.transform.transform import MEETS, RowPosition, Run, Transform
from rowwise.ingest.transform.user_function import UserFunction

AnyKind = (
    SigridHash
    | FirstX
    | PositiveModulus
    | Enumerate
    | NGram
    | MapId
    | SplitText
    | Cartesian
    | IdListTransform
    | ComputeScore
    | Bucketize
    | Clamp
    | Log1p
    | Logit
    | BoxCox
    | Fill
    | Onehot
    | GetLocalHour
    | Sampling
    | UserFunction
)
Transforms = tuple[AnyKind | str, ...]  # a text is path.py:function, short for {kind: own, function: path.py:function}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStep:
    """A transform with its inputs and outputs resolved."""

    number: int
    transform: Transform
    run: Run

    def __str__(self) -> str:
        return f"transforms[{self.number}] ({self.transform.kind})"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTransforms:
    """Transforms with what their files say inside: nothing else is needed to apply them.

    Own functions do not go to other processes: send `to_json`.
    """

    steps: tuple[ChainStep, ...]

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms as values; user functions have their source, mappings their ids."""
        return tuple(step.transform for step in self.steps)


def load(transforms: Iterable[AnyKind | Transform | str]) -> LoadedTransforms:
    """Read the files that transforms name, and run those of own functions."""
    full = [(UserFunction(function=t) if isinstance(t, str) else t).loaded() for t in transforms]
    for transform in full:
        if "" in transform.makes:
            raise transform.refuse("to='': want a name for what it makes")
    return LoadedTransforms(steps=tuple(ChainStep(number=n, transform=t, run=t.ready()) for n, t in enumerate(full)))


def serving(loaded: LoadedTransforms) -> LoadedTransforms:
    """Without what leaves rows out: who asks for a row gets an answer, and it takes no label."""
    return LoadedTransforms(steps=tuple(step for step in loaded.steps if not isinstance(step.transform, Sampling)))


def sources(loaded: LoadedTransforms, wanted: Sequence[str]) -> tuple[str, ...]:
    """The columns to read for those that are wanted, each once."""
    return _needed_steps(loaded, wanted)[1]


def unread(loaded: LoadedTransforms, wanted: Sequence[str]) -> tuple[ChainStep, ...]:
    """The transforms that no wanted column depends on."""
    needed = {step.number for step in _needed_steps(loaded, wanted)[0]}
    return tuple(step for step in loaded.steps if step.number not in needed)


def schema_after(schema: pa.Schema, loaded: LoadedTransforms, source: str = "data") -> pa.Schema:
    """All columns, those of the data and those that are made; columns that do not fit are refused here, unread."""
    kinds = {field.name: field.type for field in schema}
    for step in loaded.steps:
        _check(step, kinds, loaded, source)
        made = step.transform.types(tuple(plain_kind(kinds[name]) for name in step.transform.reads))
        kinds |= dict(zip(step.transform.makes, made, strict=True))
    return pa.schema(kinds)


def apply(
    table: pa.Table, loaded: LoadedTransforms, wanted: Sequence[str], where: RowPosition | None = None
) -> tuple[pa.Table, Mask | None]:
    """The wanted columns of rows, any number of them.

    Args:
        table: has the columns of `sources`.
        loaded: the transforms.
        wanted: columns of the table or of transforms.
        where: which rows these are.

    Returns:
        All rows, and which of them sampling keeps; None: all.
    """
    where = where or RowPosition()
    steps, names = _needed_steps(loaded, wanted)
    check_columns(names, table.schema, where.split.source)
    columns, keep_R = _TransformColumns(table), None
    for step in steps:
        transform = step.transform
        _check(step, columns.kinds(transform.reads), loaded, where.split.source)
        if isinstance(transform, Sampling):
            kept_R = transform.keeps(columns.arrays(transform.reads), where, table.num_rows)
            keep_R = kept_R if keep_R is None else keep_R & kept_R
        elif not columns.fused(transform):
            made = step.run(columns.arrays(transform.reads), where)
            columns.put(transform.makes, made)
    return columns.table(wanted), keep_R


def digest(loaded: LoadedTransforms) -> str:
    """64 letters, the same for transforms that do the same: own functions and mappings go in by their contents."""
    # As they are when they are read again: in code, 2 may stand for 2.0.
    plain = [_plain(transform) for transform in decode(to_json(loaded))]
    return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()


def to_json(loaded: LoadedTransforms) -> bytes:
    """All that applying them takes, own functions' sources too."""
    return msgspec.json.encode(loaded.transforms)


def from_json(data: bytes) -> LoadedTransforms:
    """Transforms from `to_json`. They may contain user functions, whose code is run: load only what you trust."""
    return load(decode(data))


def decode(data: bytes) -> tuple[AnyKind, ...]:
    """Transforms from `to_json` as values, without running user functions."""
    try:
        return msgspec.json.decode(data, type=tuple[AnyKind, ...])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise SpecError(f"not a list of transforms: {error}") from None


def _needed_steps(loaded: LoadedTransforms, wanted: Sequence[str]) -> tuple[list[ChainStep], tuple[str, ...]]:
    """The transforms that wanted columns depend on, in order, and the columns that these read and nothing makes."""
    open_names, steps = dict.fromkeys(wanted), list[ChainStep]()
    for step in reversed(loaded.steps):
        transform = step.transform
        if isinstance(transform, Sampling) or any(name in open_names for name in transform.makes):
            steps.append(step)
            for name in transform.makes:
                open_names.pop(name, None)
            open_names |= dict.fromkeys(transform.reads)
    return steps[::-1], tuple(open_names)


def _check(step: ChainStep, kinds: Mapping[str, pa.DataType], loaded: LoadedTransforms, source: str) -> None:
    """Refuse columns that are not there or hold something else."""
    transform = step.transform
    for name, want in zip(transform.reads, transform.wants, strict=True):
        if name not in kinds:
            later = [s for s in loaded.steps if s.number > step.number and name in s.transform.makes]
            if later:
                raise DataError(f"{source}: {step}: no column {name!r} yet: {later[0]} makes it; want that one before")
            _refuse_missing(name, kinds, f"{source}: {step}")
        if not MEETS[want](kinds[name]):
            raise DataError(f"{source}: {step}: column {name!r} holds {kinds[name]}: want {want}")
    complaint = transform.complaint(tuple(plain_kind(kinds[name]) for name in transform.reads))
    if complaint:
        names = ", ".join(f"{name!r} ({kinds[name]})" for name in transform.reads)
        raise DataError(f"{source}: {step}: column {names}: {complaint}")


def _refuse_missing(name: str, kinds: Mapping[str, pa.DataType], place: str) -> None:
    check_columns([name], pa.schema(dict(kinds)), place)


def _plain(transform: Transform) -> dict[str, Any]:
    """Values that differ from the defaults, so that a new option changes no digest; files by name alone."""
    fields = {f.name: f for f in msgspec.structs.fields(transform)}
    given = {name: value for name, value in msgspec.structs.asdict(transform).items() if value != fields[name].default}
    if isinstance(transform, UserFunction):
        given["function"] = f"{PurePath(transform.file).name}:{transform.name}"
    return {"kind": transform.kind} | {name: msgspec.to_builtins(value) for name, value in given.items()}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _DeferredFirstX:
    """The result of FirstX, not made yet: hashing takes one pass over what is not cut, without it."""

    array: pa.Array
    count: int


@final
class _TransformColumns:
    """The columns of some rows while transforms are applied to them."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._made: dict[str, pa.Array | _DeferredFirstX] = {}

    def kinds(self, names: Iterable[str]) -> dict[str, pa.DataType]:
        return {name: self._kind(name) for name in names}

    def arrays(self, names: Iterable[str]) -> tuple[pa.Array, ...]:
        return tuple(self._array(name) for name in names)

    def put(self, names: Sequence[str], arrays: Sequence[pa.Array | _DeferredFirstX]) -> None:
        """New columns, or others in the place of old ones."""
        self._made |= dict(zip(names, arrays, strict=True))

    def fused(self, transform: Transform) -> bool:
        """Put FirstX off until something needs it; do it together with a hash that follows."""
        if isinstance(transform, FirstX):
            self.put(transform.makes, [_DeferredFirstX(array=self._array(transform.column), count=transform.count)])
            return True
        cut = self._made.get(transform.column) if isinstance(transform, SigridHash) else None
        if isinstance(transform, SigridHash) and isinstance(cut, _DeferredFirstX):
            self.put(transform.makes, [transform.of_first(cut.array, cut.count)])
            return True
        return False

    def table(self, names: Sequence[str]) -> pa.Table:
        """The wanted columns; columns that no transform made are unchanged."""
        found = {name: self._array(name) if name in self._made else self._table[name] for name in names}
        return pa.table(found) if found else self._table.select([])

    def _kind(self, name: str) -> pa.DataType:
        there = self._made.get(name)
        if there is None:
            return self._table.schema.field(name).type
        return there.array.type if isinstance(there, _DeferredFirstX) else there.type

    def _array(self, name: str) -> pa.Array:
        there = self._made.get(name)
        if there is None:
            return combine_chunks(self._table[name])
        if isinstance(there, _DeferredFirstX):
            self._made[name] = there = first(there.array, there.count)
        return there
