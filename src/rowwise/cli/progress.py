"""Progress bars: over splits, and over long work of which the share done and the current part are known."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from rowwise.cli.console import LOG_S


@contextmanager
def splits_bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (splits done, splits in all) that moves the bar; off terminals nothing is shown."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


@contextmanager
def share_bar(
    console: Console, columns: tuple[ProgressColumn, ...], before: str = ""
) -> Iterator[Callable[[str, float], None]]:
    """Yields a function of (current work, share done); off terminals prints `before` and both every ten seconds."""
    shown_s = monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)

        def tell(text: str, share: float) -> None:
            nonlocal shown_s
            bar.update(task, completed=share, description=text)
            if not console.is_terminal and monotonic() - shown_s >= LOG_S:
                shown_s = monotonic()
                console.print(f"{share:4.0%} {before}{text}", markup=False)

        yield tell
