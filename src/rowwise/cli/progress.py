"""Bars: of splits, for whatever goes over them once, and of a share of a long work, with what is done now."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from rowwise.cli.console import LOGGED_S


@contextmanager
def splits_bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives what is to be told how many splits are done, of how many; shows itself on terminals only."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


@contextmanager
def share_bar(
    console: Console, columns: tuple[ProgressColumn, ...], before: str = ""
) -> Iterator[Callable[[str, float], None]]:
    """Gives what is to be told what is done and the share of all; off terminals a line now and then, `before` first."""
    shown_s = monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)

        def tell(text: str, share: float) -> None:
            nonlocal shown_s
            bar.update(task, completed=share, description=text)
            if not console.is_terminal and monotonic() - shown_s >= LOGGED_S:
                shown_s = monotonic()
                console.print(f"{share:4.0%} {before}{text}", markup=False)

        yield tell
