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


def div(look: str, *children: Html) -> Html:
    return tag("div", {"class": look}, *children)


def span(look: str, words: str) -> Html:
    return tag("span", {"class": look}, text(words))


def note(words: str) -> Html:
    return tag("p", {"class": "note"}, text(words))


def section(key: str, title: str, *children: Html) -> Html:
    return tag("section", {"id": key}, tag("h2", None, text(title)), *children)
