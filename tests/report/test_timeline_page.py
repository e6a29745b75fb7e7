"""The report draws recorded steps and the model's schedule of them; torn and hostile files give a page all the same."""

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report import runs
from report.markup_check import check

from rowwise.planning.perf.overlap import exposed_intervals, find_overlaps
from rowwise.planning.perf.step_program import PROGRAM, ScheduledStage, StageCosts, training_stages
from rowwise.planning.perf.timeline import schedule
from rowwise.report import write
from rowwise.report.read import read_run
from rowwise.report.timeline import draw_timeline

COLUMNS = ("step", "rank", "resource", "stage", "begin_s", "end_s")
MEASURED, MODEL = "timeline-measured", "timeline-model"
RECIPE = "train:\n  pipeline_depth: {depth}\n"


def write_timeline(folder, ranks=2, depth=2, steps=10, first=21):
    """A recording of steps of uneven ranks, each rank's clock from its own first step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(RECIPE.format(depth=depth))
    given = {name: tuple(0.001 + 0.0005 * ((k + rank) % 3) for rank in range(ranks)) for k, name in enumerate(PROGRAM)}
    given |= {"status": (0.001,) * ranks, "route.send": (0.0,) * ranks}
    costs = StageCosts(ranks, given, latency_s=0.001)  # that of the shortest transfer
    scheduled = schedule(training_stages(costs, depth), 16 + steps)
    rows = []
    for rank in range(ranks):
        own = [one for one in scheduled if one.rank == rank and 16 <= one.step < 16 + steps]
        origin = max(one.end_s for one in scheduled if one.rank == rank and (one.name, one.step) == ("update", 15))
        for one in own:
            times = f"{one.begin_s - origin:.9f}", f"{one.end_s - origin:.9f}"
            rows.append([one.step - 16 + first, rank, one.resource, one.kind, *times])
    runs.put(folder / "timeline.csv", COLUMNS, rows)
    return folder


def section_of(folder):
    return draw_timeline(read_run(folder))


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "depth"), [(1, 1), (2, 2), (3, 3), (9, 2)])
def test_the_model_has_the_period_of_a_recording_that_it_made(tmp_path, ranks, depth):
    folder = write_timeline(tmp_path / "r", ranks, depth)
    page = write(folder).read_text("utf-8")
    assert {MEASURED, MODEL} <= set(check(page))
    text = section_of(folder)
    assert text.count("(1.00\u00d7)") == 2  # from mean costs, and from those of each step
    assert f"with {depth} step" in text
    assert ("Ranks 0 to 7 are drawn, of 9." in text) == (ranks == 9)
    assert f"rank {min(ranks, 8) - 1} link" in text
    assert "rank 8 link" not in text
    assert re.search(r"<title>lookup of step 25: from [\d.]+ ms, [\d.]+ ms</title>", text)


def test_without_a_recording_there_is_no_section(tmp_path):
    folder = runs.make(tmp_path / "r" / "1", steps=20)
    assert 'id="timeline"' not in write(folder).read_text("utf-8")


def test_busy_and_exposed_seconds_of_stages(tmp_path):
    folder = write_timeline(tmp_path / "r")
    lines = ["step,rank,phase,measured_s,busy_s,predicted_s"]
    lines += [f"{step},{rank},route,0.00{1 + rank},0.00{4 + rank}," for step in (10, 20) for rank in (0, 1)]
    lines += ["20,0,wait,0.003,0.003,", "20,0,lookup,0.001,,", "20,0,<b>,0.001,0.001,"]
    (folder / "stages.csv").write_text("\n".join(lines) + "\n")
    check(write(folder).read_text("utf-8"))
    cells = re.findall(r'<td data-head="(?:Busy|Exposed)">([^<]*)</td>', section_of(folder))
    assert [cell.replace("\u202f", " ") for cell in cells] == ["5 ms", "2 ms", "", "3 ms", "1 ms", "1 ms"]


@given(st.data())
def test_a_torn_recording_gives_a_page(data):
    with tempfile.TemporaryDirectory() as place:
        folder = write_timeline(Path(place) / "r", steps=3)
        content = (folder / "timeline.csv").read_bytes()
        (folder / "timeline.csv").write_bytes(content[: data.draw(st.integers(0, len(content)))])
        check(write(folder).read_text("utf-8"))


HOSTILE = [
    "",
    "a,b\n1,2\n",
    "{head}\n",
    "{head}\n1,0,processor,update,nan,1\n1,0,gpu,update,0,1\n1,-1,processor,update,0,1\n1,0,processor,update,2,1\n",
    "{head}\n1,7,processor,update,0,1\n2,7,processor,update,1,2\n",  # no rank 0
    "{head}\n1,16000,processor,update,0,1\n",
    "{head}\n1,0,processor,update,0,1\n",
    "{head}\n1,0,processor,update,0,0\n2,0,processor,update,0,0\n",
    "{head}\n1e12,0,processor,update,-9e6,9e6\n3,0,link,<b>,0,1e-12\n3,0,processor,update,1e-9,2e-9\n",
]


@pytest.mark.parametrize("content", HOSTILE)
def test_a_file_of_other_things_gives_a_page(tmp_path, content):
    folder = write_timeline(tmp_path / "r")
    (folder / "timeline.csv").write_text(content.format(head=",".join(COLUMNS)))
    check(write(folder).read_text("utf-8"))


TICKS = st.integers(0, 30)
SPANS = st.lists(st.tuples(TICKS, TICKS).map(sorted), max_size=6)


@given(
    st.dictionaries(st.sampled_from([0, 1]), st.tuples(SPANS, SPANS, SPANS), min_size=1),
    st.sampled_from(["exchange", "return"]),
)
def test_a_transfer_is_hidden_while_its_rank_computes(by_rank, kind):
    """Against a count of whole seconds, one by one."""
    stages, busy, hidden, exposed = [], 0, 0, {}
    for rank, (sent, computed, waited) in by_rank.items():
        for spans, resource, name in ((sent, "link", kind), (computed, "processor", "lookup")):
            stages += [ScheduledStage(name, resource, rank, 1, *span) for span in spans]
        stages += [ScheduledStage("wait", "processor", rank, 1, *span) for span in waited]
        stages += [ScheduledStage("route", "link", rank, 1, *span) for span in waited]
        link, computing = ({t for a, b in spans for t in range(a, b)} for spans in (sent, computed))
        busy, hidden, exposed[rank] = busy + len(link), hidden + len(link & computing), link - computing
    assert find_overlaps(stages) == ([("exchange of vectors", busy, hidden)] if busy else [])
    for rank, wanted in exposed.items():
        assert {t for a, b in exposed_intervals(stages, rank) for t in range(a, b)} == wanted


def test_the_page_says_how_much_is_hidden(tmp_path):
    """Ten steps of a rank of a second each: of an exchange a quarter, of a gather in a backward nothing."""
    lines = [",".join(COLUMNS)]
    for step in range(10):
        for resource, stage, begin, end in (
            ("processor", "forward", 0.0, 0.5), ("link", "exchange", 0.4, 0.8), ("processor", "wait", 0.5, 0.8),
            ("processor", "backward", 0.8, 0.85), ("link", "backward", 0.85, 0.95), ("processor", "wait", 0.85, 0.95),
            ("processor", "update", 0.95, 1.0),
        ):  # fmt: skip
            lines.append(f"{step + 1},0,{resource},{stage},{step + begin},{step + end}")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "recipe.yaml").write_text(RECIPE.format(depth=1))
    (tmp_path / "r" / "timeline.csv").write_text("\n".join(lines) + "\n")
    text = section_of(tmp_path / "r").replace("\u202f", " ")
    assert "exchange of vectors 25.0 % of 400 ms a step, transfers of layers 0.0 % of 100 ms a step" in text
    measured = text.split(MODEL)[0]
    assert measured.count('class="edge"') == 20
