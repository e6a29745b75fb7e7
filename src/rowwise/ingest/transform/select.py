"""Sampling: some of the rows, the same ones whatever the order, the worker or the run.

It says which rows are used and leaves the table as it is, so that errors go on naming rows by their numbers in the
file. Rows that are served are never left out, see `chain.serving`.
"""

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from rowwise.ingest.columns import KEYS
from rowwise.ingest.mix import Words, mix
from rowwise.ingest.transform.arrays import Mask, ids_of, numbers_of, words_of
from rowwise.ingest.transform.transform import NUMBER_OR_KEY, Arrays, Kinds, RowPosition, Transform, is_words


class Sampling(Transform, frozen=True, kw_only=True, tag="sampling", tag_field="kind"):
    """A share of the rows, drawn by a hash of each row's place (its split, and its number there), or of its key.

    With `column`, only rows where it holds `value` are drawn, and all others stay: a tenth of the negatives is
    {kind: sampling, rate: 0.1, column: label, value: 0}. A null or NaN there is no value, so such a row stays. With
    `key`, rows of the same key stay or go together; a row whose key is null is drawn by its place.
    """

    rate: float  # how many of those that are drawn stay
    seed: int = 0
    column: str | None = None
    value: int | float | str = 0
    key: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise self.refuse(f"rate={self.rate}: want 0 to 1, such as 0.1 to keep a tenth")
        if self.column is None and self.value != 0:
            raise self.refuse(f"value={self.value!r} without a column that holds it: want column as well, or no value")
        if not 0 <= self.seed < 1 << 63:
            raise self.refuse(f"seed={self.seed}: want at least 0, and less than 2**63")

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(name for name in (self.column, self.key) if name is not None)

    @property
    def makes(self) -> tuple[str, ...]:
        return ()

    @property
    def wants(self) -> tuple[str, ...]:
        """A value to compare, and a key."""
        wanted = ((self.column, NUMBER_OR_KEY), (self.key, KEYS))
        return tuple(want for name, want in wanted if name is not None)

    def complaint(self, kinds: Kinds) -> str:
        """Numbers and words are never the same."""
        if self.column is not None and is_words(kinds[0]) != isinstance(self.value, str):
            return f"compared with {self.value!r}: want {'a text' if is_words(kinds[0]) else 'a number'}"
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
        stays_R = (draw_R >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.rate
        return stays_R if self.column is None else stays_R | ~_holds(arrays[0], self.value)


def _hash_keys(array: pa.Array, seed: Words, by_place_R: Words) -> Words:
    ids = ids_of(array)
    keyed = mix(words_of(ids.values).view(np.uint64) ^ seed)
    if ids.null_R is None:
        return keyed
    by_place_R[~ids.null_R] = keyed
    return by_place_R


def _holds(array: pa.Array, value: int | float | str) -> Mask:
    if isinstance(value, str):
        texts = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        same = pc.call_function("equal", [texts.cast(pa.large_binary()), pa.scalar(value.encode(), pa.large_binary())])
        return same.fill_null(False).to_numpy(zero_copy_only=False)
    numbers = numbers_of(array.dictionary_decode() if pa.types.is_dictionary(array.type) else array)
    same_R: Mask = numbers.x_N == value
    return same_R if numbers.null_N is None else same_R & ~numbers.null_N
