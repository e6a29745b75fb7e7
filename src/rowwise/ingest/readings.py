"""How to parse a column whose type does not describe its values: times and numbers in text, whole numbers in floats.

Guessed from the first rows; a recipe reads the column by a transform of the same name.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import types

from rowwise.ingest.kinds import is_text
from rowwise.ingest.names import sense_of
from rowwise.ingest.transform import RowPosition, ToNumber, ToTime, ToWhole
from rowwise.ingest.transform.read import ISO, is_whole, parse_numbers, parse_times
from rowwise.tables.spec import Value

DATES = (
    "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d", "%b %d %Y", "%b %d, %Y",
    "%d %b %Y", "%d-%b-%Y", "%d/%m/%y", "%m/%d/%y", "%d-%b-%y", "%d-%m-%y", "%m-%d-%y",
    "%d.%m.%y", "%a, %d %b %Y",
)  # fmt: skip
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p", ", %H:%M", ", %I:%M %p", " %H:%M:%S GMT")
WHOLE_FORMATS = ("%d/%b/%Y:%H:%M:%S %z", "%a %b %d %H:%M:%S %Y", "%b-%Y", "%b %Y")
FORMATS = (ISO, *(day + clock for day in DATES for clock in CLOCKS), *WHOLE_FORMATS)
MAX_FORMATS = 4  # of one column
SPAN = (1900, 2100)  # plausible years
FITS = 0.98  # minimum share of the distinct texts that parse
NUMBERS_FIT = 0.9
DIFFERENT = 3  # minimum number of distinct texts for a guess
MAX_TEXTS = 1000  # distinct texts that are parsed
FEW_TEXTS = 60  # texts that all formats are tried on first
LOOKS_LIKE_TIME = r"^.{6,40}$"
DIGIT_PAIRS = r"\d[-/.: ,]|[A-Za-z]{3}[ -]\d"
LEADING_ZERO = r"^0\d"
FRACTION = r"[.$€£%,]"
MISSING = ("na", "n/a", "nan", "null", "none", "-", "?", "unknown", "missing", "")


class ColumnReading(Value, frozen=True):
    """How to parse the values of a column."""

    how: Literal["time", "number", "whole"]
    formats: tuple[str, ...] = ()
    doubt: str = ""  # an ambiguity that the values do not resolve

    def read(self, array: pa.Array) -> pa.Array:
        """The parsed values; null where a value does not parse."""
        return self.transform("column").run((array,), RowPosition())[0]

    def misread(self, before: pa.Array, after: pa.Array) -> int:
        """The number of values that do not parse; blanks and words such as NA count as missing."""
        lost = before.filter(pc.call_function("and_not", [before.is_valid(), after.is_valid()]))
        if types.is_floating(lost.type):
            return pc.call_function("is_finite", [lost]).true_count if self.how == "whole" else 0
        return len(_without_missing(pc.call_function("utf8_trim_whitespace", [lost])))

    def transform(self, column: str) -> ToTime | ToNumber | ToWhole:
        if self.how == "time":
            return ToTime(column=column, formats=self.formats)
        return ToNumber(column=column) if self.how == "number" else ToWhole(column=column)


def find_readings(columns: Mapping[str, pa.Array]) -> dict[str, ColumnReading]:
    """The readings of columns whose type does not describe their first values."""
    readings = {name: _find(name, array) for name, array in columns.items()}
    return {name: reading for name, reading in readings.items() if reading is not None}


def _find(name: str, array: pa.Array) -> ColumnReading | None:
    if types.is_floating(array.type):
        x_N = array.drop_null().cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        x_N = x_N[~np.isnan(x_N)]
        finite_N = x_N[np.isfinite(x_N)]
        if len(finite_N) and is_whole(finite_N).all() and sense_of(name) != "amount":
            return ColumnReading(how="whole")
        with np.errstate(over="ignore"):
            return ColumnReading(how="number") if not np.isfinite(x_N.astype(np.float32)).all() else None
    if not is_text(array.type) or types.is_large_binary(array.type):
        return None
    texts = pc.call_function("utf8_trim_whitespace", [array.drop_null().unique()])
    texts = _without_missing(texts)[:MAX_TEXTS]
    if len(texts) < DIFFERENT:
        return None
    return _time_reading(texts) or _number_reading(name, texts)


def _without_missing(texts: pa.Array) -> pa.Array:
    lower = pc.call_function("utf8_lower", [texts])
    known = pc.call_function("is_in", [lower], pc.SetLookupOptions(value_set=pa.array(MISSING, texts.type)))
    return texts.filter(pc.call_function("invert", [known]))


def _time_reading(texts: pa.Array) -> ColumnReading | None:
    if _share(texts, LOOKS_LIKE_TIME) < FITS or _share(texts, DIGIT_PAIRS) < FITS:
        return None
    # Try all formats on a few texts, and only those that fit on all texts.
    few = texts.take(pa.array(np.linspace(0, len(texts) - 1, min(len(texts), FEW_TEXTS)).astype(np.int64)))
    possible = [form for form in FORMATS if _fitting(few, form).true_count]
    formats: list[str] = []
    rest, doubt = texts, ""
    while len(rest) > (1 - FITS) * len(texts) and len(formats) < MAX_FORMATS:
        fits = {form: _fitting(rest, form) for form in possible}
        counts = {form: fit.true_count for form, fit in fits.items() if fit.true_count}
        if not counts:
            return None
        twins = {a: [b for b in counts if _are_swapped(a, b) and counts[a] == counts[b]] for a in counts}
        form = max(counts, key=lambda candidate: (not twins[candidate], counts[candidate]))
        swapped = twins[form]
        before = {earlier[:2] for earlier in formats}  # the order of day and month in other texts of the column
        if swapped and (swapped[0][:2] in before or (form.startswith("%d/%m") and form[:2] not in before)):
            form = swapped[0]  # as in the United States, where slashes are usual
        if swapped and form[:2] not in before:
            doubt = f"the order of day and month in {form} is a guess: no day is above 12"
        formats.append(form)
        rest = rest.filter(pc.call_function("invert", [fits[form]]))
    if len(rest) > (1 - FITS) * len(texts):
        return None
    return ColumnReading(how="time", formats=tuple(formats), doubt=doubt)


def _are_swapped(a: str, b: str) -> bool:
    """Whether two formats differ only in the order of day and month."""
    return a != b and sorted(a) == sorted(b)


def _fitting(texts: pa.Array, form: str) -> pa.Array:
    years = pc.call_function("year", [parse_times(texts, form)])
    late = pc.call_function("greater_equal", [years, SPAN[0]])
    return pc.fill_null(pc.call_function("and", [late, pc.call_function("less", [years, SPAN[1]])]), False)


def _number_reading(name: str, texts: pa.Array) -> ColumnReading | None:
    numbers = texts.filter(parse_numbers(texts).is_valid())
    if len(numbers) < NUMBERS_FIT * len(texts) or _share(numbers, LEADING_ZERO) or sense_of(name) == "id":
        return None
    measured = _share(numbers, FRACTION) > 0 or sense_of(name) == "amount"
    return ColumnReading(how="number") if measured else None


def _share(texts: pa.Array, pattern: str) -> float:
    match = pc.call_function("match_substring_regex", [texts], pc.MatchSubstringOptions(pattern))
    return match.true_count / max(len(texts), 1)
