"""An id map as data: sections of ids, and the rows that each section gives them.

Every method that maps many ids to few rows is a function that returns an `IdMap` (`rules`, `arrays`). One operator runs
them all, `map_ids`; `tables/ops/reference/idmap.py` defines it in plain torch. So a new method is one function;
checkpoints, files and counts of bytes do not change.

[Note: Id maps] A map knows the ids 0 to `ids` - 1. In each column an id has one row or none (-1). The vector of an id
is the sum of its rows, or their product. A part is rows of one width, stored as a table of its own; rows narrower than
the table are projected to its dim. Rows are numbered consecutively through all `parts`. In each column, the first
section that has an id gives its row, counted from the section's `base`:

    hash       has every id: the row is `scramble(id, seed) % rows`, see [Note: Scrambled ids]
    quotient   has every id: `permute(id, seed) // divisor`, where `permute` is a permutation of all ids
    remainder  has every id: `permute(id, seed) % divisor`
    every      has every id: `words` hold an entry of `entry_bits` bits for each, from `at` on
    ranked     has the ids of a set, see [Note: Sets of ids]: the index of the id in the ascending set
    listed     has the ids of a set: an entry of `entry_bits` bits for each
    rest       has every id: its index among the ids that no earlier set of this column has

An entry of `rows` or more gives no row, as if the section lacked the id; a file with such an entry is refused. The sets
of a column are disjoint.

[Note: Sets of ids] `count` ascending ids take about 2.4 + log2(ids / count) bits each (Elias-Fano). An id is split into
its `low_bits` lowest bits, which are stored, and its bucket (the other bits), which is counted in unary. From `at` on
lie five arrays of 64-bit words:

    starts     for each 256th bucket, the position of its first bit in `marks`
    zeros      for each 64th word of `marks`, the number of zeros before it
    marks      for each bucket as many ones as it has ids, then a zero
    lows       the lowest bits of each id
    entries    `entry_bits` for each id, if the section is `listed`

Each array begins on a word. Shorter numbers are packed from the lowest bit of a word on, and may cross into the next
word. `every` has entries only. `zeros` make dense sets fast, such as the most frequent ids where ids are numbered by
frequency: there 256 buckets may have more bits than can be counted one by one.

[Note: Scrambled ids] Arithmetic on 64-bit words wraps around. `mix` is splitmix64 (Steele et al. 2014), which begins by
adding 0x9E3779B97F4A7C15. `scramble(id, seed)` is mix(id ^ mix(seed)), unsigned. `permute(id, seed)` is a Feistel
network: it splits the id into halves a, b of h bits, the fewest that hold all ids, at least one. Four times (a, b)
becomes (b, a ^ mix(b ^ key) % 2**h); the first key is mix(seed), each further one the mix of the last. This is repeated
until the result is an id of the map. Sections of a map have different seeds, so their rows are independent.

[Note: Folds] A map learned from labels carries information on the labels of each id. If the same samples train the
model, the model reads its targets from the map, the more the rarer the id, learns to trust it, and is wrong on new
samples. So a learned map has one map for each fold of the samples, made from what the probe learned on all other
folds, and one map made from all samples. In training mode each sample is looked up by the map of its fold; in
evaluation and serving all use the one made from all samples. The ids of a sample choose its fold (`folds.py`), so equal
samples share a fold. Maps of folds are not served, and `map_bytes` leaves them out.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rowwise.base.value import Value

Words = NDArray[np.int64]  # 64-bit words with packed contents
Kind = Literal["hash", "quotient", "remainder", "every", "ranked", "listed", "rest"]
KINDS: tuple[Kind, ...] = ("hash", "quotient", "remainder", "every", "ranked", "listed", "rest")
WORD_bytes = 8


class MapSection(Value, frozen=True):
    """A set of ids with one rule for their rows. See [Note: Id maps]."""

    kind: Kind
    rows: int  # number of rows, from `base` on
    base: int = 0  # index of the first row among the rows of all parts
    column: int = 0
    seed: int = 0
    divisor: int = 1
    at: int = 0
    count: int = 0
    low_bits: int = 0
    entry_bits: int = 0

    @property
    def kernel_args(self) -> list[int]:
        """The section as one row of the int64 tensor that `map_ids` takes."""
        rule = [KINDS.index(self.kind), self.rows, self.base, self.column, self.seed, self.divisor]
        return [*rule, self.at, self.count, self.low_bits, self.entry_bits]


class MapPart(Value, frozen=True):
    """A part of a map: rows of one width."""

    rows: int
    dim: int | None = None  # None: the table's dim


class MapShape(Value, frozen=True):
    """All fields of a map except its words."""

    ids: int
    parts: tuple[MapPart, ...]
    sections: tuple[MapSection, ...]
    combine: Literal["sum", "product"] = "sum"

    @property
    def columns(self) -> int:
        """The largest number of rows that one id can have."""
        return 1 + max(section.column for section in self.sections)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


class FoldAssignment(Value, frozen=True):
    """Assigns samples to the map of a fold. See [Note: Folds]."""

    features: tuple[str, ...]  # their ids choose the fold of a sample
    seed: int
    shapes: tuple[MapShape, ...]  # the shape of each fold's map, with the ids, parts and columns of the main map

    @property
    def count(self) -> int:
        return len(self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdMap:
    """Maps the ids of a table to rows. See [Note: Id maps]."""

    shape: MapShape
    words: Words = field(default_factory=lambda: np.empty(0, np.int64))
    about: dict[str, Any] = field(default_factory=dict)  # provenance, for people: method, history, seed
    folding: FoldAssignment | None = None
    fold_words: tuple[Words, ...] = ()  # the words of each fold's map

    @property
    def map_bytes(self) -> int:
        return WORD_bytes * len(self.words)

    @property
    def digest(self) -> str:
        sha256 = hashlib.sha256(msgspec.json.encode(self.shape))
        sha256.update(np.ascontiguousarray(self.words, "<i8").tobytes())
        if self.folding is not None:
            sha256.update(msgspec.json.encode(self.folding))
            for words in self.fold_words:
                sha256.update(np.ascontiguousarray(words, "<i8").tobytes())
        return sha256.hexdigest()[:32]
