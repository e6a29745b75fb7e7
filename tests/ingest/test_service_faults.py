"""Rows count exactly once, whoever is killed: workers, their host, or the trainer itself, a hundred times in a run."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from launching import is_there
from pyarrow import parquet as pq
from test_service import children_of

from rowwise import Table
from rowwise.ingest import Batcher, Batching, Columns, Dense, ParquetReader, Position, Sparse
from rowwise.ingest.batcher import EncodedSplit
from rowwise.ingest.service.local import Service, Workers

COLUMNS = Columns(labels=("label",), dense=(Dense(column="x"),), sparse=(Sparse(column="id"),), key="row")
TABLES = (Table(name="id", rows=1000, dim=4),)
ROWS, FILES, EPOCHS = 6000, 3, 2
VICTIMS = {"trainer": 10, "host": 25, "worker": 65}
CALM = "calm"
STEP_S, DEADLINE_S = 0.25, 900  # steps take long until all kills are done
STEPS, BATCH = 480, 25
LAST = STEPS - 40  # steps that wait until all kills are done


class Line(msgspec.Struct):
    """What a trainer has written down: where it stands after a step, and the rows of the step."""

    position: Position
    rows: list[int]


class Patient(Workers, frozen=True):
    """Workers that are lost again and again are no fault of a split here, nor of how they are started."""

    def service_config(self, clients, splits):
        return msgspec.structs.replace(Workers.service_config(self, clients, splits), attempts=1000)


def batches(folder, position=None):
    return Batcher(ParquetReader(folder), COLUMNS, TABLES, Batching(size=BATCH, seed=5), position)


def train(folder, saved, workers):
    """The trainer, a process of its own: steps until all epochs are done, each written down before the next begins."""
    calm = Path(saved).with_name(CALM)
    with open(saved, "ab+") as file:
        file.seek(0)
        whole = file.read().rpartition(b"\n")[0].splitlines()
        file.truncate(sum(len(line) + 1 for line in whole))  # a line that was cut by a kill does not count
        position, steps = msgspec.json.decode(whole[-1], type=Line).position if whole else None, len(whole)
        made = batches(folder, position)
        with Service(made.task, Patient(count=int(workers))) as service:
            client = service.client()
            made.use_splits(lambda epoch, at: map(EncodedSplit, client.splits(epoch, at, made.splits)))
            while made.state().epoch < EPOCHS:
                for batch in made:
                    line = Line(position=made.state(), rows=batch.keys_B.tolist())
                    file.write(msgspec.json.encode(line) + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                    steps += 1
                    time.sleep(0 if calm.exists() else STEP_S)
                    while steps > LAST and not calm.exists():
                        time.sleep(STEP_S)


def started(folder, saved, workers):
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_service_faults as t; t.train(*sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen([sys.executable, "-c", code, str(folder), str(saved), str(workers)], env=environment)


def those_there(trainer):
    """The processes of each kind."""
    hosts = children_of(trainer.pid)
    return {"trainer": [trainer.pid], "host": hosts, "worker": [w for host in hosts for w in children_of(host)]}


def write_files(folder):
    for index in range(FILES):
        rows = np.arange(index * 2000, (index + 1) * 2000)
        table = pa.table({"row": rows, "label": rows % 2, "x": rows / 2, "id": rows * 7})
        pq.write_table(table, folder / f"{index}.parquet", row_group_size=130)


def victims(draw):
    kinds = [kind for kind, count in VICTIMS.items() for _ in range(count)]
    draw.shuffle(kinds)
    return kinds


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(DEADLINE_S + 60)
def test_every_row_counts_once_however_often_somebody_is_killed(tmp_path):
    write_files(tmp_path)
    undisturbed, expected = batches(tmp_path), []
    for _ in range(EPOCHS):
        expected += [batch.keys_B.tolist() for batch in undisturbed]
    draw, seen = random.Random(7), set()
    saved, workers, end_s = tmp_path / "steps", 1, time.monotonic() + DEADLINE_S
    trainer = started(tmp_path, saved, workers)
    try:
        for kind in victims(draw):
            pids = []
            while not pids:
                assert time.monotonic() < end_s
                assert trainer.poll() is None, "it ended before all kills were done"
                there = those_there(trainer)
                seen |= {*there["host"], *there["worker"]}
                # The trainer itself is killed once it has others to leave behind.
                pids = there[kind] if there["worker"] or kind != "trainer" else []
                time.sleep(0.01)
            time.sleep(draw.uniform(0.0, 0.2))
            with suppress(ProcessLookupError):
                os.kill(draw.choice(pids), signal.SIGKILL)
            if kind == "trainer":
                assert trainer.wait() == -signal.SIGKILL
                workers = workers % 4 + 1
                trainer = started(tmp_path, saved, workers)
        (tmp_path / CALM).touch()
        assert trainer.wait(max(end_s - time.monotonic(), 1)) == 0
    finally:
        trainer.kill()
        trainer.wait()
    lines = [msgspec.json.decode(line, type=Line) for line in saved.read_bytes().splitlines()]
    assert [line.rows for line in lines] == expected
    assert len(lines) == STEPS
    assert sorted(row for line in lines for row in line.rows) == sorted([*range(ROWS)] * EPOCHS)
    while any(map(is_there, seen)):
        assert time.monotonic() < end_s + 30
        time.sleep(0.05)
