"""The folder of a run: its files, written so that a kill at any moment leaves them readable.

    runs/<recipe>/<n>/  recipe.yaml env.json plan.json result.json warnings.txt log.txt mllog.txt
                        metrics.csv steps.csv stages.csv timeline.csv caches.csv tables.csv slices.csv reliability.csv
                        ckpt/ trace/ tb/ disk/   report.html   managed.csv evicted_ids.<table>.csv

Whole files are replaced atomically. Lines are appended, each in one write. Resuming from a checkpoint cuts off the
lines that were written after it, so that the files are those of an uninterrupted run. A CSV file of another version,
with other columns, is rewritten with this version's columns before lines are added; new columns are empty in old lines.
"""

import csv
import fcntl
import io
import json
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from time import sleep
from typing import Any, final

from rowwise.base.errors import DataError
from rowwise.base.inside import number_in
from rowwise.base.textfile import append, open_regular, parse_whole, read_bytes, read_text, refuse_links, write_new

HEADERS = {
    "metrics.csv": ("step", "samples", "time_s", "split", "task", "metric", "value"),
    "steps.csv": (
        *("step", "samples", "time_s", "samples_s"),
        *("data_s", "route_s", "prefetch_s", "lookup_s", "exchange_s", "wait_s", "forward_s", "backward_s", "return_s"),
        *("reduce_s", "status_s", "update_s", "other_s"),
        *("memory_bytes", "rate", "gradient_norm"),  # memory: maximum over ranks; seconds: of rank 0
        *("workers", "ready", "restarts"),  # of rank 0's host; empty without workers
        *("reads", "read_bytes", "written_bytes", "disk_bytes"),  # of the files of all ranks; disk_bytes: their size
        # Means over the ranks with tables on disk: seconds in which calls waited, and in which reads were in flight.
        *("disk_wait_s", "disk_busy_s"),
    ),
    # Mean seconds per step since the last line: of the main thread, and of the phase's resource. The forecast of
    # `exchange` includes `route` and `return`.
    "stages.csv": ("step", "rank", "phase", "measured_s", "busy_s", "predicted_s"),
    # When each resource worked, in ten steps; seconds since the rank's first of these steps began.
    "timeline.csv": ("step", "rank", "resource", "stage", "begin_s", "end_s"),
    # Counts since the last line, of all ranks; only tables on disk.
    "caches.csv": ("step", "table", "hits", "misses", "new_rows", "evictions", "writes", "memory_bytes"),
    "tables.csv": (
        *("table", "rows", "dim", "row_type", "optimizer", "features", "bytes", "state_bytes"),
        *("ids_per_sample", "unique_share", "top_share", "traffic_bytes"),
    ),
    "slices.csv": (
        *("split", "feature", "value", "task", "count", "base_rate", "loss", "ne", "auc", "auc_bound", "calibration"),
    ),
    "reliability.csv": ("task", "count", "predicted", "observed"),  # of the test rows
    "managed.csv": (
        *("step", "table", "rows", "in_use", "ids", "admitted", "evicted", "rejected", "overflowed", "expired"),
    ),
}
EVICTED = ("evicted_ids.", ".csv"), ("step", "id")  # prefix and suffix of the file names; columns
FRAME = "frame"  # folder of the recipe and vocabularies that `rowwise.fit` makes from a data frame
# Files that a run may have written before its recipe.
UNBEGUN = (".lock", ".recipe.yaml.part", "bad_rows", "disk", "mirror.json", ".mirror.json.part", FRAME)
Cell = str | int | float | None
ATTEMPTS, ATTEMPT_s = 5, 0.05  # to lock a folder
AFTER = "test"  # the split that is measured after the end of a run


@final
class RunFolder:
    """The folder of a run; call `hold` before writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: weakref.finalize[..., RunFolder] | None = None  # calling it releases the lock
        self._upgraded: set[str] = set()  # CSV files that have this version's columns

    @classmethod
    def create(cls, root: Path, name: str) -> "RunFolder":
        """Make a folder with the next free number under root/name."""
        parent = root / name
        parent.mkdir(parents=True, exist_ok=True)
        number = 1 + max((number_in(p.name) or 0 for p in parent.iterdir()), default=0)
        while True:
            try:
                (parent / str(number)).mkdir()
            except FileExistsError:  # another run has just taken it
                number += 1
            else:
                return cls(parent / str(number))

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open the folder of an existing run."""
        if not cls(path).has_begun:
            raise DataError(f"{path} is not a run: it has no recipe.yaml", "a folder such as runs/dlrm-synthetic/1")
        return cls(path)

    @property
    def has_begun(self) -> bool:
        """Whether a run has written its recipe here, so that it can be resumed."""
        return (self.path / "recipe.yaml").is_file()

    def make(self) -> "RunFolder":
        """Create the folder of a new run; reuses the folder of a start that was killed."""
        self.path.mkdir(parents=True, exist_ok=True)
        foreign = sorted(p.name for p in self.path.iterdir() if p.name not in UNBEGUN)
        if foreign:
            raise DataError(f"{self.path} has {foreign[0]} and no recipe.yaml", "the folder of a run, or a new folder")
        return self

    @property
    def checkpoints(self) -> Path:
        return self.path / "ckpt"

    def hold(self) -> None:
        """Lock the folder until `release`, or until this object or its process ends.

        Raises if the folder contains links, through which a run would write elsewhere.
        """
        if self._lock is not None and self._lock.alive:
            return
        refuse_links(self.path)
        file = open_regular(self.path / ".lock", "a+b", links=False)
        for attempt in range(ATTEMPTS):  # `rowwise watch` takes the lock for a moment, to test whether it is held
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == ATTEMPTS - 1:
                    file.close()
                    problem = f"{self.path}: another process is working on this run"
                    raise DataError(problem, hint="wait for it, or stop it") from None
                sleep(ATTEMPT_s)
        self._lock = weakref.finalize(self, file.close)  # closing the file releases the lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock()

    def write(self, name: str, text: str) -> None:
        part = self.path / f".{name}.part"
        with _naming(self.path / name):
            try:
                write_new(part, text.encode())
                part.replace(self.path / name)
            finally:
                part.unlink(missing_ok=True)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace a JSON file; NaN and infinity become null."""
        self.write(name, json.dumps(_jsonable(content), indent=2) + "\n")

    def append(self, name: str, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Append lines to a CSV file."""
        self._upgrade_columns(name)
        self.add(name, _csv(name, rows, header=not (self.path / name).exists()))

    def replace(self, name: str, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Replace all lines of a CSV file."""
        self.write(name, _csv(name, rows, header=True))

    def rows(self, name: str) -> list[dict[str, Cell]]:
        """All lines of a CSV file; cells are text."""
        path = self.path / name
        return list(csv.DictReader(read_text(path).splitlines())) if path.exists() else []

    def drop_after(self, step: int) -> None:
        """Cut off the lines of later steps, and those of the test at the end of the run."""
        evicted = sorted(self.path.glob(evicted_ids_name("*")))
        names = [name for name, columns in HEADERS.items() if columns[0] == "step"]
        for path in (*(self.path / name for name in names), *evicted):
            if not path.exists():
                continue
            header, *lines = read_bytes(path).splitlines(keepends=True) or [b""]
            if not header.endswith(b"\n"):
                path.unlink()  # a kill cut the header itself
                continue
            # Lines are sorted by step, so a prefix stays; truncating needs no space on a full disk.
            kept = takewhile(lambda line: _is_before(line, step), lines)
            with open_regular(path, "r+b", links=False) as file:
                file.truncate(len(header) + sum(map(len, kept)))

    def add(self, name: str, text: str) -> None:
        """Append lines to a file, in one write."""
        path = self.path / name
        with _naming(path):
            append(path, text.encode())

    def warn(self, line: str) -> None:
        """Add a warning to warnings.txt, for the report; each text once."""
        path = self.path / "warnings.txt"
        if line not in (read_text(path).splitlines() if path.exists() else []):
            self.add("warnings.txt", f"{line}\n")

    def log(self, line: str) -> None:
        self.add("log.txt", f"{line}\n")

    def _upgrade_columns(self, name: str) -> None:
        """Rewrite a CSV file of another version with this version's columns."""
        path = self.path / name
        if name in self._upgraded:
            return
        if path.exists():
            with open_regular(path) as file:
                columns = tuple(next(csv.reader([file.readline().decode()]), ()))
            if columns != _columns(name):
                self.replace(name, self.rows(name))
        self._upgraded.add(name)


def now() -> str:
    """Local time for logs: ISO 8601, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def evicted_ids_name(table: str) -> str:
    """File name of the evicted ids of a managed table."""
    return table.join(EVICTED[0])


def _columns(name: str) -> tuple[str, ...]:
    begin, end = EVICTED[0]
    return EVICTED[1] if name.startswith(begin) and name.endswith(end) else HEADERS[name]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError, which lacks it if the disk is full."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"not written: {error.strerror}", str(path)) from error


def _csv(name: str, rows: Sequence[Mapping[str, Cell]], *, header: bool) -> str:
    text = io.StringIO()
    lines = csv.DictWriter(text, _columns(name), lineterminator="\n", extrasaction="ignore")
    if header:
        lines.writeheader()
    lines.writerows([{key: _cell(value) for key, value in row.items()} for row in rows])
    return text.getvalue()


def _is_before(line: bytes, step: int) -> bool:
    """Whether a line is complete and not of a later step."""
    if not line.endswith(b"\n"):
        return False
    first, *cells = line.decode().rstrip("\n").split(",")
    # Every line begins with its step; the fourth column of metrics.csv is the split.
    written = parse_whole(first)
    return written is not None and written <= step and cells[2:3] != [AFTER]


def _cell(value: Cell) -> Cell:
    # repr keeps all bits of a float: files of metrics are compared bit by bit.
    return repr(value) if isinstance(value, float) else value


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
