"""Parses columns that other programs wrote: times, numbers and lists in text, integers stored as floats.

A value that does not parse becomes null. Known limits: names of months and days are English; a
comma separates thousands, not decimals.
"""

import datetime

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import types

from rowwise.ingest.bags import as_float32, decoded, to_offsets
from rowwise.ingest.kinds import KEYS, NUMBER_OR_KEY, NUMBERS
from rowwise.ingest.transform.arrays import lists, to_id_lists
from rowwise.ingest.transform.transform import Arrays, Kinds, OneColumn, RowPosition, is_words

ISO = "iso"
MAX_WHOLE = 1 << 53  # whole numbers up to here are exact in 64-bit floats
NUMBER = r"^[-+]?[$€£]?(\d{1,3}(,\d{3})+(\.\d*)?|\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?%?$"


class ToTime(OneColumn, frozen=True, kw_only=True, tag="to_time", tag_field="kind"):
    """Parses text as a time, by the first format that fits. Times with a zone are converted to UTC."""

    formats: tuple[str, ...] = (ISO,)  # iso, such as 2024-05-31T12:00:00+02:00; or of strptime: "%d/%m/%Y %H:%M"
    want = KEYS

    def __post_init__(self) -> None:
        bad = [form for form in self.formats if form != ISO and "%" not in form]
        if bad or not self.formats:
            raise self.spec_error(f"formats={list(self.formats)}: expected {ISO}, or some such as '%d/%m/%Y %H:%M'")

    def type_problem(self, kinds: Kinds) -> str:
        return "" if is_words(kinds[0]) else f"it holds {kinds[0]}: expected text"

    def types(self, kinds: Kinds) -> Kinds:
        return (pa.timestamp("us"),)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Try the formats in order, on all texts that have not parsed yet."""
        texts = _trimmed(arrays[0])
        times = pa.nulls(len(texts), pa.timestamp("us"))
        for form in self.formats:
            if times.null_count:
                times = pc.call_function("coalesce", [times, parse_times(texts, form)])
        return (times,)


def parse_times(texts: pa.Array, form: str) -> pa.Array:
    """The times of trimmed texts; null where the format does not fit."""
    if form == ISO:
        return _parse_iso(texts)
    options = pc.StrptimeOptions(form, "us", error_is_null=True)
    return pc.call_function("strptime", [texts], options).cast(pa.timestamp("us"))


def _parse_iso(texts: pa.Array) -> pa.Array:
    for zone in (None, "UTC"):
        try:
            return texts.cast(pa.timestamp("us", zone)).cast(pa.timestamp("us"))
        except pa.ArrowInvalid:
            continue
    return pa.array([_iso_time(text) for text in texts.to_pylist()], pa.timestamp("us"))


def _iso_time(text: str | None) -> datetime.datetime | None:
    if text is None or "-" not in text:
        return None
    try:
        when = datetime.datetime.fromisoformat(text)
        return when.astimezone(datetime.UTC).replace(tzinfo=None) if when.tzinfo else when
    except (ValueError, OverflowError):
        return None


class ToNumber(OneColumn, frozen=True, kw_only=True, tag="to_number", tag_field="kind"):
    """A number of 64 bits from a number or from text such as `1,250.5`, `$12` or `7%` (7); null if it is not finite."""

    want = NUMBER_OR_KEY

    def type_problem(self, kinds: Kinds) -> str:
        return f"it holds {kinds[0]}: expected numbers or text" if types.is_binary(kinds[0]) else ""

    def types(self, kinds: Kinds) -> Kinds:
        return (pa.float64(),)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Numbers that overflow float32, the type of models, become null."""
        numbers = parse_numbers(arrays[0]) if is_words(arrays[0].type) else arrays[0].cast(pa.float64(), safe=False)
        finite = pc.call_function("is_finite", [as_float32(numbers)])
        return (pc.call_function("if_else", [finite, numbers, pa.scalar(None, pa.float64())]),)


def parse_numbers(array: pa.Array) -> pa.Array:
    """The numbers of texts; null for other texts."""
    texts = _trimmed(array)
    is_number = pc.call_function("match_substring_regex", [texts], pc.MatchSubstringOptions(NUMBER))
    plain = pc.call_function("replace_substring_regex", [texts], pc.ReplaceSubstringOptions("[$€£,%]", ""))
    plain = pc.call_function("replace_substring_regex", [plain], pc.ReplaceSubstringOptions(r"^\+", ""))
    return pc.call_function("if_else", [is_number, plain, pa.scalar(None, pa.large_string())]).cast(pa.float64())


class ToWhole(OneColumn, frozen=True, kw_only=True, tag="to_whole", tag_field="kind"):
    """Whole numbers up to 2**53 that are stored as floats, as pandas does where some are missing; others are null."""

    want = NUMBERS

    def types(self, kinds: Kinds) -> Kinds:
        return (pa.int64(),)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        if types.is_integer(arrays[0].type):
            return (arrays[0].cast(pa.int64(), safe=False),)
        x_R = arrays[0].cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        good_R = is_whole(x_R)
        return (pa.array(np.where(good_R, x_R, 0).astype(np.int64), mask=~good_R),)


def is_whole(x_R: np.ndarray) -> np.ndarray:
    """Mask of the numbers that are exact integers."""
    with np.errstate(invalid="ignore"):
        return np.isfinite(x_R) & (np.abs(x_R) <= MAX_WHOLE) & (np.floor(x_R) == x_R)


class SplitText(OneColumn, frozen=True, kw_only=True, tag="split", tag_field="kind"):
    """Splits text into trimmed words. Empty words are dropped; a null row stays null."""

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


def _trimmed(array: pa.Array) -> pa.Array:
    return pc.call_function("utf8_trim_whitespace", [decoded(array).cast(pa.large_string())])
