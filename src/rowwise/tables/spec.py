"""Specifications: tables with pooling, initialisation and row type; topology; wire types.

Frozen values with a strict JSON round trip and without torch, so that planning does not load it. `plan` places tables
on ranks, `ops.arena` has their memory.
"""

import enum
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

import msgspec

from rowwise.base.errors import SpecError
from rowwise.base.inside import fault_of_name, has_control
from rowwise.base.value import MAX_DIM, MAX_RANKS, check_max
from rowwise.base.value import Value as Value
from rowwise.tables.idmaps import AnyIdMap
from rowwise.tables.managed import MAX_ROWS, Managed, bucket_count, round_rows
from rowwise.tables.row_optimizers import RowOptimizer, RowWiseAdagrad, Slot, hyperparameter_fault


class Pooling(enum.StrEnum):
    """The reduction of a bag's rows to one vector."""

    SUM = "sum"
    MEAN = "mean"
    WEIGHTED = "weighted"  # sum of rows times per-id weights of the batch
    SEQUENCE = "sequence"  # no pooling: one vector for each id


class RowType(enum.StrEnum):
    """The type in which rows are stored. Arithmetic is in float32; updates are rounded stochastically.

    Rows of int4 are only looked up: `rowwise export` makes them from rows of a type that was trained.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"  # one byte a weight, and two floats (scale and offset) for each group of columns
    INT4 = "int4"  # half a byte a weight, and two floats for the row

    @property
    def facts(self) -> "RowTypeFacts":
        return ROW_TYPES[self]


class RowTypeFacts(Value, frozen=True):
    """Properties of a row type; see [Note: Row formats] in `tables/ops/_cpp/tables.h`."""

    numbers: str  # name of the torch dtype of stored rows, also in checkpoints
    weight_bits: int
    trained: bool = True  # whether updates are supported
    scaled: bool = False  # whether groups of columns have a scale and an offset, stored before the weights


ROW_TYPES = {  # in the order of `ROWWISE_ROW_TYPES` in `tables/ops/_cpp/tables.h`
    RowType.FP32: RowTypeFacts(numbers="float32", weight_bits=32),
    RowType.FP16: RowTypeFacts(numbers="float16", weight_bits=16),
    RowType.BF16: RowTypeFacts(numbers="bfloat16", weight_bits=16),
    RowType.INT8: RowTypeFacts(numbers="uint8", weight_bits=8, scaled=True),
    RowType.INT4: RowTypeFacts(numbers="uint8", weight_bits=4, scaled=True, trained=False),
}
TRAINED_TYPES = tuple(kind for kind, facts in ROW_TYPES.items() if facts.trained)


class Uniform(Value, frozen=True, tag="uniform", tag_field="kind"):
    """Uniform in [-bound, bound); without a bound, 1 / sqrt(rows)."""

    bound: float | None = None


class Normal(Value, frozen=True, tag="normal", tag_field="kind"):
    """Normal with mean 0."""

    std: float = 1.0


class Constant(Value, frozen=True, tag="constant", tag_field="kind"):
    """Every weight has the same value."""

    value: float = 0.0


Init = Uniform | Normal | Constant


class Table(Value, frozen=True):
    """An embedding table and the features that look rows up in it."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...] = ()  # empty: one feature, named like the table
    pooling: Pooling = Pooling.SUM
    optimizer: RowOptimizer = RowWiseAdagrad()
    init: Init = Uniform()
    unknown: Literal["raise", "last_row"] = "raise"  # for an id outside 0 .. rows - 1
    row_type: RowType = RowType.FP32
    column_group: int | None = None  # int8: columns that share a scale, a multiple of 16; None: all of a row
    id_map: AnyIdMap | None = None  # maps `rows` ids to fewer rows; None: each id has its own row
    managed: Managed | None = None  # ids are any 64-bit numbers, of which `rows` have a row; None: ids are row numbers

    def __post_init__(self) -> None:
        _check_types(self)
        fault = "it has a dot" if "." in self.name else fault_of_name(self.name)
        if fault:
            raise SpecError(
                f"table name {self.name[:80]!r}: {fault}",
                "a name without dots and slashes, as it names a parameter and files",
            )
        check_max(f"table {self.name!r}: ", self, dim=MAX_DIM, column_group=MAX_DIM)
        if self.rows < 1 or self.dim < 1:
            raise SpecError(f"table {self.name!r} is {self.rows} x {self.dim}", "at least one row and one column")
        # The update packs (row, contribution) into 64 bits and needs 24 of them for the contribution.
        if self.rows >= 1 << 40:
            raise SpecError(f"table {self.name!r} has {self.rows} rows", "fewer than 2**40", hint="hash the ids")
        bad = [feature for feature in self.features if has_control(feature)]
        if bad:
            raise SpecError(f"table {self.name!r}: feature {bad[0][:80]!r}", "a name without control characters")
        if len(set(self.features)) != len(self.features):
            raise SpecError(
                f"table {self.name!r} names a feature twice: {', '.join(self.features)}", "each feature once"
            )
        _check_numbers(self)
        if self.managed is not None:
            _check_managed(self)
            msgspec.structs.force_setattr(self, "rows", round_rows(self.rows))

    @property
    def buckets(self) -> int:
        """The buckets of a managed table; 1 for others."""
        return 1 if self.managed is None else bucket_count(self.rows)

    @property
    def row_multiple(self) -> int:
        """The multiple of rows at which tiles may be cut."""
        return 1 if self.managed is None else self.rows // self.buckets

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The features in lookup order."""
        return self.features or (self.name,)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as it is stored, without optimizer state."""
        return row_bytes(self.row_type, self.dim, self.column_group or 0)


def row_bytes(row_type: RowType, dim: int, column_group: int = 0) -> int:
    """Bytes of one row; `column_group=0`: all columns share a scale."""
    facts = row_type.facts
    weights_bytes = -(-facts.weight_bits * dim // 8)
    return 8 * -(-dim // (column_group or dim)) + -(-weights_bytes // 4) * 4 if facts.scaled else weights_bytes


Bits = Literal[8, 4]  # bits per weight in a quantised checkpoint


def quantised_bytes(dim: int, bits: Bits) -> int:
    """Bytes of a row in a quantised checkpoint: two floats for its range, then its codes."""
    return row_bytes(RowType.INT8 if bits == 8 else RowType.INT4, dim)


def state_slots(table: Table) -> dict[str, Slot]:
    """The optimizer state of each row, in order; names are those of torch's optimizers."""
    return table.optimizer.slots(table.dim)


def state_width(table: Table) -> int:
    """Floats of optimizer state in each row."""
    return sum(slot.width for slot in state_slots(table).values())


def stored_bytes(table: Table) -> int:
    """Bytes of all rows with their optimizer state."""
    return table.rows * (table.row_bytes + 4 * state_width(table))


def state_bytes(table: Table) -> int:
    """Bytes per row of optimizer state and, in managed tables, of id, policy and index."""
    ids = 0 if table.managed is None else table.managed.row_bytes
    return 4 * state_width(table) + ids


def _check_types(table: Table) -> None:
    """Check the types of a table built in code as strictly as those in a file; convert names of enums."""
    name = table.name
    for field, value in (("rows", table.rows), ("dim", table.dim)):
        if type(value) is not int:
            raise SpecError(f"table {name!r}: {field}={value!r}", "a whole number")
    if not isinstance(table.features, tuple) or not all(type(f) is str for f in table.features):
        raise SpecError(f"table {name!r}: features={table.features!r}", "a tuple of names, such as ('clicked',)")
    if table.unknown not in ("raise", "last_row"):
        raise SpecError(f"table {name!r}: unknown={table.unknown!r}", "'raise' or 'last_row'")
    for field, kind in (("optimizer", RowOptimizer), ("init", Init)):
        try:
            msgspec.convert(msgspec.to_builtins(getattr(table, field)), kind)
        except (msgspec.ValidationError, TypeError) as error:
            raise SpecError(f"table {name!r}: {field}: {error}") from None
    _convert_enum(f"table {name!r}", table, "pooling", Pooling)
    _convert_enum(f"table {name!r}", table, "row_type", RowType)
    group = table.column_group
    if group is not None and (table.row_type is not RowType.INT8 or type(group) is not int or group < 16 or group % 16):
        raise SpecError(
            f"table {name!r}: column_group={group!r} with rows of type {str(table.row_type)!r}",
            "a multiple of 16, for rows of type 'int8' only",
        )


def _check_managed(table: Table) -> None:
    lead = f"table {table.name!r} is managed"
    if type(table.managed) is not Managed:
        raise SpecError(f"table {table.name!r}: managed={table.managed!r}", "Managed(...)")
    if table.id_map is not None:
        raise SpecError(f"{lead} and has an id_map", "one of them")
    if not 2 <= table.rows < MAX_ROWS:
        raise SpecError(f"{lead} and has {table.rows} rows", "at least 2, and fewer than 2**32")


def _convert_enum(lead: str, owner: Value, field: str, kind: type[enum.StrEnum]) -> None:
    """Replace the name of an enum's member in a field by the member."""
    value = getattr(owner, field)
    try:
        msgspec.structs.force_setattr(owner, field, kind(value))
    except ValueError:
        choices = ", ".join(repr(str(choice)) for choice in kind)
        raise SpecError(f"{lead}: {field}={value!r}", f"one of {choices}") from None


def _check_numbers(table: Table) -> None:
    name, optimizer = table.name, table.optimizer
    numbers = msgspec.structs.asdict(optimizer) | msgspec.structs.asdict(table.init)
    numbers.pop("schedule", None)
    for field, value in numbers.items():
        expected = hyperparameter_fault(field, value)
        if expected:
            raise SpecError(f"table {name!r}: {field}={value}", expected)
    if optimizer.problem:
        raise SpecError(f"table {name!r}: {optimizer.problem}")


Link = Literal["host", "network", "uplink"]  # inside a host, between hosts, or between groups of hosts
LINKS: tuple[Link, ...] = ("host", "network", "uplink")
VectorExchange = Literal["all_to_all", "all_to_all_sum", "hierarchical", "replicated"]
"""How vectors reach the ranks of their samples: from one rank each; as partial sums of all ranks, added up on arrival;
as sums over a host, sent between hosts; or not at all, as every rank has the table and only its gradients travel."""


class Topology(Value, frozen=True):
    """Hosts with equally many devices, in groups that share an uplink; ranks are numbered host by host."""

    hosts: int = 1
    devices: int = 1  # of each host
    groups: tuple[int, ...] = ()  # hosts of each group, such as a rack, in order; empty: all hosts are one group

    def __post_init__(self) -> None:
        if self.groups and (min(self.groups) < 1 or sum(self.groups) != self.hosts):
            raise SpecError(f"groups of {self.groups} hosts", f"at least 1 in each, and {self.hosts} in all")
        if self.hosts < 1 or self.devices < 1:
            raise SpecError(f"{self.hosts} hosts of {self.devices} devices", "at least one of each")
        if self.world > MAX_RANKS:
            raise SpecError(f"{self.hosts} hosts of {self.devices} devices", f"at most {MAX_RANKS:,} devices in all")

    @property
    def world(self) -> int:
        return self.hosts * self.devices

    def host_of(self, rank: int) -> int:
        return rank // self.devices

    @property
    def links(self) -> tuple[Link, ...]:
        """The kinds of links that connect at least one pair of ranks."""
        has_link = {
            "host": self.devices > 1,
            "network": self.hosts > max(1, len(self.groups)),
            "uplink": len(self.groups) > 1,
        }
        return tuple(link for link in LINKS if has_link[link])

    def ranks_of(self, host: int) -> range:
        return range(host * self.devices, (host + 1) * self.devices)

    @property
    def near_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group of hosts or, if all hosts are one group, of each host."""
        unit_of = self.host_of if len(self.groups) < 2 else lambda rank: self.group_of(self.host_of(rank))
        return tuple(tuple(ranks) for _, ranks in groupby(range(self.world), unit_of))

    def group_of(self, host: int) -> int:
        return bisect_right(tuple(accumulate(self.groups)), host) if self.groups else 0

    def link(self, a: int, b: int) -> Link:
        """The kind of link between two ranks."""
        host_a, host_b = self.host_of(a), self.host_of(b)
        if host_a == host_b:
            return "host"
        return "network" if self.group_of(host_a) == self.group_of(host_b) else "uplink"


class WireType(enum.StrEnum):
    """Type of vectors and of their gradients between ranks, and of dense gradients."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"  # one byte a number, and two floats for each vector

    @property
    def facts(self) -> "WireFacts":
        return WIRE_TYPES[self]

    def vector_bytes(self, numbers: int) -> int:
        """Bytes of a vector of `numbers` numbers that share a header."""
        return self.facts.vector_bytes(numbers)


class WireFacts(Value, frozen=True):
    """Properties of a type on the wire, near or far."""

    number_bits: int
    header_bytes: int = 0  # of each vector; with a header, its numbers are padded to four bytes
    exact: bool = False  # whether decoding gives the bits that were encoded
    dtype: str = ""  # name of the torch dtype that numbers are rounded to; empty: a codec of its own
    narrow: bool = False  # range: gradients of a mean over a large batch would underflow without a loss scale
    coded_as: str = "int8"  # the type whose coding a hardware profile measures
    coding: float = 1.0  # time of coding, over that of `coded_as`

    def vector_bytes(self, numbers: int) -> int:
        """Bytes of a vector of `numbers` numbers that share a header."""
        bits = numbers * self.number_bits
        return self.header_bytes + -(-bits // 32) * 4 if self.header_bytes else bits // 8


# Coding of int4 and top-k: one thread of an AMD EPYC with AVX-512, 2,048 runs of 256 numbers, 3 of 256 kept. Keeping
# 19 % takes 1.5 times as long.
WIRE_TYPES = {
    "fp32": WireFacts(number_bits=32, exact=True, dtype="float32"),
    "fp16": WireFacts(number_bits=16, dtype="float16", narrow=True, coded_as="fp16"),
    "bf16": WireFacts(number_bits=16, dtype="bfloat16", coded_as="bf16"),
    "int8": WireFacts(number_bits=8, header_bytes=8),
    "int4": WireFacts(number_bits=4, header_bytes=8, coding=6.0),  # half a byte a number, and two floats for each run
}
TOP_K_FACTS = WireFacts(number_bits=40, coding=4.2)  # of a number that is sent: a float, and its column in a byte


class Codecs(Value, frozen=True):
    """Wire types on one kind of link: of vectors forward, of their gradients backward."""

    forward: WireType = WireType.FP32
    backward: WireType = WireType.FP32

    def __post_init__(self) -> None:
        _convert_enum("Codecs", self, "forward", WireType)
        _convert_enum("Codecs", self, "backward", WireType)


RUN = 256  # numbers of an encoded sum that share a scale: its 8 bytes are 3 % of a message in int8
TOP_K = re.compile(r"topk:(\d{1,2}(?:\.\d{1,6})?)%")
MAX_KEPT = 51  # numbers kept of a run; more take more bytes than int8


class FarType(NamedTuple):
    """Type of sums between groups: one of `WIRE_TYPES`, or `topk:1%` for the largest numbers of each run."""

    name: str
    kept: int = RUN  # numbers of each run that are sent

    @classmethod
    def parse(cls, text: str) -> "FarType":
        match = TOP_K.fullmatch(text) if isinstance(text, str) else None
        if match:
            kept = math.ceil(RUN * float(match[1]) / 100)
            if not 1 <= kept <= MAX_KEPT:
                raise SpecError(f"Wire: far={text!r}", "more than 0 % and less than 20 %, as int8 has fewer bytes")
            return cls(text, kept)
        if text in list(WIRE_TYPES):
            return cls(str(text))
        known = ", ".join(map(repr, WIRE_TYPES))
        raise SpecError(f"Wire: far={text!r}", f"one of {known}, or 'topk:1%'")

    @property
    def facts(self) -> WireFacts:
        return WIRE_TYPES[self.name] if self.kept == RUN else TOP_K_FACTS

    @property
    def run_bytes(self) -> int:
        """Bytes of an encoded run."""
        return self.facts.vector_bytes(self.kept)


class Wire(Value, frozen=True):
    """Wire types of all links, and of dense gradients."""

    host: Codecs = Codecs()
    network: Codecs = Codecs()
    uplink: Codecs | None = None  # between groups of hosts; None: as `network`
    dense: WireType = WireType.FP32  # gradients of dense parameters
    # Sums of dense gradients in two levels: in fp32 inside a group of hosts or a host, and in this type between them,
    # also int4, or topk:1% (the largest of every 256 numbers). None: one sum over all ranks
    far: str | None = None
    error_feedback: bool = False  # add the rounding error of a dense gradient to the next one

    def __post_init__(self) -> None:
        _convert_enum("Wire", self, "dense", WireType)
        if self.far is None:
            return
        if FarType.parse(self.far).kept < RUN and not self.error_feedback:
            raise SpecError(
                f"Wire: far={self.far!r} without error_feedback: numbers left out would be lost",
                "error_feedback=true",
            )
        if self.dense is not WireType.FP32:
            raise SpecError(f"Wire: dense={self.dense} and far={self.far}", "one of them")

    def codecs(self, link: Link) -> Codecs:
        """The wire types of vectors on a link."""
        match link:
            case "host":
                return self.host
            case "network":
                return self.network
            case "uplink":
                return self.uplink or self.network

    def vectors(self, link: Link, *, backward: bool) -> WireType:
        """The wire type of vectors on a link, or of their gradients."""
        codecs = self.codecs(link)
        return codecs.backward if backward else codecs.forward

    def in_words(self, topology: Topology) -> str:
        """The wire types of vectors in words, for the links that a topology has; empty for one rank."""
        places = {"host": "inside hosts", "network": "between them", "uplink": "between groups"}
        parts = {link: self.codecs(link) for link in topology.links}
        words = {link: f"{codecs.forward} forward and {codecs.backward} back" for link, codecs in parts.items()}
        if len(set(words.values())) < 2:
            return next(iter(words.values()), "")
        return ", ".join(f"{text} {places[link]}" for link, text in words.items())

    @property
    def exact(self) -> bool:
        """Whether no number is rounded on the wire."""
        return self.has_exact_sums and self.has_exact("forward") and self.has_exact("backward")

    def has_exact(self, way: Literal["forward", "backward"]) -> bool:
        """Whether vectors or their gradients are not rounded on any link."""
        return all(getattr(self.codecs(link), way).facts.exact for link in LINKS)

    @property
    def has_exact_sums(self) -> bool:
        """Whether sums of dense gradients are not rounded on the wire."""
        return self.dense.facts.exact and (self.far is None or FarType.parse(self.far).facts.exact)


FLOATS = Wire()
RESERVED_NAMES = ("training", "_tiles")  # attributes of `Embeddings`, which a parameter of a table would shadow


def check_names(tables: Sequence[Table]) -> None:
    """Raise unless there are tables and their names are unique."""
    if not tables:
        raise SpecError("no tables", "at least one Table(name=..., rows=..., dim=...)")
    _check_unique("table", (t.name for t in tables))


def check_tables(tables: Sequence[Table]) -> None:
    """Raise unless the names of tables and of features are unique in a model."""
    check_names(tables)
    reserved = [table.name for table in tables if table.name in RESERVED_NAMES]
    if reserved:
        raise SpecError(f"table name {reserved[0]!r}: modules have an attribute of that name", "another name")
    _check_unique("feature", (f for t in tables for f in t.feature_names))


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"{what} {name!r} is named twice", f"every {what} once in a model")
        seen.add(name)
