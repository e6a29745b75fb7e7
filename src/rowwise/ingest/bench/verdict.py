"""Interprets measured times: throughput, number of workers needed, the bottleneck, and a hint.

Pure, so that tests need no clock. Gives a single hint: the next bottleneck matters once the first is removed.
"""

import math

import pyarrow as pa
from pyarrow import types

from rowwise.ingest.bench.measure import PreparationTimes
from rowwise.ingest.columns import Columns
from rowwise.ingest.kinds import is_list, is_text
from rowwise.ingest.service.scaling import SPARE
from rowwise.tables.spec import Value

SPEEDS = (100_000, 300_000, 1_000_000)  # samples a second
HUGE_BYTES, HUGE_ROWS, TINY_ROWS = 512 << 20, 1 << 20, 4096
OVER_READ = 1.5
SLOW_CODECS = ("gzip", "brotli", "bz2")
MUCH = 0.2  # tolerated share of time for a slow codec
FASTER = {"zstd": "snappy, which is faster and larger", "snappy": "none, where the disk is fast and has room"}
PARTS = {  # in the order of execution
    "read": "bytes from files",
    "decompress": "pages",
    "decode": "Parquet into columns",
    "transform": "transforms, order of rows",
    "encode": "hash, check, lay out for batches",
}


class HintFacts(Value, frozen=True):
    """Inputs of a hint besides times."""

    source: str
    lines: bool = False  # CSV or TSV
    maps: tuple[str, ...] = ()  # map columns, which no model reads as they are
    texts: int = 0  # columns of text that are hashed
    columns: int = 0  # columns read


class BenchVerdict(Value, frozen=True):
    """The report of `rowwise data bench`."""

    source: str
    measured: PreparationTimes
    columns: int
    rows_s_core: float  # of one worker, by CPU time
    rows_s: float  # of one worker, on the clock
    read_mb_s: float  # file bytes read by one worker
    over_read: float  # bytes read per wanted byte
    rows_s_trainer: float  # throughput limit of a trainer's hand-off
    shares: dict[str, float]  # share of a worker's time, by stage
    slowest: str
    hint: str
    workers: dict[int, int]  # number needed, by samples a second


def facts_of(source: str, schema: pa.Schema, columns: Columns, *, lines: bool) -> HintFacts:
    maps = tuple(field.name for field in schema if types.is_map(field.type))
    kinds = [schema.field(s.column).type for s in columns.sparse if s.column in schema.names]
    texts = sum(is_text(kind.value_type if is_list(kind) else kind) for kind in kinds)
    return HintFacts(source=source, lines=lines, maps=maps, texts=texts, columns=len(columns.names))


def judge(measured: PreparationTimes, facts: HintFacts, speeds: tuple[int, ...] = SPEEDS) -> BenchVerdict:
    shares = shares_of(measured)
    slowest = max(shares, key=lambda name: shares[name])
    return BenchVerdict(
        source=facts.source,
        measured=measured,
        columns=facts.columns,
        rows_s_core=measured.rows / max(measured.cpu_s, 1e-9),
        rows_s=measured.rows / max(measured.wall_s, 1e-9),
        read_mb_s=measured.bytes_read / 1e6 / max(measured.wall_s, 1e-9),
        over_read=measured.bytes_read / measured.bytes_wanted if measured.bytes_wanted else 1.0,
        rows_s_trainer=measured.rows / max(measured.hand_off_s, 1e-9),
        shares=shares,
        slowest=slowest,
        hint=hint(measured, facts, slowest),
        workers={speed: workers_for(measured, speed) for speed in speeds},
    )


def shares_of(measured: PreparationTimes) -> dict[str, float]:
    """Each stage's share of the sum of all stages."""
    seconds = {name: getattr(measured.parts, f"{name}_s") for name in PARTS}
    total = max(sum(seconds.values()), 1e-9)
    return {name: value / total for name, value in seconds.items()}


def workers_for(measured: PreparationTimes, samples_s: float) -> int:
    """The number of workers at which autoscaling settles, with spare capacity."""
    return max(1, math.ceil(SPARE * samples_s * measured.wall_s / max(measured.rows, 1)))


def hint(measured: PreparationTimes, facts: HintFacts, slowest: str) -> str:
    """The most useful change: the layout of the files first, then the slowest stage."""
    return _advise_on_files(measured, facts) or _advise_on_part(measured, facts, slowest)


def _advise_on_files(measured: PreparationTimes, facts: HintFacts) -> str:
    convert = f"rowwise data convert {facts.source} DEST"
    rows, encoded = measured.rows_in // max(measured.splits, 1), measured.bytes_encoded // max(measured.splits, 1)
    over = measured.bytes_read / measured.bytes_wanted if measured.bytes_wanted else 1.0
    if facts.lines:
        return f"lines are parsed anew each time: {convert} makes Parquet of them"
    if facts.maps:
        return f"column {facts.maps[0]!r} is a map, which is read whole: {convert} makes a column of each key"
    if rows > HUGE_ROWS or encoded > HUGE_BYTES:
        size = f"{rows:,} rows, {encoded / 1e6:,.0f} MB when encoded"
        return f"a row group is huge ({size}), and each worker holds a few: {convert} makes smaller ones"
    if rows < TINY_ROWS and measured.of > measured.splits:
        return f"a row group has {rows:,} rows only, so what each costs is paid often: {convert} makes larger ones"
    if over > OVER_READ:
        return f"{over:.1f} times the bytes wanted are read: {convert} --columns with those in use puts them together"
    return ""


def _advise_on_part(measured: PreparationTimes, facts: HintFacts, slowest: str) -> str:
    convert = f"rowwise data convert {facts.source} DEST"
    if slowest == "read" and not measured.codec:
        return f"the file is not compressed: {convert} makes it smaller, which saves what reading takes"
    if slowest == "decompress" or (measured.codec in SLOW_CODECS and shares_of(measured)["decompress"] > MUCH):
        return f"{measured.codec} takes long to unpack: {convert} --compression {FASTER.get(measured.codec, 'zstd')}"
    if slowest == "encode" and facts.texts:
        are = "column of text is" if facts.texts == 1 else "columns of text are"
        return f"{facts.texts} {are} hashed letter by letter: whole numbers, where the data are made, are faster"
    advice = {
        "read": "reading takes longest: a faster disk, fewer columns, or more workers, where the disk can do more",
        "decode": "decoding takes longest, as it mostly does: leave out columns that the model does not need",
        "transform": "transforms take longest: functions of your own are the likely cause; rowwise's are native",
        "encode": "hashing and laying out takes longest: fewer ids of a list (columns.sparse first=) make less of it",
    }
    return advice[slowest]
