"""Filters, sampling, shares and sessions: together, each row that is wanted comes once, in an order that follows."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest.test_batcher import keys
from test_service import served

from rowwise import DataError, SpecError, StateError, Table
from rowwise.ingest import Batcher, Batching, Columns, FrameReader, GeneratorReader, Sparse
from rowwise.ingest.service.local import Service, Workers
from rowwise.ingest.share import Share
from rowwise.ingest.transform import Sampling, load
from rowwise.ingest.where import parse

COLUMNS = Columns(labels=("label",), sparse=(Sparse(column="id", ids="direct"),), key="row")
TABLES = (Table(name="id", rows=10_000, dim=4),)


def make(sessions):
    sessions = pa.array(sessions, pa.int64()) if isinstance(sessions, list) else sessions
    rows = np.arange(len(sessions))
    columns = {"row": rows, "label": rows % 2, "id": rows, "day": rows % 5}
    return pa.table({name: pa.array(cells) for name, cells in columns.items()} | {"session": sessions})


def make_rows(first, count):
    rows = np.arange(first, first + count)
    return pa.table({"row": rows, "label": rows % 2, "id": rows, "day": rows % 5})


def batches(frame, transforms=(), position=None, split_rows=40, **how):
    batching = Batching(**({"size": 16} | how))
    reader = FrameReader(frame, split_rows=split_rows)
    return Batcher(reader, COLUMNS, TABLES, batching, position, load(transforms) if transforms else None)


RUNS = st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 4)), st.integers(1, 6)), min_size=1, max_size=30)


@settings(max_examples=60)
@given(RUNS, st.integers(1, 50), st.integers(0, 3), st.booleans(), st.sampled_from([pa.int64(), pa.string()]))
def test_sessions_stay_together(runs, split_rows, seed, shuffle, kind):
    sessions = pa.array([session for session, length in runs for _ in range(length)], pa.int64()).cast(kind)
    frame = make(sessions)
    how = {"seed": seed, "shuffle": shuffle, "split_rows": split_rows, "together": "session"}
    found = keys(batches(frame, **how))
    assert sorted(found) == list(range(len(sessions)))
    names = sessions.to_pylist()
    after = dict(pairwise(found))
    for row in range(len(names) - 1):
        at_border = (row + 1) % split_rows == 0
        if names[row] is not None and names[row] == names[row + 1] and not at_border:
            assert after[row] == row + 1


@settings(max_examples=40)
@given(RUNS, st.integers(1, 40), st.integers(0, 3), st.floats(0.1, 0.9), st.floats(0.1, 1.0))
def test_share_filter_and_sampling_together(runs, split_rows, seed, cut, rate):
    frame = make([session for session, length in runs for _ in range(length)])
    sampling = [Sampling(rate=rate, column="label", value=0, seed=3)]
    how = {"seed": seed, "split_rows": split_rows, "together": "session"}
    parts = [Share(end=cut), Share(begin=cut)]
    where = parse("day >= 2")
    alone = {
        "where": set(keys(batches(frame, where=where, **how))),
        "sampled": set(keys(batches(frame, sampling, **how))),
    }
    assert alone["where"] == {row for row in range(len(frame)) if row % 5 >= 2}
    for share in parts:
        mine = keys(batches(frame, share=share, **how))
        found = keys(batches(frame, sampling, share=share, where=where, **how))
        # What selects rows only leaves some out: the order of the others stays.
        assert found == [row for row in mine if row in alone["where"] & alone["sampled"]]


CHANGED = [
    {"where": parse("day >= 2")},
    {"together": "session"},
    {"transforms": [Sampling(rate=0.5)]},
    {"share": Share(end=0.5)},
]


@pytest.mark.parametrize("change", CHANGED, ids=["where", "together", "transforms", "share"])
def test_a_position_holds_for_the_same_rows_only(change):
    frame = make([1] * 200)
    want = "has other files, splits, filters or transforms .or another together or on_bad_rows. than this run"
    for position, how in ((batches(frame).state(), change), (batches(frame, **change).state(), {})):
        with pytest.raises(StateError, match=want):
            batches(frame, position=position, **how)
    assert keys(batches(frame, position=batches(frame, **change).state(), **change)) == keys(batches(frame, **change))


def test_a_run_that_met_a_bad_row_may_go_on_without_bad_rows(tmp_path):
    labels = [row % 2 for row in range(200)]
    labels[77] = 3
    frame = make([1] * 200).set_column(1, "label", pa.array(labels))
    made, got = batches(frame), []
    with pytest.raises(DataError, match="77, column 'label': 3"):
        got.extend(key for batch in made for key in batch.keys_B.tolist())
    rest = batches(frame, position=made.state(), quarantine=str(tmp_path))
    whole = keys(batches(frame, quarantine=str(tmp_path)))
    assert got + keys(rest) == whole
    assert sorted([*whole, 77]) == list(range(200))
    with pytest.raises(StateError, match="on_bad_rows"):
        batches(frame, position=rest.state())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"where": parse("dai >= 2")}, r"no column 'dai'; did you mean 'day'\? There are"),
        ({"where": parse("day >= x")}, "column 'day' holds int64, but is compared with 'x': expected a whole number"),
        ({"together": "sesion"}, r"no column 'sesion'; did you mean 'session'\?"),
        ({"together": "bag"}, "together: column 'bag' holds list<.*>: expected a column of single values"),
    ],
)
def test_what_cannot_be_selected_by_is_said_before_a_row_is_read(how, message, tmp_path):
    frame = make([1] * 20).append_column("bag", pa.array([[1]] * 20))
    with pytest.raises(DataError, match=message):
        batches(frame, quarantine=str(tmp_path / "bad"), **how)
    assert not (tmp_path / "bad").exists()


WRONG = [
    ({"count": 0}, "data.workers.count=0: expected at least 1, or data.workers=null"),
    ({"most": 0}, "data.workers.most=0: expected at least 1"),
    ({"ahead": -1}, "data.workers.ahead=-1: expected at least 1"),
    ({"lease_s": 0}, "data.workers.lease_s=0: expected more than 0"),
    ({"lease_s": float("nan")}, "data.workers.lease_s=nan: expected more than 0"),
    ({"cpus": -1}, "data.workers.cpus=-1: expected more than 0"),
    ({"on": "moon"}, "data.workers.on='moon': expected processes or ray"),
    ({"address": "here:1"}, "data.workers.address='here:1' with on=processes: expected on=ray"),
    ({"count": 4, "most": 2}, "count=4 and most=2: expected count"),
]


@pytest.mark.parametrize(("how", "message"), WRONG)
def test_workers_that_cannot_be(how, message):
    with pytest.raises(SpecError, match=message):
        Workers(**how)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("size", [7, 1000])
def test_a_batch_may_be_of_more_splits_than_a_service_has_room_for(size):
    def made():
        batching = Batching(size=size, where=parse("row in [3, 4, 250, 251, 299]") if size == 7 else parse("row >= 0"))
        return Batcher(GeneratorReader(make_rows, 300, split_rows=5), COLUMNS, TABLES, batching)

    expected, there = keys(made()), made()
    with Service(there.task, Workers(count=1, ahead=1)) as service:
        assert keys(served(there, service.client())) == expected


@pytest.mark.slow
def test_a_split_that_is_taken_twice_is_given_back_twice():
    there = Batcher(GeneratorReader(make_rows, 300, split_rows=10), COLUMNS, TABLES, Batching(size=10))
    with Service(there.task, Workers(count=1, ahead=1)) as service:
        client = service.client()
        first = next(client.splits(0, 0, there.splits))
        again = client.splits(0, 0, there.splits)
        second = next(again)
        before = second.block.copy()
        del first
        third = next(again)
        assert third.rows == 10
        assert np.array_equal(second.block, before)
