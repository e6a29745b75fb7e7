"""Errors that users meet, as they read them: `golden/errors.txt`, which is read as prose. Elsewhere tests match names.

`python tests/test_error_lines.py` prints the list anew.
"""

import contextlib
import io
import os
import pickle
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import typer
from launching import write_recipe
from pyarrow import parquet as pq

import rowwise as rw
from rowwise.base.errors import AgreedError, RowwiseError, SpecError, StoreError
from rowwise.cli.main import make_app

LIST = Path(__file__).parent / "golden" / "errors.txt"
USER, ITEM = rw.Table(name="user", rows=10, dim=8), rw.Table(name="item", rows=4, dim=8, features=("seen",))


def embeddings(*tables):
    return rw.Embeddings(tables or (USER, ITEM))


def batch(user=(3,), seen=((1,),)):
    return rw.Jagged.from_lists({"user": [[one] for one in user], "seen": [list(one) for one in seen]})


def backward_of_nan():
    module = embeddings()
    (module(batch()).matrix_BS.sum() * float("nan")).backward()
    module.update()


def plan(*tiles, world=2):
    rw.Plan(world=world, tiles=tiles).validate([USER])


def tile(rows, cols=(0, 8), rank=0):
    return rw.Tile(table="user", rank=rank, rows=rows, cols=cols)


IN_PYTHON = (
    lambda: rw.Table(name="user", rows=0, dim=3),
    lambda: rw.Table(name="user", rows=9, dim=8, optimizer=rw.RowWiseAdagrad(lr=-1)),
    lambda: rw.Table(name="user", rows=9, dim=8, optimizer=rw.Adam(beta1=1.5)),
    lambda: embeddings(USER, USER),
    lambda: embeddings()(batch(user=(10,))),
    lambda: embeddings()(batch(user=(-2,))),
    lambda: embeddings()(rw.Jagged.from_lists({"user": [[1]]})),
    lambda: rw.Jagged.from_lists({"user": [[1], [2]], "seen": [[1]]}),
    lambda: rw.Jagged(features=("user",), values_N=torch.ones(2), lengths_FB=torch.ones(2, dtype=torch.int64)),
    backward_of_nan,
    lambda: plan(tile((0, 5))),
    lambda: plan(tile((0, 6)), tile((5, 10), rank=1)),
    lambda: plan(tile((0, 10), (0, 3)), tile((0, 10), (3, 8), rank=1)),
    lambda: plan(tile((0, 10), rank=5)),
)
COMMANDS = (
    "train none.yaml",
    "train small.yaml --set train.batch=0",
    "train small.yaml --set train.bach=9",
    "train small.yaml --set model.kind=dcm",
    "train small.yaml --set columns.labels=[lable]",
    "train small.yaml --set evaluate.metric=acc",
    "train small.yaml --set evaluate.patience=0",
    "train small.yaml --set tables.each.usr.rows=100",
    "train small.yaml --set data.test_share=1.5",
    "train small.yaml --set plan=none.json",
    "train small.yaml --set init_from=none",
    "train small.yaml --nproc 0",
    "train small.yaml --on moon",
    "train small.yaml --run mine --runs all",
    "train small.yaml --nodes 2",
    "train odd.yaml",
    "train twice.yaml",
    "resume runs/none",
    "eval runs/none",
    "predict runs/none --data csv:rows.csv --out p.parquet",
    "export runs/none v",
    "serve none",
    "report runs/none",
    "ckpt ls none",
    "ckpt export none --torch x.pt",
    "data inspect none.csv",
    "data inspect uneven.csv",
    "data inspect empty.csv",
    "data inspect rows.csv",
    "data inspect rows.csv --label lable",
    "data inspect cut.parquet --label a",
    "plan --tables none.csv --topology 8xa100-like",
    "plan --tables tables.csv --topology 8xmoon",
    "plan --tables huge.csv --topology 8xa100-like --batch 1024",
    "plan --tables tables.csv --topology 8xa100-like --method best",
    "compress none.yaml",
    "compress none.yaml --ratio 4",
    "bench none",
)


def errors(folder):
    """Each of them, with the folder that it names replaced."""
    write_recipe(folder)
    text = (folder / "small.yaml").read_text()
    (folder / "odd.yaml").write_text("train: [1\n")
    (folder / "twice.yaml").write_text(text + "\ntrain: {batch: 8}\n")
    (folder / "rows.csv").write_text("a,b\n1,2\n3,4\n")
    (folder / "uneven.csv").write_text("a,b\n1,2\n1,2,3\n")
    (folder / "empty.csv").write_text("")
    (folder / "tables.csv").write_text("name,rows,dim,pooling\nuser,1000,16,1\n")
    (folder / "huge.csv").write_text("name,rows,dim,pooling\nuser,90000000000000,16,1\n")
    pq.write_table(pa.table({"a": np.arange(9)}), folder / "whole.parquet")
    (folder / "cut.parquet").write_bytes((folder / "whole.parquet").read_bytes()[:100])
    before = Path.cwd()
    os.chdir(folder)
    try:
        for number, call in enumerate(IN_PYTHON):
            try:
                call()
            except RowwiseError as error:
                yield f"{type(error).__name__}: {error}"
            else:
                raise AssertionError(f"call {number} raises nothing")
        app = typer.main.get_command(make_app())
        for words in COMMANDS:
            err = io.StringIO()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err), pytest.raises(SystemExit):
                app(words.split())
            yield f"rowwise {words}\n    {err.getvalue().strip()}"
    finally:
        os.chdir(before)


def lines(folder):
    cleared = (one.replace(str(folder), "FOLDER") for one in errors(folder))
    return [re.sub(r"\b[\d.]+ (GB|MB|TB)\b", r"N \1", one) for one in cleared]


def test_errors_read_as_they_did(tmp_path):
    assert lines(tmp_path) == LIST.read_text().strip().split("\n\n")


def test_an_error_has_its_parts_wherever_it_goes():
    error = SpecError("table 'user': rows=0", "at least 1", hint="remove it")
    assert str(error) == "table 'user': rows=0: expected at least 1; remove it"
    assert str(StoreError("disk full", hint="free some")) == "disk full; free some"
    again = pickle.loads(pickle.dumps(error))
    assert (again.problem, again.expected, again.hint) == ("table 'user': rows=0", "at least 1", "remove it")
    assert pickle.loads(pickle.dumps(AgreedError("rank 1", frozenset({"IdError"})))).kinds == {"IdError"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.stdout.write("\n\n".join(lines(Path(made))) + "\n")
