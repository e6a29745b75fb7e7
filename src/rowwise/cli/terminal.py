"""Where commands write: no name or value from a file reaches a terminal as a command to it."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rowwise.textfile import printable

WIDTH = 120


class Terminal(Console):
    """A console whose texts are printable; colours and the movements of live lines stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments, as rich makes them, with what is not printable written out."""
        for segment in super().render(renderable, options):
            told = segment.control is None and not segment.text.isprintable()
            yield Segment(printable(segment.text), segment.style) if told else segment


def terminal(*, stderr: bool = False, quiet: bool = False, width: int = WIDTH) -> Terminal:
    """Standard output or standard error; a file or a pipe has no width of its own."""
    found = Terminal(stderr=stderr, highlight=False, quiet=quiet)
    return found if found.is_terminal else Terminal(stderr=stderr, highlight=False, quiet=quiet, width=width)


def say(text: str) -> None:
    """A line on standard output."""
    print(printable(text))
