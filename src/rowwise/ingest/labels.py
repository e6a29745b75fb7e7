"""Labels: a column of numbers, or a condition on columns that is true or false, such as "rating >= 4".

`parse_label` parses a text of `columns.labels`; `choose_label` chooses the text for a column of any form: pure
functions. Conditions have the syntax of `where.py`. A row whose column is missing has no label; rows that lack any
label are left out by `prepare.py`.
"""

import functools
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.ingest.bags import combine_chunks, floats
from rowwise.ingest.block import Floats
from rowwise.ingest.kinds import is_number, is_text
from rowwise.ingest.reader import Reader, Split, check_columns
from rowwise.ingest.where import NULLS, Plain, RowFilter, parse

LABELS = ("label", "click", "clicked", "is_click", "target", "y", "conversion", "converted")
LabelValues = Literal["clicks", "numbers", "amounts"]
WANTED: dict[LabelValues, str] = {
    "clicks": "expected a label of 0 or 1",
    "numbers": "expected a label that is a finite number",
    "amounts": "expected a label that is finite and not negative",
}
YES = {
    *("yes", "y", "true", "t", "1", "good", "ok", "positive", "pos", "on", "click", "clicked", "open", "opened", "hit"),
    *("buy", "bought", "purchase", "purchased", "paid", "sold", "convert", "converted", "churn", "churned", "like"),
    *("liked", "win", "won", "success", "fraud", "spam"),
}
NO = {
    *("no", "n", "false", "f", "0", "-1", "bad", "negative", "neg", "off", "none", "never", "null", "not", "miss"),
    *("lost", "loss", "fail", "failure", "ham"),
}
RATING_NAME = re.compile(r"(^|_)(rating|ratings|stars?|score|grade|nps)($|_)", re.IGNORECASE)
MONEY_NAME = re.compile(r"(^|_)(price|cost|revenue|amount|salary|income|spend|sales|value|balance|fare)($|_)", re.I)
MAX_RATINGS = 11  # distinct values; more are an amount
MAX_VALUES = 1 << 12  # distinct values counted for the choice
GOOD_RATING = 0.75  # relative position of a good rating between the minimum and the maximum
NO_WORDS = ("true", "false", "nan", "inf", "infinity")  # words that `where` parses as other values
SIGNS = re.compile(r"[=<>!`]|\bis\s+(not\s+)?null\b|\bin\s*\[", re.IGNORECASE)


class Label(NamedTuple):
    """A parsed text of `columns.labels`."""

    name: str  # the column
    test: RowFilter | None = None  # the condition; None for a column of numbers

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name,) if self.test is None else self.test.columns

    def check(self, schema: pa.Schema, source: str) -> None:
        """Refuse columns that are missing or have a type that is no label, and values that a type cannot hold."""
        check_columns(self.columns, schema, source)
        if self.test is not None:
            self.test.check(schema, source, "label")
        elif not is_number(kind := schema.field(self.name).type):
            raise DataError(
                f"{source}: column {self.name!r} holds {kind}",
                f"numbers for a label, or a condition such as {condition(self.name, 'Yes')}",
            )

    def values(self, arrays: Mapping[str, pa.Array]) -> Floats:
        """The label of each row; NaN if it has none."""
        if self.test is None:
            return floats(arrays[self.name])
        mask_R = np.ones(len(arrays[self.name]), np.bool_)
        for term in self.test.all_of:
            mask_R &= term.mask(pa.chunked_array([arrays[term.column]]))
        values_R = mask_R.astype(np.float32)
        missing_R = self.missing(arrays)
        if missing_R is not None:
            values_R[missing_R] = np.nan
        return values_R

    def missing(self, arrays: Mapping[str, pa.Array | pa.ChunkedArray]) -> NDArray[np.bool_] | None:
        """Mask of the rows without a label, or None if all have one."""
        terms = () if self.test is None else self.test.all_of
        null_tests = {term.column for term in terms if term.op in NULLS}  # true or false also for a missing value
        return _in_any(_nulls(arrays[name]) for name in self.columns if name not in null_tests)


@functools.lru_cache(1024)
def parse_label(text: str) -> Label:
    """A column, or a condition in the syntax of `where`; a name with an operator in it is quoted by backquotes."""
    quoted = re.fullmatch(r"\s*`([^`]+)`\s*", text)
    if quoted or not SIGNS.search(text):
        return Label(quoted[1] if quoted else text)
    test = parse(text, "label")
    return Label(test.columns[0], test)


def unlabelled(table: pa.Table, labels: Sequence[Label]) -> NDArray[np.bool_] | None:
    """Mask of the rows that lack any of the labels, or None."""
    return _in_any(label.missing({name: table[name] for name in label.columns}) for label in labels)


def _in_any(masks: Iterable[NDArray[np.bool_] | None]) -> NDArray[np.bool_] | None:
    """The union of the masks, or None if there is none."""
    present = [mask_R for mask_R in masks if mask_R is not None]
    return np.logical_or.reduce(present) if present else None


def describe_unlabelled(missing: int, rows: int, *, all_rows: bool = True) -> str:
    """A note that unlabelled rows are left out."""
    return f"{missing:,} of {'' if all_rows else 'the first '}{rows:,} rows have no label and are left out"


def bad_values(label_R: Floats, wanted: LabelValues) -> NDArray[np.bool_]:
    """Mask of the labels outside the domain of the loss."""
    if wanted == "clicks":
        return (label_R != 0) & (label_R != 1)
    return ~np.isfinite(label_R) if wanted == "numbers" else ~(np.isfinite(label_R) & (label_R >= 0))


class LabelCounter:
    """Counts labels split by split."""

    def __init__(self, choices: Sequence["LabelChoice"]) -> None:
        self.labels = tuple(parse_label(choice.text) for choice in choices)
        self.border = choices[0].border if choices else 0.0
        self.high = self.missing = 0  # rows

    def take(self, table: pa.Table) -> tuple[pa.Table, NDArray[np.bool_]]:
        """The labelled rows, and a mask of those whose first label is high."""
        unlabelled_R = unlabelled(table, self.labels)
        if unlabelled_R is not None:
            table = table.filter(pa.array(~unlabelled_R))
            self.missing += int(unlabelled_R.sum())
        high_R = np.zeros(table.num_rows, np.bool_)
        for label in self.labels[:1]:
            high_R = label.values({name: combine_chunks(table[name]) for name in label.columns}) > self.border
        self.high += int(high_R.sum())
        return table, high_R


class LabelChoice(NamedTuple):
    """The label of a recipe, and a note on the choice."""

    text: str
    note: str = ""
    values: LabelValues = "clicks"
    border: float = 0.0  # labels above it count as positive in the evidence for roles


def choose_label(name: str, kind: pa.DataType, counts: Mapping[Plain, int], *, more: bool = False) -> LabelChoice:
    """The label for a column, given the rows of each of its values; `more`: not all of its values were counted."""
    if not counts or set(counts) <= {0, 1}:  # also false and true
        return LabelChoice(column_text(name))
    if len(counts) <= 2 and not more:
        if len(counts) == 1:
            raise DataError(f"the label {name!r} is {next(iter(counts))!r} in all rows", "rows with another value, too")
        return _choose_yes(name, counts)
    if is_text(kind) or types.is_dictionary(kind):
        frequent = [str(value) for value in sorted(counts, key=lambda v: -counts[v])[:2]]
        ways = " or ".join(f"--label {_shell(condition(name, value))}" for value in frequent)
        number = f"{'at least ' * more}{len(counts):,}"
        raise DataError(
            f"the label {name!r} has {number} different words, and rowwise predicts yes or no", hint=f"choose {ways}"
        )
    return _choose_rating(name, sorted(map(float, counts)), more=more) or choose_loss(name, counts)


def _choose_yes(name: str, counts: Mapping[Plain, int]) -> LabelChoice:
    a, b = counts
    words = isinstance(a, str)
    yes, no = ([_plain(value) in known for value in (a, b)] for known in (YES, NO))
    if isinstance(a, int | float) and isinstance(b, int | float) and min(a, b) <= 0 < max(a, b):
        positive, reason = max(a, b), "as the number above 0"
    elif words and yes[0] != yes[1]:
        positive, reason = (a if yes[0] else b), "as it means yes"
    elif words and no[0] != no[1]:
        positive, reason = (b if no[0] else a), f"as {a if no[0] else b!r} means no"
    else:
        positive, reason = min(counts, key=lambda value: (counts[value], str(value))), "as it is the rarer one"
    negative = b if positive == a else a
    note = f"the label {name!r} holds {a!r} and {b!r}; {positive!r} is predicted, {reason}"
    text = condition(name, positive)
    return LabelChoice(text, f"{note}: for the other, --label {_shell(condition(name, negative))}")


def _choose_rating(name: str, values: Sequence[float], *, more: bool) -> LabelChoice | None:
    """A condition for good ratings, or None if the values are amounts."""
    least, most, whole = values[0], values[-1], all(value.is_integer() for value in values)
    named = RATING_NAME.search(name) is not None
    steps = all((2 * value).is_integer() for value in values) if named else whole and least >= 1
    if steps and not more and len(values) <= MAX_RATINGS and 0 <= least < most <= MAX_RATINGS:
        good = min(value for value in values if value >= least + GOOD_RATING * (most - least))
        text = f"{_term(name)} >= {_number(good)}"
        note = f"the label {name!r} is a rating of {_number(least)} to {_number(most)}; {text} is predicted"
        alternative = f"{_term(name)}>={_number(most if good < most else least)}"
        return LabelChoice(
            text, f"{note}: for another border, --label {_shell(alternative)}; for the rating itself, --amount"
        )
    return None


def choose_loss(name: str, counts: Mapping[Plain, int]) -> LabelChoice:
    """An amount as it is, with the loss that suits it."""
    values = {float(value): count for value, count in counts.items()}
    mean = sum(value * count for value, count in values.items()) / max(sum(values.values()), 1)
    least, whole = min(values), all(value.is_integer() for value in values)
    if whole and least >= 0 and not MONEY_NAME.search(name):
        note = "is a count; its mean is predicted, by Poisson loss: for squared errors, train.objective.kind: squared"
        return LabelChoice(column_text(name), f"the label {name!r} {note}", "amounts", mean)
    alternative = ", or train.objective.kind: poisson" if least >= 0 else ""
    note = f"the label {name!r} is an amount; its mean is predicted, by squared errors{alternative}"
    return LabelChoice(column_text(name), note, "numbers", mean)


def label_note(name: str, values: LabelValues, distinct: int, least: float, most: float) -> str | None:
    """An anomaly of a label over all rows, or None; least > most if it has no numbers."""
    if distinct < 2:
        return f"the label {name!r} is the same in all rows"
    if values == "clicks" and (distinct > 2 or (least <= most and {least, most} - {0.0, 1.0})):
        return f"the label {name!r} is not 0 or 1: {distinct} values from {least} to {most}"
    return f"the label {name!r} is a count, and is {least} in some rows" if values == "amounts" and least < 0 else None


def is_likely(distinct: int, least: float | None, most: float | None, nulls: int) -> bool:
    """Whether a column holds only 0 and 1."""
    return distinct == 2 and (least, most) == (0, 1) and not nulls


def choose_labels(
    reader: Reader, splits: Sequence[Split], texts: Sequence[str], *, amount: bool = False
) -> tuple[LabelChoice, ...]:
    """The labels of a recipe for requested columns or conditions, by the values of the first rows.

    Args:
        reader: reads the rows.
        splits: read until a column has literal two values.
        texts: columns or conditions.
        amount: predict columns as amounts, whatever their values.
    """
    choices = tuple(_choose_by_values(reader, splits, text, amount=amount) for text in texts)
    kinds = {choice.values for choice in choices}
    if "clicks" in kinds and len(kinds) > 1:
        forms = ", ".join(f"{c.text} ({'yes or no' if c.values == 'clicks' else 'an amount'})" for c in choices)
        raise DataError(
            f"{splits[0].source}: labels {forms}", "labels of one form", hint="write a recipe for each form"
        )
    if len(kinds) > 1:
        choices = tuple(
            choice._replace(values="numbers", note=choice.note and choice.note.split(";")[0]) for choice in choices
        )
    return choices


def _choose_by_values(reader: Reader, splits: Sequence[Split], text: str, *, amount: bool) -> LabelChoice:
    source = splits[0].source
    label = Label(text) if text in reader.schema.names else parse_label(text)
    check_columns(label.columns, reader.schema, source)
    if label.test is not None:
        label.check(reader.schema, source)
        return LabelChoice(text)
    kind = reader.schema.field(label.name).type
    if not can_be_label(kind) or (amount and not is_number(kind)):
        wanted = "numbers" if amount else "numbers, words, or true and false"
        raise DataError(f"{source}: column {label.name!r} holds {kind}", f"{wanted} for a label")
    counts = Counter[Plain]()
    for split in splits:
        counts.update(value_counts(combine_chunks(reader.read(split, (label.name,))[label.name])))
        if len(counts) > 1:
            break
    try:
        if amount:
            return choose_loss(label.name, counts)
        return choose_label(label.name, kind, counts, more=len(counts) >= MAX_VALUES)
    except DataError as error:
        raise DataError(f"{source}: {error}") from None


def can_be_label(kind: pa.DataType) -> bool:
    """Whether a column with the name of a label has a possible type: numbers, or words."""
    return is_number(kind) or is_text(kind) or (types.is_dictionary(kind) and is_text(kind.value_type))


def value_counts(array: pa.Array) -> dict[Plain, int]:
    """The number of rows of each of the first MAX_VALUES values, without missing ones."""
    if types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if types.is_decimal(array.type):
        array = array.cast(pa.float64())
    counts: dict[Plain, int] = {}
    for pair in array.drop_null().value_counts()[:MAX_VALUES].to_pylist():
        value = pair["values"].decode(errors="replace") if isinstance(pair["values"], bytes) else pair["values"]
        if not isinstance(value, float) or math.isfinite(value):
            counts[value] = pair["counts"]
    return counts


def condition(name: str, value: Plain) -> str:
    """`name = value`, as `parse_label` reads it."""
    if isinstance(value, bool):
        literal = str(value).lower()
    elif isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z][\w.-]*", value) and value.casefold() not in NO_WORDS
        quote = "'" if '"' in value else '"'
        literal = value if plain else f"{quote}{value}{quote}"
    else:
        literal = _number(value)
    return f"{_term(name)} = {literal}"


def column_text(name: str) -> str:
    """A column as `parse_label` reads it."""
    return f"`{name}`" if SIGNS.search(name) else name


def _term(name: str) -> str:
    """A column as the left side of a condition."""
    return f"`{name}`" if SIGNS.search(name) or re.search(r"\s", name) else name


def _nulls(array: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_] | None:
    missing = array.is_null(nan_is_null=True) if types.is_floating(array.type) else array.is_null()
    if not array.null_count and not types.is_floating(array.type):
        return None
    mask_R = np.asarray(missing.to_numpy(zero_copy_only=False) if isinstance(missing, pa.Array) else missing.to_numpy())
    return mask_R.astype(np.bool_) if mask_R.any() else None


def _plain(value: Plain) -> str:
    return _number(value) if isinstance(value, float) else str(value).strip().casefold()


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _shell(text: str) -> str:
    """A condition as a shell argument."""
    short = text.replace(" = ", "=").replace(" >= ", ">=")
    return short if re.fullmatch(r"[\w=.-]+", short) else shlex.quote(short)
