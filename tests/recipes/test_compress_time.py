"""How long compressing takes: a function of counts and of the measured seconds of a row. No test looks at a clock."""

import pytest
from compressible import recipe
from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.errors import SpecError
from rowwise.recipes.compose import resolve
from rowwise.recipes.compress.advise import advise
from rowwise.recipes.compress.estimate import (
    FOLLOWING,
    CompressionWork,
    TimeLimit,
    count_rows,
    count_trainings,
    forecast_work,
)
from rowwise.recipes.compress.folder import TrialFolderSpec, open_folder
from rowwise.recipes.compress.selection import CompressionGoal, select_tables
from rowwise.recipes.compress.window import open_window
from rowwise.recipes.resolved import make_batcher

GOAL = CompressionGoal(ratio=4.0, methods=("hash", "learned"))
COUNTS = st.integers(1, 10_000)
WORK = st.builds(
    CompressionWork,
    history=COUNTS, later=COUNTS, step_rows=st.integers(1, 300), steps=st.integers(1, 200), every=st.integers(0, 50),
    trainings=st.integers(1, 60), passes=st.integers(0, 12),
)  # fmt: skip


@given(WORK, st.floats(1e-6, 1e-2), st.floats(1e-3, 1e5))
def test_trials_train_on_the_most_rows_that_fit_into_the_time(work, row_s, budget_s):
    rows = work.max_rows(row_s, budget_s)
    assert rows == 0 or work.rows(rows) * row_s <= budget_s
    assert rows == work.steps * work.step_rows or work.rows(rows + work.step_rows) * row_s > budget_s


@given(st.floats(0, 100), st.floats(0, 50), st.floats(1, 100))
def test_a_trial_begins_only_if_what_follows_still_fits(spent_s, took_s, budget_s):
    times = iter((7.0, 7.0 + spent_s))
    allowed = TimeLimit(budget_s, lambda: next(times)).allows(took_s)
    assert allowed == (7.0 + spent_s - 7.0 + (1 + FOLLOWING) * took_s <= budget_s)
    assert TimeLimit().allows(1e9)


def test_rows_of_splits_are_counted(tmp_path):
    resolved = resolve(recipe(tmp_path, data={"where": ["row < 3000"]}))
    batcher = make_batcher(resolved, resolved.rows.train)
    exact = sum(len(batch.labels_BK) for batch in batcher)
    assert count_rows(batcher).rows == pytest.approx(exact, rel=0.15)


@pytest.mark.slow
def test_sizes_without_time_are_left_out_and_the_rest_is_used(tmp_path):
    resolved = resolve(recipe(tmp_path))
    spec = TrialFolderSpec.of(resolved.recipe, (), 1500, 0)
    folder, window, selection = (
        open_folder(tmp_path / "c", spec),
        open_window(resolved, ()),
        select_tables(resolved.tables, GOAL),
    )
    before = count_trainings(selection, GOAL, 0, {})
    _, line = forecast_work(window, selection, GOAL, spec, folder.path, None)
    assert f": {before} trainings on 1,536 rows, 12 passes of a small model; " in line
    limit = TimeLimit(60.0, iter((0.0, *[61.0] * 1000)).__next__)
    advice = advise(window, selection, GOAL, spec, folder, lambda text, share: None, limit)
    assert advice.size_bytes <= advice.budget_bytes
    assert advice.warnings[0].startswith("no time for ")
    assert len({one.ratio for one in folder.read() if one.table in selection.names}) == 1
    left = count_trainings(selection, GOAL, 0, folder.read())
    assert 0 < left < before
    # A folder keeps its rows, whatever there is time for now.
    known, _ = forecast_work(
        window, selection, GOAL, TrialFolderSpec.of(resolved.recipe, (), None, 0), folder.path, 99.0
    )
    assert known.rows == 1500
    with pytest.raises(SpecError, match="--minutes 1e-05: one step"):
        forecast_work(window, selection, GOAL, spec, tmp_path / "new", 1e-5)
