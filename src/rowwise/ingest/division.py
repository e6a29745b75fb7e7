"""How to divide rows into training, validation and test rows: by time, by whole groups, or at random; and why."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import types

from rowwise.ingest.kinds import is_time
from rowwise.ingest.names import is_birth, time_rank
from rowwise.ingest.roles import AS_TOLD, FEW, Facts, Use, may_group, unit_of
from rowwise.ingest.survey import ColumnSurvey
from rowwise.ingest.times import LABEL_nats, Nearness, TimeBorders, TimeSample, is_ordered, time_text, times_of
from rowwise.ingest.transform.times import PER_SECOND, Unit

SHARE = 0.1  # of validation rows, and of test rows
MAX_NAMED = 5  # columns in one line
FEWEST_DAYS = {"hour": 2, "weekday": 14}  # time span of the rows in which a part of the time recurs
FEWEST_HOURS = 3  # distinct hours of the day
DAY_us = 86_400_000_000
Part = Literal["hour", "weekday"]


class Division(NamedTuple):
    """How rows are divided, and why."""

    reason: str
    borders: TimeBorders | None = None
    group: str | None = None
    checks: tuple[str, ...] = ()  # warnings on splits that make test metrics too optimistic


def find_times(columns: Mapping[str, pa.Array]) -> list[str]:
    """Candidates for the time of a row, the likeliest first: columns of times without nulls in the first rows."""
    times: list[str] = []
    for name, array in columns.items():
        if not is_ordered(array.type) or array.null_count or not len(array):
            continue
        time_R = times_of(array)
        least, most = float(time_R.min()), float(time_R.max())
        if least < most and (is_time(array.type) or unit_of(least, most)) and not is_birth(name):
            times.append(name)
    return sorted(times, key=time_rank)


def divide(
    uses: Mapping[str, Use], facts: Mapping[str, Facts], surveys: Mapping[str, ColumnSurvey], sample: TimeSample,
    times: Sequence[str], *, forced: bool,
) -> Division:  # fmt: skip
    """Divide by the first of the times if the user (`forced`) or the evidence says so; else by groups, if any."""
    requested = next((name for name, use in uses.items() if use.role == "group"), None)
    if requested is not None and not forced:
        return Division(f"rows of one {requested!r} stay in one split, by --group", group=requested)
    alternatives = f"; {_listed(times[1:])} may be times, too: --time chooses" if times[1:] else ""
    objection = ""
    checks: tuple[str, ...] = ()
    if times and uses[times[0]].role == "time":
        by_time = _by_time(uses, surveys, sample, times[0], forced=forced)
        if by_time.borders is not None:
            return by_time._replace(reason=by_time.reason + alternatives)
        objection, checks = by_time.reason + alternatives, by_time.checks
    groups = [name for name in facts if _is_free(uses[name]) and may_group(facts[name])]
    if groups:
        group = min(groups, key=lambda name: facts[name].repeats.guess.error)
        rows = facts[group].repeats.rows / max(facts[group].repeats.values, 1)
        grouping = f"rows of one {group!r}, {rows:.1f} on average, stay in one split, as they are alike"
        return Division(f"{grouping}; splits are drawn at random", group=group, checks=checks)
    reason = objection or "no column has the time of every row, and no groups of rows were found"
    return Division(f"splits are drawn at random: {reason}", checks=checks)


def parts_of(survey: ColumnSurvey, sample: TimeSample) -> tuple[tuple[Part, ...], Unit]:
    """The recurring parts of the times of rows, and their unit."""
    unit = unit_of(survey.least, survey.most) if types.is_integer(survey.kind) else "us"
    if unit is None or not len(sample.time_S):
        return (), "s"
    time_S = sample.time_S // max(PER_SECOND[unit] // 10**6, 1) * max(10**6 // PER_SECOND[unit], 1)
    days = (time_S.max() - time_S.min()) / DAY_us
    hours = len(np.unique(time_S // (DAY_us // 24) % 24))
    enough: dict[Part, bool] = {"hour": hours >= FEWEST_HOURS, "weekday": True}
    return tuple(part for part, varies in enough.items() if varies and days >= FEWEST_DAYS[part]), unit


def unseen_ids(
    uses: Mapping[str, Use], surveys: Mapping[str, ColumnSurvey], sample: TimeSample, division: Division
) -> dict[str, float]:
    """The estimated share of the ids in test rows that are unseen in training, for each column of ids."""
    borders = None if division.borders is None else sample.borders(SHARE)
    unseen: dict[str, float] = {}
    for name, use in uses.items():
        survey = surveys[name]
        if not use.is_ids or not survey.values:
            continue
        if borders is None:
            share = survey.sketch.unseen(2 * SHARE) / survey.values
        else:
            tested = float((sample.time_S >= borders[1]).mean())
            share = survey.sketch.unseen_before(*borders) / (survey.values * tested)
        unseen[name] = min(share, 1.0)
    return unseen


def _by_time(
    uses: Mapping[str, Use], surveys: Mapping[str, ColumnSurvey], sample: TimeSample, name: str, *, forced: bool
) -> Division:
    near = {
        column: nearness
        for column, use in uses.items()
        if use.role == "sparse" and column in sample.ids and surveys[column].sketch.distinct > FEW
        if (nearness := sample.nearness(column)).is_near
    }
    evidence = _time_evidence(near, sample.label_nats())
    if not forced and evidence is None:
        return Division(f"{name!r} is a time, but rows near in time are no more alike than others")
    survey = surveys[name]
    comparable = is_ordered(survey.kind)
    borders = sample.borders(SHARE) if comparable and not survey.nulls else None
    few = f"the last tenths by {name!r} have too few times, or only one label"
    problem = few if comparable else f"{name!r} holds {survey.kind}"
    problem = f"{name!r} is missing in {survey.nulls:,} rows" if survey.nulls else problem
    easy = "" if evidence is None else f"near in time by {name!r}, {evidence}: a random split is too easy"
    if borders is None:
        reason = f"rows cannot be split by time, as {problem}: expected later rows as data.valid and data.test"
        return Division(reason, checks=(f"{easy}; {reason}" if easy else reason,))
    valid_from, test_from = (time_text(border, survey.kind) for border in borders)
    time_borders = TimeBorders(column=name, valid_from=valid_from, test_from=test_from)
    checks = (f"{easy}, so the recipe splits by time",) if easy else ()
    reason = f"split by {name!r}, test rows last: {'by --time' if forced else evidence}"
    return Division(reason, time_borders, checks=checks)


def _time_evidence(near: Mapping[str, Nearness], label_nats: float) -> str | None:
    """How rows that are near in time are alike, or None if they are not."""
    if near:
        ratios = sorted(((nearness.ratio, name) for name, nearness in near.items()), reverse=True)[:MAX_NAMED]
        named = ", ".join(f"{name!r} {ratio:.1f} times" for ratio, name in ratios)
        return f"rows share ids more often than at random ({named})"
    if label_nats >= LABEL_nats:
        return "labels of neighbouring rows correlate"
    return None


def _is_free(use: Use) -> bool:
    return use.role in ("sparse", "key") and use.why != AS_TOLD


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:MAX_NAMED]))
