"""Progress bars: over splits, over work of unknown length, or over a fraction with a current stage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rowwise.cli.console import LOG_S


@contextmanager
def splits_bar(console: Console, what: str) -> Iterator[Callable[[float, float], None]]:
    """Show a bar on terminals; yields a function of (splits done, total splits) that updates it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def activity_bar(console: Console, what: str, *, hidden: bool = False) -> Iterator[None]:
    """Show on terminals that work of unknown length is in progress."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as bar:
        bar.add_task(what, total=None)
        yield


@contextmanager
def fraction_bar(
    console: Console, columns: tuple[ProgressColumn, ...], prefix: str = ""
) -> Iterator[Callable[[str, float], None]]:
    """Show a bar; yields a function of (current stage, fraction done). Off terminals, print both every ten seconds."""
    shown_s = monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)

        def tell(text: str, fraction: float) -> None:
            nonlocal shown_s
            bar.update(task, completed=fraction, description=text)
            if not console.is_terminal and monotonic() - shown_s >= LOG_S:
                shown_s = monotonic()
                console.print(f"{fraction:4.0%} {prefix}{text}", markup=False)

        yield tell
