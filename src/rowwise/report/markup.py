"""HTML and SVG as strings of their own type, so that the type checker rejects text that was not escaped."""

import html
import re
from collections.abc import Iterable, Mapping
from typing import NewType

Html = NewType("Html", str)
Attributes = Mapping[str, str | float]

CLOSED = frozenset({"br", "circle", "line", "meta", "path", "rect"})  # elements that never have children
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML forbids


def text(words: str) -> Html:
    """Escaped text, with characters that XML forbids replaced."""
    return Html(html.escape(FORBIDDEN.sub("\ufffd", words)))


def tag(name: str, attributes: Attributes | None = None, *children: Html) -> Html:
    inside = "".join(f' {key}="{_attribute(value)}"' for key, value in (attributes or {}).items())
    if name in CLOSED:
        return Html(f"<{name}{inside}/>")
    return Html(f"<{name}{inside}>{''.join(children)}</{name}>")


def join(parts: Iterable[Html]) -> Html:
    return Html("".join(parts))


def _attribute(value: str | float) -> str:
    return text(value) if isinstance(value, str) else coordinate(value)


def coordinate(value: float) -> str:
    """A coordinate with at most two decimals."""
    short = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if short == "-0" else short


def div(style: str, *children: Html) -> Html:
    return tag("div", {"class": style}, *children)


def span(style: str, words: str) -> Html:
    return tag("span", {"class": style}, text(words))


def lead(words: str) -> Html:
    """The first sentence of a section."""
    return tag("p", {"class": "lead"}, text(words))


def note(words: str) -> Html:
    return tag("p", {"class": "note"}, text(words))


def header(title: str, number: str, when: str) -> Html:
    """The top of a page: title, name of its subject, and source."""
    return tag(
        "header", None, tag("h1", None, text(title), span("number", number)), tag("p", {"class": "when"}, text(when))
    )


def section(key: str, title: str, *children: Html) -> Html:
    return tag("section", {"id": key}, tag("h2", None, text(title)), *children)


def figure(title: str, chart: Html, *remarks: Html) -> Html:
    """A chart below its title, with remarks beside the title."""
    caption = tag("figcaption", None, tag("b", None, text(title)), *remarks)
    return tag("figure", {"class": "chart"}, caption, chart)


def data_table(headers: Iterable[str], rows: Iterable[Html], style: str = "") -> Html:
    """A table that scrolls sideways on narrow screens."""
    head = tag("thead", None, tag("tr", None, *(tag("th", None, text(header)) for header in headers)))
    return div("wide", tag("table", {"class": style} if style else None, head, tag("tbody", None, *rows)))


def row(name: str, remark: str, *cells: Html) -> Html:
    """A row of a table that begins with its name and a remark in small letters."""
    small = [tag("small", None, text(remark))] if remark else []
    return tag("tr", None, tag("th", {"scope": "row"}, text(name), *small), *cells)


def cells(*words: str) -> tuple[Html, ...]:
    return tuple(tag("td", None, text(cell)) for cell in words)


def named_cell(header: str, content: Html, remark: str = "") -> Html:
    """A cell that narrow screens show with its header."""
    return tag("td", {"data-head": header}, content, *([tag("small", None, text(remark))] if remark else []))


def text_table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> Html:
    return data_table(headers, (tag("tr", None, *cells(*line)) for line in rows))


def tiles(facts: Iterable[tuple[str, str, str]]) -> Html:
    """A line of tiles, from facts (name, value, remark)."""
    return div("tiles", *(div("tile", span("name", n), span("value", v), span("beside", r)) for n, v, r in facts))


def legend(*entries: tuple[str, str], style: str = "legend") -> Html:
    """A line of entries (colour, name)."""
    return div(style, *(legend_entry(colour, name) for colour, name in entries))


def legend_entry(colour: str, name: str, *remarks: Html) -> Html:
    return tag("span", {"class": "entry"}, span(f"swatch {colour}", ""), text(name), *remarks)
