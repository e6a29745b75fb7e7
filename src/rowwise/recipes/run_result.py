"""The result of a run, the content of its result.json."""

from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from rowwise.base.textfile import decode_json, read_bytes
from rowwise.ingest.quarantine import ROWS, count_quarantined, read_quarantined
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import all_gather_uneven
from rowwise.tables.spec import Value
from rowwise.train.feeding import DataWait
from rowwise.train.progress import BestEvaluation
from rowwise.train.recorder import peak_memory_bytes
from rowwise.train.stages import PhaseTime
from rowwise.train.trainer import Trainer

RESULT, BAD_ROWS = "result.json", "bad_rows"  # in the folder of a run
MAX_REASONS = 5


class RunResult(Value, frozen=True):
    """Outcome and measurements of a run."""

    status: Literal["finished", "stopped", "failed"]
    recipe: str
    run: str
    message: str | None = None
    steps: int = 0
    samples: int = 0
    epochs: int = 0
    wall_s: float = 0.0  # seconds of the last process of the run
    samples_s: float = 0.0  # while training, over the whole run
    peak_memory_bytes: int = 0
    data_wait: DataWait = DataWait()  # waiting for rows, in the last process of the run
    step: dict[str, PhaseTime] = msgspec.field(default_factory=dict)  # phases of rank 0 in the last process of the run
    workers: int | None = None  # number of workers at the end; None: trainers prepared the rows
    bad_rows: int = 0  # quarantined
    bad_reasons: tuple[str, ...] = ()  # errors of the first quarantined rows
    best: BestEvaluation | None = None
    test: dict[str, dict[str, float | None]] = msgspec.field(default_factory=dict)
    ceiling: dict[str, dict[str, float | None]] = msgspec.field(default_factory=dict)  # best possible, where known
    expected: dict[str, float] = msgspec.field(default_factory=dict)
    spread: dict[str, float] = msgspec.field(default_factory=dict)
    published: dict[str, float] = msgspec.field(default_factory=dict)  # published results on the same split


def peak_of_ranks(comm: Comm) -> int:
    """Largest peak memory of a rank, in bytes; a collective."""
    return max(map(int, all_gather_uneven(comm, torch.tensor([peak_memory_bytes()]), "memory")))


def measured_fields(trainer: Trainer, run: Path) -> dict[str, Any]:
    """Fields of the result: peak memory, waiting for data, workers and quarantined rows."""
    health, (bad_rows, reasons) = trainer.job.health(), find_bad_rows(run / BAD_ROWS)
    workers = None if health is None else health.workers
    rows = {"workers": workers, "bad_rows": bad_rows, "bad_reasons": reasons}
    return {"peak_memory_bytes": peak_memory_bytes(), "data_wait": trainer.data_wait, "step": trainer.mean_step, **rows}


def find_bad_rows(folder: Path) -> tuple[int, tuple[str, ...]]:
    """The number of quarantined rows, and reasons for the first ones, each with the row's position in the data.

    Rows of unreadable splits count if their number is known. The folder exists only if rows were quarantined.
    """
    counts = count_quarantined(folder)
    reasons = [f"{split.source}: {split.error}" for split in counts.unread[:MAX_REASONS]]
    for path in sorted(folder.glob(f"*{ROWS}")):
        if len(reasons) >= MAX_REASONS:
            break
        table = read_quarantined(path).slice(0, MAX_REASONS - len(reasons))
        reasons += [f"{row['_place']}: {row['_reason']}" for row in table.to_pylist()]
    return counts.rows + sum(split.rows or 0 for split in counts.unread), tuple(reasons)


def finished_step(path: Path) -> int | None:
    """The last step of a run that result.json calls finished; None for other runs."""
    try:
        result = decode_json(read_bytes(path / RESULT), RunResult)
    except (OSError, msgspec.DecodeError):
        return None
    return result.steps if result.status == "finished" else None
