"""A dataset card: what is in the columns, what to make of them, and what looks wrong.

Pure but for reading splits: `inspect` gives a value, `cli/data.py` shows it. Needs no torch.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from msgspec import structs
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.columns import Columns, Dense, Sparse
from rowwise.ingest.division import MAX_NAMED, Part, Unit, divide, find_times, parts_of, unseen_ids
from rowwise.ingest.evidence import find_separator
from rowwise.ingest.kinds import FITS, TIMES, element_of, is_list, is_number, is_text
from rowwise.ingest.labels import (
    LABELS,
    LabelChoice,
    LabelCounter,
    LabelValues,
    can_be_label,
    choose_labels,
    is_likely,
    label_note,
    parse_label,
    say_unlabelled,
)
from rowwise.ingest.names import sense_of
from rowwise.ingest.reader import Reader, Split, check_columns
from rowwise.ingest.readings import DIFFERENT, ColumnReading, find_readings
from rowwise.ingest.roles import AS_TOLD, FEW, NEVER_SEEN, Facts, Role, Use, choose_role, when_never_seen
from rowwise.ingest.survey import SAMPLE_ROWS, ColumnSurvey, borders_of, count_infinite
from rowwise.ingest.times import TimeBorders, TimeSample, is_ordered, may_be_ids, times_of
from rowwise.ingest.transform.read import split_text
from rowwise.tables.spec import RESERVED_NAMES, Table, Value

LOOKS = 8  # splits, from the first to the last, that tell what a column is where the values of one are alike
LARGEST_TABLE = 100_000_000
ROOM = ((16.0, 1 << 20), (8.0, 1 << 24), (1.25, LARGEST_TABLE))  # rows for each id, as long as the table is no larger
UNSEEN = 0.01  # of the ids in test rows; fewer are not worth a warning
MISSING_TELLS = 0.5  # of the labels that are not guessed right without the column
# What an option may read a column as, by the role that it gives
READ_AS: dict[str | None, tuple[str, ...]] = {
    None: ("time", "number", "whole"), "dense": ("number",), "sparse": ("whole",), "time": ("time", "whole"),
    "key": ("whole",), "unused": (), "label": (), "group": (),
}  # fmt: skip
MISREAD = {"time": 0.1, "number": 0.1, "whole": 0.0}  # most of the rows that may not be what the first rows are


class ColumnCard(Value, frozen=True):
    """The type, counts, range and role of one column."""

    name: str
    type: str
    role: Role  # what to make of it
    rows: int
    nulls: int
    distinct: int
    distinct_error: float  # relative standard error; 0: counted
    top_share: float  # of all occurrences, those of the most frequent hundredth of the values
    least: float | None = None
    most: float | None = None
    mean_length: float | None = None  # of lists
    longest: int | None = None
    table_rows: int | None = None  # suggested
    table_dim: int | None = None
    listed: bool = False  # its ids can have a vocabulary; else they have to be hashed
    separator: str = ""  # of lists in text
    note: str | None = None  # what looks wrong
    why: str = ""  # it is used so
    unseen: float | None = None  # share of the ids in test rows that no training row has, estimated
    close: bool = False  # it could as well be used otherwise
    both: bool = False  # a number that is an id, too
    reading: ColumnReading | None = None  # of values that are not what their type says
    borders: tuple[float, ...] = ()  # of parts of a number with about equally many rows
    mean: float | None = None  # of a number, or of its logarithm if it is skewed
    std: float | None = None
    parts: tuple[Part, ...] = ()  # of a time, that come again
    unit: Unit = "s"  # of a time in whole numbers

    @property
    def is_ids(self) -> bool:
        """Whether it has a table."""
        return self.role == "sparse" or self.both

    @property
    def is_number_too(self) -> bool:
        """Whether the order of its ids may count: whole numbers that are ids by their values, not by their name."""
        return self.role == "sparse" and self.why != AS_TOLD and sense_of(self.name) != "id" and bool(self.std)

    @property
    def is_skewed(self) -> bool:
        """Whether it holds counts or amounts over a wide range."""
        return self.least is not None and self.most is not None and self.least >= 0 and self.most > FEW


class DatasetCard(Value, frozen=True):
    """The columns of a dataset, with roles and warnings."""

    source: str
    rows: int
    label: str | None
    label_rate: float | None
    columns: tuple[ColumnCard, ...]
    warnings: tuple[str, ...]  # the notes of columns, then `checks`
    checks: tuple[str, ...] = ()  # what looks wrong with testing on a share of the rows
    borders: TimeBorders | None = None  # to divide the rows by; None: at random
    group: str | None = None  # the column whose equal values are in one share
    division: str = ""  # how rows are divided into those to train, to validate and to test on, and why
    labels: tuple[str, ...] = ()  # of the recipe: columns, or conditions on them
    label_values: LabelValues = "clicks"
    label_choices: tuple[str, ...] = ()  # how they were chosen, and how to choose others
    unlabelled: int = 0  # rows without a label, which are in no count

    def suggest(self, dim: int, derived: Sequence[tuple[Sparse, int]] = ()) -> tuple[Columns, tuple[Table, ...]]:
        """Columns and tables to begin with, all tables of one width as DLRM wants them.

        Args:
            dim: of the tables.
            derived: columns that transforms make, each with the rows of its table.
        """
        if self.label is None:
            likely = f" ({', '.join(self.likely_labels)} hold 0 and 1)" if self.likely_labels else ""
            raise DataError(
                f"{self.source}: no column of numbers is called {', '.join(LABELS)}",
                hint=f"say which one is the label{likely}",
            )
        sparse = [c for c in self.columns if c.is_ids]
        if not sparse and not derived:
            raise DataError(
                f"{self.source}: no column of ids", "at least one", hint="name it: rowwise data inspect --sparse COLUMN"
            )
        names = table_names([*(c.name for c in sparse), *(made.column for made, _ in derived)])
        more = [(structs.replace(made, table=_unless(names[made.column], made.column)), rows) for made, rows in derived]
        columns = Columns(
            labels=self.labels or (self.label,),
            label_values=self.label_values,
            dense=tuple(Dense(column=c.name, log1p=c.is_skewed) for c in self.columns if c.role == "dense"),
            sparse=(
                *(Sparse(column=c.name, table=_unless(names[c.name], c.name)) for c in sparse),
                *(made for made, _ in more),
            ),
            key=self.first("key"),
            time=self.first("time"),
        )
        tables = [
            Table(name=names[column], rows=rows, dim=dim, features=() if names[column] == column else (column,))
            for column, rows in [
                *((c.name, _hashed_rows(c.distinct)) for c in sparse),
                *((made.column, rows) for made, rows in derived),
            ]
        ]
        return columns, tuple(tables)

    @property
    def likely_labels(self) -> tuple[str, ...]:
        """Columns of numbers that hold nothing but 0 and 1."""
        return tuple(c.name for c in self.columns if is_likely(c.distinct, c.least, c.most, c.nulls))

    def first(self, role: Role) -> str | None:
        """The first such column that is never missing."""
        return next((c.name for c in self.columns if c.role == role and not c.nulls), None)


class Inspection(NamedTuple):
    """The card of a dataset, and the ids of its columns for vocabularies, the most frequent first."""

    card: DatasetCard
    ids: dict[str, list[str]]  # of columns of ids that can be listed


def inspect(  # noqa: PLR0913 - what a user may say of the columns
    reader: Reader,
    label: str | Sequence[str] | None = None,
    *,
    amount: bool = False,
    name: str | None = None,
    splits: int | None = None,
    roles: Mapping[str, Role] | None = None,
    separators: Mapping[str, str] | None = None,
    tell: Callable[[int, int], None] | None = None,
    plain: bool = False,
) -> Inspection:
    """Profile the columns of the rows.

    Args:
        reader: where they come from.
        label: the column to predict, a condition on columns, or several; None: the column that is called so.
        amount: the label is an amount, whatever it looks like.
        name: what the card is called; None: as the first split's source is.
        splits: look at so many of the first ones only.
        roles: by column: what it is used as, whatever is in it.
        separators: by column of text: it holds lists.
        tell: hears how many of how many splits are done.
        plain: read values as their type says, for columns that no transform reads.
    """
    first_splits = reader.splits()[:splits]
    if not first_splits:
        raise DataError(f"{name or type(reader).__name__}: no rows to look at", "files with rows")
    source = first_splits[0].source
    told = dict(roles or {})
    check_columns([*reader.schema.names, *told], reader.schema, source)
    given = (label,) if isinstance(label, str) else tuple(label or ())
    choices, problem = _labels(reader, first_splits, given, amount=amount)
    labels = {column: choice for choice in choices for column in parse_label(choice.text).columns}
    separators = separators or {}
    check_columns(tuple(separators), reader.schema, source)
    for column, separator in separators.items():
        if not is_text(kind := reader.schema.field(column).type) or not separator:
            raise DataError(f"{source}: column {column!r} holds {kind}", "text and a separator for --list")
    names = [n for n in reader.schema.names if told.get(n) != "unused" or n in labels]
    if not names:
        raise DataError(f"{source}: every column is ignored", "at least one to learn from")
    head = _first_values(reader, first_splits, [n for n in names if n not in separators and n not in labels])
    found: dict[str, ColumnReading] = {} if plain else find_readings(head)
    readings = {n: r for n, r in found.items() if r.how in READ_AS[told.get(n)]}
    times = [n for n, role in told.items() if role == "time"] or find_times(
        {n: _read(array, readings.get(n)) for n, array in head.items() if n not in told}
    )
    look = _Look(source, names, choices, labels, readings, separators, times)
    for column, role in told.items():
        _check_role(column, look.kind(reader.schema.field(column)), role, source)
    seen = _survey(reader, first_splits, look, tell)
    rows = seen.surveys[names[0]].rows
    wrong = {n for n, count in seen.misread.items() if count > MISREAD[readings[n].how] * rows}
    if wrong:  # the first rows were not like the others
        look = look._replace(
            readings={n: r for n, r in readings.items() if n not in wrong}, times=[n for n in times if n not in wrong]
        )
        seen = _survey(reader, first_splits, look, tell)
    return _judge(name or source, look, seen, told, problem)


def _first_values(reader: Reader, splits: Sequence[Split], names: Sequence[str]) -> dict[str, pa.Array]:
    """First values of columns; also of later splits where those of the first are alike, such as its day."""
    table = reader.read(splits[0], names).slice(0, SAMPLE_ROWS)
    head = {name: combine_chunks(table[name]) for name in names}
    alike = [name for name, array in head.items() if _may_tell_time(array.type) and len(array.unique()) < DIFFERENT]
    places = np.unique(np.linspace(0, len(splits) - 1, LOOKS).astype(np.int64))[1:]
    for place in places if alike else ():
        more = reader.read(splits[place], alike).slice(0, SAMPLE_ROWS)
        head |= {name: pa.concat_arrays([head[name], combine_chunks(more[name])]) for name in alike}
    return head


def _may_tell_time(kind: pa.DataType) -> bool:
    return is_ordered(kind) or is_text(kind)


class _Look(NamedTuple):
    """How the columns are looked at."""

    source: str
    names: Sequence[str]  # of the columns that are read
    choices: tuple[LabelChoice, ...]
    labels: dict[str, LabelChoice]  # by column that one reads
    readings: dict[str, ColumnReading]
    separators: Mapping[str, str]  # of lists in text
    times: list[str]  # columns that may tell when a row happened

    def kind(self, field: pa.Field) -> pa.DataType:
        """The type of what is read."""
        if field.name in self.separators:
            return pa.large_list(pa.large_string())
        reading = self.readings.get(field.name)
        return field.type if reading is None else reading.transform(field.name).types((field.type,))[0]


class _Seen(NamedTuple):
    """What all rows say."""

    surveys: dict[str, ColumnSurvey]
    sample: TimeSample
    counted: LabelCounter
    misread: dict[str, int]  # values that are not what the first rows are


def _survey(reader: Reader, splits: Sequence[Split], look: _Look, tell: Callable[[int, int], None] | None) -> _Seen:
    time = look.times[0] if look.times else None
    surveys = {field.name: ColumnSurvey(look.kind(field)) for field in reader.schema}
    sample = TimeSample()
    counted, misread = LabelCounter(look.choices), dict.fromkeys(look.readings, 0)
    for index, split in enumerate(splits):
        table, positive_R = counted.take(reader.read(split, look.names))
        arrays = {column: combine_chunks(table[column]) for column in look.names}
        for column, reading in look.readings.items():
            raw, arrays[column] = arrays[column], reading.read(arrays[column])
            misread[column] += reading.misread(raw, arrays[column])
            surveys[column].infinite += count_infinite(raw)
        time_R = None if time is None else times_of(arrays[time])
        if time_R is not None:
            ids = {
                n: array for n, array in arrays.items() if n != time and n not in look.labels and may_be_ids(array.type)
            }
            sample.add(time_R, positive_R, ids)
        for column, array in arrays.items():
            separator = look.separators.get(column)
            surveys[column].add(array if separator is None else split_text(array, separator), positive_R, time_R)
        if tell is not None:
            tell(index + 1, len(splits))
    return _Seen(surveys, sample, counted, misread)


def _judge(name: str, look: _Look, seen: _Seen, told: Mapping[str, Role], problem: str | None) -> Inspection:
    """The roles of columns, the division of rows, and what looks wrong; `problem`: why there is no label."""
    surveys, sample, choices, counted = seen.surveys, seen.sample, look.choices, seen.counted
    label, values = next(iter(look.labels), None), choices[0].values if choices else "clicks"
    others = {n: survey for n, survey in surveys.items() if n not in look.labels}
    facts = {n: Facts(n, survey, labelled=label is not None) for n, survey in others.items()}
    uses = {n: Use(told[n], AS_TOLD) if n in told else choose_role(found) for n, found in facts.items()}
    division = divide(uses, facts, surveys, sample, look.times, told="time" in told.values())
    if division.group is not None and division.group not in told:
        uses[division.group] = Use("group", "rows of one value are alike")
    unseen = unseen_ids(uses, surveys, sample, division)
    for column in [n for n, share in unseen.items() if share >= NEVER_SEEN and n not in told]:
        uses[column] = when_never_seen(facts[column], uses[column], unseen.pop(column))
    for column, choice in look.labels.items():
        uses[column] = Use("label", note=_label_note(column, choice, surveys[column]))
    borders = division.borders
    if borders is not None and (reading := look.readings.get(borders.column)) is not None:
        borders = structs.replace(borders, formats=reading.formats)
    columns = tuple(_column(n, survey, uses[n], look, seen, unseen.get(n)) for n, survey in surveys.items())
    rows = surveys[look.names[0]].rows
    checks = (*division.checks, *_unseen_line(columns), *_missing_line(facts, uses))
    lacking = (say_unlabelled(counted.missing, rows + counted.missing),) if counted.missing else ()
    card = DatasetCard(
        source=name,
        rows=rows,
        label=label,
        label_rate=counted.high / rows if label and rows and values == "clicks" else None,
        columns=columns,
        warnings=(*(column.note for column in columns if column.note), *checks),
        checks=checks,
        borders=borders,
        group=division.group,
        division=division.said,
        labels=tuple(choice.text for choice in choices),
        label_values=values,
        label_choices=(*(choice.said for choice in choices if choice.said), *lacking),
        unlabelled=counted.missing,
    )
    if label is None:
        likely = f"; {', '.join(map(repr, card.likely_labels))} hold 0 and 1" if card.likely_labels else ""
        first = problem or f"no label: say which column it is with --label{likely}"
        card = structs.replace(card, warnings=(first, *card.warnings))
    return Inspection(card, {c.name: surveys[c.name].ids() or [] for c in columns if c.listed})


def find_separators(reader: Reader, ignored: Collection[str] = ()) -> dict[str, str]:
    """Separators of columns whose text holds lists, by the rows of the first split."""
    splits = reader.splits()
    texts = [field.name for field in reader.schema if is_text(field.type) and not types.is_binary(field.type)]
    names = [name for name in texts if name not in ignored]
    if not splits or not names:
        return {}
    table = reader.read(splits[0], names).slice(0, SAMPLE_ROWS)
    separators = {name: find_separator(combine_chunks(table[name]).drop_null()) for name in names}
    return {name: separator for name, separator in separators.items() if separator}


def _read(array: pa.Array, reading: ColumnReading | None) -> pa.Array:
    return array if reading is None else reading.read(array)


def _reading_note(name: str, reading: ColumnReading, wrong: int) -> str | None:
    """What is doubtful about how the values of a column are read."""
    odd = f"{name!r}: {wrong:,} values are no {'times' if reading.how == 'time' else 'numbers'}: read as missing"
    notes = [f"{name!r}: {reading.doubt}"] * bool(reading.doubt) + [odd] * bool(wrong)
    return "; ".join(notes) or None


def _unseen_line(columns: Sequence[ColumnCard]) -> tuple[str, ...]:
    """A line about ids of test rows that no training row has."""
    many = {c.name: c.unseen for c in columns if c.unseen is not None and c.unseen >= UNSEEN}
    said = _largest(many, "", "some in {} more columns")
    return (f"test rows with ids that are unseen in training, by an estimate: {said}",) if many else ()


def _missing_line(facts: Mapping[str, Facts], uses: Mapping[str, Use]) -> tuple[str, ...]:
    """A line about columns that may be filled after the label is known."""
    used = [f for n, f in facts.items() if uses[n].role in ("dense", "sparse") and uses[n].why != AS_TOLD]
    many = {f.name: f.missing_tells for f in used if f.missing_tells >= MISSING_TELLS}
    said = _largest(many, "by ", "{} more columns")
    way_out = "--ignore what is filled after the outcome"
    return (f"missing or not cuts errors on the label: {said}: {way_out}",) if many else ()


def _largest(shares: Mapping[str, float], by: str, others: str) -> str:
    """The columns with the largest shares, and how many others there are."""
    ordered = sorted(((share, name) for name, share in shares.items()), reverse=True)
    named = ", ".join(f"{name!r} {by}{share:.0%}" for share, name in ordered[:MAX_NAMED])
    return named + (f", and {others.format(len(ordered) - MAX_NAMED)}" if len(ordered) > MAX_NAMED else "")


def _labels(
    reader: Reader, splits: Sequence[Split], given: tuple[str, ...], *, amount: bool
) -> tuple[tuple[LabelChoice, ...], str | None]:
    """The labels as given, or the column that is called so; and why that one is none."""
    fields = [field for field in reader.schema if field.name.lower() in LABELS and can_be_label(field.type)]
    if given or not fields:
        return choose_labels(reader, splits, given, amount=amount), None
    try:
        return choose_labels(reader, splits, (fields[0].name,), amount=amount), None
    except DataError as error:
        return (), str(error)


def _column(name: str, survey: ColumnSurvey, use: Use, look: _Look, seen: _Seen, unseen: float | None) -> ColumnCard:
    sketch, listed, ranged = survey.sketch, is_list(survey.kind), survey.least <= survey.most
    is_ids, reading = use.is_ids, look.readings.get(name)
    ids = survey.ids() if is_ids else None
    is_main_time = use.role == "time" and look.times[:1] == [name]
    parts, unit = parts_of(survey, seen.sample) if is_main_time else ((), "s")
    doubt = None if reading is None else _reading_note(name, reading, seen.misread[name])
    card = ColumnCard(
        name=name,
        type=str(survey.kind),
        role=use.role,
        rows=survey.rows,
        nulls=survey.nulls,
        distinct=sketch.distinct,
        distinct_error=sketch.error,
        top_share=sketch.top_share(),
        least=survey.least if ranged else None,
        most=survey.most if ranged else None,
        mean_length=survey.values / max(survey.rows, 1) if listed else None,
        longest=survey.longest if listed else None,
        table_rows=None if not is_ids else len(ids) + 1 if ids else _hashed_rows(sketch.distinct),
        table_dim=_dim(sketch.distinct) if is_ids else None,
        listed=bool(ids),
        separator=look.separators.get(name, ""),
        note="; ".join(note for note in (use.note, doubt) if note) or None,
        why=use.why,
        close=use.close,
        both=use.both,
        unseen=unseen,
        reading=reading,
        parts=parts,
        unit=unit,
    )
    x_N = survey.numbers()
    if listed or not len(x_N):
        return card
    bent_N = np.log1p(x_N, dtype=np.float64) if card.is_skewed else x_N.astype(np.float64)
    return structs.replace(card, borders=borders_of(x_N), mean=float(bent_N.mean()), std=float(bent_N.std()))


def _hashed_rows(distinct: int) -> int:
    """Rows for hashed ids: with 16 for each, one id in 16 shares its row."""
    return max(16, *(min(int(distinct * room), most) for room, most in ROOM))


def _check_role(name: str, kind: pa.DataType, role: Role, source: str) -> None:
    """Raise if a column of this type cannot be used so."""
    element = element_of(kind)
    words = is_text(element) or types.is_integer(element) or types.is_dictionary(element)
    possible = {
        "dense": is_number(kind),
        "sparse": words,
        "time": FITS[TIMES](kind) or is_ordered(kind),
        "key": words and not is_list(kind),
    }
    if not possible.get(role, True):
        raise DataError(
            f"{source}: column {name!r} holds {kind}: it cannot be used as {role}", hint=f"leave out --{role} {name}"
        )


def table_names(columns: Collection[str]) -> dict[str, str]:
    """A table for each column; its name is also that of a parameter and of files."""
    names: dict[str, str] = {}
    for column in columns:
        name = re.sub(r"[./\\\0]", "_", column) or "_"
        while name in names.values() or name in RESERVED_NAMES or (name != column and name in columns):
            name += "_"
        names[column] = name
    return names


def _unless(name: str, same: str) -> str:
    return "" if name == same else name


def _dim(distinct: int) -> int:
    """The usual 6 * distinct ** 0.25, in steps of 8."""
    return min(max(8, round(6 * distinct**0.25 / 8) * 8), 128)


def _label_note(name: str, choice: LabelChoice, survey: ColumnSurvey) -> str | None:
    if parse_label(choice.text).test is not None:
        return None
    return label_note(name, choice.values, survey.sketch.distinct, survey.least, survey.most)
