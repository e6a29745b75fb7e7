"""Reports in a real browser: the charts are there, the script runs without an error, and nothing is asked for."""

import re

import pytest
from report import browser, runs

from rowwise.report import compare, write

POINT = """<script>document.querySelectorAll("svg[data-kind]").forEach((svg) => {
  const r = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: r.left + r.width / 2, clientY: r.top + 40}));
  const tip = svg.parentNode.querySelector(".tip");
  svg.dataset.said = tip ? tip.textContent : "";
});</script></body>"""


@pytest.fixture
def pages(tmp_path):
    one = runs.make(tmp_path / "r" / "1", steps=300, names=(runs.HOSTILE,))
    two = runs.make(tmp_path / "r" / "2", steps=30, tasks=("click", "buy"), tables=60, status=None, seed=1)
    (two / "metrics.csv").write_bytes((two / "metrics.csv").read_bytes()[:9000])
    both = compare([one, two], tmp_path / "compare.html")
    return {"whole": write(one), "killed": write(two), "compared": both}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "killed", "compared"])
def test_a_page_in_a_browser(pages, kind):
    page = pages[kind]
    source = page.read_text("utf-8")
    assert not re.search(r"https?:|//[a-z]+\.", source)
    page.write_text(source.replace("</body>", POINT), "utf-8")
    document, log = browser.dump(page)
    assert "CONSOLE" not in log, log
    assert not re.search(r"net::|ERR_", log), log
    drawn = set(re.findall(r'data-chart="([^"]+)"', document))
    assert {"loss", "ne", "auc", "calibration", "throughput", "memory"} <= drawn
    charts = re.findall(r'data-kind="\w+"', document)
    assert f'data-charts="{len(charts)}"' in document  # the script saw them all
    said = re.findall(r'data-said="([^"]*)"', document)
    assert len(said) == len(charts)
    assert all(words.startswith(("samples", "seconds", "minutes")) and re.search(r"\d", words) for words in said)
    assert "NaN" not in "".join(said)
