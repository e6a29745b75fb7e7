"""The role of a column: a pure function of facts about it, by an ordered list of rules; the first match decides."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, final

from pyarrow import types

from rowwise.base.errors import SpecError
from rowwise.ingest.kinds import is_list, is_text
from rowwise.ingest.names import is_group, sense_of
from rowwise.ingest.sketch import Guess, Repeats
from rowwise.ingest.survey import ColumnSurvey
from rowwise.ingest.transform.times import PER_SECOND, Unit

Role = Literal["label", "dense", "sparse", "time", "key", "group", "unused"]

FEW = 100  # whole numbers with at most this many values may be categories
CODES = 12  # at most this many values may be codes, whatever the column's name
FLAG = 2
LARGEST_COUNT = 1 << 31
TIMES = (631_152_000, 4_102_444_800)  # 1990 to 2100 in seconds
DAYS = (19000101, 21001231)  # written as whole numbers
CLOSE_nats = 0.01  # a smaller gain in log loss, or difference between the two readings, makes the role ambiguous
MANY_TIMES = 1000
ENOUGH_ROWS = 3000  # with fewer, evidence for ids or amounts may be chance
NEARLY_ALL = 0.9
LEAK_AUC = 0.99
LEAK_ERROR, LEAK_MISSING = 0.02, 0.05
NO_VALUES = 0.001  # share of rows with a value, below which (and up to `CODES` rows) a column is unused
LEAK_ROWS = 200  # of the rarer label; with fewer, a high AUC may just be a good column
LARGEST_GROUPS = 50  # rows per group, on average
FEWEST_GROUPS = 20
IN_GROUPS = 0.5  # minimum share of rows in groups of two or more
GROUP_ERROR = 0.2  # wrong guesses of the label from other rows of the group, relative to guesses without them
EVEN = 0.7  # values in the upper half of the range over those in the lower half, or the other way round
# An amount with at most MAX_BOTH distinct values, at OFTEN_AGAIN rows each, also gets a table: for non-monotone effects
MAX_BOTH, OFTEN_AGAIN = 1024, 20
EQUAL = 2  # expected collisions of random numbers
PEAKED, PEAKED_CODES = 0.75, 0.95  # minimum `Shape.peaked` of counts, and of counts with up to `CODES` values
AS_COUNTS = "looks like a count"
SENTENCE = 5  # mean words of free text
LONG_TEXTS = 0.3  # share of distinct texts, above which they are free text
AS_TOLD = "as told"  # the reason for a role that an option gives
NEVER_SEEN = 0.95  # share of the ids in test rows that are unseen in training
MOSTLY = 0.5


class Use(NamedTuple):
    """The role of a column, and the reason for it."""

    role: Role
    why: str = ""
    note: str | None = None  # anomaly
    close: bool = False  # ambiguous: another role fits about as well
    both: bool = False  # its numbers are also used as ids

    @property
    def is_ids(self) -> bool:
        """Whether it looks up a table."""
        return self.role == "sparse" or self.both


@final
class Facts:
    """Statistics of a column over all rows; those of the label only if there is one."""

    def __init__(self, name: str, survey: ColumnSurvey, *, labelled: bool) -> None:
        self.name, self.sense, self.kind = name, sense_of(name), survey.kind
        self.rows, self.nulls, self.distinct = survey.rows, survey.nulls, survey.sketch.distinct
        self.least, self.most, self.infinite = survey.least, survey.most, survey.infinite
        self.words, self.texts = survey.words, survey.texts
        self.evidence, self.shape = survey.evidence() or (None, None)
        self.repeats = survey.sketch.repeats(2)  # values of two rows and more
        missing = survey.missing_guess()
        self.leak = _leak(survey, self.repeats, missing) if labelled else None
        self.missing_tells = missing.gain if labelled else 0.0  # wrong guesses corrected by where it is missing

    @property
    def whole(self) -> bool:
        return bool(types.is_integer(self.kind))

    @property
    def number(self) -> bool:
        return self.whole or bool(types.is_floating(self.kind) or types.is_decimal(self.kind))

    @property
    def text(self) -> bool:
        return is_text(self.kind)

    @property
    def filled_rows(self) -> int:
        return self.rows - self.nulls

    @property
    def nearly_all_different(self) -> bool:
        return self.distinct > NEARLY_ALL * self.filled_rows

    @property
    def numbers_rows(self) -> bool:
        """Whether whole numbers are row numbers: all different, nearly without gaps."""
        span = self.most - self.least + 1
        return (
            self.whole
            and self.rows >= CODES
            and self.distinct == self.filled_rows
            and self.distinct > NEARLY_ALL * span
        )

    @property
    def counts(self) -> bool:
        """Whether frequencies fall with the distance from the mode, as those of counts do."""
        enough = PEAKED if self.distinct > CODES else PEAKED_CODES
        return self.shape is not None and self.least >= 0 and self.shape.peaked >= enough

    @property
    def never_by_chance(self) -> bool:
        """Whether all are different although random numbers of the range would collide (birthday paradox)."""
        return self.distinct == self.filled_rows and self.filled_rows**2 > 2 * EQUAL * (self.most - self.least + 1)

    @property
    def spread_evenly(self) -> bool:
        return self.shape is not None and EVEN <= self.shape.even <= 1 / EVEN

    @property
    def seconds(self) -> bool:
        """Whether numbers are times since 1970, in seconds, or in thousandths, millionths or billionths."""
        return unit_of(self.least, self.most) is not None

    @property
    def days(self) -> bool:
        """Whether whole numbers are days such as 20240531."""
        ends = [int(end) % 10_000 for end in (self.least, self.most)] if self.least <= self.most else [0]
        valid = all(1 <= end // 100 <= 12 and 1 <= end % 100 <= 31 for end in ends)
        return self.whole and DAYS[0] <= self.least and self.most <= DAYS[1] and valid


def unit_of(least: float, most: float) -> Unit | None:
    """The unit of whole numbers that are times since 1970, or None if they are not."""
    return next((u for u, per in PER_SECOND.items() if TIMES[0] * per <= least and most <= TIMES[1] * per), None)


def parse_roles(columns: Mapping[Role, str | Sequence[str] | None]) -> dict[str, Role]:
    """Invert the columns of each role, as options name them, to the role of each column."""
    roles: dict[str, Role] = {}
    for role, names in columns.items():
        for column in [names] if isinstance(names, str) else names or ():
            if roles.setdefault(column, role) != role:
                raise SpecError(f"column {column!r} has two roles, {roles[column]} and {role}", "one role")
    return roles


def may_group(facts: Facts) -> bool:
    """Whether rows of one value belong together: many small groups, by the column's name or with like labels."""
    repeats = facts.repeats
    if not (facts.whole or facts.text) or facts.sense in ("amount", "part of time", "time"):
        return False
    if repeats.values < FEWEST_GROUPS or repeats.rows < IN_GROUPS * facts.rows:
        return False
    if (facts.distinct <= FEW and facts.sense != "id") or facts.distinct * LARGEST_GROUPS < facts.rows:
        return False
    alike = repeats.guess.blind >= FEWEST_GROUPS and repeats.guess.error <= GROUP_ERROR
    named = is_group(facts.name)
    return named or (alike and (facts.sense == "id" or facts.text))


def choose_role(facts: Facts) -> Use:
    """The use by the first rule that applies."""
    return next(use for rule in RULES if (use := rule(facts)) is not None)


Rule = Callable[[Facts], Use | None]


def _useless(f: Facts) -> Use | None:
    if f.leak:
        return Use("unused", note=f"{f.name!r} leaks the label: {f.leak}: left out")
    if f.distinct <= 1 and not is_list(f.kind):
        return Use("unused", note=f"{f.name!r} is constant{' or missing' if f.nulls else ''}")
    if 0 < f.filled_rows <= min(CODES, NO_VALUES * f.rows):
        return Use("unused", note=f"{f.name!r} is missing in all but {f.filled_rows:,} of {f.rows:,} rows")
    if f.infinite > MOSTLY * f.rows:
        return Use("unused", note=f"{f.name!r} holds mostly numbers that are infinite in 32 bits")
    return None


def _other_types(f: Facts) -> Use | None:
    """Types with one use."""
    listed = is_list(f.kind)
    kind = f.kind.value_type if listed else f.kind
    if types.is_dictionary(kind):
        known = is_text(kind.value_type) or types.is_integer(kind.value_type)
        return Use("sparse", "categories") if known else Use("unused", f"categories of {kind.value_type}")
    if listed and is_text(kind):
        return Use("sparse", "lists of words")
    if listed:
        return Use("sparse", "lists of whole numbers") if types.is_integer(kind) else Use("unused", "lists of numbers")
    if types.is_timestamp(kind) or types.is_date(kind):
        return Use("time", "time")
    if types.is_boolean(kind):
        return Use("dense", "yes or no")
    return None if f.number or f.text else Use("unused", "no numbers, words or lists of them")


def _time(f: Facts) -> Use | None:
    if not f.number or not f.least <= f.most:
        return None
    if f.seconds and f.sense != "amount" and (f.distinct >= MANY_TIMES or f.sense == "time"):
        return Use("time", "time since 1970")
    if f.days and f.sense in ("time", "part of time") and f.distinct > FLAG:
        return Use("time", "day such as 20240531")
    return None


def _row_key(f: Facts) -> Use | None:
    """A key: different in nearly every row, and no amount."""
    key = Use("key", note=f"{f.name!r} is unique in nearly every row: a key, no feature")
    if f.numbers_rows and f.sense != "amount":
        return key
    if not f.nearly_all_different or f.rows < CODES:
        return None
    if f.text:
        return None if f.words >= SENTENCE else key
    if not f.whole or f.sense in ("amount", "time"):
        return None
    named = f.sense == "id" or (
        f.rows >= MANY_TIMES and (f.spread_evenly or f.never_by_chance or f.most > LARGEST_COUNT)
    )
    return key if named else None


def _texts(f: Facts) -> Use | None:
    if not f.text:
        return None
    if f.words >= SENTENCE and f.distinct > LONG_TEXTS * f.filled_rows:
        note = f"{f.name!r} is free text, {f.words:.0f} words in a value: no ids, as nearly all are different"
        return Use("unused", note=note)
    if {text.strip().lower() for text in f.texts} <= YES_NO:
        return Use("sparse", "yes or no")
    return Use("sparse", "words")


def _numbers(f: Facts) -> Use | None:
    if f.whole:
        return None
    if f.infinite:
        note = f"{f.name!r} has {f.infinite:,} numbers that are infinite in 32 bits: read as missing"
        return Use("dense", "fractions", note=note)
    return Use("dense", "fractions")


def _named(f: Facts) -> Use | None:
    """The use of whole numbers by their name."""
    if f.sense == "id" or f.sense == "row":
        return Use("sparse", "id by name")
    if f.sense == "part of time" and f.distinct <= FEW:
        return Use("sparse", "part of a time by name")
    if f.sense == "amount" and not (f.distinct <= FLAG):
        both = f.distinct <= MAX_BOTH and f.rows >= max(ENOUGH_ROWS, OFTEN_AGAIN * f.distinct)
        return Use("dense", "number by name", both=both)
    return None


def _large(f: Facts) -> Use | None:
    return Use("sparse", "too large for a count") if f.most > LARGEST_COUNT else None


def _by_label(f: Facts) -> Use | None:
    evidence = f.evidence
    if evidence is None or evidence.reading is None:
        return None
    ids, amounts = (max(evidence.base - loss, 0) / evidence.base for loss in (evidence.ids, evidence.amounts))
    close = min(max(ids, amounts), abs(ids - amounts)) * evidence.base < CLOSE_nats
    gains = f"log loss -{ids:.1%} as ids, -{amounts:.1%} as number"
    if evidence.reading == "amounts":
        return Use("dense", gains, close=close)
    if f.distinct <= FEW and f.counts:
        return Use("dense", AS_COUNTS, close=True, both=True)
    if f.rows < ENOUGH_ROWS and f.distinct > CODES:
        return Use("dense", "a count: too few rows for ids", close=True, both=f.distinct <= FEW)
    return Use("sparse", gains, close=close)


def _few(f: Facts) -> Use | None:
    if f.least < 0 or f.distinct > FEW:
        return None
    if f.counts:
        return Use("dense", AS_COUNTS, close=True, both=True)
    if f.distinct <= CODES:
        return Use("sparse", f"{f.distinct} values", close=f.distinct > FLAG)
    if f.rows < ENOUGH_ROWS:
        return Use("dense", "a count: too few rows for ids", close=True, both=True)
    return Use("sparse", f"{f.distinct} values", close=True)


def _shaped(f: Facts) -> Use:
    shape = f.shape
    if shape is not None and shape.is_of_ids and f.least >= 0 and f.rows >= ENOUGH_ROWS and not f.counts:
        reason = f"repeats like ids: {shape.repeats:.0f} rows a value"
        return Use("sparse", reason, close=True)
    return Use("dense", "looks numeric", close=True)


RULES: tuple[Rule, ...] = (
    _useless, _other_types, _time, _row_key, _texts, _numbers, _named, _large, _by_label, _few, _shaped,
)  # fmt: skip
YES_NO = frozenset(("yes", "no", "y", "n", "true", "false", "t", "f", "on", "off", "ja", "nein", "si", "oui", "non"))


def when_never_seen(facts: Facts, use: Use, share: float) -> Use:
    """The use of a column whose ids in test rows are nearly all unseen in training."""
    if facts.whole and (facts.sense in ("amount", "part of time") or facts.distinct <= FEW):
        return Use("dense", f"as ids, {share:.0%} would be unseen in training", close=True)
    note = f"{facts.name!r} is left out: {share:.0%} of test rows have an id that is unseen in training"
    return Use("unused", note=note)


def _leak(survey: ColumnSurvey, repeats: Repeats, missing: Guess) -> str | None:
    often, auc = survey.sketch.repeats(), survey.auc()
    few = repeats.values * LARGEST_GROUPS <= survey.rows or survey.sketch.distinct <= FEW  # else they may be groups
    if few and often.guess.error <= LEAK_ERROR and not is_list(survey.kind):
        return f"it alone cuts errors by {often.guess.gain:.0%}"
    if missing.error <= LEAK_MISSING:
        return f"missing or not cuts errors by {missing.gain:.0%}"
    rare = min(survey.positive, survey.rows - survey.positive)
    if auc is not None and max(auc, 1 - auc) >= LEAK_AUC and rare >= LEAK_ROWS:
        return f"it alone orders rows by label (AUC {max(auc, 1 - auc):.3f})"
    return None
