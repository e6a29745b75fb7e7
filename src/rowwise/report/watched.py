"""Reads the progress of runs from the last lines of their files, in a folder or in an object store (`save.mirror`).

Only ends of files are read, so the cost does not grow with the length of a run.
"""

import fcntl
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic, time
from typing import Literal, NamedTuple, final

import msgspec

from rowwise.base.errors import DataError, RowwiseError, escape_newlines
from rowwise.base.storage.folder import Folder, as_storage, read_file, read_range, size_of_file
from rowwise.base.storage.interface import StoredObject
from rowwise.base.textfile import MAX_BYTES, decode_json, open_regular
from rowwise.report.read import RECIPE, RecordedResult

TAIL_bytes = {"metrics.csv": 1 << 20}  # evaluations may be long ago
SHORT_bytes = 1 << 16  # of other files
HEAD_bytes = 1 << 12  # for the header
NOT_PHASES = ("samples_s", "disk_wait_s", "disk_busy_s", "time_s")  # columns of steps.csv that end with _s
State = Literal["training", "finished", "stopped", "failed", "killed", "unknown"]
Line = Mapping[str, str]


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State, progress and newest numbers of a run."""

    run: str
    state: State  # unknown if a mirror, or the file system, does not tell whether the process lives
    step: int = 0
    samples: int = 0
    samples_s: float | None = None  # as of the newest line, like all fields below
    age_s: float | None = None  # of the newest line; None before the first line
    memory_bytes: int | None = None  # maximum over ranks
    disk_bytes: int | None = None  # of tables on disk
    seconds: dict[str, float] = {}  # of rank 0 since the line before, by phase
    metrics: dict[str, dict[str, dict[str, float | None]]] = {}  # by split, task and metric
    hit_rates: dict[str, float] = {}  # of caches of tables on disk
    workers: int | None = None
    restarts: int | None = None  # of workers
    warnings: tuple[str, ...] = ()
    message: str | None = None  # of a failed run

    @property
    def is_over(self) -> bool:
        return self.state in ("finished", "stopped", "failed", "killed")

    @property
    def data_share(self) -> float | None:
        """The share of time spent waiting for rows."""
        total_s = sum(self.seconds.values())
        return self.seconds.get("data", 0.0) / total_s if total_s else None


class _ObservedFile(NamedTuple):
    """The observed version of a file; times are of this process's monotonic clock."""

    version: StoredObject
    before_s: float  # the last observation of its former version
    since_s: float  # the first observation of this version
    newest_s: float  # the newest observation


@final
class LineAges:
    """Ages of the newest lines by this host's clock: file times may come from clocks that are hours off.

    A line is no older than the last observation without it, and no younger than the first observation with it.
    """

    def __init__(self) -> None:
        self._files: dict[str, _ObservedFile] = {}

    def age_s(self, run: str, version: StoredObject) -> float:
        now_s, former = monotonic(), self._files.get(run)
        if former is None:
            file = _ObservedFile(version, -math.inf, now_s, now_s)
        elif former.version != version:
            file = _ObservedFile(version, former.newest_s, now_s, now_s)
        else:
            file = former._replace(newest_s=now_s)
        self._files[run] = file
        return min(max(time() - version.modified_s, now_s - file.since_s), now_s - file.before_s)


def find_runs(place: Folder) -> dict[str, Folder]:
    """The run at a place, or the runs below it, by their shortest distinct name."""
    if isinstance(place, Path):
        if not place.is_dir():
            raise DataError(f"{place}: no such folder", "a run, or a folder of runs such as runs")
        place = place.resolve()
        folders = {path.parent for depth in ("", "*/", "*/*/") for path in place.glob(f"{depth}{RECIPE}")}
        heads = sorted(str(path.relative_to(place)) for path in folders)
    else:
        names = place.relative_names()
        heads = sorted(
            name.removesuffix(RECIPE).rstrip("/") or "." for name in names if f"/{name}".endswith(f"/{RECIPE}")
        )
    if heads[:1] == ["."]:
        return {escape_newlines(f"{place.parent.name}/{place.name}" if place.parent.name else place.name): place}
    if not heads:
        raise DataError(f"{place} has no run", "the folder of a run, or of several runs, such as runs")
    return {escape_newlines(head): place / head for head in heads}  # names may have any bytes


def read_status(name: str, place: Folder, ages: LineAges | None = None) -> RunStatus:
    """The status of the run at a place; unreadable files are left out. `ages`: observations of earlier calls."""
    steps, metrics, caches = (list(_last_lines(place, file)) for file in ("steps.csv", "metrics.csv", "caches.csv"))
    result = _result_of(place)
    newest: Line = steps[-1] if steps else {}
    seconds = {column[:-2]: _number(text) for column, text in newest.items() if column.endswith("_s")}
    seconds = {phase: s for phase, s in seconds.items() if s is not None and f"{phase}_s" not in NOT_PHASES}
    state, written = _state_of(place, result), _stat_lines(place)
    return RunStatus(
        run=name,
        state=state,
        step=_whole(newest.get("step")) or 0,
        samples=_whole(newest.get("samples")) or 0,
        samples_s=_number(newest.get("samples_s")),
        age_s=None if written is None else (ages or LineAges()).age_s(name, written),
        memory_bytes=_whole(newest.get("memory_bytes")),
        disk_bytes=_whole(newest.get("disk_bytes")),
        seconds=seconds,
        metrics=_by_split(metrics),
        hit_rates=_hit_rates(caches),
        workers=_whole(newest.get("workers")),
        restarts=_whole(newest.get("restarts")),
        warnings=_warnings_of(place),
        message=result.message if result is not None and state == "failed" else None,
    )


def _state_of(place: Folder, result: RecordedResult | None) -> State:
    ended: State = "unknown" if result is None else next(
        (state for state in ("finished", "stopped", "failed") if state == result.status), "unknown"
    )  # fmt: skip
    if not isinstance(place, Path):
        return ended
    held = _is_held(place)
    if held:
        return "training"
    return ended if result is not None else "unknown" if held is None else "killed"


def _is_held(run: Path) -> bool | None:
    """Whether a process holds the lock of the run; None if the file system has no locks."""
    try:
        with open_regular(run / ".lock", links=False) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def _result_of(place: Folder) -> RecordedResult | None:
    try:
        return decode_json(read_file(place, "result.json", MAX_BYTES), RecordedResult)
    except (RowwiseError, OSError, ValueError):
        return None


def _warnings_of(place: Folder) -> tuple[str, ...]:
    """The newest warnings of a run, from the end of its file."""
    try:
        size_bytes = size_of_file(place, "warnings.txt")
        begin = max(0, size_bytes - SHORT_bytes)
        lines = read_range(place, "warnings.txt", begin, size_bytes).decode(errors="replace").splitlines()
    except (RowwiseError, OSError):
        return ()
    return tuple(lines[1:] if begin else lines)  # the first line may be partial


def _stat_lines(place: Folder) -> StoredObject | None:
    stored = as_storage(place)
    try:
        return stored.storage.stat(stored.inside("steps.csv"))
    except (RowwiseError, OSError):
        return None


def _last_lines(place: Folder, name: str) -> Iterator[Line]:
    """The complete lines at the end of a CSV file, as cells by column."""
    try:
        size_bytes = size_of_file(place, name)
        head = read_range(place, name, 0, min(HEAD_bytes, size_bytes))
        begin = max(0, size_bytes - TAIL_bytes.get(name, SHORT_bytes))
        tail = read_range(place, name, begin, size_bytes)
    except (RowwiseError, OSError):
        return
    columns = head.partition(b"\n")[0].decode(errors="replace").rstrip("\r").split(",")
    lines = tail.split(b"\n")[1:-1]  # without the header or a partial first line, and without a partial last line
    for line in lines:
        cells = line.decode(errors="replace").rstrip("\r").split(",")  # lines with quoted commas are skipped below
        if len(cells) == len(columns):
            yield dict(zip(columns, cells, strict=True))


def _by_split(lines: list[Line]) -> dict[str, dict[str, dict[str, float | None]]]:
    splits: dict[str, dict[str, dict[str, float | None]]] = {}
    for line in lines:
        task = splits.setdefault(line.get("split", ""), {}).setdefault(line.get("task", ""), {})
        task[line.get("metric", "")] = _number(line.get("value"))
    return splits


def _hit_rates(lines: list[Line]) -> dict[str, float]:
    newest = {line.get("table", ""): line for line in lines}
    counts = {table: (_number(line.get("hits")), _number(line.get("misses"))) for table, line in newest.items()}
    return {
        table: hits / (hits + misses)
        for table, (hits, misses) in counts.items()
        if hits is not None and misses is not None and hits + misses > 0
    }


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _whole(text: str | None) -> int | None:
    value = _number(text)
    return None if value is None else int(value)
