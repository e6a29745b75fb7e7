"""Console output of a run: a summary, a live line (off terminals, a line every ten seconds), and the result.

It goes to standard error, as `--json` uses standard output; the run folder has the same facts.
"""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rowwise.base.quantity import format_bytes, format_duration
from rowwise.cli.signals import BOTH, note_signals
from rowwise.cli.terminal import make_table, say

if TYPE_CHECKING:
    from rowwise.recipes.outlook import Outlook
    from rowwise.recipes.run_result import RunResult
    from rowwise.recipes.runs import TrainingRun
    from rowwise.train.stages import PhaseTime
    from rowwise.train.trainer import RunDisplay, Trainer

LIVE_S, LOG_S = 0.2, 10.0  # seconds between two updates, on a terminal and elsewhere
LIVE_METRICS = ("ne", "auc", "rmse", "calibration")
SHOWN_SHARE = 0.01  # smallest share of a step that is printed
HIDDEN_METRICS = ("base_rate", "auc_bound", "count")  # facts of the data, and error bounds


@final
class LiveLine:
    """The live line of a run; the trainer calls it after each step."""

    def __init__(self, console: Console) -> None:
        self._console, self._live = console, console.is_terminal
        columns = (BarColumn(24), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}"))
        self._bar = Progress(*columns, TimeRemainingColumn(compact=True), console=console, transient=True)
        self._task = self._bar.add_task("starting", total=1.0)
        self._shown_s, self._since = 0.0, (0.0, 0)
        self._rows_of_split = 1

    @contextmanager
    def show(self) -> Iterator[None]:
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
        if now - self._shown_s < (LIVE_S if self._live else LOG_S):
            return
        self._shown_s = now
        text = self._text(shown, now)
        self._bar.update(self._task, completed=self._share_done(shown), description=escape(text))
        if not self._live:
            self._console.print(f"{self._share_done(shown):4.0%} {text}", markup=False)

    def _text(self, shown: "RunDisplay", now: float) -> str:
        from rowwise.train.feeding import describe_wait
        from rowwise.train.recorder import memory_bytes

        begin_s, begin = self._since
        rate = (shown.progress.samples - begin) / max(now - begin_s, 1e-9)
        parts = [f"step {shown.progress.step:,}", f"{rate:,.0f} samples/s", f"loss {shown.recorder.recent_loss():.4f}"]
        for task, values in shown.recorder.recent_metrics.items():
            lead = f"{task} " if len(shown.recorder.recent_metrics) > 1 else ""
            parts += [f"{lead}{name} {values[name]:.4f}" for name in LIVE_METRICS if name in values]
        wait = describe_wait(shown.data_wait.share, shown.health)
        hit_rate = shown.recorder.hit_rate
        cache = [] if hit_rate is None else [f"cache {hit_rate:.0%}"]
        return ", ".join([*parts, *cache, wait, f"{memory_bytes() / 1e9:.1f} GB"])

    def _share_done(self, shown: "RunDisplay") -> float:
        """Estimated progress: assumes that every split has the rows of the largest one so far."""
        position, train, splits = shown.progress.position, shown.settings.train, max(shown.splits, 1)
        in_epoch = (position.split + min(position.row / self._rows_of_split, 1.0)) / splits
        share = (position.epoch + min(in_epoch, 1.0)) / train.epochs
        return max(share, shown.progress.step / train.steps) if train.steps else share


@contextmanager
def stop_on_signals(trainer: "Trainer", console: Console, *, watched: bool = False) -> Iterator[list[int]]:
    """Stop the run after its current step on Ctrl-C or SIGTERM, at once on a second one; yields the signals received.

    With `watched` a parent process handles Ctrl-C and second signals, and sends SIGTERM.
    """

    def stop() -> None:
        trainer.stop()
        console.print("stopping after this step; Ctrl-C again stops at once")

    with note_signals(stop, (signal.SIGTERM,) if watched else BOTH, again=not watched) as received:
        yield received


def show_start(run: "TrainingRun", console: Console) -> None:
    """Print the outlook, the warm start's matches and the step that training continues from."""
    from rowwise.recipes.outlook import make_outlook

    show_outlook(make_outlook(run.resolved, run.model, run.plan, run.comm.topology), console, str(run.folder.path))
    for line in run.label_notes:
        show_warning(console, line)
    for line in run.match.lines() if run.match else ():
        console.print(f"warm    {line}", markup=False)
    if run.trainer.progress.step:
        console.print(f"resumed at step {run.trainer.progress.step:,}")


def show_outlook(outlook: "Outlook", console: Console, where: str) -> None:
    splits = ", ".join(f"{count} {name}" for name, count in outlook.splits.items())
    columns = f"{outlook.dense} dense and {outlook.sparse} sparse features, labels {', '.join(outlook.labels)}"
    threads = "1 thread" if outlook.threads == 1 else f"{outlook.threads} threads"
    training = f"batches of {outlook.batch:,}, {outlook.precision}, {threads}"
    states = (
        f"{format_bytes(outlook.rows_bytes)} of rows and {format_bytes(outlook.state_bytes)} of their optimizer state"
    )
    tables_bytes = outlook.rows_bytes + outlook.state_bytes
    if outlook.disk:
        tables_bytes = outlook.resident_bytes + outlook.cache_bytes
        states = f"{format_bytes(outlook.resident_bytes)} of tables and {format_bytes(outlook.cache_bytes)} of caches"
    if outlook.pictures_bytes:
        states += f", {format_bytes(outlook.pictures_bytes)} of decoded pictures"
    total_bytes = tables_bytes + outlook.dense_bytes + outlook.pictures_bytes
    memory = f"{format_bytes(total_bytes)} without batches: {states}"
    console.print(f"[bold]{escape(outlook.recipe)}[/bold]  {escape(where)}")
    console.print(f"data    {outlook.dataset}: {columns}; splits {splits}", markup=False)
    console.print(f"model   {outlook.model}, {outlook.dense_parameters:,} dense parameters; {training}", markup=False)
    console.print(f"tables  {outlook.tables} of {outlook.rows:,} rows; the largest is {outlook.largest}", markup=False)
    console.print(f"memory  {memory}, {format_bytes(outlook.dense_bytes)} for the dense parameters", markup=False)
    if outlook.ranks > 1:
        hosts = "1 host" if outlook.hosts == 1 else f"{outlook.hosts} hosts"
        memory_use = (
            f"rank {outlook.fullest} holds the most rows, {format_bytes(outlook.fullest_bytes)}; plan: {outlook.plan}"
        )
        threads = f"{outlook.threads} thread{'s' if outlook.threads > 1 else ''} each"
        say(console, f"ranks   {outlook.ranks} on {hosts}, {threads}; {memory_use}")
    if outlook.wire:
        say(console, f"wire    {outlook.wire}")
    if outlook.disk:
        say(console, f"disk    {outlook.disk}")
    if outlook.cached:
        say(console, f"cached  {outlook.cached}")
    for line in outlook.notes:
        show_warning(console, line)
    if outlook.idle:
        problem = (
            f"a batch of {outlook.batch:,} is too small for {outlook.ranks} ranks, which take blocks of 256 samples"
        )
        console.print(f"warning {problem}: {outlook.idle} of them get no samples", markup=False)


def show_warning(console: Console, line: str) -> None:
    say(console, f"warning {line}", "yellow")


def show_result(result: "RunResult", console: Console) -> None:
    from rowwise.report.feeding import advice, is_worth_advice
    from rowwise.train.evaluate import undefined

    if result.best is not None:
        best = result.best
        where = f"of {best.task} on the validation rows, step {best.step:,}"
        console.print(f"best    {best.metric} {best.value:.4f} {where}", markup=False)
    if result.test:
        console.print(_metrics_table(result))
    for line in undefined(result.test, "test"):
        show_warning(console, line)
    speed = f"{result.samples:,} samples, {result.samples_s:,.0f} samples/s, {result.wall_s:.0f} s"
    console.print(f"{result.status}: {speed}, at most {result.peak_memory_bytes / 1e9:.1f} GB of memory")
    if result.step:
        say(console, f"step    {_describe_step(result.step)}")
    wait = result.data_wait
    if is_worth_advice(wait.seconds, wait.of_s) and not result.ceiling:  # synthetic rows are slow to draw
        text = advice(wait.share, result.workers, f"{result.run}/recipe.yaml")
        say(console, f"data    {text}")
    if result.bad_rows:
        rows = f"{result.bad_rows:,} bad row{'s are' if result.bad_rows != 1 else ' is'} quarantined"
        reason = f", such as {result.bad_reasons[0]}" if result.bad_reasons else ""
        say(console, f"rows    {rows} in {result.run}/bad_rows{reason}", "yellow")
    say(console, f"report  {result.run}/report.html")


def _describe_step(phases: "Mapping[str, PhaseTime]") -> str:
    """Phases of at least one percent of a step, with the busy time of their resource where overlap hides it."""
    total_s = sum(time.exposed_s for time in phases.values())
    parts: list[str] = []
    for name, time in phases.items():
        if max(time.exposed_s, time.busy_s) >= SHOWN_SHARE * total_s:
            hidden_s = time.busy_s - time.exposed_s
            busy = f" (busy {format_duration(time.busy_s)})" if hidden_s >= SHOWN_SHARE * total_s else ""
            parts.append(f"{name} {format_duration(time.exposed_s)}{busy}")
    return f"{format_duration(total_s)}: {', '.join(parts)}"


def _metrics_table(result: "RunResult") -> Table:
    """Metrics on the test rows, the best possible ones if known, and the expected ones of the shipped recipe."""
    names = dict.fromkeys(name for values in result.test.values() for name in values if name not in HIDDEN_METRICS)
    table = make_table(("",), names)
    lines: list[tuple[str, Mapping[str, float | None]]] = []
    for lead, metrics in (("test", result.test), ("best possible", result.ceiling)):
        lines += [(f"{lead} {task}" if len(metrics) > 1 else lead, values) for task, values in metrics.items()]
    if result.expected:
        lines.append(("expected", result.expected))
    for lead, values in lines:
        cells = (values.get(name) for name in names)
        table.add_row(escape(lead), *("" if value is None else f"{value:.4f}" for value in cells))
    return table
