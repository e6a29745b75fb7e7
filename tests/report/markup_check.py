"""What every page must be: well formed, drawn inside its charts, and in want of nothing from outside."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta", "br", "circle", "line", "path", "rect"}
PLACES = {"x": 0, "x1": 0, "x2": 0, "cx": 0, "y": 1, "y1": 1, "y2": 1, "cy": 1}


class Reader(HTMLParser):
    """Checks that elements close in order, and collects them."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.found, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def check(page: str) -> list[str]:
    """Check a page; give the names of its charts."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert sum(tag == "script" for tag, _ in reader.found) == 1  # ours
    for tag, attributes in reader.found:
        assert tag not in {"img", "link", "iframe", "object", "embed", "base", "form"}
        assert not {"src", "href", "srcset"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp", page[: page.index("<body")])
    charts = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(charts) == sum(tag == "svg" for tag, _ in reader.found)
    return [check_chart(chart) for chart in charts]


def check_chart(chart: str) -> str:
    """Check one chart; give its name."""
    svg = ElementTree.fromstring(chart)
    assert svg.get("role") == "img"
    assert svg.get("aria-label")
    box = [float(number) for number in svg.get("viewBox").split()]
    for part in svg.iter():
        for name, axis in PLACES.items():
            if name in part.attrib and part is not svg:
                assert -0.01 <= float(part.get(name)) <= box[2 + axis] + 0.01
        for name in ("width", "height"):
            if part is not svg and name in part.attrib:
                assert 0 <= float(part.get(name)) <= box[2 + (name == "height")] + 0.01
        if "d" in part.attrib and "mark" not in part.get("class", ""):
            check_path(part.get("d"), box)
    return svg.get("data-chart")


def check_path(path: str, box: list[float]) -> None:
    assert re.fullmatch(r"[MLhz ,.\d-]*", path), path  # neither nan nor inf nor 1e9
    for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", path):
        assert 0 <= float(x) <= box[2]
        assert 0 <= float(y) <= box[3]
