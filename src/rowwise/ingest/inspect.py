"""A dataset card: what is in the columns, what to make of them, and what looks wrong.

Pure but for reading splits: `inspect` gives a value, `cli/data.py` shows it. Needs no torch.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from msgspec import structs
from pyarrow import types

from rowwise.errors import DataError
from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.columns import Columns, Dense, Sparse, is_list, is_text
from rowwise.ingest.encode import floats
from rowwise.ingest.evidence import find_separator
from rowwise.ingest.reader import Reader, Split, check_columns
from rowwise.ingest.survey import SAMPLE_ROWS, ColumnSurvey
from rowwise.ingest.times import LABEL_nats, Nearness, TimeBorders, TimeSample, is_time, may_be_ids, time_text, times_of
from rowwise.ingest.transform.split import split_text
from rowwise.spec import RESERVED_NAMES, Table, Value

LABELS = ("label", "click", "clicked", "is_click", "target", "y", "conversion", "converted")
# Whole numbers that name something. A thing counts as a name only where it comes last: user, but not user_age.
THINGS = (
    "user|item|product|ad|campaign|creative|advertiser|publisher|device|site|domain|app|page|url|query|session|category|"
    "brand|store|shop|seller|merchant|video|movie|film|song|track|artist|author|channel|city|country|region|zip|postcode"
)
ID_NAME = re.compile(rf"(^|_)(id|ids|key|code|hash)($|_)|(^|_)({THINGS})$|(?-i:[a-z]I[dD]s?$)", re.IGNORECASE)
AMOUNT_NAME = re.compile(
    r"(^|_)(age|amount|avg|balance|clicks|cost|count|days|duration|height|hours|income|length|likes|load|loads|minutes|"
    r"num|number|paid|price|quantity|qty|rating|sales|score|seconds|size|spend|sum|total|views|visits|weight|years)($|_)",
    re.IGNORECASE,
)
FEW = 100  # whole numbers with so few values are taken for categories
LARGEST_COUNT = 1 << 31
TIMES = (631_152_000, 4_102_444_800)  # 1990 to 2100 in seconds
CLOSE_nats = 0.01  # of the label; a column that tells less, or as much in both readings, is close
MANY_TIMES = 1000
NEARLY_ALL = 0.9
LEAK_AUC = 0.99
LEAK_ERROR = 0.02
LARGEST_TABLE = 100_000_000
ROOM = ((16.0, 1 << 20), (8.0, 1 << 24), (1.25, LARGEST_TABLE))  # rows for each id, as long as the table is no larger
LARGEST = 3.4e38  # in 32 bits
SHARE = 0.1  # of the rows to validate on, and again to test on, in a first recipe
UNSEEN = 0.01  # of the ids in test rows; fewer are not worth a warning
AS_TOLD = "as told"  # the reason for a role that an option gives
MOST_NAMED = 5  # columns in one warning
Role = Literal["label", "dense", "sparse", "time", "key", "unused"]


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

    def suggest(self, dim: int) -> tuple[Columns, tuple[Table, ...]]:
        """Columns and tables to begin with, all tables of one width as DLRM wants them."""
        if self.label is None:
            likely = f" ({', '.join(self.likely_labels)} hold 0 and 1)" if self.likely_labels else ""
            want = f"say which one is the label{likely}"
            raise DataError(f"{self.source}: no column of numbers is called {', '.join(LABELS)}: {want}")
        sparse = [c for c in self.columns if c.role == "sparse"]
        if not sparse:
            raise DataError(f"{self.source}: no column of ids: want one: rowwise data inspect --sparse COLUMN")
        names = table_names([c.name for c in sparse])
        columns = Columns(
            labels=(self.label,),
            dense=tuple(Dense(column=c.name, log1p=_is_skewed(c)) for c in self.columns if c.role == "dense"),
            sparse=tuple(Sparse(column=c.name, table=_unless(names[c.name], c.name)) for c in sparse),
            key=self._first("key"),
            time=self._first("time"),
        )
        tables = [
            Table(name=name, rows=_hashed_rows(c.distinct), dim=dim, features=() if name == c.name else (c.name,))
            for c, name in zip(sparse, names.values(), strict=True)
        ]
        return columns, tuple(tables)

    @property
    def likely_labels(self) -> tuple[str, ...]:
        """Columns of numbers that hold nothing but 0 and 1."""
        return tuple(c.name for c in self.columns if c.distinct == 2 and (c.least, c.most) == (0, 1) and not c.nulls)

    def _first(self, role: Role) -> str | None:
        """The first such column that is never missing."""
        return next((c.name for c in self.columns if c.role == role and not c.nulls), None)


class Inspection(NamedTuple):
    """The card of a dataset, and the ids of its columns for vocabularies, the most frequent first."""

    card: DatasetCard
    ids: dict[str, list[str]]  # of columns of ids that can be listed


def inspect(
    reader: Reader,
    label: str | None = None,
    *,
    name: str | None = None,
    splits: int | None = None,
    roles: Mapping[str, Role] | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> DatasetCard:
    """The card of a dataset; arguments are those of `inspect_ids`."""
    return inspect_ids(reader, label, name=name, splits=splits, roles=roles, tell=tell).card


def inspect_ids(  # noqa: PLR0913 - what a user may say of the columns
    reader: Reader,
    label: str | None = None,
    *,
    name: str | None = None,
    splits: int | None = None,
    roles: Mapping[str, Role] | None = None,
    separators: Mapping[str, str] | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Profile the columns of the rows.

    Args:
        reader: where they come from.
        label: the column to predict; None: the one that is called so.
        name: what the card is called; None: as the first split's source is.
        splits: look at so many of the first ones only.
        roles: by column: what it is used as, whatever is in it.
        separators: by column of text: it holds lists.
        tell: hears how many of how many splits are done.
    """
    first_splits = reader.splits()[:splits]
    if not first_splits:
        raise DataError(f"{name or type(reader).__name__}: no rows to look at: want files with rows")
    source = first_splits[0].source
    names = reader.schema.names
    roles = dict(roles or {})
    check_columns([*(names if label is None else [label]), *roles], reader.schema, source)
    for column, role in roles.items():
        _check_role(column, reader.schema.field(column).type, role, source)
    label = label or next((name for name in names if name.lower() in LABELS and _counts(reader.schema, name)), None)
    separators = separators or {}
    check_columns(tuple(separators), reader.schema, source)
    for column, separator in separators.items():
        if not is_text(kind := reader.schema.field(column).type) or not separator:
            raise DataError(f"{source}: column {column!r} holds {kind}: want text and a separator for --list")
    text_lists = pa.large_list(pa.large_string())
    kinds = {name: text_lists if name in separators else reader.schema.field(name).type for name in names}
    surveys = {column: ColumnSurvey(kind) for column, kind in kinds.items()}
    time = _time_column(reader, first_splits[0], roles, label)
    sample = TimeSample()
    positives = 0
    for index, split in enumerate(first_splits):
        table = reader.read(split, names)
        positive_R = _positive(table, label, source)
        positives += int(positive_R.sum())
        arrays = {column: combine_chunks(table[column]) for column in names}
        time_R = None if time is None else times_of(arrays[time])
        if time_R is not None:
            ids = {
                name: array for name, array in arrays.items() if name not in (time, label) and may_be_ids(array.type)
            }
            sample.add(time_R, positive_R, ids)
        for column, survey in surveys.items():
            array = arrays[column]
            survey.add(split_text(array, separators[column]) if column in separators else array, positive_R, time_R)
        if tell is not None:
            tell(index + 1, len(first_splits))
    card = _card(name or source, label, surveys, positives, roles)
    if time is not None and any(c.name == time and c.role == "time" for c in card.columns):
        card = _divide_by_time(card, surveys, sample, time, told=time in roles)
    card = _count_unseen(card, surveys, sample)
    ids = {c.name: listed for c in card.columns if c.role == "sparse" and (listed := surveys[c.name].ids()) is not None}
    listed = [
        structs.replace(c, listed=True, table_rows=len(ids[c.name]) + 1) if c.name in ids else c for c in card.columns
    ]
    counted = [structs.replace(c, separator=separators.get(c.name, "")) for c in listed]
    return Inspection(structs.replace(card, columns=tuple(counted)), ids)


def find_separators(reader: Reader) -> dict[str, str]:
    """Separators of columns whose text holds lists, by the rows of the first split."""
    splits = reader.splits()
    names = [field.name for field in reader.schema if is_text(field.type) and not types.is_binary(field.type)]
    if not splits or not names:
        return {}
    table = reader.read(splits[0], names).slice(0, SAMPLE_ROWS)
    separators = {name: find_separator(combine_chunks(table[name]).drop_null()) for name in names}
    return {name: separator for name, separator in separators.items() if separator}


def _time_column(reader: Reader, first: Split, roles: Mapping[str, Role], label: str | None) -> str | None:
    """The column that tells when a row happened: as told, else the first one of times that are not missing."""
    told = next((column for column, role in roles.items() if role == "time"), None)
    if told is not None:
        return told
    open_fields = [field for field in reader.schema if field.name not in roles and field.name != label]
    names = [f.name for f in open_fields if is_time(f.type) or types.is_integer(f.type)]
    table = reader.read(first, names)
    for name in names:
        array = combine_chunks(table[name])
        if array.null_count or not len(array):
            continue
        time_R = times_of(array)
        least, most = float(time_R.min()), float(time_R.max())
        if least < most and (is_time(array.type) or _are_times(least, most)):
            return name
    return None


def _divide_by_time(
    card: DatasetCard, surveys: Mapping[str, ColumnSurvey], sample: TimeSample, name: str, *, told: bool
) -> DatasetCard:
    """The card with borders of time, if the user or the evidence wants them."""
    near = {
        c.name: found
        for c in card.columns
        if c.role == "sparse" and c.name in sample.ids and c.distinct > FEW
        if (found := sample.nearness(c.name)).is_near
    }
    evidence = _time_evidence(near, sample.label_nats())
    if not told and evidence is None:
        return card
    survey = surveys[name]
    comparable = is_time(survey.kind) or types.is_integer(survey.kind)
    borders = sample.borders(SHARE) if comparable and not survey.nulls else None
    few = f"the last tenths by {name!r} have too few times, or only one label"
    problem = few if comparable else f"{name!r} holds {survey.kind}"
    problem = f"{name!r} is missing in {survey.nulls:,} rows" if survey.nulls else problem
    easy = "" if evidence is None else f"near in time by {name!r}, {evidence}: a random test share is too easy"
    if borders is None:
        why = f"rows cannot be divided by time, as {problem}: want later rows as data.valid and data.test"
        return structs.replace(card, checks=(*card.checks, f"{easy}; {why}" if easy else why))
    valid_from, test_from = (time_text(border, survey.kind) for border in borders)
    made = TimeBorders(column=name, valid_from=valid_from, test_from=test_from)
    divided = (f"{easy}, so the recipe divides rows by time",) if easy else ()
    return structs.replace(card, borders=made, checks=(*card.checks, *divided))


def _time_evidence(near: Mapping[str, Nearness], label_nats: float) -> str | None:
    """What rows that are near in time have in common; None: nothing."""
    if near:
        ratios = sorted(((found.ratio, name) for name, found in near.items()), reverse=True)[:MOST_NAMED]
        named = ", ".join(f"{name!r} {ratio:.1f} times" for ratio, name in ratios)
        return f"rows share ids more often than at random ({named})"
    if label_nats >= LABEL_nats:
        return f"labels are alike ({label_nats:.3f} nats)"
    return None


def _count_unseen(card: DatasetCard, surveys: Mapping[str, ColumnSurvey], sample: TimeSample) -> DatasetCard:
    """The card with the share of ids, in test rows, that no training row has."""
    tested = borders = None
    if card.borders is not None:
        borders = sample.borders(SHARE)
        assert borders is not None
        tested = float((sample.time_S >= borders[1]).mean())
    unseen: dict[str, float] = {}
    for column in card.columns:
        survey = surveys[column.name]
        if column.role != "sparse" or not survey.values:
            continue
        if borders is None or tested is None:
            share = survey.sketch.unseen(2 * SHARE) / survey.values
        else:
            share = survey.sketch.unseen_before(*borders) / (survey.values * tested)
        unseen[column.name] = min(share, 1.0)
    columns = tuple(structs.replace(c, unseen=unseen.get(c.name)) for c in card.columns)
    many = sorted(((share, name) for name, share in unseen.items() if share >= UNSEEN), reverse=True)
    named = ", ".join(f"{share:.0%} of {name!r}" for share, name in many[:MOST_NAMED])
    more = f" and some of {len(many) - MOST_NAMED} more columns" if len(many) > MOST_NAMED else ""
    line = (f"no training row has these ids of test rows (estimated): {named}{more}",) if many else ()
    checks = (*card.checks, *line)
    return structs.replace(card, columns=columns, checks=checks, warnings=(*card.warnings, *checks))


def _positive(table: pa.Table, label: str | None, source: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    if label is None:
        return np.zeros(table.num_rows, np.bool_)
    if not _counts(table.schema, label):
        kind = table.schema.field(label).type
        raise DataError(f"{source}: column {label!r} holds {kind}: want numbers for a label, 0 and 1")
    return floats(combine_chunks(table[label])) > 0


def _counts(schema: pa.Schema, name: str) -> bool:
    """Whether a column can be a label."""
    kind = schema.field(name).type
    return any(test(kind) for test in (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal))


def _card(
    source: str, label: str | None, surveys: dict[str, ColumnSurvey], positives: int, roles: Mapping[str, Role]
) -> DatasetCard:
    columns: list[ColumnCard] = []
    for name, survey in surveys.items():
        if name == label:
            use = _label(name, survey)
        elif name in roles:
            use = Use(roles[name], AS_TOLD)
        else:
            use = _choose_role(name, survey, label is not None)
        columns.append(_column(name, survey, use))
    rows = next(iter(surveys.values())).rows
    rate = positives / rows if label and rows else None
    notes = tuple(column.note for column in columns if column.note)
    card = DatasetCard(source=source, rows=rows, label=label, label_rate=rate, columns=tuple(columns), warnings=notes)
    if label is not None:
        return card
    likely = f"; {', '.join(map(repr, card.likely_labels))} hold 0 and 1" if card.likely_labels else ""
    return structs.replace(card, warnings=(f"no label: say which column it is with --label{likely}", *notes))


class Use(NamedTuple):
    """The role of a column, and the reason for it."""

    role: Role
    why: str = ""
    note: str | None = None  # what looks wrong
    close: bool = False


def _column(name: str, survey: ColumnSurvey, use: Use) -> ColumnCard:
    sketch, listed, ranged = survey.sketch, is_list(survey.kind), survey.least <= survey.most
    role = use.role
    return ColumnCard(
        name=name,
        type=str(survey.kind),
        role=role,
        rows=survey.rows,
        nulls=survey.nulls,
        distinct=sketch.distinct,
        distinct_error=sketch.error,
        top_share=sketch.top_share(),
        least=survey.least if ranged else None,
        most=survey.most if ranged else None,
        mean_length=survey.values / max(survey.rows, 1) if listed else None,
        longest=survey.longest if listed else None,
        table_rows=_hashed_rows(sketch.distinct) if role == "sparse" else None,
        table_dim=_dim(sketch.distinct) if role == "sparse" else None,
        note=use.note,
        why=use.why,
        close=use.close,
    )


def _hashed_rows(distinct: int) -> int:
    """Rows for hashed ids: with 16 for each, one id in 16 shares its row."""
    return max(16, *(min(int(distinct * room), most) for room, most in ROOM))


def _role_of_values(name: str, survey: ColumnSurvey) -> Use:
    """The role of a column without warnings."""
    listed = is_list(survey.kind)
    kind = survey.kind.value_type if listed else survey.kind
    if types.is_dictionary(kind):
        known = is_text(kind.value_type) or types.is_integer(kind.value_type)
        return Use("sparse", "categories") if known else Use("unused", f"categories of {kind.value_type}")
    if is_text(kind):
        return Use("sparse", "lists of words" if listed else "words")
    if types.is_integer(kind):
        return Use("sparse", "lists of whole numbers") if listed else _role_of_whole_numbers(name, survey)
    if listed:
        return Use("unused", "lists of numbers")
    if types.is_timestamp(kind) or types.is_date(kind):
        return Use("time", "times")
    if types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return Use("dense", "yes or no" if types.is_boolean(kind) else "numbers with fractions")
    return Use("unused", "no numbers, words or lists of them")


def _role_of_whole_numbers(name: str, survey: ColumnSurvey) -> Use:
    """Ids or amounts: by the name, by what each tells of the label, by how the values lie."""
    evidence, shape = survey.evidence() or (None, None)
    if ID_NAME.search(name):
        return Use("sparse", "the name is that of an id")
    if survey.most > LARGEST_COUNT:
        return Use("sparse", "numbers that large count nothing")
    if evidence is not None and evidence.reading is not None:
        role: Role = "sparse" if evidence.reading == "ids" else "dense"
        ids, amounts = evidence.base - evidence.ids, evidence.base - evidence.amounts
        said = f"{max(ids, 0):.3f} nats of the label as ids, {max(amounts, 0):.3f} as amounts"
        return Use(role, said, close=min(max(ids, amounts), abs(ids - amounts)) < CLOSE_nats)
    few = survey.least >= 0 and survey.sketch.distinct <= FEW
    if few:
        return Use("sparse", f"{survey.sketch.distinct} values", close=survey.sketch.distinct > 2)
    if AMOUNT_NAME.search(name):
        return Use("dense", "the name is that of an amount")
    if shape is not None and shape.is_of_ids and survey.least >= 0:
        return Use("sparse", f"{shape.filled:.0%} of the range taken, {shape.repeats:.0f} rows a value", close=True)
    return Use("dense", "the values lie as amounts do", close=True)


def _check_role(name: str, kind: pa.DataType, role: Role, source: str) -> None:
    """Raise if a column of this type cannot be used so."""
    numbers = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    element = kind.value_type if is_list(kind) else kind
    times = types.is_timestamp(kind) or types.is_date(kind) or types.is_integer(kind)
    words = is_text(element) or types.is_integer(element) or types.is_dictionary(element)
    possible = {"dense": numbers, "sparse": words, "time": times, "key": words and not is_list(kind)}
    if not possible.get(role, True):
        raise DataError(
            f"{source}: column {name!r} holds {kind}: it cannot be used as {role}; leave out --{role} {name}"
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


def _is_skewed(column: ColumnCard) -> bool:
    """Whether a column holds counts or amounts over a wide range."""
    return column.least is not None and column.most is not None and column.least >= 0 and column.most > FEW


def _choose_role(name: str, survey: ColumnSurvey, labelled: bool) -> Use:
    """The role of a column other than the label, with a note where it should not be a feature."""
    distinct = survey.sketch.distinct
    leak = _leak(survey) if labelled else None
    if leak:
        return Use("unused", note=f"{name!r} nearly tells the label: {leak}")
    if distinct <= 1 and not is_list(survey.kind):
        return Use("unused", note=f"{name!r} is constant{' or missing' if survey.nulls else ''}")
    if types.is_integer(survey.kind) and distinct >= MANY_TIMES and _are_times(survey.least, survey.most):
        return Use("time", note=f"{name!r} looks like times since 1970, which are never seen again: no ids")
    if _is_key(survey):
        return Use("key", note=f"{name!r} is different in nearly every row: it names the row")
    use = _role_of_values(name, survey)
    if use.role == "dense" and max(abs(survey.least), abs(survey.most)) > LARGEST and survey.least <= survey.most:
        return Use("unused", note=f"{name!r} holds numbers that are infinite in 32 bits")
    return use


def _label(name: str, survey: ColumnSurvey) -> Use:
    distinct, ranged = survey.sketch.distinct, survey.least <= survey.most
    wrong: list[str] = []
    if survey.nulls:
        wrong.append(f"is missing in {survey.nulls} rows")
    if distinct > 2 or (ranged and (survey.least not in (0.0, 1.0) or survey.most not in (0.0, 1.0))):
        wrong.append(f"is not 0 or 1: {distinct} values from {survey.least} to {survey.most}")
    elif distinct < 2:
        wrong.append("is the same in all rows")
    return Use("label", note=f"the label {name!r} {' and '.join(wrong)}" if wrong else None)


def _leak(survey: ColumnSurvey) -> str | None:
    error, auc = survey.sketch.label_error(), survey.auc()
    if error is not None and error <= LEAK_ERROR and not is_list(survey.kind):
        return f"guessed from it, {error:.1%} as many labels are wrong as without it"
    missing = survey.missing_error()
    if missing is not None and missing <= LEAK_ERROR:
        return f"guessed from where it is missing, {missing:.1%} as many labels are wrong as without it"
    if auc is not None and max(auc, 1 - auc) >= LEAK_AUC:
        return f"alone it has an AUC of {auc:.3f}"
    return None


def _is_key(survey: ColumnSurvey) -> bool:
    kind = survey.kind
    named = types.is_integer(kind) or is_text(kind)
    return named and survey.rows >= MANY_TIMES and survey.sketch.distinct > NEARLY_ALL * survey.rows


def _are_times(least: float, most: float) -> bool:
    """In seconds, or in thousandths, millionths or billionths."""
    return any(TIMES[0] * unit <= least and most <= TIMES[1] * unit for unit in (1, 1e3, 1e6, 1e9))
