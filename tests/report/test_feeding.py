"""A report says what was waited for rows, by whom they were prepared, and which were put aside."""

import json

import pytest
from report import runs
from report.markup_check import check

from rowwise.report import write
from rowwise.report.feeding import advice, is_worth_advice


def with_steps(folder, waits, workers=None, ready=4, restarts=0, synthetic=False, line_s=100.0):
    """A run whose lines of a hundred seconds waited such a part for rows."""
    runs.make(folder, steps=20)
    if not synthetic:
        facts = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps(facts | {"ceiling": {}}))
    head = ("step", "samples", "time_s", "samples_s", "data_s", "forward_s", "memory_bytes")
    told = {} if workers is None else {"workers": workers, "ready": ready, "restarts": restarts}
    rows = [
        (n, n * 100, n, 100.0, line_s * wait, line_s * (1.0 - wait), 10**9, *told.values())
        for n, wait in enumerate(waits, 1)
    ]
    runs.put(folder / "steps.csv", (*head, *told), rows)
    return write(folder).read_text("utf-8")


def test_waits_with_workers(tmp_path):
    page = with_steps(tmp_path / "r" / "1", [0.9, 0.38, 0.38, 0.38], workers=2, restarts=3)
    assert "Training waited 38% of the time for rows: set data.workers to more than 2; rowwise data bench" in page
    assert {"data_wait", "workers"} <= set(check(page))
    assert "last 2 workers, 3 restarts" in page


def test_waits_without_workers(tmp_path):
    page = with_steps(tmp_path / "r" / "1", [0.9, 0.5, 0.5])
    assert "Training waited 50% of the time for rows: set data.workers; rowwise data bench" in page
    assert "data_wait" in check(page)
    assert "workers" not in check(page)


@pytest.mark.parametrize(("workers", "by"), [(None, ""), (1, " by 1 worker")])
def test_no_waits_to_speak_of(tmp_path, workers, by):
    """However long it takes until the first step."""
    page = with_steps(tmp_path / "r" / "1", [0.99, 0.02, 0.02], workers)
    assert f"Training waited 2.0\u202f% of the time for rows, which are prepared fast enough{by}." in page
    assert "data bench" not in page


def test_a_short_run_gets_no_advice(tmp_path):
    page = with_steps(tmp_path / "r" / "1", [0.9])
    assert "Training waited" not in page
    page = with_steps(tmp_path / "r" / "2", [0.9, 0.4], line_s=59.0)  # workers would take as long to start
    assert "data bench" not in page
    assert "waited 40.0\u202f% of the time for rows, but the run is too short to need action" in page


def test_advice_is_for_runs_that_last():
    assert is_worth_advice(4.0, 61.0)
    assert not is_worth_advice(40.0, 59.0)
    assert not is_worth_advice(4.0, 100.0)


def test_drawn_rows_get_no_advice(tmp_path):
    page = with_steps(tmp_path / "r" / "1", [0.9, 0.5, 0.5], synthetic=True)
    assert "Training waited 50.0\u202f% of the time for rows, as they were generated." in page
    assert "data bench" not in page


def test_runs_of_older_versions(tmp_path):
    folder = tmp_path / "r" / "1"
    with_steps(folder, [0.1, 0.2, 0.3])
    (folder / "steps.csv").write_text("step,samples,forward_s\n1,10,0.5\n2,20,0.5\n")
    page = write(folder).read_text("utf-8")
    check(page)
    assert "Training waited" not in page


def test_rows_that_were_put_aside(tmp_path):
    folder = runs.make(tmp_path / "r" / "1", steps=20)
    assert "quarantined" not in write(folder).read_text("utf-8")
    facts = json.loads((folder / "result.json").read_text())
    reasons = ["a.parquet: row 7: column 'label': None: expected 0 or 1", runs.HOSTILE]
    (folder / "result.json").write_text(json.dumps(facts | {"bad_rows": 1234, "bad_reasons": reasons}))
    page = write(folder).read_text("utf-8")
    check(page)
    assert "1,234 rows quarantined in bad_rows/" in page
    assert "a.parquet: row 7" in page


def test_advice():
    assert advice(0.384, None, "my.yaml") == (
        "training waited 38% of the time for rows: set data.workers; rowwise data bench my.yaml computes how many"
    )
    assert "set data.workers to more than 4;" in advice(0.1, 4, "my.yaml")
