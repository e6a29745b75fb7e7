"""An id map as data: sections of ids, and the rows that each section gives them.

Every way to put many ids into few rows is a function that makes this value (`rules`, `placed`), and one operator runs
them all (`map_ids`; `ops/reference/idmap.py` says in torch what it means). So a new way is one function, and
checkpoints, files and bytes are the same for all of them.

[Note: Id maps] A map knows the ids 0 to `ids` - 1. Each has one row in each column, or none there (-1), and its vector
is the sum of its rows, or their product. Rows are numbered through all `parts`: a part is rows of one width, stored as
a table of its own; narrower ones are projected to the table's dim. The sections of a column are asked in order, the
first that has an id gives its row, from `base` on:

    hash       has every id: the row is `scramble(id, seed) % rows`, see [Note: Scrambled ids]
    quotient   every id: `order(id, seed) // divisor`, where `order` is a permutation of all ids
    remainder  every id: `order(id, seed) % divisor`
    every      every id: a number of `entry_bits` bits for each id, in `words` from `at` on
    ranked     the ids of a set, see [Note: Sets of ids]: the place of the id in the set, ascending
    listed     the ids of a set: a number of `entry_bits` bits for each of them
    rest       every id: its place among those that no earlier set of this column has

A number that is not below `rows` gives no row, as if the section had not the id; a map that is read from a file is
refused if it holds one. The sets of a column share no id.

[Note: Sets of ids] `count` ids, ascending, in about 2.4 + log2(ids / count) bits each (Elias-Fano): the `low_bits`
lowest bits of each, and the rest of it, its bucket, by counting. In words of 64 bits, from `at` on:

    starts     for each 256th bucket, where its bits begin among `marks`
    zeros      for each 64th word of `marks`, how many zeros there are before it
    marks      for each bucket as many ones as it has ids, then a zero
    lows       the lowest bits of each id
    entries    `entry_bits` for each id, where the section is `listed`

Each of the five begins on a word; numbers of fewer bits lie one after another from the lowest bit of a word on, and may
cross into the next. `every` has entries only. `zeros` are for sets whose ids lie close together, such as the first ones
of many that are numbered by how frequent they are: then 256 buckets may have more bits than can be counted one by one.

[Note: Scrambled ids] Words of 64 bits wrap around. `mix` is splitmix64: the sum of the word and 0x9E3779B97F4A7C15 is
scrambled as Steele et al. 2014 do. Then `scramble(id, seed)` is mix(id ^ mix(seed)), a number without a sign. And
`order(id, seed)` takes the id as two halves a, b of h bits, the fewest that hold all ids, at least one. Four times (a,
b) becomes (b, a ^ mix(b ^ key) % 2**h), where the first key is mix(seed), the next the mix of that, and so on; all of
it again until the id is one of the map's. Any seed of a section gives other rows: those of a map differ.

[Note: Folds] A map that is learned from labels tells of an id what its labels were. Where the same rows train the
model, it reads there what it is to predict, the more the rarer the id, and learns to trust it; on new rows it is
wrong. So a learned map is one map for each fold of the samples, made of what the probe has learned from all other
folds, and one made of all. While a module is trained, each sample is looked up by the map of its fold; when it is
evaluated or served, by the one of all. Which fold a sample is in follows from the ids that it has (`folds.py`), so
that rows that are alike are together. The maps of folds are not served and do not count in `map_bytes`.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rowwise.value import Value

Words = NDArray[np.int64]  # 64 bits each, whatever they mean
Kind = Literal["hash", "quotient", "remainder", "every", "ranked", "listed", "rest"]
KINDS: tuple[Kind, ...] = ("hash", "quotient", "remainder", "every", "ranked", "listed", "rest")
WORD_bytes = 8


class MapSection(Value, frozen=True):
    """A set of ids with one rule for their rows. See [Note: Id maps]."""

    kind: Kind
    rows: int  # how many there are, from `base` on
    base: int = 0  # the first row, of the rows of all parts
    column: int = 0
    seed: int = 0
    divisor: int = 1
    at: int = 0
    count: int = 0
    low_bits: int = 0
    entry_bits: int = 0

    @property
    def numbers(self) -> list[int]:
        about = [KINDS.index(self.kind), self.rows, self.base, self.column, self.seed, self.divisor]
        return [*about, self.at, self.count, self.low_bits, self.entry_bits]


class MapPart(Value, frozen=True):
    """A part of a map: rows of one width."""

    rows: int
    dim: int | None = None  # None: the table's


class MapShape(Value, frozen=True):
    """All fields of a map except its words."""

    ids: int
    parts: tuple[MapPart, ...]
    sections: tuple[MapSection, ...]
    combine: Literal["sum", "product"] = "sum"

    @property
    def columns(self) -> int:
        """The largest number of rows of one id."""
        return 1 + max(section.column for section in self.sections)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


class FoldAssignment(Value, frozen=True):
    """Assigns samples to the map of a fold. See [Note: Folds]."""

    features: tuple[str, ...]  # whose ids say in which fold a sample is
    seed: int
    shapes: tuple[MapShape, ...]  # of each fold's map; but for where words begin, rows and parts are those of the map

    @property
    def count(self) -> int:
        return len(self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdMap:
    """Maps the ids of a table to rows. See [Note: Id maps]."""

    shape: MapShape
    words: Words = field(default_factory=lambda: np.empty(0, np.int64))
    about: dict[str, Any] = field(default_factory=dict)  # how it was made, for people: method, history, seed
    folding: FoldAssignment | None = None
    fold_words: tuple[Words, ...] = ()  # of each fold's map

    @property
    def map_bytes(self) -> int:
        return WORD_bytes * len(self.words)

    @property
    def digest(self) -> str:
        content = hashlib.sha256(msgspec.json.encode(self.shape))
        content.update(np.ascontiguousarray(self.words, "<i8").tobytes())
        if self.folding is not None:
            content.update(msgspec.json.encode(self.folding))
            for words in self.fold_words:
                content.update(np.ascontiguousarray(words, "<i8").tobytes())
        return content.hexdigest()[:32]
