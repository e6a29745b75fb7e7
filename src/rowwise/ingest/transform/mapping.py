"""Maps ids to numbers by a vocabulary, inline in the recipe or in a file.

Known limits: a vocabulary is held in memory, twice while loading; for hundreds of millions of ids use hashing instead.
"""

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from rowwise.base.errors import DataError
from rowwise.base.textfile import read_text
from rowwise.ingest import native
from rowwise.ingest.bags import decoded, hash_ids, int64, to_offsets
from rowwise.ingest.block import Ints
from rowwise.ingest.kinds import IDS, holds_whole
from rowwise.ingest.native import RowMapping
from rowwise.ingest.transform.arrays import IdLists, Mask, lists, to_id_lists
from rowwise.ingest.transform.transform import Arrays, Kinds, RowPosition, Run, ToIds, is_words

MAX_BYTES = 1 << 30  # of a vocabulary file
MAX_DIGITS = 19  # of a 64-bit integer
INTS = range(-(1 << 63), 1 << 63)


class MapId(ToIds, frozen=True, kw_only=True, tag="map_id", tag_field="kind"):
    """Replaces each id by its number in a mapping, such as its row in a table of frequent ids.

    A null row stays null, an empty list stays empty, and a null inside a list is dropped. An unknown id is dropped by
    default (a single one becomes null), or gets one common number, or is an error.
    """

    mapping: dict[str | int, int] = msgspec.field(default_factory=dict)
    file: str = ""  # instead of `mapping`: one id per line, with a tab and its number, or numbered by line from 0
    unknown: int | Literal["drop", "raise"] = "drop"
    want = IDS

    def __post_init__(self) -> None:
        """Convert keys to text, as in JSON."""
        if bool(self.mapping) == bool(self.file):
            number = "both" if self.file else "neither"
            raise self.spec_error(f"got {number} of mapping and file: expected exactly one")
        if isinstance(self.unknown, str) and self.unknown not in ("drop", "raise"):
            raise self.spec_error(f"unknown={self.unknown!r}: expected a number, 'drop' or 'raise'")
        keyed: dict[str | int, int] = {str(key): number for key, number in self.mapping.items()}
        if len(keyed) < len(self.mapping):
            raise self.spec_error("mapping: an id appears as a number and as text: expected each id once")
        outside = [
            n for n in (*keyed.values(), *([] if isinstance(self.unknown, str) else [self.unknown])) if n not in INTS
        ]
        if outside:
            raise self.spec_error(f"{outside[0]}: expected numbers of 64 bits")
        msgspec.structs.force_setattr(self, "mapping", keyed)

    def type_problem(self, kinds: Kinds) -> str:
        """Refuse to look up whole numbers among words."""
        if not is_words(kinds[0]):
            words = [key for key in self.mapping if _parse_whole(key) is None]
            if words:
                return f"whole numbers are looked up among ids such as {words[0]!r}: expected whole numbers of 64 bits"
        return ""

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Look up the ids of all rows."""
        return self.prepare()(arrays, where)

    def read_files(self) -> "MapId":
        return msgspec.structs.replace(self, mapping=read_mapping(self), file="") if self.file else self

    def prepare(self) -> Run:
        """Build the hash tables of the known ids once."""
        full = self.read_files()
        return partial(_run, full, _words(full.mapping), _numbers(full.mapping))


def read_mapping(transform: MapId) -> dict[str | int, int]:
    path = Path(transform.file)
    try:
        lines = io.StringIO(read_text(path, MAX_BYTES), newline=None)  # unlike str.splitlines, at line feeds alone
    except OSError as error:
        raise transform.spec_error(f"{path}: cannot be read as a list of ids: {error.strerror}") from None
    values: dict[str | int, int] = {}
    for number, line in enumerate(lines):
        key, tab, digits = line.removesuffix("\n").partition("\t")
        value = _parse_whole(digits) if tab else number
        if value is None:
            raise transform.spec_error(f"{path}: line {number + 1}: {digits!r}: expected a whole number after the tab")
        if key in values:
            raise transform.spec_error(f"{path}: line {number + 1}: id {key!r} appears twice: expected each id once")
        values[key] = value
    if not values:
        raise transform.spec_error(f"{path}: it has no ids: expected an id on each line")
    return values


def _parse_whole(key: str | int) -> int | None:
    """The whole number of a text in decimal digits."""
    text = str(key)
    digits = text.removeprefix("-")
    plain = digits.isascii() and digits.isdigit() and (digits == "0" or digits[0] != "0") and text != "-0"
    return int(text) if plain and len(digits) <= MAX_DIGITS and int(text) in INTS else None


class KnownIds(NamedTuple):
    """A hash table of the known ids, with linear probing."""

    slots: int  # home slots, a power of two; probing may go beyond the last, instead of wrapping around
    key_S: Ints
    index_S: Ints  # index of the known id; -1 for a free slot
    words: pa.Array | None  # the texts of the ids, if keys are hashes
    becomes_K: Ints  # the number that each known id is mapped to


def _known(keys_K: Ints, words: pa.Array | None, becomes_K: Ints) -> KnownIds:
    slots = 1 << (2 * len(keys_K)).bit_length()
    home_K = native.map_ids(keys_K, RowMapping(native.HASH, slots))
    order_K = np.argsort(home_K, kind="stable")
    # Linear probing, vectorised: in the order of home slots, each key takes its home slot or the next free one.
    # The slot of the k-th key is k + max(home - rank) over all keys up to it.
    nth_K = np.arange(len(order_K))
    at_K = np.maximum.accumulate(home_K[order_K] - nth_K) + nth_K
    key_S, index_S = np.zeros(max(slots, at_K[-1] + 1) + 1, np.int64), np.full(max(slots, at_K[-1] + 1) + 1, -1)
    key_S[at_K], index_S[at_K] = keys_K[order_K], order_K
    return KnownIds(slots, key_S, index_S, words, becomes_K)


def _find(known: KnownIds, keys_N: Ints) -> tuple[Ints, Mask]:
    """The index of each id among the known ids, and whether it is known. The first probe finds most of them."""
    at_N = native.map_ids(keys_N, RowMapping(native.HASH, known.slots))
    index_N = known.index_S[at_N]
    left_N = np.flatnonzero((known.key_S[at_N] != keys_N) & (index_N >= 0))
    while left_N.size:
        at_N[left_N] += 1
        index_N[left_N] = known.index_S[at_N[left_N]]
        left_N = left_N[(known.key_S[at_N[left_N]] != keys_N[left_N]) & (index_N[left_N] >= 0)]
    return np.maximum(index_N, 0), index_N >= 0


def _numbers(mapping: Mapping[str | int, int]) -> KnownIds | None:
    """The known ids as integers, or None if some are not."""
    keys = [key for key in map(_parse_whole, mapping) if key is not None]
    if len(keys) < len(mapping):
        return None
    return _known(np.array(keys, np.int64), None, np.fromiter(mapping.values(), np.int64, len(mapping)))


def _words(mapping: Mapping[str | int, int]) -> KnownIds:
    """The known ids as texts, by their hashes."""
    words = pa.array([str(key).encode() for key in mapping], pa.large_binary())
    return _known(hash_ids(words).view(np.int64), words, np.fromiter(mapping.values(), np.int64, len(mapping)))


def _run(transform: MapId, words: KnownIds, numbers: KnownIds | None, arrays: Arrays, where: RowPosition) -> Arrays:
    ids = to_id_lists(arrays[0])
    if holds_whole(ids.values.type):
        assert numbers is not None  # else `type_problem` refuses the column
        at_N, known_N = _find(numbers, int64(ids.values))
        mapped_N = numbers.becomes_K[at_N]
    else:
        texts = decoded(ids.values)
        at_N, known_N = _find(words, hash_ids(texts).view(np.int64))
        assert words.words is not None
        # An unknown text may collide with the hash of a known one.
        same = pc.call_function("equal", [words.words.take(pa.array(at_N)), texts.cast(pa.large_binary())])
        known_N &= same.to_numpy(zero_copy_only=False)
        mapped_N = words.becomes_K[at_N]
    if known_N.all():
        return (ids.with_values(mapped_N),)
    if transform.unknown == "raise":
        _refuse_unknown(transform, ids, known_N, where)
    if isinstance(transform.unknown, int):
        return (ids.with_values(np.where(known_N, mapped_N, transform.unknown)),)
    return (_drop_unknown(ids, mapped_N, known_N),)


def _drop_unknown(ids: IdLists, mapped_N: Ints, known_N: Mask) -> pa.Array:
    """Drop unknown ids: from a list, or as null where a row has one value."""
    offsets_R1 = to_offsets(known_N)[ids.starts()]
    if ids.single:
        null_R = np.diff(offsets_R1) == 0
        return IdLists(values=ids.values, offsets_R1=offsets_R1, null_R=null_R, single=True).with_values(
            mapped_N[known_N]
        )
    return lists(pa.array(mapped_N[known_N]), offsets_R1, ids.null_R)


def _refuse_unknown(transform: MapId, ids: IdLists, known_N: Mask, where: RowPosition) -> None:
    at = int(np.argmin(known_N))
    row = int(np.searchsorted(ids.starts(), at, "right")) - 1
    raise DataError(
        f"{where.split.locate_row(row)}, column {transform.column!r}: id {ids.values[at].as_py()!r} is unknown",
        f"one of the {len(transform.mapping)} ids of the mapping",
        hint="unknown='drop' leaves it out",
    )
