"""Sampling: a share of the rows, the same for every order, worker and run.

It returns a mask instead of a smaller table, so that errors name rows by their numbers in the file. Serving uses all
rows: see `chain.serving`.
"""

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from rowwise.ingest.bags import decoded
from rowwise.ingest.kinds import KEYS, NUMBER_OR_KEY
from rowwise.ingest.mix import Words, mix, unit
from rowwise.ingest.transform.arrays import Mask, id_words, to_id_lists, to_numbers
from rowwise.ingest.transform.transform import Arrays, Kinds, RowPosition, Transform, is_words


class Sampling(Transform, frozen=True, kw_only=True, tag="sampling", tag_field="kind"):
    """Keeps a share of the rows, chosen by a hash of the row's split and number, or of its key.

    With `column`, only rows whose column equals `value` are sampled, and all others are kept: a tenth of the negatives
    is {kind: sampling, rate: 0.1, column: label, value: 0}. Rows with null or NaN in the column are kept. With `key`,
    rows of the same key are kept or left out together; a row with a null key is sampled by its number.
    """

    rate: float  # share of the sampled rows that is kept
    seed: int = 0
    column: str | None = None
    value: int | float | str = 0
    key: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise self.spec_error(f"rate={self.rate}: expected 0 to 1, such as 0.1 to keep a tenth")
        if self.column is None and self.value != 0:
            raise self.spec_error(f"value={self.value!r} without a column: expected a column, or no value")
        if not 0 <= self.seed < 1 << 63:
            raise self.spec_error(f"seed={self.seed}: expected at least 0, and less than 2**63")

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(name for name in (self.column, self.key) if name is not None)

    @property
    def makes(self) -> tuple[str, ...]:
        return ()

    @property
    def wants(self) -> tuple[str, ...]:
        """A value to compare, and a key."""
        requirements = ((self.column, NUMBER_OR_KEY), (self.key, KEYS))
        return tuple(want for name, want in requirements if name is not None)

    def type_problem(self, kinds: Kinds) -> str:
        """Refuse to compare numbers with words."""
        if self.column is not None and is_words(kinds[0]) != isinstance(self.value, str):
            return f"compared with {self.value!r}: expected {'a text' if is_words(kinds[0]) else 'a number'}"
        return ""

    def types(self, kinds: Kinds) -> Kinds:
        return ()

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        return ()

    def keeps(self, arrays: Arrays, where: RowPosition, rows: int) -> Mask:
        seed = mix(np.array([self.seed], np.uint64))
        draw_R = mix(np.arange(rows, dtype=np.uint64) + mix(np.array([where.index], np.uint64) ^ seed))
        if self.key is not None:
            draw_R = _hash_keys(arrays[-1], seed, draw_R)
        sampled_R = unit(draw_R) < self.rate
        return sampled_R if self.column is None else sampled_R | ~_equals(arrays[0], self.value)


def _hash_keys(array: pa.Array, seed: Words, by_place_R: Words) -> Words:
    ids = to_id_lists(array)
    keyed = mix(id_words(ids.values).view(np.uint64) ^ seed)
    if ids.null_R is None:
        return keyed
    by_place_R[~ids.null_R] = keyed
    return by_place_R


def _equals(array: pa.Array, value: int | float | str) -> Mask:
    array = decoded(array)
    if isinstance(value, str):
        same = pc.call_function("equal", [array.cast(pa.large_binary()), pa.scalar(value.encode(), pa.large_binary())])
        return same.fill_null(False).to_numpy(zero_copy_only=False)
    numbers = to_numbers(array)
    same_R: Mask = numbers.x_N == value
    return same_R if numbers.null_N is None else same_R & ~numbers.null_N
