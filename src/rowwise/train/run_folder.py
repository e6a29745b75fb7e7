"""The folder of one run: where everything that it leaves is, and how it is written so that a kill spoils nothing.

    runs/<recipe>/<n>/  recipe.yaml env.json plan.json result.json warnings.txt log.txt
                        metrics.csv steps.csv stages.csv tables.csv slices.csv   ckpt/ trace/ tb/   report.html

Whole files appear in one step under their names. Lines are appended, each in one write; going on from a checkpoint
cuts off what was written after it, so that the files are those of an uninterrupted run. A file that another version
began, with other columns, is written anew with those of this one before lines are added to it; what it did not count
stays empty.
"""

import csv
import fcntl
import io
import json
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, final

from rowwise.errors import DataError
from rowwise.textfile import append, open_regular, read_bytes, read_text, refuse_links, write_new

HEADERS = {
    "metrics.csv": ("step", "samples", "time_s", "split", "task", "metric", "value"),
    "steps.csv": (
        *("step", "samples", "time_s", "samples_s"),
        *("data_s", "route_s", "lookup_s", "exchange_s", "wait_s", "forward_s", "backward_s", "update_s", "other_s"),
        *("memory_bytes", "rate", "gradient_norm"),  # memory: of the rank that holds most; times: of the first
        *("workers", "ready", "restarts"),  # that prepare rows on the host of the first; empty without any
    ),
    # Seconds a step, since the last line. What travels is predicted as one: in the line of `exchange`, with `route`.
    "stages.csv": ("step", "rank", "phase", "measured_s", "predicted_s"),
    "tables.csv": (
        *("table", "rows", "dim", "row_type", "optimizer", "features", "bytes", "state_bytes"),
        *("ids_per_sample", "unique_share", "top_share", "traffic_bytes"),
    ),
    "slices.csv": (
        *("split", "feature", "value", "task", "count", "base_rate", "loss", "ne", "auc", "auc_bound", "calibration"),
    ),
}
Cell = str | int | float | None
DIGITS = 19  # of a step, at most
AFTER = "test"  # the split that is measured when a run has ended, beside whatever its last step was


@final
class RunFolder:
    """The folder of a run; `hold` it before writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: weakref.finalize[..., RunFolder] | None = None  # lets go of the lock
        self._begun: set[str] = set()  # files whose columns are known to be those of this version

    @classmethod
    def create(cls, root: Path, name: str) -> "RunFolder":
        """The next free number under root/name."""
        parent = root / name
        parent.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(p.name) for p in parent.iterdir() if p.name.isdecimal()), default=0)
        while True:
            try:
                (parent / str(number)).mkdir()
            except FileExistsError:  # another run has just taken it
                number += 1
            else:
                return cls(parent / str(number))

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """A run that was made before."""
        if not (path / "recipe.yaml").is_file():
            raise DataError(f"{path} is not a run: it has no recipe.yaml; want a folder such as runs/dlrm-synthetic/1")
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "ckpt"

    def hold(self) -> None:
        """Make sure that nobody else writes here, until `release`, or until this object or its process ends.

        What is written goes into this folder and nowhere else: one with links in it is refused.
        """
        refuse_links(self.path)
        held = open_regular(self.path / ".lock", "a+b", links=False)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.close()
            raise DataError(f"{self.path}: another process is working on this run: wait for it, or stop it") from None
        self._held = weakref.finalize(self, held.close)  # the system forgets the lock with the file

    def release(self) -> None:
        if self._held is not None:
            self._held()

    def write(self, name: str, text: str) -> None:
        part = self.path / f".{name}.part"
        with _naming(self.path / name):
            try:
                write_new(part, text.encode())
                part.replace(self.path / name)
            finally:
                part.unlink(missing_ok=True)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """A whole file; what is no number in JSON is null."""
        self.write(name, json.dumps(_jsonable(content), indent=2) + "\n")

    def append(self, name: str, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Lines of one of the CSV files."""
        self._take_over(name)
        self._add(name, _csv(name, rows, header=not (self.path / name).exists()))

    def replace(self, name: str, rows: Sequence[Mapping[str, Cell]]) -> None:
        """All lines of one of the CSV files."""
        self.write(name, _csv(name, rows, header=True))

    def rows(self, name: str) -> list[dict[str, Cell]]:
        """All lines of one of the CSV files, as text."""
        path = self.path / name
        return list(csv.DictReader(read_text(path).splitlines())) if path.exists() else []

    def drop_after(self, step: int) -> None:
        """Forget the lines that were written after a step, and those of the test that ended the run."""
        for name in ("metrics.csv", "steps.csv", "stages.csv"):
            path = self.path / name
            if not path.exists():
                continue
            header, *lines = read_bytes(path).splitlines(keepends=True) or [b""]
            if not header.endswith(b"\n"):
                path.unlink()  # not even that was written whole
                continue
            # Lines are in the order of their steps, so what stays is a beginning: cut in place, which needs no room.
            kept = takewhile(lambda line: _is_before(line, step), lines)
            with open_regular(path, "r+b", links=False) as file:
                file.truncate(len(header) + sum(map(len, kept)))

    def warn(self, line: str) -> None:
        """Something that the reader of the report should know; each once."""
        path = self.path / "warnings.txt"
        if line not in (read_text(path).splitlines() if path.exists() else []):
            self._add("warnings.txt", f"{line}\n")

    def log(self, line: str) -> None:
        """A line of log.txt."""
        self._add("log.txt", f"{line}\n")

    def _take_over(self, name: str) -> None:
        """Give a file that another version began the columns of this one, so that cells stand under their names."""
        path = self.path / name
        if name in self._begun:
            return
        if path.exists():
            with open_regular(path) as file:
                columns = tuple(next(csv.reader([file.readline().decode()]), ()))
            if columns != HEADERS[name]:
                self.replace(name, self.rows(name))
        self._begun.add(name)

    def _add(self, name: str, text: str) -> None:
        path = self.path / name
        with _naming(path):
            append(path, text.encode())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say which file could not be written: a full disk does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"not written: {error.strerror}", str(path)) from error


def _csv(name: str, rows: Sequence[Mapping[str, Cell]], *, header: bool) -> str:
    text = io.StringIO()
    lines = csv.DictWriter(text, HEADERS[name], lineterminator="\n", extrasaction="ignore")
    if header:
        lines.writeheader()
    lines.writerows([{key: _cell(value) for key, value in row.items()} for row in rows])
    return text.getvalue()


def _is_before(line: bytes, step: int) -> bool:
    """Whether a line is whole, and one that a run writes up to a step."""
    if not line.endswith(b"\n"):
        return False
    first, *others = line.decode().rstrip("\n").split(",")
    # Every line begins with its step; of metrics.csv the fourth column is the split.
    return first.isdecimal() and len(first) < DIGITS and int(first) <= step and others[2:3] != [AFTER]


def _cell(value: Cell) -> Cell:
    # As many digits as tell one float from another: a file of metrics is compared bit by bit.
    return repr(value) if isinstance(value, float) else value


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
