"""Rows that are near in time: what they have in common, where a share of them begins, and which ids are new then."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv
from pyarrow import parquet as pq

from rowwise.ingest import FrameReader, ParquetReader
from rowwise.ingest.inspect import inspect
from rowwise.ingest.mix import mix
from rowwise.ingest.share import Share
from rowwise.ingest.sketch import Sketch
from rowwise.ingest.times import BINS, TimeSample, first_time, nearness

ROWS = 6000
SMALL = st.lists(st.integers(0, 6), min_size=2, max_size=40)


@given(SMALL, st.integers(0, 9))
def test_nearness_counts_pairs(ids, seed):
    bins = np.random.default_rng(seed).integers(0, BINS, len(ids))
    pairs = [(a, b) for a in range(len(ids)) for b in range(a)]
    same = [ids[a] == ids[b] for a, b in pairs]
    near = [bins[a] == bins[b] for a, b in pairs]
    found = nearness(np.array(ids, np.uint64), bins)
    if not any(same) or not any(near):
        assert not found.is_near
        return
    both = sum(x and y for x, y in zip(same, near, strict=True))
    assert found.ratio == pytest.approx((both / sum(near)) / (sum(same) / len(pairs)))


@given(SMALL, st.sampled_from([0.1, 0.2, 0.5]))
def test_a_share_begins_at_the_time_that_comes_nearest(times, share):
    found = first_time(np.array(times), share)
    possible = sorted(set(times))[1:]
    if not possible:
        assert found is None
        return
    shares = {one: sum(time >= one for time in times) / len(times) for one in possible}
    assert found in possible
    assert abs(shares[found] - share) == pytest.approx(min(abs(one - share) for one in shares.values()))


@given(st.lists(st.integers(1, 900), min_size=1, max_size=6), st.sampled_from([100, 5000]))
def test_a_sample_does_not_depend_on_splits(sizes, most):
    rows = sum(sizes)
    time, ids = np.arange(rows) * 3, pa.array([None if i % 5 == 0 else i % 7 for i in range(rows)])
    whole, parts = TimeSample(most), TimeSample(most)
    whole.add(time, time % 2 == 0, {"id": ids})
    at = 0
    for size in sizes:
        window = slice(at, at + size)
        parts.add(time[window], time[window] % 2 == 0, {"id": ids.slice(at, size)})
        at += size
    assert set(parts.time_S) == set(whole.time_S)
    assert len(whole.time_S) <= most
    assert rows > most or len(whole.time_S) == rows
    assert ((parts.ids["id"] == 0) == (parts.time_S // 3 % 5 == 0)).all()


OCCURRENCES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 50)), max_size=60)


@given(OCCURRENCES, st.integers(0, 50), st.integers(0, 20))
def test_values_that_are_new_are_counted_by_time(pairs, seen, more):
    begin = seen + more
    sketch = Sketch()
    for part in (pairs[::2], pairs[1::2]):
        value, time = np.array(part, np.int64).reshape(-1, 2).T
        sketch.add(mix(value.astype(np.uint64)), np.zeros(len(value), bool), time)
    times = {value: sorted(time for one, time in pairs if one == value) for value, _ in pairs}
    exact = sum(time >= begin for found in times.values() if found[0] >= seen for time in found)
    # What lies between the first and the last time of a value is taken to be spread evenly.
    unsure = sum(len(found) - 2 for found in times.values() if seen <= found[0] < begin <= found[-1])
    assert sketch.unseen_before(seen, begin) == pytest.approx(exact, abs=unsure + 1e-9)


def frame(seed=0, sessions=False, drift=False, rows=ROWS, **columns):
    draw = np.random.default_rng(seed)
    at = np.sort(draw.integers(0, 30 * 86400, rows)) + 1_714_521_600
    user = draw.integers(0, 2000, rows)
    if sessions:  # of about five rows in a few minutes
        user = draw.integers(0, 2000, rows)[np.cumsum(draw.random(rows) < 0.2)]
    rate = 0.1 + 0.3 * (np.arange(rows) > rows / 2) if drift else np.full(rows, 0.3)
    made = {"clicked": (draw.random(rows) < rate).astype(int), "at": pa.array(at, pa.timestamp("s")), "user": user}
    item = {"item": [f"i{i}" for i in draw.integers(0, 300, rows)]}
    return pa.table(made | item | columns).take(pa.array(draw.permutation(rows)))


def look(table, **more):
    return inspect(FrameReader(table, split_rows=1700), **more).card


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_only_have_a_time_are_divided_at_random(seed):
    card = look(frame(seed))
    assert card.borders is None
    assert not any("near in time" in line for line in card.warnings)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"sessions": True}, "near in time by 'at', rows share ids more often than at random ('user' "),
        ({"drift": True}, "near in time by 'at', labels of neighbouring rows correlate"),
    ],
)
def test_rows_that_are_alike_near_in_time_are_divided_by_it(planted, said, seed):
    table = frame(seed, **planted)
    card = look(table)
    (line,) = (one for one in card.warnings if "near in time" in one)
    assert line.startswith(said)
    assert line.endswith("a random split is too easy, so the recipe splits by time")
    at = table["at"].to_numpy().astype("datetime64[s]")
    valid, test = (np.datetime64(border) for border in (card.borders.valid_from, card.borders.test_from))
    assert np.mean(at >= test) == pytest.approx(0.1, abs=0.005)
    assert np.mean(at >= valid) == pytest.approx(0.2, abs=0.005)


def test_a_time_that_is_told_divides_the_rows():
    draw = np.random.default_rng(0)
    told = {"roles": {"week": "time"}}
    assert look(frame(week=draw.integers(0, 52, ROWS)), **told).borders.column == "week"
    on = [datetime.date(2024, 1, 1) + datetime.timedelta(days=int(day)) for day in draw.integers(0, 60, ROWS)]
    borders = look(frame(on=on), roles={"on": "time"}).borders
    assert (borders.valid_from, borders.test_from) == ("2024-02-18", "2024-02-24")


def test_seconds_with_fractions_divide_the_rows():
    table = frame(sessions=True)
    seconds = table["at"].cast(pa.int64()).to_numpy() + 0.25
    card = look(table.drop_columns("at").append_column("at", pa.array(seconds)))
    assert card.borders.column == "at"
    assert np.mean(seconds >= card.borders.test_from) == pytest.approx(0.1, abs=0.005)


@pytest.mark.parametrize("inside", [True, False])
def test_days_of_files_divide_the_rows(inside, tmp_path):
    """The first file has one day."""
    table = frame(drift=True)
    day_R = table["at"].cast(pa.date32()).to_numpy().astype(str)
    for day in np.unique(day_R):
        rows = table.filter(pa.array(day_R == day)).drop_columns("at")
        folder = tmp_path / ("" if inside else f"on={day}")
        folder.mkdir(exist_ok=True)
        more = rows.append_column("on", pa.array([day] * len(rows))) if inside else rows
        pq.write_table(more, folder / f"{day}.parquet")
    borders = inspect(ParquetReader(tmp_path)).card.borders
    assert (borders.column, borders.formats) == ("on", ("iso",))
    assert np.mean(day_R >= borders.test_from[:10]) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"on": [None if i % 9 == 0 else i for i in range(ROWS)]}, "'on' is missing in 667 rows"),
        ({"on": [i % 2 for i in range(ROWS)]}, "the last tenths by 'on' have too few times, or only one label"),
        (
            {"on": np.arange(ROWS), "clicked": (np.arange(ROWS) < ROWS // 2).astype(int)},
            "the last tenths by 'on' have too few times, or only one label",
        ),
    ],
)
def test_times_that_cannot_divide_the_rows(columns, why):
    card = look(frame(**columns), roles={"on": "time"})
    assert card.borders is None
    (line,) = (one for one in card.warnings if "cannot be split" in one)
    assert line.endswith(f"rows cannot be split by time, as {why}: expected later rows as data.valid and data.test")


def new_ids(column, train_R, test_R):
    known = set(np.asarray(column)[train_R])
    return np.mean([one not in known for one in np.asarray(column)[test_R]])


@pytest.mark.parametrize("sessions", [False, True])
def test_ids_of_test_rows_that_no_training_row_has(sessions):
    """Beside the rows that a run takes."""
    draw = np.random.default_rng(3)
    table = frame(sessions=sessions, query=draw.geometric(0.001, ROWS), few=draw.integers(0, 5, ROWS))
    card = look(table, roles={"query": "sparse", "few": "sparse"})
    assert (card.borders is not None) == sessions
    if card.borders is None:
        at_R = np.arange(ROWS)
        parts = [Share(begin=0.2).select(None, ROWS, 0), Share(end=0.1).select(None, ROWS, 0)]
        train_R, test_R = (np.isin(at_R, part) for part in parts)
    else:
        at = table["at"].to_numpy().astype("datetime64[s]")
        train_R, test_R = at < np.datetime64(card.borders.valid_from), at >= np.datetime64(card.borders.test_from)
    for name in ("user", "item", "query", "few"):
        (found,) = (column.unseen for column in card.columns if column.name == name)
        assert found == pytest.approx(new_ids(table[name], train_R, test_R), abs=0.03), name
    (line,) = (one for one in card.warnings if "unseen in training" in one)
    assert "'query'" in line
    assert "'few'" not in line


def test_of_many_columns_with_new_ids_the_first_are_named():
    draw = np.random.default_rng(0)
    columns = {f"id_{n}": draw.integers(0, 1500 + n, ROWS) for n in range(9)}
    (line,) = (one for one in look(frame(**columns)).warnings if "unseen in training" in one)
    assert line.endswith(" and some in 5 more columns")


def test_new_ids_are_estimated_where_values_are_too_many_to_count():
    sketch, rows = Sketch(2000), 60_000
    ids = np.random.default_rng(0).integers(0, 40_000, rows).astype(np.uint64)
    for part in np.array_split(ids, 5):
        sketch.add(mix(part), np.zeros(len(part), bool))
    exact = Sketch(1 << 20)
    exact.add(mix(ids), np.zeros(rows, bool))
    assert not sketch.exact
    assert sketch.unseen(0.2) == pytest.approx(exact.unseen(0.2), rel=0.1)


@pytest.mark.parametrize("what", ["null", "empty list"])
def test_a_value_that_is_missing_tells_the_label(what):
    clicked = frame()["clicked"].to_pylist()
    values = [(7.5 if what == "null" else [1, 2]) if one else (None if what == "null" else []) for one in clicked]
    (column,) = (c for c in look(pa.table({"clicked": clicked, "paid": values})).columns if c.name == "paid")
    assert column.role == "unused"
    assert column.note == "'paid' leaks the label: missing or not cuts errors by 100%: left out"
    random = [values[0] if i % 3 else None for i in range(ROWS)]
    assert not any("label" in line for line in look(pa.table({"clicked": clicked, "paid": random})).warnings)


def test_the_command_says_each_in_a_line(command, tmp_path):
    table = frame(sessions=True, refund=[None] * ROWS)
    clicked = table["clicked"].to_pylist()
    refund = pa.array([float(i % 90) if one else None for i, one in enumerate(clicked)])
    csv.write_csv(table.set_column(table.column_names.index("refund"), "refund", refund), tmp_path / "clicks.csv")
    code, out, err = command("data", "inspect", "clicks.csv")
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("! ")]
    assert [line.split(",")[0] for line in lines] == [
        "! 'refund' leaks the label: missing or not cuts errors by 100%: left out",
        "! near in time by 'at'",
        "! test rows with ids that are unseen in training",
    ]
    assert "by 'at': validation rows from 2024-05-2" in out
    text = (tmp_path / "clicks.yaml").read_text()
    assert "# Before you trust its test metrics:\n#   near in time by 'at', rows share ids" in text
    assert "#   'at' splits the rows" in text
    assert "  share: {column: at, valid_from: '2024-05-2" in text
    command("data", "inspect", "clicks.csv", "--recipe", "b.yaml", "--ignore", "item", "--ignore", "at")
    text = (tmp_path / "b.yaml").read_text()
    assert "#   'item' by --ignore\n" in text
    assert "share: random" in text
