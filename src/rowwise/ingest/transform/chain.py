"""Applies a list of transforms in order: the columns to read, the resulting types, and the resulting columns.

Training and serving load the same transforms and call `apply`. Only `load` reads files; the other functions are pure. A
transform reads the results of earlier ones. Only transforms that a wanted column depends on are run.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, final

import msgspec
import pyarrow as pa

from rowwise.base.errors import DataError, SpecError
from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.kinds import FITS
from rowwise.ingest.reader import check_columns
from rowwise.ingest.transform.arrays import Mask, plain_kind
from rowwise.ingest.transform.classes import Onehot
from rowwise.ingest.transform.ids import Enumerate, FirstX, NGram, PositiveModulus, SigridHash, first
from rowwise.ingest.transform.mapping import MapId
from rowwise.ingest.transform.numbers import BoxCox, Bucketize, Clamp, Fill, Log1p, Logit
from rowwise.ingest.transform.pairs import Cartesian, ComputeScore, IdListTransform
from rowwise.ingest.transform.read import SplitText, ToNumber, ToTime, ToWhole
from rowwise.ingest.transform.select import Sampling
from rowwise.ingest.transform.times import GetLocalHour, GetLocalWeekday
from rowwise.ingest.transform.transform import RowPosition, Run, Transform
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
    | GetLocalWeekday
    | ToTime
    | ToNumber
    | ToWhole
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
    """Transforms with the contents of their files inlined.

    To send them to another process use `to_json`: a user's function cannot be pickled.
    """

    steps: tuple[ChainStep, ...]

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms as values; a user's function includes its source, a mapping its ids."""
        return tuple(step.transform for step in self.steps)


def load(transforms: Iterable[AnyKind | Transform | str]) -> LoadedTransforms:
    """Read the files that transforms name, and execute those of the user's functions."""
    full = [(UserFunction(function=t) if isinstance(t, str) else t).read_files() for t in transforms]
    for transform in full:
        if "" in transform.makes:
            raise transform.spec_error("to='': expected a name for the result")
    return LoadedTransforms(steps=tuple(ChainStep(number=n, transform=t, run=t.prepare()) for n, t in enumerate(full)))


def serving(loaded: LoadedTransforms) -> LoadedTransforms:
    """The transforms without sampling: when serving, every row gets a prediction, and column is no label."""
    return LoadedTransforms(steps=tuple(step for step in loaded.steps if not isinstance(step.transform, Sampling)))


def sources(loaded: LoadedTransforms, wanted: Sequence[str]) -> tuple[str, ...]:
    """The input columns that the wanted columns depend on."""
    return _needed_steps(loaded, wanted)[1]


def unread(loaded: LoadedTransforms, wanted: Sequence[str]) -> tuple[ChainStep, ...]:
    """The transforms that no wanted column depends on."""
    needed = {step.number for step in _needed_steps(loaded, wanted)[0]}
    return tuple(step for step in loaded.steps if step.number not in needed)


def schema_after(schema: pa.Schema, loaded: LoadedTransforms, source: str = "data") -> pa.Schema:
    """The schema after all transforms; refuses input columns of wrong types, without reading data."""
    kinds = {field.name: field.type for field in schema}
    for step in loaded.steps:
        _check(step, kinds, loaded, source)
        new_kinds = step.transform.types(tuple(plain_kind(kinds[name]) for name in step.transform.reads))
        kinds |= dict(zip(step.transform.makes, new_kinds, strict=True))
    return pa.schema(kinds)


def apply(
    table: pa.Table, loaded: LoadedTransforms, wanted: Sequence[str], where: RowPosition | None = None
) -> tuple[pa.Table, Mask | None]:
    """Compute the wanted columns.

    Args:
        table: rows with the columns of `sources`.
        loaded: the transforms.
        wanted: columns of the table or of transforms.
        where: the split of the rows.

    Returns:
        The columns of all rows, and a mask of the rows that sampling keeps; None for all.
    """
    where = where or RowPosition()
    steps, names = _needed_steps(loaded, wanted)
    check_columns(names, table.schema, where.split.source)
    columns, keep_R = _TransformColumns(lambda name: combine_chunks(table[name])), None
    for step in steps:
        transform = step.transform
        kinds = {name: columns.kind(name, table.schema) for name in transform.reads}
        _check(step, kinds, loaded, where.split.source)
        if isinstance(transform, Sampling):
            kept_R = transform.keeps(columns.arrays(transform.reads), where, table.num_rows)
            keep_R = kept_R if keep_R is None else keep_R & kept_R
        elif not columns.try_fuse(transform):
            arrays = step.run(columns.arrays(transform.reads), where)
            columns.put(transform.makes, arrays)
    return columns.table(wanted, table), keep_R


@final
class BoundTransforms:
    """Transforms without sampling, bound to a schema: `apply` for tables whose columns need no further checks.

    Args:
        schema: of the columns that are read, at least.
        loaded: the transforms, from `serving`.
        wanted: columns of the schema or of transforms.
        source: named in errors.
    """

    def __init__(
        self, schema: pa.Schema, loaded: LoadedTransforms, wanted: Sequence[str], source: str = "data"
    ) -> None:
        """Refuse columns that are missing or have wrong types."""
        self._steps, self.names = _needed_steps(loaded, wanted)
        self._wanted = tuple(dict.fromkeys(wanted))
        check_columns(self.names, schema, source)
        kinds = {name: schema.field(name).type for name in self.names}
        for step in self._steps:
            assert not isinstance(step.transform, Sampling)
            _check(step, kinds, loaded, source)
            new_kinds = step.transform.types(tuple(plain_kind(kinds[name]) for name in step.transform.reads))
            kinds |= dict(zip(step.transform.makes, new_kinds, strict=True))
        self.schema = pa.schema([(name, kinds[name]) for name in self._wanted])  # of the wanted columns
        made = {name for step in self._steps for name in step.transform.makes}
        self.makes = tuple(name for name in self._wanted if name in made)

    def __call__(self, arrays: Mapping[str, pa.Array], where: RowPosition) -> dict[str, pa.Array]:
        """The wanted columns that are made, of some rows; `arrays` are columns as `combine_chunks` returns them."""
        columns = _TransformColumns(arrays.__getitem__)
        for step in self._steps:
            if not columns.try_fuse(step.transform):
                columns.put(step.transform.makes, step.run(columns.arrays(step.transform.reads), where))
        return dict(zip(self.makes, columns.arrays(self.makes), strict=True))


def digest(loaded: LoadedTransforms) -> str:
    """A digest of 64 characters, equal for equal transforms; files count by their contents, not by their paths."""
    # Through JSON, so that 2 in code has the digest of a recipe's 2.0.
    plain = [_plain(transform) for transform in decode(to_json(loaded))]
    return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()


def to_json(loaded: LoadedTransforms) -> bytes:
    """The transforms with the contents of their files, including the source of the user's functions."""
    return msgspec.json.encode(loaded.transforms)


def from_json(data: bytes) -> LoadedTransforms:
    """Load the result of `to_json`. It executes the code of a user's functions: load only trusted data."""
    return load(decode(data))


def decode(data: bytes) -> tuple[AnyKind, ...]:
    """Decode the result of `to_json` to values, without executing code."""
    try:
        return msgspec.json.decode(data, type=tuple[AnyKind, ...])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise SpecError(f"not a list of transforms: {error}") from None


def _needed_steps(loaded: LoadedTransforms, wanted: Sequence[str]) -> tuple[list[ChainStep], tuple[str, ...]]:
    """The transforms that the wanted columns depend on, in order, and the columns of the data that they read."""
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
    """Refuse input columns that are missing or have a type that the transform does not take."""
    transform = step.transform
    for name, want in zip(transform.reads, transform.wants, strict=True):
        if name not in kinds:
            later = [s for s in loaded.steps if s.number > step.number and name in s.transform.makes]
            if later:
                raise DataError(
                    f"{source}: {step}: no column {name!r} yet: {later[0]} makes it",
                    hint="move that transform before this one",
                )
            check_columns([name], pa.schema(dict(kinds)), f"{source}: {step}")
        if not FITS[want](kinds[name]):
            raise DataError(f"{source}: {step}: column {name!r} holds {kinds[name]}", want)
    type_problem = transform.type_problem(tuple(plain_kind(kinds[name]) for name in transform.reads))
    if type_problem:
        names = ", ".join(f"{name!r} ({kinds[name]})" for name in transform.reads)
        raise DataError(f"{source}: {step}: column {names}: {type_problem}")


def _plain(transform: Transform) -> dict[str, Any]:
    """Fields that differ from their defaults, so that a new option changes no digest; a path is reduced to its name."""
    fields = {f.name: f for f in msgspec.structs.fields(transform)}
    changed = {n: value for n, value in msgspec.structs.asdict(transform).items() if value != fields[n].default}
    if isinstance(transform, UserFunction):
        changed["function"] = f"{PurePath(transform.file).name}:{transform.name}"
    return {"kind": transform.kind} | {name: msgspec.to_builtins(value) for name, value in changed.items()}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _DeferredFirstX:
    """A deferred FirstX, fused with a following SigridHash: one pass truncates and hashes."""

    array: pa.Array
    count: int


@final
class _TransformColumns:
    """The columns of some rows while transforms are applied; `read` returns an input column."""

    def __init__(self, read: Callable[[str], pa.Array]) -> None:
        self._read = read
        self._made: dict[str, pa.Array | _DeferredFirstX] = {}

    def arrays(self, names: Iterable[str]) -> tuple[pa.Array, ...]:
        return tuple(self._array(name) for name in names)

    def put(self, names: Sequence[str], arrays: Sequence[pa.Array | _DeferredFirstX]) -> None:
        """Add or replace columns."""
        self._made |= dict(zip(names, arrays, strict=True))

    def try_fuse(self, transform: Transform) -> bool:
        """Defer a FirstX, or fuse a SigridHash with a deferred FirstX; returns false if neither applies."""
        if isinstance(transform, FirstX):
            self.put(transform.makes, [_DeferredFirstX(array=self._array(transform.column), count=transform.count)])
            return True
        cut = self._made.get(transform.column) if isinstance(transform, SigridHash) else None
        if isinstance(transform, SigridHash) and isinstance(cut, _DeferredFirstX):
            self.put(transform.makes, [transform.of_first(cut.array, cut.count)])
            return True
        return False

    def table(self, names: Sequence[str], source: pa.Table) -> pa.Table:
        columns = {name: self._array(name) if name in self._made else source[name] for name in names}
        return pa.table(columns) if columns else source.select([])

    def kind(self, name: str, schema: pa.Schema) -> pa.DataType:
        """The type of a column: computed so far, or an input of this schema."""
        column = self._made.get(name)
        if column is None:
            return schema.field(name).type
        return column.array.type if isinstance(column, _DeferredFirstX) else column.type

    def _array(self, name: str) -> pa.Array:
        column = self._made.get(name)
        if column is None:
            return self._read(name)
        if isinstance(column, _DeferredFirstX):
            self._made[name] = column = first(column.array, column.count)
        return column
