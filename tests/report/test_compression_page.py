"""The page of a compression stands for what was found, whatever it holds, and is XML that a browser can draw."""

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.records import CompressionAdvice, KeptTable, ModelScore, SizePoint, TableAdvice
from rowwise.recipes.compress.explain import explain_advice
from rowwise.report.compression import draw_compression

LOSSES = st.floats(-0.1, 2)
SIZES = st.integers(1, 10**12)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
METHODS = st.sampled_from(["hash", "learned", "mixed", "a", "b", "c", "d", "e<f"])


@st.composite
def points(draw):
    size_bytes = draw(SIZES)
    losses = {"ne": draw(LOSSES), "loss": draw(LOSSES), "auc": draw(LOSSES)}
    ratio, map_bytes = draw(st.floats(1, 1e4)), draw(st.integers(0, size_bytes))
    return SizePoint(method=draw(METHODS), ratio=ratio, size_bytes=size_bytes, map_bytes=map_bytes, **losses)


@st.composite
def tables(draw):
    made = sorted(draw(st.lists(points(), max_size=12)), key=lambda point: point.method)
    size_bytes = draw(SIZES)
    return TableAdvice(
        name=draw(NAMES),
        ids=draw(SIZES),
        full_bytes=draw(SIZES),
        points=tuple(made),
        method=draw(st.just("") | METHODS),
        size_bytes=size_bytes,
        map_bytes=draw(st.integers(0, size_bytes)),
        ne=draw(LOSSES),
        measured=draw(st.booleans()),
        ordered=draw(st.none() | st.floats(0.1, 1)),
    )


SCORES = st.builds(ModelScore, ne=LOSSES, loss=LOSSES, auc=LOSSES)
ADVICES = st.builds(
    CompressionAdvice,
    recipe=NAMES,
    history=st.lists(NAMES, max_size=2).map(tuple),
    later=NAMES,
    rows=st.none() | SIZES,
    full=SCORES,
    noise=st.floats(0, 0.1),
    seeds=st.just(3),
    full_bytes=SIZES,
    budget_bytes=SIZES,
    size_bytes=SIZES,
    ne=LOSSES,
    error=st.sampled_from([0.0, 0.001]),
    together=st.none() | SCORES,
    tables=st.lists(tables(), max_size=3).map(tuple),
    left=st.lists(st.builds(KeptTable, name=NAMES, ids=SIZES, size_bytes=SIZES, why=NAMES), max_size=2).map(tuple),
    warnings=st.lists(NAMES, max_size=2).map(tuple),
)


@given(ADVICES)
def test_any_advice_is_a_page_and_a_text(advice):
    page = draw_compression(advice)
    found = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(found) == len(advice.tables)
    for svg, table in zip(found, advice.tables, strict=True):
        drawn = ElementTree.fromstring(svg)
        titles = [one.text for one in drawn.iter("title")]
        # The noise, each point, what was chosen.
        assert len(titles) == len(table.points) + 2
        numbers = [float(n) for n in re.findall(r"-?\d+\.?\d*", " ".join(p.get("d", "") for p in drawn.iter("path")))]
        assert all(-10 <= n <= 490 for n in numbers)
    assert sum(line.startswith("  choice: ") for line in explain_advice(advice)) == len(advice.tables)
