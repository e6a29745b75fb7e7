"""A dataset card: statistics, role and anomalies of each column.

Pure except for reading splits: `inspect` returns a value, `cli/data.py` prints it. Needs no torch.
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
    describe_unlabelled,
    is_likely,
    label_note,
    parse_label,
)
from rowwise.ingest.names import sense_of
from rowwise.ingest.reader import Reader, Split, check_columns
from rowwise.ingest.readings import DIFFERENT, ColumnReading, find_readings
from rowwise.ingest.roles import AS_TOLD, FEW, NEVER_SEEN, Facts, Role, Use, choose_role, when_never_seen
from rowwise.ingest.survey import SAMPLE_ROWS, ColumnSurvey, borders_of, count_infinite
from rowwise.ingest.times import TimeBorders, TimeSample, is_ordered, may_be_ids, times_of
from rowwise.ingest.transform.read import split_text
from rowwise.tables.spec import RESERVED_NAMES, Table, Value

PROBED_SPLITS = 8  # spread over all splits, for columns whose first values are alike
LARGEST_TABLE = 100_000_000
ROWS_PER_ID = ((16.0, 1 << 20), (8.0, 1 << 24), (1.25, LARGEST_TABLE))  # with the largest table of each factor
MIN_UNSEEN = 0.01  # share of the ids in test rows; a smaller share is not worth a warning
MISSING_TELLS = 0.5  # share of wrong guesses of the label that missing values of the column correct
# How the values of a column may be read, by the role that an option assigns
READ_AS: dict[str | None, tuple[str, ...]] = {
    None: ("time", "number", "whole"), "dense": ("number",), "sparse": ("whole",), "time": ("time", "whole"),
    "key": ("whole",), "unused": (), "label": (), "group": (),
}  # fmt: skip
MAX_MISREAD = {"time": 0.1, "number": 0.1, "whole": 0.0}  # share of rows that may not parse like the first rows


class ColumnCard(Value, frozen=True):
    """The type, counts, range and role of one column."""

    name: str
    type: str
    role: Role
    rows: int
    nulls: int
    distinct: int
    distinct_error: float  # relative standard error; 0 for an exact count
    top_share: float  # share of the occurrences that the most frequent 1 % of the values have
    least: float | None = None
    most: float | None = None
    mean_length: float | None = None  # of lists
    longest: int | None = None
    table_rows: int | None = None  # suggested
    table_dim: int | None = None
    listed: bool = False  # its ids fit into a vocabulary; else they have to be hashed
    separator: str = ""  # of lists in text
    note: str | None = None  # anomaly
    why: str = ""  # reason for the role
    unseen: float | None = None  # estimated share of the ids in test rows that no training row has
    close: bool = False  # ambiguous: another role fits about as well
    both: bool = False  # a number that is also used as an id
    reading: ColumnReading | None = None  # how to parse values that their type does not describe
    borders: tuple[float, ...] = ()  # quantiles of a number
    mean: float | None = None  # of a number, or of its logarithm if it is skewed
    std: float | None = None
    parts: tuple[Part, ...] = ()  # recurring parts of a time
    unit: Unit = "s"  # of a time stored as whole numbers

    @property
    def is_ids(self) -> bool:
        """Whether it looks up a table."""
        return self.role == "sparse" or self.both

    @property
    def is_number_too(self) -> bool:
        """Whether its ids may also be a dense feature: whole numbers that are ids by value, not by name."""
        return self.role == "sparse" and self.why != AS_TOLD and sense_of(self.name) != "id" and bool(self.std)

    @property
    def is_skewed(self) -> bool:
        """Whether it holds counts or amounts over a wide range, to be used as logarithms."""
        return self.least is not None and self.most is not None and self.least >= 0 and self.most > FEW


class DatasetCard(Value, frozen=True):
    """The columns of a dataset, with roles and warnings."""

    source: str
    rows: int
    label: str | None
    label_rate: float | None
    columns: tuple[ColumnCard, ...]
    warnings: tuple[str, ...]  # the notes of columns, then `checks`
    checks: tuple[str, ...] = ()  # anomalies of the split into training and test rows
    borders: TimeBorders | None = None  # times that divide the rows; None for a random split
    group: str | None = None  # column whose equal values stay in one share
    division: str = ""  # how rows are divided into training, validation and test rows, and why
    labels: tuple[str, ...] = ()  # columns, or conditions on columns, for the recipe
    label_values: LabelValues = "clicks"
    label_choices: tuple[str, ...] = ()  # how they were chosen, and the options to choose others
    unlabelled: int = 0  # rows without a label, excluded from all counts

    def suggest(self, dim: int, derived: Sequence[tuple[Sparse, int]] = ()) -> tuple[Columns, tuple[Table, ...]]:
        """Suggested columns and tables, all tables of one dimension as DLRM requires.

        Args:
            dim: dimension of the tables.
            derived: columns computed by transforms, each with the rows of its table.
        """
        if self.label is None:
            likely = f" ({', '.join(self.likely_labels)} hold 0 and 1)" if self.likely_labels else ""
            raise DataError(
                f"{self.source}: no column of numbers is called {', '.join(LABELS)}",
                hint=f"name the label{likely}",
            )
        sparse = [c for c in self.columns if c.is_ids]
        if not sparse and not derived:
            raise DataError(
                f"{self.source}: no column of ids", "at least one", hint="name it: rowwise data inspect --sparse COLUMN"
            )
        names = table_names([*(c.name for c in sparse), *(column.column for column, _ in derived)])
        computed = [
            structs.replace(sparse, table=_unless(names[sparse.column], sparse.column)) for sparse, _ in derived
        ]
        columns = Columns(
            labels=self.labels or (self.label,),
            label_values=self.label_values,
            dense=tuple(Dense(column=c.name, log1p=c.is_skewed) for c in self.columns if c.role == "dense"),
            sparse=(
                *(Sparse(column=c.name, table=_unless(names[c.name], c.name)) for c in sparse),
                *computed,
            ),
            key=self.first("key"),
            time=self.first("time"),
        )
        tables = [
            Table(name=names[column], rows=rows, dim=dim, features=() if names[column] == column else (column,))
            for column, rows in [
                *((c.name, _hashed_rows(c.distinct)) for c in sparse),
                *((column.column, rows) for column, rows in derived),
            ]
        ]
        return columns, tuple(tables)

    @property
    def likely_labels(self) -> tuple[str, ...]:
        """Columns that hold only 0 and 1."""
        return tuple(c.name for c in self.columns if is_likely(c.distinct, c.least, c.most, c.nulls))

    def first(self, role: Role) -> str | None:
        """The first column of this role without nulls."""
        return next((c.name for c in self.columns if c.role == role and not c.nulls), None)


class Inspection(NamedTuple):
    """The card of a dataset, and the ids for vocabularies, most frequent first."""

    card: DatasetCard
    ids: dict[str, list[str]]  # by listed column


def inspect(  # noqa: PLR0913 - options of a command
    reader: Reader,
    label: str | Sequence[str] | None = None,
    *,
    amount: bool = False,
    name: str | None = None,
    splits: int | None = None,
    roles: Mapping[str, Role] | None = None,
    separators: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    plain: bool = False,
) -> Inspection:
    """Profile the columns of the rows.

    Args:
        reader: reads the rows.
        label: the column to predict, a condition on columns, or several; by default a column with a usual name.
        amount: treat the label as an amount, whatever its values.
        name: title of the card; by default the source of the first split.
        splits: read only this many of the first splits.
        roles: roles by column, which override the guesses.
        separators: list separators by column of text.
        progress: called with the number of splits done, and of all.
        plain: read values by their type only, for columns that no transform reads.
    """
    first_splits = reader.splits()[:splits]
    if not first_splits:
        raise DataError(f"{name or type(reader).__name__}: no rows to inspect", "files with rows")
    source = first_splits[0].source
    assigned = dict(roles or {})
    check_columns([*reader.schema.names, *assigned], reader.schema, source)
    requested = (label,) if isinstance(label, str) else tuple(label or ())
    choices, problem = _labels(reader, first_splits, requested, amount=amount)
    labels = {column: choice for choice in choices for column in parse_label(choice.text).columns}
    separators = separators or {}
    check_columns(tuple(separators), reader.schema, source)
    for column, separator in separators.items():
        if not is_text(kind := reader.schema.field(column).type) or not separator:
            raise DataError(f"{source}: column {column!r} holds {kind}", "text and a separator for --list")
    names = [n for n in reader.schema.names if assigned.get(n) != "unused" or n in labels]
    if not names:
        raise DataError(f"{source}: every column is ignored", "at least one to learn from")
    head = _first_values(reader, first_splits, [n for n in names if n not in separators and n not in labels])
    guesses: dict[str, ColumnReading] = {} if plain else find_readings(head)
    readings = {n: r for n, r in guesses.items() if r.how in READ_AS[assigned.get(n)]}
    times = [n for n, role in assigned.items() if role == "time"] or find_times(
        {n: _read(array, readings.get(n)) for n, array in head.items() if n not in assigned}
    )
    plan = _ReadPlan(source, names, choices, labels, readings, separators, times)
    for column, role in assigned.items():
        _check_role(column, plan.kind(reader.schema.field(column)), role, source)
    stats = _survey(reader, first_splits, plan, progress)
    rows = stats.surveys[names[0]].rows
    wrong = {n for n, count in stats.misread.items() if count > MAX_MISREAD[readings[n].how] * rows}
    if wrong:  # the first rows were not representative
        plan = plan._replace(
            readings={n: r for n, r in readings.items() if n not in wrong}, times=[n for n in times if n not in wrong]
        )
        stats = _survey(reader, first_splits, plan, progress)
    return _judge(name or source, plan, stats, assigned, problem)


def _first_values(reader: Reader, splits: Sequence[Split], names: Sequence[str]) -> dict[str, pa.Array]:
    """First values of columns; also of later splits if those of the first are alike, as the day of a file is."""
    table = reader.read(splits[0], names).slice(0, SAMPLE_ROWS)
    head = {name: combine_chunks(table[name]) for name in names}
    alike = [name for name, array in head.items() if _may_tell_time(array.type) and len(array.unique()) < DIFFERENT]
    places = np.unique(np.linspace(0, len(splits) - 1, PROBED_SPLITS).astype(np.int64))[1:]
    for place in places if alike else ():
        more = reader.read(splits[place], alike).slice(0, SAMPLE_ROWS)
        head |= {name: pa.concat_arrays([head[name], combine_chunks(more[name])]) for name in alike}
    return head


def _may_tell_time(kind: pa.DataType) -> bool:
    return is_ordered(kind) or is_text(kind)


class _ReadPlan(NamedTuple):
    """How the columns are read."""

    source: str
    names: Sequence[str]  # columns to read
    choices: tuple[LabelChoice, ...]
    labels: dict[str, LabelChoice]  # by input column
    readings: dict[str, ColumnReading]
    separators: Mapping[str, str]  # of lists in text
    times: list[str]  # candidates for the time of a row

    def kind(self, field: pa.Field) -> pa.DataType:
        """The type after reading."""
        if field.name in self.separators:
            return pa.large_list(pa.large_string())
        reading = self.readings.get(field.name)
        return field.type if reading is None else reading.transform(field.name).types((field.type,))[0]


class _Stats(NamedTuple):
    """Statistics of all rows."""

    surveys: dict[str, ColumnSurvey]
    sample: TimeSample
    counted: LabelCounter
    misread: dict[str, int]  # values that do not parse like the first rows


def _survey(
    reader: Reader, splits: Sequence[Split], plan: _ReadPlan, progress: Callable[[int, int], None] | None
) -> _Stats:
    time = plan.times[0] if plan.times else None
    surveys = {field.name: ColumnSurvey(plan.kind(field)) for field in reader.schema}
    sample = TimeSample()
    counted, misread = LabelCounter(plan.choices), dict.fromkeys(plan.readings, 0)
    for index, split in enumerate(splits):
        table, positive_R = counted.take(reader.read(split, plan.names))
        arrays = {column: combine_chunks(table[column]) for column in plan.names}
        for column, reading in plan.readings.items():
            raw, arrays[column] = arrays[column], reading.read(arrays[column])
            misread[column] += reading.misread(raw, arrays[column])
            surveys[column].infinite += count_infinite(raw)
        time_R = None if time is None else times_of(arrays[time])
        if time_R is not None:
            ids = {
                n: array for n, array in arrays.items() if n != time and n not in plan.labels and may_be_ids(array.type)
            }
            sample.add(time_R, positive_R, ids)
        for column, array in arrays.items():
            separator = plan.separators.get(column)
            surveys[column].add(array if separator is None else split_text(array, separator), positive_R, time_R)
        if progress is not None:
            progress(index + 1, len(splits))
    return _Stats(surveys, sample, counted, misread)


def _judge(name: str, plan: _ReadPlan, stats: _Stats, assigned: Mapping[str, Role], problem: str | None) -> Inspection:
    """The roles of columns, the division of rows, and anomalies; `problem`: why there is no label."""
    surveys, sample, choices, counted = stats.surveys, stats.sample, plan.choices, stats.counted
    label, values = next(iter(plan.labels), None), choices[0].values if choices else "clicks"
    features = {n: survey for n, survey in surveys.items() if n not in plan.labels}
    facts = {n: Facts(n, survey, labelled=label is not None) for n, survey in features.items()}
    uses = {n: Use(assigned[n], AS_TOLD) if n in assigned else choose_role(column) for n, column in facts.items()}
    division = divide(uses, facts, surveys, sample, plan.times, forced="time" in assigned.values())
    if division.group is not None and division.group not in assigned:
        uses[division.group] = Use("group", "rows of one value are alike")
    unseen = unseen_ids(uses, surveys, sample, division)
    for column in [n for n, share in unseen.items() if share >= NEVER_SEEN and n not in assigned]:
        uses[column] = when_never_seen(facts[column], uses[column], unseen.pop(column))
    for column, choice in plan.labels.items():
        uses[column] = Use("label", note=_label_note(column, choice, surveys[column]))
    borders = division.borders
    if borders is not None and (reading := plan.readings.get(borders.column)) is not None:
        borders = structs.replace(borders, formats=reading.formats)
    columns = tuple(_column(n, survey, uses[n], plan, stats, unseen.get(n)) for n, survey in surveys.items())
    rows = surveys[plan.names[0]].rows
    checks = (*division.checks, *_unseen_line(columns), *_missing_line(facts, uses))
    unlabelled_note = (describe_unlabelled(counted.missing, rows + counted.missing),) if counted.missing else ()
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
        division=division.reason,
        labels=tuple(choice.text for choice in choices),
        label_values=values,
        label_choices=(*(choice.note for choice in choices if choice.note), *unlabelled_note),
        unlabelled=counted.missing,
    )
    if label is None:
        likely = f"; {', '.join(map(repr, card.likely_labels))} hold 0 and 1" if card.likely_labels else ""
        first = problem or f"no label: name it with --label{likely}"
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
    """Doubts about the reading of a column; `wrong`: values that it does not parse."""
    misread = f"{name!r}: {wrong:,} values are no {'times' if reading.how == 'time' else 'numbers'}: read as missing"
    notes = [f"{name!r}: {reading.doubt}"] * bool(reading.doubt) + [misread] * bool(wrong)
    return "; ".join(notes) or None


def _unseen_line(columns: Sequence[ColumnCard]) -> tuple[str, ...]:
    """A warning about ids of test rows that no training row has."""
    many = {c.name: c.unseen for c in columns if c.unseen is not None and c.unseen >= MIN_UNSEEN}
    shares = _largest(many, "", "some in {} more columns")
    return (f"test rows with ids that are unseen in training, by an estimate: {shares}",) if many else ()


def _missing_line(facts: Mapping[str, Facts], uses: Mapping[str, Use]) -> tuple[str, ...]:
    """A warning about columns that may be filled after the label is known (leaks)."""
    used = [f for n, f in facts.items() if uses[n].role in ("dense", "sparse") and uses[n].why != AS_TOLD]
    many = {f.name: f.missing_tells for f in used if f.missing_tells >= MISSING_TELLS}
    shares = _largest(many, "by ", "{} more columns")
    hint = "--ignore what is filled after the outcome"
    return (f"missing or not cuts errors on the label: {shares}: {hint}",) if many else ()


def _largest(shares: Mapping[str, float], by: str, others: str) -> str:
    """The columns with the largest shares, and the number of others."""
    ordered = sorted(((share, name) for name, share in shares.items()), reverse=True)
    named = ", ".join(f"{name!r} {by}{share:.0%}" for share, name in ordered[:MAX_NAMED])
    return named + (f", and {others.format(len(ordered) - MAX_NAMED)}" if len(ordered) > MAX_NAMED else "")


def _labels(
    reader: Reader, splits: Sequence[Split], requested: tuple[str, ...], *, amount: bool
) -> tuple[tuple[LabelChoice, ...], str | None]:
    """The requested labels, or the column with a usual name; or why that column is no label."""
    fields = [field for field in reader.schema if field.name.lower() in LABELS and can_be_label(field.type)]
    if requested or not fields:
        return choose_labels(reader, splits, requested, amount=amount), None
    try:
        return choose_labels(reader, splits, (fields[0].name,), amount=amount), None
    except DataError as error:
        return (), str(error)


def _column(
    name: str, survey: ColumnSurvey, use: Use, plan: _ReadPlan, stats: _Stats, unseen: float | None
) -> ColumnCard:
    sketch, listed, ranged = survey.sketch, is_list(survey.kind), survey.least <= survey.most
    is_ids, reading = use.is_ids, plan.readings.get(name)
    ids = survey.ids() if is_ids else None
    is_main_time = use.role == "time" and plan.times[:1] == [name]
    parts, unit = parts_of(survey, stats.sample) if is_main_time else ((), "s")
    doubt = None if reading is None else _reading_note(name, reading, stats.misread[name])
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
        separator=plan.separators.get(name, ""),
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
    scaled_N = np.log1p(x_N, dtype=np.float64) if card.is_skewed else x_N.astype(np.float64)
    return structs.replace(card, borders=borders_of(x_N), mean=float(scaled_N.mean()), std=float(scaled_N.std()))


def _hashed_rows(distinct: int) -> int:
    """Rows for hashed ids: at 16 rows per id, one id in 16 shares its row."""
    return max(16, *(min(int(distinct * factor), largest) for factor, largest in ROWS_PER_ID))


def _check_role(name: str, kind: pa.DataType, role: Role, source: str) -> None:
    """Raise if a column of this type cannot have this role."""
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
    """A table name for each column, valid as a parameter name and a file name."""
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
    """The usual heuristic 6 * distinct ** 0.25, in steps of 8."""
    return min(max(8, round(6 * distinct**0.25 / 8) * 8), 128)


def _label_note(name: str, choice: LabelChoice, survey: ColumnSurvey) -> str | None:
    if parse_label(choice.text).test is not None:
        return None
    return label_note(name, choice.values, survey.sketch.distinct, survey.least, survey.most)
