"""Splits text such as `Action|Comedy` into lists of words at a separator."""

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import types

from rowwise.ingest.bags import to_offsets
from rowwise.ingest.kinds import KEYS
from rowwise.ingest.transform.arrays import lists, to_id_lists
from rowwise.ingest.transform.transform import Arrays, Kinds, OneColumn, RowPosition, is_words


class SplitText(OneColumn, frozen=True, kw_only=True, tag="split", tag_field="kind"):
    """The words of a text, without surrounding spaces. Empty words are left out; a null row stays null."""

    separator: str  # between words
    want = KEYS

    def __post_init__(self) -> None:
        if not self.separator:
            raise self.spec_error("separator='': expected at least one character")

    def type_problem(self, kinds: Kinds) -> str:
        is_bytes = types.is_binary(kinds[0]) or types.is_large_binary(kinds[0])
        return "" if is_words(kinds[0]) and not is_bytes else f"it holds {kinds[0]}: expected text"

    def types(self, kinds: Kinds) -> Kinds:
        return (pa.large_list(pa.large_string()),)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        return (split_text(arrays[0], self.separator),)


def split_text(array: pa.Array, separator: str) -> pa.Array:
    """A list of words for each text."""
    texts = to_id_lists(array)
    cut = pc.call_function("split_pattern", [texts.values.cast(pa.large_string())], pc.SplitPatternOptions(separator))
    words = pc.call_function("utf8_trim_whitespace", [cut.flatten()])
    kept_N = pc.call_function("not_equal", [words, ""]).to_numpy(zero_copy_only=False)
    counts = np.diff(to_offsets(kept_N)[to_offsets(pc.call_function("list_value_length", [cut]).to_numpy())])
    counts_R = np.zeros(len(array), np.int64)
    counts_R[slice(None) if texts.null_R is None else ~texts.null_R] = counts
    return lists(words.filter(pa.array(kept_N)), to_offsets(counts_R), texts.null_R)
