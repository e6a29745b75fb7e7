"""HTML and SVG as strings of a type of their own, so that text which was not escaped does not type-check as markup.

A template language would be a dependency and would escape by habit; here the type checker asks for it.
"""

import html
import re
from collections.abc import Iterable, Mapping
from typing import NewType

Html = NewType("Html", str)
Attributes = Mapping[str, str | float]

CLOSED = frozenset({"br", "circle", "line", "meta", "path", "rect"})  # elements that never have children
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML, and some of them in UTF-8


def text(words: str) -> Html:
    """Words as they are, whatever they hold."""
    return Html(html.escape(FORBIDDEN.sub("\ufffd", words)))


def tag(name: str, attributes: Attributes | None = None, *children: Html) -> Html:
    inside = "".join(f' {key}="{_attribute(value)}"' for key, value in (attributes or {}).items())
    if name in CLOSED:
        return Html(f"<{name}{inside}/>")
    return Html(f"<{name}{inside}>{''.join(children)}</{name}>")


def join(parts: Iterable[Html]) -> Html:
    """Elements, one after the other."""
    return Html("".join(parts))


def _attribute(value: str | float) -> str:
    return text(value) if isinstance(value, str) else coordinate(value)


def coordinate(value: float) -> str:
    """A length in the units of a drawing, to a hundredth."""
    short = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if short == "-0" else short


def div(look: str, *children: Html) -> Html:
    """A `div` of a class."""
    return tag("div", {"class": look}, *children)


def span(look: str, words: str) -> Html:
    """A `span` of a class around words."""
    return tag("span", {"class": look}, text(words))


def note(words: str) -> Html:
    return tag("p", {"class": "note"}, text(words))


def section(key: str, title: str, *children: Html) -> Html:
    """A titled part of a page."""
    return tag("section", {"id": key}, tag("h2", None, text(title)), *children)
