"""A report is made of whatever is left of a run folder, is well formed, and says what is missing."""

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report import runs
from report.markup_check import check
from report.runs import put

from rowwise.base.errors import DataError
from rowwise.report import compare, write
from rowwise.report.charts import ChartLine, draw_series
from rowwise.report.markup import section
from rowwise.report.page import draw_page
from rowwise.report.read import FILES, read_run

MAIN = {"loss", "ne", "auc", "calibration", "base_rate", "steps", "throughput", "memory", "step-total", "table-size"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runs.make(tmp_path_factory.mktemp("runs") / "small" / "1", steps=60)


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "small" / "1"))


def page_of(folder):
    return write(folder).read_text("utf-8")


def test_a_whole_run(copy):
    out = write(copy)
    page = out.read_text("utf-8")
    assert out == copy / "report.html"
    assert MAIN | {"rate", "gradient_norm", "slice-ne", "table-traffic", "table-top"} <= set(check(page))
    result = json.loads((copy / "result.json").read_text())
    for expected in (
        "small",
        "run 1",
        "finished",
        f"{result['test']['click']['auc']:.4f}",
        "ceiling 0.8021",
        "1\u202fmin 43",
    ):
        assert expected in page
    assert "Missing from this report" not in page
    assert not list(copy.glob("*.part"))


@pytest.mark.slow
def test_a_usual_run_is_small(tmp_path):
    page = page_of(runs.make(tmp_path / "long" / "1", steps=5000, tables=26))
    assert len(page.encode()) < 300_000


def test_a_chart_of_another_module_is_on_a_page(run):
    steps = read_run(run).steps
    line = ChartLine(
        name="Norm", points=list(zip(steps["samples"], steps["gradient_norm"], strict=True)), colour="blue"
    )
    page = draw_page("own", section("own", "Own", draw_series(line, "own_norm", "last 1", "of layers", from_zero=True)))
    assert check(page) == ["own_norm"]
    assert "Norm over samples: last 1" in page


def test_another_place(copy, tmp_path):
    out = tmp_path / "new" / "folder" / "r.html"
    assert write(copy, out) == out
    assert not (copy / "report.html").exists()


def test_the_same_run_gives_the_same_page(copy):
    assert page_of(copy) == page_of(copy)


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("recipe.yaml", "slices.csv", "warnings.txt")])
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    page = page_of(copy)
    check(page)
    assert f"{name} is missing" in page


@pytest.mark.parametrize("name", ["slices.csv", "warnings.txt"])
def test_some_files_need_not_be_there(copy, name):
    (copy / name).unlink()
    assert "Missing from this report" not in page_of(copy)


def test_a_recipe_alone(tmp_path):
    (tmp_path / "recipe.yaml").write_text("a: 1\n")
    page = page_of(tmp_path)
    check(page)
    assert "running or killed" in page
    assert "metrics.csv has no values" in page


def test_no_run_folder(run, tmp_path):
    with pytest.raises(DataError, match=r"run folder: recipe.yaml"):
        write(tmp_path)
    with pytest.raises(DataError, match=r"you mean .*small/1\?"):
        write(run.parent)
    with pytest.raises(DataError, match=r"recipe\.yaml is missing"):
        write(tmp_path / "nowhere")


def test_a_place_that_cannot_be_written(copy, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="report was not written"):
        write(copy, tmp_path / "file" / "r.html")


@given(st.data())
def test_any_files_missing_or_cut(run, data):
    """A killed run: each file is there, not there, or there up to some byte."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(shutil.copytree(run, Path(root) / "killed" / "7"))
        for name in FILES:
            size = (folder / name).stat().st_size
            fate = data.draw(st.sampled_from(["whole", "cut", "gone"]), label=name)
            if fate == "gone" and name != "recipe.yaml":
                (folder / name).unlink()
            elif fate == "cut":
                end = data.draw(st.integers(0, size), label=f"bytes of {name}")
                (folder / name).write_bytes((folder / name).read_bytes()[:end])
        check(page_of(folder))
        compare([folder, run], folder / "both.html")
        check((folder / "both.html").read_text("utf-8"))


@given(st.integers(1, 300))
def test_a_cut_line_is_never_read(run, end):
    """What is read of a cut file are whole lines of it: no 0.78 that was 0.7812."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "recipe.yaml").write_text("")
        whole = (run / "metrics.csv").read_bytes()
        (folder / "metrics.csv").write_bytes(whole[: len(whole) // 2 + end])
        found, all_of_it = read_run(folder).curves, read_run(run).curves
        assert all(set(readings) <= set(all_of_it[curve]) for curve, readings in found.items())


numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([math.nan, math.inf, 0.0, 1.0, 1e300, 5e-324, 0.1 + 0.2]),
    st.just(""),
    st.just("x"),
)
names = st.one_of(st.sampled_from(["", "auc", "ne", "<b>", runs.HOSTILE, "]]>", "a,b\n\"c'"]), st.text(max_size=8))


@given(
    st.lists(st.tuples(numbers, st.sampled_from(["train", "valid", "test", "?"]), names, names, numbers), max_size=12),
    st.lists(st.lists(numbers, min_size=15, max_size=15), max_size=6),
    st.lists(st.tuples(names, st.lists(numbers, min_size=11, max_size=11)), max_size=6),
)
def test_any_values_at_all(metrics, steps, tables):
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "recipe.yaml").write_text("a: [1, {b: 2}]\n")
        head = ["step", "samples", "time_s", "split", "task", "metric", "value"]
        put(folder / "metrics.csv", head, [[1, s, 2.0, *rest] for s, *rest in metrics])
        head = ["step", "samples", "time_s", "samples_s", *runs.PHASES, "memory_bytes", "gradient_norm"]
        head += ["workers", "ready", "restarts"]
        put(folder / "steps.csv", head, steps)
        head = "table,rows,dim,row_type,optimizer,features,bytes,state_bytes,ids_per_sample,unique_share,top_share"
        put(folder / "tables.csv", [*head.split(","), "traffic_bytes"], [[name, *rest] for name, rest in tables])
        head = ["feature", "count", "ne", "base_rate", "auc", "calibration", "value", "task"]
        put(folder / "slices.csv", head, [[name, *rest[:6], name] for name, rest in tables])
        check(page_of(folder))
        compare([folder, folder], folder / "both.html")
        check((folder / "both.html").read_text("utf-8"))


def test_names_do_not_become_markup(tmp_path):
    folder = runs.make(tmp_path / "<i>x" / "1", steps=20, tasks=(runs.HOSTILE,), names=(runs.HOSTILE,))
    hostile = "</script><script>alert(1)</script></pre><img src=x onerror=alert(1)>"
    (folder / "recipe.yaml").write_text(f"a: '{hostile}'\n")
    (folder / "env.json").write_text(json.dumps({hostile: [hostile], "half": "\ud800"}))
    (folder / "warnings.txt").write_text(hostile)
    facts = json.loads((folder / "result.json").read_text()) | {"message": hostile, "status": hostile}
    (folder / "result.json").write_text(json.dumps(facts))
    check(page_of(folder))
    check(compare([folder, folder], tmp_path / "c.html").read_text("utf-8"))


def test_a_resumed_run_counts_repeated_steps_once(copy):
    lines = (copy / "metrics.csv").read_text().splitlines(keepends=True)
    before = read_run(copy).curves
    (copy / "metrics.csv").write_text("".join([*lines, *lines[20:40]]))
    assert read_run(copy).curves == before


def test_values_that_are_no_numbers_are_counted(copy):
    page = (copy / "metrics.csv").read_text()
    (copy / "metrics.csv").write_text(re.sub(r"(valid,click,auc,)[\d.]+", r"\1nan", page))
    assert "Not drawn, as not a number: 12 of valid." in page_of(copy)


def test_a_failed_run_says_why(tmp_path):
    page = page_of(runs.make(tmp_path / "r" / "1", steps=20, status="failed"))
    assert "failed" in page
    assert "loss was nan at step 7,980; lower the learning rate" in page


def test_many_tables_are_cut_short(tmp_path):
    page = page_of(runs.make(tmp_path / "r" / "1", steps=20, tables=60))
    assert check(page).count("table-size") == 40
    assert "The largest 40 are shown; 20 more take" in page


def test_compare(tmp_path):
    """Runs with other metrics and tasks; the best is marked where a best there is."""
    one = runs.make(tmp_path / "r" / "1", steps=40)
    two = runs.make(tmp_path / "r" / "2", steps=60, seed=1, lr=0.2, extra=("recall@10",))
    three = runs.make(tmp_path / "r" / "3", steps=20, tasks=("click", "buy"), seed=2)
    out = compare([one, two, three], tmp_path / "compare.html")
    page = out.read_text("utf-8")
    assert {"loss", "auc", "recall@10", "throughput", "memory", "loss-time"} <= set(check(page))
    for expected in ("r / 1", "r / 3", "tables.user.optimizer.lr", "0.05", "0.2", "seed", "data.train_samples"):
        assert expected in page
    aucs = [json.loads((folder / "result.json").read_text())["test"]["click"]["auc"] for folder in (one, two, three)]
    assert f'<td class="best">{max(aucs):.4f}</td>' in page
    assert "<td>0.1.0</td>" not in page  # the same in all environments


def test_runs_of_different_rows_or_labels_are_not_compared(tmp_path):
    one, two = (runs.make(tmp_path / "r" / name, steps=40, seed=seed) for name, seed in (("1", 0), ("2", 1)))
    same = compare([one, two], tmp_path / "same.html").read_text("utf-8")
    assert '<td class="best">0.' in same
    recipe = (two / "recipe.yaml").read_text()
    (two / "recipe.yaml").write_text(recipe.replace("data:", "data:\n  test_share: 0.3", 1))
    other = runs.make(tmp_path / "r" / "3", steps=40, tasks=("buy",))
    for pair in ([one, two], [one, other]):
        page = compare(pair, tmp_path / "other.html").read_text("utf-8")
        check(page)
        assert "cannot be compared" in page
        assert "test_share 0.3" in page or other in pair
        assert 'class="best"' not in page
    # The first and the last have the same rows and label.
    again = runs.make(tmp_path / "r" / "4", steps=40, seed=3)
    page = compare([one, two, other, again], tmp_path / "four.html").read_text("utf-8")
    tables = re.findall(r'<table class="runs">.*?</table>', page)
    assert [set(re.findall(r"r / \d", table)) for table in tables[:4]] == [
        {"r / 1", "r / 4"}, {"r / 2"}, {"r / 3"}, {"r / 1", "r / 2", "r / 3", "r / 4"}
    ]  # fmt: skip
    assert 'class="best"' in tables[0]
    assert not any('class="best"' in table for table in tables[1:4])


def test_what_is_null_is_as_if_it_were_not_there(tmp_path):
    """Runs of former versions do not name it."""
    one, two = (runs.make(tmp_path / "r" / name, steps=40) for name in ("1", "2"))
    recipe = (two / "recipe.yaml").read_text()
    (two / "recipe.yaml").write_text(recipe.replace("data:", "data:\n  valid: null\n  label: ''", 1) + "plan: null\n")
    page = compare([one, two], tmp_path / "same.html").read_text("utf-8")
    assert "data.valid" not in page
    assert re.search(r"All \d+ values are the same", page)


def test_compare_wants_two_to_eight(run, tmp_path):
    for many in (0, 1, 9):
        with pytest.raises(DataError, match=f"{many} runs to compare: expected 2 to 8"):
            compare([run] * many, tmp_path / "c.html")
    compare([run] * 8, tmp_path / "c.html")


def test_reports_need_no_tensors():
    code = "import sys, rowwise.report; print([m for m in ('torch', 'numpy', 'pyarrow') if m in sys.modules])"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
