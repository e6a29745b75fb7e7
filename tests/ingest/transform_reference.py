"""What every transform means, one row after another in plain Python.

It shares nothing with what it checks, not even the hashes; it takes and gives the values of `to_pylist`, in which a
null is None.
"""

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from rowwise.ingest.transform.classes import Onehot
from rowwise.ingest.transform.ids import Enumerate, FirstX, NGram, PositiveModulus, SigridHash
from rowwise.ingest.transform.mapping import MapId
from rowwise.ingest.transform.numbers import BoxCox, Bucketize, Clamp, Fill, Log1p, Logit
from rowwise.ingest.transform.pairs import Cartesian, ComputeScore, IdListTransform
from rowwise.ingest.transform.read import SplitText, ToNumber, ToTime, ToWhole
from rowwise.ingest.transform.select import Sampling
from rowwise.ingest.transform.times import FARTHEST_S, PER_SECOND, GetLocalHour, GetLocalWeekday
from rowwise.ingest.transform.transform import Transform

BITS = (1 << 64) - 1
Row = tuple[Any, ...]  # the value of each column that a transform reads


def reference(transform: Transform, row: Row) -> Row:
    """What a transform makes of a row: the value of each column that it makes."""
    return MEANINGS[type(transform)](transform, row)


def signed(bits: int) -> int:
    """64 bits as a number that may be negative."""
    bits &= BITS
    return bits - (1 << 64) if bits >> 63 else bits


def mixed(bits: int) -> int:
    """splitmix64."""
    z = (bits + 0x9E3779B97F4A7C15) & BITS
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & BITS
    z = (z ^ z >> 27) * 0x94D049BB133111EB & BITS
    return z ^ z >> 31


def word(value: int | str | bytes) -> int:
    """An id before any hash that depends on a parameter: a whole number, or the hash of a text."""
    return value & BITS if isinstance(value, int) else _text(value)


def hashed(value: int | str | bytes) -> int:
    """An id hashed: numbers and texts alike."""
    return mixed(value & BITS) if isinstance(value, int) else _text(value)


def _text(value: str | bytes) -> int:
    data = value.encode() if isinstance(value, str) else value
    made = mixed(len(data))
    for at in range(0, len(data), 8):
        made = mixed(made ^ int.from_bytes(data[at : at + 8], "little"))
    return made


def sigrid(bits: int, salt: int, rows: int) -> int:
    """Thomas Wang's mix of 64 bits, then combined with the salt by 128 bits to 64 as in CityHash, by rows."""
    key = (~bits + (bits << 21)) & BITS
    key ^= key >> 24
    key = (key + (key << 3) + (key << 8)) & BITS
    key ^= key >> 14
    key = (key + (key << 2) + (key << 4)) & BITS
    key ^= key >> 28
    key = (key + (key << 31)) & BITS
    factor, salt = 0x9DDFEA08EB382D69, salt & BITS
    a = (key ^ salt) * factor & BITS
    a ^= a >> 47
    b = (salt ^ a) * factor & BITS
    b ^= b >> 47
    return signed(b * factor) % rows


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    """Of a list each element, where nulls are left out; of a single value that; null of null."""
    if isinstance(value, list):
        return [function(v) for v in value if v is not None]
    return None if value is None else function(value)


def _in_place(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same for numbers, where nulls keep their places."""
    if isinstance(value, list):
        return [None if v is None else function(v) for v in value]
    return None if value is None else function(value)


def _there(values: list[Any]) -> list[Any]:
    return [v for v in values if v is not None]


def _cut(bits: int, rows: int | None) -> int:
    return signed(bits) if rows is None else bits % rows


def _joined(ids: list[Any] | Row, rows: int | None) -> int:
    made = 0
    for one in ids:
        made = mixed(made ^ hashed(one))
    return _cut(made, rows)


def sigrid_hash(t: SigridHash, row: Row) -> Row:
    """Each id."""
    return (_each(row[0], lambda v: sigrid(word(v), t.salt, t.rows)),)


def first_x(t: FirstX, row: Row) -> Row:
    """A slice of the ids that are there; lists of numbers that are no ids are plainly sliced, nulls and all."""
    return (None if row[0] is None else _there(row[0])[: t.count],)


def positive_modulus(t: PositiveModulus, row: Row) -> Row:
    """Python's remainder."""
    return (_each(row[0], lambda v: v % t.rows),)


def enumerated(t: Enumerate, row: Row) -> Row:
    """A range."""
    return (None if row[0] is None else list(range(len(_there(row[0])))),)


def ngram(t: NGram, row: Row) -> Row:
    """Windows."""
    if row[0] is None:
        return (None,)
    ids = _there(row[0])
    return ([_joined(ids[at : at + t.n], t.rows) for at in range(len(ids) - t.n + 1)],)


def map_id(t: MapId, row: Row) -> Row:
    """A dictionary."""
    if isinstance(row[0], list):
        found = [_looked_up(t, v) for v in row[0] if v is not None]
        return (_there(found),)
    return (None if row[0] is None else _looked_up(t, row[0]),)


def _looked_up(t: MapId, value: Any) -> int | None:
    key = value.decode() if isinstance(value, bytes) else str(value)
    return t.mapping.get(key, t.unknown if isinstance(t.unknown, int) else None)


def split(t: SplitText, row: Row) -> Row:
    """Python's split and strip."""
    text = row[0]
    return (None if text is None else [word for part in text.split(t.separator) if (word := part.strip())],)


def cartesian(t: Cartesian, row: Row) -> Row:
    """Two loops."""
    a, b = row
    if a is None or b is None:
        return (None,)
    if not isinstance(a, list) and not isinstance(b, list):
        return (_joined((a, b), t.rows),)
    ids = [_there(x) if isinstance(x, list) else [x] for x in (a, b)]
    return ([_joined((x, y), t.rows) for x in ids[0] for y in ids[1]],)


def id_list(t: IdListTransform, row: Row) -> Row:
    """Those of the first that are in the second."""
    if row[0] is None or row[1] is None:
        return (None,)
    return (list(dict.fromkeys(v for v in _there(row[0]) if v in row[1])),)


def compute_score(t: ComputeScore, row: Row) -> Row:
    """The scores that count."""
    if any(v is None for v in row):
        return (None,)
    pairs = [(i, s) for i, s in zip(row[0], row[1], strict=True) if i is not None and s is not None and s == s]
    scores = [float(s) for i, s in pairs if t.among is None or i in _there(row[2])]
    if t.by == "sum":
        return (_total(scores),)
    if not scores:
        return (None,)
    if t.by == "mean":
        return (_total(scores) / len(scores),)
    return (max(scores) if t.by == "max" else min(scores),)


def _total(scores: list[float]) -> float:
    total = 0.0  # one after another: Python's own sum rounds less since 3.12
    for score in scores:
        total += score
    return total


def bucketize(t: Bucketize, row: Row) -> Row:
    """Count."""
    return (_in_place(row[0], lambda v: None if math.isnan(v) else sum(b < float(v) for b in t.borders)),)


def clamp(t: Clamp, row: Row) -> Row:
    """Compare."""

    def cut(v: Any) -> Any:
        low = v if t.low is None or not v < t.low else t.low
        return low if t.high is None or not low > t.high else t.high

    return (_in_place(row[0], cut),)


def log1p(t: Log1p, row: Row) -> Row:
    """The logarithm."""
    return (_in_place(row[0], lambda v: v if v != v else math.log1p(max(v, 0))),)


def logit(t: Logit, row: Row) -> Row:
    """The logarithm of the odds."""

    def odds(v: float) -> float:
        inside = min(max(v, t.eps), 1 - t.eps)
        return math.log(inside / (1 - inside))

    return (_in_place(row[0], lambda v: v if v != v else odds(v)),)


def box_cox(t: BoxCox, row: Row) -> Row:
    """A power, or the logarithm."""

    def bent(v: float) -> float:
        y = max(v + t.shift, 1e-6)
        if t.power == 0:
            return math.log(y)
        try:
            return (y**t.power - 1) / t.power
        except OverflowError:
            return math.copysign(math.inf, t.power)

    return (_in_place(row[0], lambda v: v if v != v else bent(v)),)


def fill(t: Fill, row: Row) -> Row:
    """The value instead; a null of a column of lists cannot be told from another here, and is the caller's."""

    def filled(v: Any) -> Any:
        return t.value if v is None or v != v else v

    return ([filled(v) for v in row[0]] if isinstance(row[0], list) else filled(row[0]),)


def onehot(t: Onehot, row: Row) -> Row:
    """Ones."""
    values = _there(row[0] if isinstance(row[0], list) else [row[0]])
    ones = [0.0] * t.width
    for v in values:
        if t.borders and v == v:
            ones[sum(b < float(v) for b in t.borders)] = 1.0
        if v in t.classes:
            ones[t.classes.index(v)] = 1.0
    return (ones,) if t.into == "lists" else tuple(ones)


def get_local_hour(t: GetLocalHour, row: Row) -> Row:
    """A clock."""
    local = _local_time(t, row)
    return (None if local is None else local.hour,)


def get_local_weekday(t: GetLocalWeekday, row: Row) -> Row:
    """A calendar."""
    local = _local_time(t, row)
    return (None if local is None else local.weekday(),)


def _local_time(t: GetLocalHour | GetLocalWeekday, row: Row) -> datetime | None:
    """Times come as whole numbers."""
    if any(v is None or not math.isfinite(v) for v in row) or abs(row[0] // PER_SECOND[t.unit]) > FARTHEST_S:
        return None
    utc = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=row[0] // PER_SECOND[t.unit])
    if t.zone is not None:
        return utc.astimezone(ZoneInfo(t.zone))
    return utc + timedelta(seconds=math.floor(row[1] * 60) if t.offset else 0)


def to_whole(t: ToWhole, row: Row) -> Row:
    """Floats without a fraction, exact ones."""
    x = row[0]
    good = x is not None and math.isfinite(x) and x == int(x) and (isinstance(x, int) or abs(x) <= 2**53)
    return (int(x) if good else None,)


def to_number(t: ToNumber, row: Row) -> Row:
    """A float that is finite in 32 bits; of text what it says, without signs of money and thousands."""
    x = row[0]
    if isinstance(x, str):
        plain = x.strip().replace(",", "")
        x = float(plain) if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", plain) else None
    if x is None or not math.isfinite(x):
        return (None,)
    with np.errstate(over="ignore"):
        return (float(x) if math.isfinite(np.float32(float(x))) else None,)


def to_time(t: ToTime, row: Row) -> Row:
    """Microseconds of text in ISO 8601."""
    try:
        when = datetime.fromisoformat(row[0].strip()) if row[0] is not None and "-" in row[0] else None
    except ValueError:
        return (None,)
    return (when if when is None or when.tzinfo is None else when.astimezone(UTC).replace(tzinfo=None),)


def keeps(t: Sampling, row: Row, index: int, number: int) -> bool:
    """Whether a row stays: its values, the number of its split, and its own in it."""
    key = row[-1] if t.key is not None else None
    seed = mixed(t.seed)
    draw = mixed(number + mixed(index ^ seed)) if key is None else mixed(word(key) ^ seed)
    return (draw >> 11) * 2.0**-53 < t.rate or (t.column is not None and row[0] != t.value)


MEANINGS: dict[type[Transform], Callable[[Any, Row], Row]] = {
    SigridHash: sigrid_hash,
    FirstX: first_x,
    PositiveModulus: positive_modulus,
    Enumerate: enumerated,
    NGram: ngram,
    MapId: map_id,
    SplitText: split,
    Cartesian: cartesian,
    IdListTransform: id_list,
    ComputeScore: compute_score,
    Bucketize: bucketize,
    Clamp: clamp,
    Log1p: log1p,
    Logit: logit,
    BoxCox: box_cox,
    Fill: fill,
    Onehot: onehot,
    GetLocalHour: get_local_hour,
    GetLocalWeekday: get_local_weekday,
    ToWhole: to_whole,
    ToNumber: to_number,
    ToTime: to_time,
}
