"""What was predicted stands beside what was measured, by stage and rank; without a prediction, how to get one."""

import html
import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report import runs
from report.markup_check import check
from report.runs import put
from report.test_report import names, numbers

from rowwise.report import compare, write
from rowwise.report.forecast import draw_forecast
from rowwise.report.read import read_run

LOOKUP, EXCHANGE, UPDATE = "stage-lookup", "stage-exchange", "stage-update"
RECIPE = "train:\n  batch: 2048\n  accumulate: 1\n"


def made(folder, recipe=RECIPE, **how):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "recipe.yaml").write_text(recipe)
    runs.write_stages(folder, **how)
    return folder


def words(folder):
    """What the section says, without its drawings."""
    plain = re.sub(r"<svg.*?</svg>", " ", str(draw_forecast(read_run(folder))), flags=re.S)
    return re.sub(r"[ \n]+", " ", html.unescape(re.sub(r"<[^>]*>", " ", plain)))


def bars(page, chart):
    """Titles of the bars of a chart, and their heights."""
    drawn = re.search(rf'data-chart="{chart}".*?</svg>', page, re.S)[0]
    return {
        html.unescape(title): float(height)
        for title, height in re.findall(r"<title>([^<]*)</title><rect[^>]*height=\"([\d.]+)\"", drawn)
    }


def test_stages_by_rank(tmp_path):
    page = write(made(tmp_path / "run")).read_text("utf-8")
    assert {LOOKUP, EXCHANGE, UPDATE} <= set(check(page))
    said = words(tmp_path / "run")
    # The median of lines 2 to 5, of rank 1, which is twice as slow: 4 ms * 2 * 1.035.
    assert "lookup rows looked up 3\u202fms rank 1 8.28\u202fms rank 1 2.76\u00d7" in said
    assert "4\u202fms rank 0 6.21\u202fms rank 1 1.55\u00d7" in said  # route and exchange
    assert "wait for the slowest rank 1\u202fms rank 0 6.21\u202fms rank 1 6.21\u00d7" in said
    assert "update rows updated 5\u202fms rank 0 12.4\u202fms rank 1 2.48\u00d7" in said
    assert "together 13\u202fms 33.1\u202fms 2.55\u00d7" in said
    assert "Predicted by networks learned on here, for 2,048 samples a step, with rates of a typical" in said
    assert "Measured: median of 4 lines after the first" in said
    found = bars(page, LOOKUP)
    assert list(found) == [
        "rank 0, predicted: 2\u202fms",
        "rank 0, measured: 4.14\u202fms",
        "rank 1, predicted: 3\u202fms",
        "rank 1, measured: 8.28\u202fms",
    ]
    heights = list(found.values())
    assert [h / heights[0] for h in heights] == pytest.approx([1, 2.07, 1.5, 4.14], rel=0.01)


def test_what_the_recipe_names_is_no_guess(tmp_path):
    for number, key in enumerate(("hardware: mine.json", "plan: two.json")):
        assert "typical" not in words(made(tmp_path / str(number), f"{RECIPE}{key}\n"))


def test_one_process_sends_nothing(tmp_path):
    folder = made(tmp_path, ranks=1)
    text = (folder / "stages.csv").read_text()
    (folder / "stages.csv").write_text(re.sub(r"(0,(?:route|exchange)),[\d.e-]+", r"\1,0.0", text))
    page = write(folder).read_text("utf-8")
    drawn = set(check(page))
    assert {LOOKUP, UPDATE} <= drawn
    assert EXCHANGE not in drawn
    assert "reaches a collective" not in words(folder)


def test_one_line_is_better_than_none(tmp_path):
    assert "Measured: mean of one line" in words(made(tmp_path, lines=1))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"predicted": False}, "The run has no forecast: rowwise train --hardware takes a preset"),
        ({"batch": 65536}, "for steps of 65,536 samples, but this run has 2,048: rowwise "),
        ({"batch": 4096, "recipe": RECIPE.replace("1\n", "2\n")}, "no usable values"),
    ],
)
def test_without_a_prediction_the_way_to_one(tmp_path, how, said):
    folder = made(tmp_path, **how)
    (folder / "stages.csv").write_text(re.sub(r",[\d.e-]*\n", ",\n", (folder / "stages.csv").read_text()))
    assert said in words(folder)
    assert not {LOOKUP, EXCHANGE, UPDATE} & set(check(write(folder).read_text("utf-8")))


def test_a_forecast_of_no_stages(tmp_path):
    folder = made(tmp_path)
    plan = json.loads((folder / "plan.json").read_text())
    del plan["forecast"]["stages_s"]
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "stages.csv").write_text(re.sub(r",[\d.e-]*\n", ",\n", (folder / "stages.csv").read_text()))
    assert "has no stages, which plans of this version have" in words(folder)


def test_only_the_newest_plan_is_measured(tmp_path):
    """A run that goes on with other ranks, or another plan, is compared with the plan that it ends with."""
    made(tmp_path, ranks=3, slow=100.0)
    runs.write_stages(tmp_path, ranks=2, first=6)
    assert "median of 4 lines" in words(tmp_path)
    assert "8.68\u202fms rank 1" in words(tmp_path)  # lines 7 to 10


def test_runs_of_older_versions_have_no_section(tmp_path):
    old = runs.make(tmp_path / "small" / "1", steps=20)
    assert draw_forecast(read_run(old)) == ""
    page = write(old).read_text("utf-8")
    assert "Predicted and measured" not in page
    assert "Missing from this report" not in page
    new = runs.make(tmp_path / "small" / "2", steps=20)
    runs.write_stages(new)
    check(compare([old, new], tmp_path / "both.html").read_text("utf-8"))


@given(
    st.lists(st.tuples(numbers, numbers, st.one_of(st.sampled_from(list(runs.MEASURED)), names), numbers, numbers)),
    st.sampled_from(
        ['{"forecast": null}', "[", "{}", '{"forecast": {"batch": 1e999}}', '{"forecast": {"batch": -0.0}}']
    ),
)
def test_any_values_at_all(lines, plan):
    with tempfile.TemporaryDirectory() as root:
        folder = made(Path(root) / "run")
        text = (folder / "stages.csv").read_text()
        put(folder / "more.csv", ["x"], lines)
        (folder / "stages.csv").write_text(text + (folder / "more.csv").read_text().removeprefix("x\n"))
        (folder / "plan.json").write_text(plan)
        check(write(folder).read_text("utf-8"))


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4), st.integers(1, 3))
def test_any_times_at_all(times, lines):
    """Whole lines of all phases, with times that nobody can have."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "recipe.yaml").write_text("")
        rows = [
            [line, rank, phase, *pair]
            for line in range(lines)
            for rank, pair in enumerate(times)
            for phase in runs.MEASURED
        ]
        put(folder / "stages.csv", ["step", "rank", "phase", "measured_s", "predicted_s"], rows)
        check(write(folder).read_text("utf-8"))
