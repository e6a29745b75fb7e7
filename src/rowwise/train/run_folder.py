"""The folder of one run: where everything that it leaves is, and how it is written so that a kill spoils nothing.

    runs/<recipe>/<n>/  recipe.yaml env.json plan.json result.json warnings.txt log.txt
                        metrics.csv steps.csv tables.csv slices.csv   ckpt/ trace/ tb/   report.html

Whole files appear in one step under their names. Lines are appended, each in one write; going on from a checkpoint
cuts off what was written after it, so that the files are those of an uninterrupted run.
"""

import csv
import fcntl
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from rowwise.errors import DataError

HEADERS = {
    "metrics.csv": ("step", "samples", "time_s", "split", "task", "metric", "value"),
    "steps.csv": (
        *("step", "samples", "time_s", "samples_s"),
        *("data_s", "lookup_s", "forward_s", "backward_s", "update_s", "other_s"),
        *("memory_bytes", "rate", "gradient_norm"),
    ),
    "tables.csv": (
        *("table", "rows", "dim", "row_type", "optimizer", "features", "bytes", "state_bytes"),
        *("ids_per_sample", "unique_share", "top_share", "traffic_bytes"),
    ),
    "slices.csv": (
        *("split", "feature", "value", "task", "count", "base_rate", "loss", "ne", "auc", "auc_bound", "calibration"),
    ),
}
Cell = str | int | float | None


@final
class RunFolder:
    """One run's folder; `hold` it before writing."""

    def __init__(self, path: Path) -> None:
        """A folder that is there."""
        self.path = path
        self._held: int | None = None

    @classmethod
    def create(cls, root: Path, name: str) -> "RunFolder":
        """The next free number under root/name."""
        parent = root / name
        parent.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(p.name) for p in parent.iterdir() if p.name.isdigit()), default=0)
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
        """Where checkpoints are."""
        return self.path / "ckpt"

    def hold(self) -> None:
        """Make sure that nobody else writes here, until `release` or the end of this process."""
        self._held = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise DataError(f"{self.path}: another process is working on this run: wait for it, or stop it") from None

    def release(self) -> None:
        """Others may write here again."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def write(self, name: str, text: str) -> None:
        """A whole file."""
        part = self.path / f".{name}.part"
        with _naming(part):
            part.write_text(text)
        part.replace(self.path / name)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """A whole file; what is no number in JSON is null."""
        self.write(name, json.dumps(_jsonable(content), indent=2) + "\n")

    def append(self, name: str, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Lines of one of the CSV files."""
        path = self.path / name
        text = io.StringIO()
        lines = csv.DictWriter(text, HEADERS[name], lineterminator="\n", extrasaction="ignore")
        if not path.exists():
            lines.writeheader()
        lines.writerows([{key: _cell(value) for key, value in row.items()} for row in rows])
        with _naming(path), path.open("a") as file:
            file.write(text.getvalue())

    def replace(self, name: str, rows: Sequence[Mapping[str, Cell]]) -> None:
        """All lines of one of the CSV files."""
        (self.path / name).unlink(missing_ok=True)
        self.append(name, rows)

    def cut(self, step: int) -> None:
        """Forget the lines that were written after a step."""
        for name in ("metrics.csv", "steps.csv"):
            path = self.path / name
            if not path.exists():
                continue
            header, *lines = path.read_text().splitlines(keepends=True) or [""]
            if not header.endswith("\n"):
                path.unlink()  # not even that was written whole
                continue
            kept = [line for line in lines if line.endswith("\n") and int(line.partition(",")[0] or -1) <= step]
            self.write(name, "".join([header, *kept]))

    def drop_test(self, step: int) -> None:
        """Forget the lines of a test after a step, to write them anew."""
        path = self.path / "metrics.csv"
        if path.exists():
            lines = (line.split(",") for line in path.read_text().splitlines(keepends=True))
            self.write(path.name, "".join(",".join(x) for x in lines if (x[0], x[3]) != (str(step), "test")))

    def warn(self, line: str) -> None:
        """Something that the reader of the report should know; each once."""
        path = self.path / "warnings.txt"
        if line not in (path.read_text().splitlines() if path.exists() else []):
            with _naming(path), path.open("a") as file:
                file.write(f"{line}\n")

    def log(self, line: str) -> None:
        """A line of log.txt."""
        with _naming(self.path / "log.txt"), (self.path / "log.txt").open("a") as file:
            file.write(f"{line}\n")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A disk that is full says so without the name of the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from None


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
