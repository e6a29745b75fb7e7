"""What models are made of travels with a version: files of code and id maps, tables of all kinds, transforms."""

import os
import shutil

import numpy as np
import pytest
from pyarrow import parquet as pq
from small import RECIPE, WORLD, trained

from rowwise import RowType, SpecError
from rowwise.recipes.ensemble import predict_ensemble
from rowwise.recipes.export import export
from rowwise.recipes.served import load_rows, open_version, read_model
from rowwise.recipes.trained import predict_rows
from rowwise.serve.row_tiers import IN_MEMORY
from rowwise.tables.ids.arrays import entry_map
from rowwise.tables.ids.file import save

OWN_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, embeddings, dense, tasks):
        super().__init__()
        self.embeddings = embeddings
        self.top = nn.Linear(dense + sum(t.dim for t in embeddings.tables), tasks)

    def forward(self, batch):
        vectors = self.embeddings(batch.sparse).values()
        return self.top(torch.cat([batch.dense_BF - batch.dense_BF.mean(0), vectors], 1))
"""
OWN_TRANSFORM = """
import pyarrow as pa

def twice(d0):
    return pa.array([None if x is None else 2 * x for x in d0.to_pylist()], pa.float32())
"""


def same_predictions(run, folder, tmp_path, **options):
    """Whether a version of the run predicts what the run does."""
    told = []
    version = export(run.folder.path, folder, warn=told.append, **options)
    pq.write_table(WORLD.rows(90_000, 50).drop_columns(["label", "logit"]), tmp_path / "new.parquet")
    data = f"parquet:{tmp_path / 'new.parquet'}"
    predict_rows(run.folder.path, tmp_path / "p.parquet", data=data)
    predict_ensemble([folder], tmp_path / "q.parquet", data=data)
    return version, told, pq.read_table(tmp_path / "p.parquet").equals(pq.read_table(tmp_path / "q.parquet"))


def test_code_and_maps_are_inside(tmp_path):
    away = tmp_path / "away"
    away.mkdir()
    (away / "net.py").write_text(OWN_MODEL)
    (away / "steps.py").write_text(OWN_TRANSFORM)
    save(away / "user.map", "user", entry_map(50, np.arange(50) % 7, 7))
    run, _ = trained(
        tmp_path,
        model=f"{away / 'net.py'}:Net",
        tables={"each": {"user": {"id_map": {"kind": "stored", "file": str(away / "user.map")}}}},
        transforms=[{"kind": "own", "function": f"{away / 'steps.py'}:twice", "to": ["d0"]}],
        train={"epochs": 1},
    )
    version, told, same = same_predictions(run, tmp_path / "models", tmp_path)
    assert same
    assert told == ["each row is computed alone, as its logits depend on the rows beside it"]
    shutil.rmtree(away)
    served = read_model(version.folder.path)
    assert served.code[0] == f"{version.folder.path.absolute()}/code/net.py:Net"
    opened = open_version(tmp_path / "models")
    assert opened.identity == "exact"
    assert opened.forward.blocks.kind == "alone"
    assert opened.digest == version.digest == version.folder.digest  # running its code has written nothing


@pytest.mark.slow
def test_versions_of_another_model_are_not_added(tmp_path):
    first, _ = trained(tmp_path, name="one", train={"epochs": 1})
    export(first.folder.path, tmp_path / "models")
    run, _ = trained(tmp_path, name="other", train={"epochs": 1})
    with pytest.raises(SpecError, match=r"'one', and .* trained"):
        export(run.folder.path, tmp_path / "models")
    assert len(list((tmp_path / "models/versions").iterdir())) == 1
    with pytest.raises(SpecError, match="folder for versions"):
        export(run.folder.path, tmp_path / "rows.parquet")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"kind": "wide_deep", "deep": [8]}},
        {"model": {"kind": "mmoe", "experts": 2, "expert_sizes": [8], "tower": [4]}},
        {"tables": {"list": [], "all": {"dim": 8, "managed": {}, "rows": 64}}},
    ],
    ids=["wide_deep", "mmoe", "managed"],
)
def test_tables_of_all_kinds_travel(tmp_path, changes):
    sparse = [{"column": one["column"]} for one in RECIPE["columns"]["sparse"]]
    columns = {"columns": {"sparse": sparse}} if "tables" in changes else {}
    run, _ = trained(tmp_path, **changes, **columns, train={"epochs": 1})
    _, told, same = same_predictions(run, tmp_path / "models", tmp_path)
    assert (told, same) == ([], True)
    version, _, _ = same_predictions(run, tmp_path / "small", tmp_path, rows=RowType.INT4)
    assert open_version(tmp_path / "small").identity == "exact"
    for folder in ("models", "small"):
        file = os.memfd_create("rows")
        shared = load_rows(tmp_path / folder, IN_MEMORY, 1, file, None, None)
        assert open_version(tmp_path / folder, number=1, rows=shared).identity == "exact"
        os.close(file)
    kinds = {table.row_type for table in version.served.parts.tables}
    assert kinds == {RowType.INT4}
