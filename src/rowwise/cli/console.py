"""What people see of a run: a summary, one live line, a final block; lines now and then where nobody watches live.

Goes to standard error, so that `--json` can have standard output for itself.
"""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rowwise.cli.terminal import terminal
from rowwise.quantity import of_bytes

if TYPE_CHECKING:
    from rowwise.recipes.outlook import Outlook
    from rowwise.recipes.runs import RunResult, TrainingRun
    from rowwise.train.trainer import RunDisplay, Trainer

LIVE_S, LOGGED_S = 0.2, 10.0  # between two looks, where somebody watches and where not
SHOWN = ("ne", "auc", "calibration")
QUIET = ("base_rate", "auc_bound", "count")  # of the data, or of how well another is known


def console_for(*, quiet: bool) -> Console:
    """Standard error; wide enough where it has no width of its own."""
    return terminal(stderr=True, quiet=quiet)


@final
class LiveLine:
    """The live line of a run; call it with each step."""

    def __init__(self, console: Console) -> None:
        self._console, self._live = console, console.is_terminal
        columns = (BarColumn(24), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}"))
        self._bar = Progress(*columns, TimeRemainingColumn(compact=True), console=console, transient=True)
        self._task = self._bar.add_task("starting", total=1.0)
        self._shown_s, self._since = 0.0, (0.0, 0)
        self._rows_of_split = 1

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Live on a terminal."""
        if not self._live:
            yield
            return
        with self._bar:
            yield

    def __call__(self, shown: "RunDisplay") -> None:
        now = monotonic()
        self._rows_of_split = max(self._rows_of_split, shown.progress.position.row)
        if not self._shown_s:
            self._shown_s, self._since = now, (now, shown.progress.samples)
        if now - self._shown_s < (LIVE_S if self._live else LOGGED_S):
            return
        self._shown_s = now
        text = self._text(shown, now)
        self._bar.update(self._task, completed=self._done(shown), description=escape(text))
        if not self._live:
            self._console.print(f"{self._done(shown):4.0%} {text}", markup=False)

    def _text(self, shown: "RunDisplay", now: float) -> str:
        from rowwise.train.feeding import in_words
        from rowwise.train.recorder import memory_bytes

        begin_s, begin = self._since
        rate = (shown.progress.samples - begin) / max(now - begin_s, 1e-9)
        parts = [f"step {shown.progress.step:,}", f"{rate:,.0f} samples/s", f"loss {shown.recorder.recent_loss():.4f}"]
        for task, values in shown.recorder.shown.items():
            lead = f"{task} " if len(shown.recorder.shown) > 1 else ""
            parts += [f"{lead}{name} {values[name]:.4f}" for name in SHOWN if name in values]
        waited, memory = shown.recorder.waited(), memory_bytes()
        return ", ".join([*parts, in_words(waited, shown.health), f"{memory / 1e9:.1f} GB"])

    def _done(self, shown: "RunDisplay") -> float:
        """The share of the run that is done, as far as it is known: rows of a split are guessed from those before."""
        position, train, splits = shown.progress.position, shown.settings.train, max(shown.splits, 1)
        in_epoch = (position.split + min(position.row / self._rows_of_split, 1.0)) / splits
        share = (position.epoch + min(in_epoch, 1.0)) / train.epochs
        return max(share, shown.progress.step / train.steps) if train.steps else share


@contextmanager
def stop_on_signal(trainer: "Trainer", console: Console, *, watched: bool = False) -> Iterator[list[int]]:
    """Ctrl-C and a polite kill end the run after its present step; a second one ends it at once.

    A rank that is `watched` leaves Ctrl-C and what is at once to its parent, who passes on what comes.
    """
    met: list[int] = []
    numbers = (signal.SIGTERM,) if watched else (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        yield met
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        if met and not watched:
            raise KeyboardInterrupt
        if met:
            return
        met.append(number)
        trainer.stop()
        console.print("stopping after this step; once more stops at once")

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield met
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_beginning(run: "TrainingRun", console: Console) -> None:
    """What is trained, on what, what it takes, and where it begins."""
    from rowwise.recipes.outlook import outlook

    show_outlook(outlook(run.resolved, run.model, run.plan, run.comm.topology), console, str(run.folder.path))
    for line in run.match.lines() if run.match else ():
        console.print(f"warm    {line}", markup=False)
    if run.trainer.progress.step:
        console.print(f"resumed at step {run.trainer.progress.step:,}")


def show_outlook(found: "Outlook", console: Console, where: str) -> None:
    """What is trained, on what, and what it takes."""
    splits = ", ".join(f"{count} {name}" for name, count in found.splits.items())
    columns = f"{found.dense} dense and {found.sparse} sparse features, labels {', '.join(found.labels)}"
    training = f"batches of {found.batch:,}, {found.precision}, {found.threads} threads"
    states = f"{of_bytes(found.rows_bytes)} of rows and {of_bytes(found.state_bytes)} of their optimizer state"
    memory = f"{of_bytes(found.rows_bytes + found.state_bytes + found.dense_bytes)} beside batches: {states}"
    console.print(f"[bold]{escape(found.recipe)}[/bold]  {escape(where)}")
    console.print(f"data    {found.dataset}: {columns}; splits {splits}", markup=False)
    console.print(f"model   {found.model}, {found.dense_parameters:,} dense parameters; {training}", markup=False)
    console.print(f"tables  {found.tables} of {found.rows:,} rows; the largest is {found.largest}", markup=False)
    console.print(f"memory  {memory}, {of_bytes(found.dense_bytes)} for the dense parameters", markup=False)
    if found.ranks > 1:
        hosts = "1 host" if found.hosts == 1 else f"{found.hosts} hosts"
        held = f"rank {found.fullest} holds most, {of_bytes(found.fullest_bytes)} of rows; plan: {found.plan}"
        threads = f"{found.threads} thread{'s' if found.threads > 1 else ''} each"
        console.print(f"ranks   {found.ranks} on {hosts}, {threads}; {held}", markup=False, soft_wrap=True)
    for line in found.notes:
        show_warning(console, line)
    if found.idle:
        idle = (
            f"a batch of {found.batch:,} is too small for {found.ranks} ranks, as parts are whole blocks of 256 samples"
        )
        console.print(f"warning {idle}: {found.idle} of them have none", markup=False)


def show_warning(console: Console, line: str) -> None:
    """Something that is not done as the user may think."""
    console.print(f"warning {line}", style="yellow", markup=False, soft_wrap=True)


def show_end(result: "RunResult", console: Console) -> None:
    """What came of it, and where it is."""
    from rowwise.report.feeding import advice

    if result.best is not None:
        best = result.best
        where = f"of {best.task} on the validation rows, step {best.step:,}"
        console.print(f"best    {best.metric} {best.value:.4f} {where}", markup=False)
    if result.test:
        console.print(_metrics(result))
    speed = f"{result.samples:,} samples, {result.samples_s:,.0f} samples/s, {result.wall_s:.0f} s"
    console.print(f"{result.status}: {speed}, at most {result.peak_memory_bytes / 1e9:.1f} GB of memory")
    if result.data_wait.is_much:
        said = advice(result.data_wait.share, result.workers, f"{result.run}/recipe.yaml")
        console.print(f"data    {said}", markup=False, soft_wrap=True)
    if result.bad_rows:
        rows = f"{result.bad_rows:,} row{'s were' if result.bad_rows != 1 else ' was'} put aside"
        why = f", such as {result.bad_reasons[0]}" if result.bad_reasons else ""
        console.print(f"rows    {rows} in {result.run}/bad_rows{why}", style="yellow", markup=False, soft_wrap=True)
    console.print(f"report  {result.run}/report.html", markup=False, soft_wrap=True)


def _metrics(result: "RunResult") -> Table:
    """The test, what nobody can beat, and what the recipe as it ships reaches."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    names = dict.fromkeys(name for values in result.test.values() for name in values if name not in QUIET)
    for name in ("", *names):
        table.add_column(name, justify="right" if name else "left")
    lines: list[tuple[str, Mapping[str, float | None]]] = []
    for lead, found in (("test", result.test), ("best possible", result.ceiling)):
        lines += [(f"{lead} {task}" if len(found) > 1 else lead, values) for task, values in found.items()]
    if result.expected:
        lines.append(("expected", result.expected))
    for lead, values in lines:
        cells = (values.get(name) for name in names)
        table.add_row(escape(lead), *("" if value is None else f"{value:.4f}" for value in cells))
    return table
