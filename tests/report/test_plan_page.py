"""A plan's page stands alone, shows each rank and table, and a run's report shows the same where it has one."""

import re
import shutil
from pathlib import Path

import msgspec
import pytest
from planning.planner.asked import question
from report import runs
from report.markup_check import Reader, check, check_chart

from rowwise.base.errors import DataError
from rowwise.planning.perf.access import Access
from rowwise.planning.planner.explain import explain
from rowwise.planning.planner.explanation import Explanation
from rowwise.planning.planner.pipeline import make_plan
from rowwise.report import write
from rowwise.report.placement import read_explanation
from rowwise.report.plan import draw_plan
from rowwise.report.read import PLAN
from rowwise.tables.row_optimizers import Sgd
from rowwise.tables.spec import Table, Topology


def explained(topology: Topology, count: int, host_bytes: float = 0.0) -> Explanation:
    tables = [Table(name=f"<t{i}>", rows=10**5 + i, dim=64, optimizer=Sgd()) for i in range(count)]
    access = [Access(pooling=1 + i % 7) for i in range(count)]
    each = 26e6 * count / topology.world / (0.6 if not host_bytes else 1.5)
    return explain(make_plan(question(tables, topology, each, access=access, host_bytes=host_bytes), seconds=0.05))


@pytest.fixture(scope="module")
def facts() -> Explanation:
    return explained(Topology(devices=4), 30)


def checked(page: str) -> list[str]:
    """The names of a page's charts; it has no script, and asks for nothing from outside."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert not [tag for tag, _ in reader.found if tag in {"script", "img", "link", "iframe", "object", "form"}]
    assert not [
        name for _, attributes in reader.found for name in attributes if name in {"src", "href"} or name[:2] == "on"
    ]
    assert not re.search(r"url\(|@import|http", page[: page.index("<body")])
    return [check_chart(chart) for chart in re.findall(r"<svg.*?</svg>", page, re.S)]


def test_the_page_of_a_plan(facts):
    page = draw_plan(facts)
    charts = checked(page)
    assert {"plan-operators", "plan-links", "plan-device", "rank-operators", "placed-time"} <= set(charts)
    assert charts.count("placed-time") == len(facts.tables)
    for table in facts.tables:
        assert f"&lt;{table.name[1:-1]}&gt;" in page
        assert msgspec.json.encode(table.reason).decode()[1:-1].replace("'", "&#x27;") in page
    assert "30 tables of" in page


def test_a_cell_for_each_rank_and_tier():
    page = draw_plan(explained(Topology(hosts=2, devices=2), 12, host_bytes=1e9))
    for tier in ("device", "host"):
        strip = re.search(rf'<svg[^>]*data-chart="plan-{tier}".*?</svg>', page, re.S).group()
        assert strip.count("<rect") == 4
    assert 'data-chart="plan-disk"' not in page
    assert "2 hosts of 2 devices" in page


@pytest.mark.slow
def test_many_ranks_and_tables(facts):
    many = explained(Topology(hosts=6, devices=8), 8)
    page = draw_plan(msgspec.structs.replace(many, tables=facts.tables * 10))
    charts = checked(page)
    assert charts.count("rank-links") == 11
    assert "Of 48 ranks: the busiest 8" in page
    assert "The busiest 200 are shown; 100 more take" in page


def test_one_rank():
    page = draw_plan(explained(Topology(), 1))
    assert "1 table of" in page
    assert "on 1 device," in page
    checked(page)


def test_later_versions_may_write_more(facts):
    content = msgspec.json.decode(facts.to_json())
    content["new"] = content["step"]["new"] = 1
    content["step"]["bound_s"] = None
    page = draw_plan(read_explanation(msgspec.json.encode(content)))
    assert "not known" in page


def test_other_files_are_refused(facts):
    with pytest.raises(DataError, match="what `rowwise plan --explain"):
        read_explanation("{}")
    with pytest.raises(DataError, match="it has no ranks"):
        read_explanation(msgspec.structs.replace(facts, ranks=()).to_json())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runs.make(tmp_path_factory.mktemp("runs") / "small" / "1", steps=20)


def test_a_run_that_has_its_plan_explained_shows_it(run, facts, tmp_path):
    assert 'id="plan"' not in write(run).read_text("utf-8")
    copy = Path(shutil.copytree(run, tmp_path / "small" / "1"))
    (copy / PLAN).write_text(facts.to_json())
    page = write(copy).read_text("utf-8")
    assert 'id="plan"' in page
    assert {"plan-operators", "plan-device"} <= set(check(page))
    (copy / PLAN).write_text("{")
    assert f"{PLAN} was not used: not an explanation of a plan" in write(copy).read_text("utf-8")
