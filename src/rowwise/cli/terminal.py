"""Prints names and values from files as text, never as control sequences.

Names of tables, columns, tensors and files are untrusted. An escape sequence in one of them could clear the screen,
change a title or hide other output.
"""

import json
import math
import re
from collections.abc import Iterable
from functools import partial

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from rowwise.base.errors import SpecError, printable

WIDTH = 120
UNUSUAL = re.compile("[^ -~\n]")


class Terminal(Console):
    """A console that writes unprintable characters as escapes; colours and live lines work as usual."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            escape = segment.control is None and not segment.text.isprintable()
            yield Segment(printable(segment.text), segment.style) if escape else segment


def make_terminal(*, stderr: bool = False, quiet: bool = False, width: int = WIDTH) -> Terminal:
    """Standard output, or standard error; `width` applies to files and pipes."""
    make = partial(Terminal, stderr=stderr, highlight=False, emoji=False, quiet=quiet)
    return terminal if (terminal := make()).is_terminal else make(width=width)


def refuse_nan(option: str, value: float | None, expected: str) -> None:
    """Raise for NaN, which passes typer's range check."""
    if value is not None and math.isnan(value):
        raise SpecError(f"{option} {value}", expected)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line verbatim, without markup and without wrapping."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def make_table(left: Iterable[str], right: Iterable[str] = (), last: Iterable[str] = ()) -> Table:
    """A table whose columns are aligned left, then right (for numbers), then left again."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for names, justify in ((left, "left"), (right, "right"), (last, "left")):
        for name in names:
            table.add_column(name, justify=justify, overflow="fold", no_wrap=justify == "right")
    return table


def print_line(text: str) -> None:
    """Print a line on standard output, with unprintable characters escaped."""
    print(printable(text))


def print_json(value: object) -> None:
    """Print a value as indented JSON on standard output; NaN and infinities become null."""
    print(escape_json(msgspec.json.format(msgspec.json.encode(value)).decode()), flush=True)


def escape_json(text: str) -> str:
    r"""The same JSON with unprintable characters as \u escapes: JSON allows U+009B, which begins a control sequence."""
    return UNUSUAL.sub(lambda match: match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1], text)
