"""From a recipe to all that a run needs: what is filled in, what is refused, and that nothing is left to chance."""

import datetime
import json
import math

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import compute as pc
from pyarrow import csv
from pyarrow import parquet as pq
from small import RECIPE, WORLD, recipe, same, saved, sections, trained, write_rows

from rowwise import DataError, SpecError
from rowwise.base.errors import RowwiseError
from rowwise.base.processor import read_processor
from rowwise.models.mlp import Mlp
from rowwise.recipes.compose import make_model, make_objective, resolve
from rowwise.recipes.machine import Environment
from rowwise.recipes.outlook import dry_run, make_outlook
from rowwise.recipes.processor import replace_unsupported
from rowwise.recipes.recipe import Data
from rowwise.recipes.resolved import evaluation_batches
from rowwise.recipes.rows import use_absolute_paths
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode, parse, read, write
from rowwise.recipes.trained import evaluate

OWN = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, embeddings, dense_features, tasks, width=4):
        super().__init__()
        self.embeddings = embeddings
        self.out = nn.Linear(dense_features + 3 * 8, tasks)
        self.width = width

    def forward(self, batch):
        return self.out(torch.cat([batch.dense_BF, self.embeddings(batch.sparse).values()], 1))

class NotOne:
    pass
"""


def keys(resolved, part):
    rows = getattr(resolved.rows, part)
    return set() if rows is None else {k for batch in evaluation_batches(resolved, rows) for k in batch.keys_B.tolist()}


def resolved(folder, **changes):
    return resolve(recipe(folder, **changes))


def refused(folder, **changes):
    with pytest.raises(RowwiseError) as caught:
        dry_run(recipe(folder, **changes))
    return str(caught.value)


def test_shares_at_random(tmp_path):
    found = resolved(tmp_path)
    parts = {name: keys(found, name) for name in ("train", "valid", "test")}
    assert set.union(*parts.values()) == set(range(2000))
    assert sum(map(len, parts.values())) == 2000
    assert len(parts["valid"]) == pytest.approx(400, abs=60)
    assert len(parts["test"]) == pytest.approx(400, abs=60)
    # Of every part of the file.
    assert {key // 500 for key in parts["test"]} == {0, 1, 2, 3}


def test_shares_at_random_of_files_of_many_splits(tmp_path):
    for first in range(0, 6000, 500):
        write_rows(tmp_path / f"many-{first:04}.parquet", 500, first=first)
    found = resolved(tmp_path, data={"dataset": f"parquet:{tmp_path}/many-*.parquet"})
    assert {key // 500 for key in keys(found, "test")} == set(range(12))
    assert len(keys(found, "test")) == pytest.approx(1200, abs=100)


def test_shares_off_the_end(tmp_path):
    found = resolved(tmp_path, data={"share": "last", "valid_share": 0.25, "test_share": 0.25})
    assert keys(found, "train") == set(range(1000))
    assert keys(found, "valid") == set(range(1000, 1500))
    assert keys(found, "test") == set(range(1500, 2000))
    message = refused(tmp_path, data={"share": "last", "test_share": 0.1})
    assert "data.share=last: 4 splits are too few to take 10% as test rows: expected data.share=random" in message


BY_ROW = {"column": "row", "valid_from": 1200, "test_from": 1700}


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("borders", [("valid_from",), ("test_from",), ("valid_from", "test_from")])
def test_shares_by_time(tmp_path, kind, borders):
    """On rows that are not in their order, and pass a filter."""
    table = pq.read_table(write_rows(tmp_path / "rows.parquet"))
    mixed = table.take(np.random.default_rng(0).permutation(len(table)))
    if kind == "csv":
        table = table.drop_columns(["seen"])
        csv.write_csv(mixed.drop_columns(["seen"]), tmp_path / "mixed.csv")
    else:
        pq.write_table(mixed, tmp_path / "mixed.parquet", row_group_size=300)
    share = {"column": "row"} | {name: BY_ROW[name] for name in borders}
    data = {"dataset": f"{kind}:{tmp_path / f'mixed.{kind}'}", "share": share, "where": ["user < 25"]}
    columns = {"sparse": [{"column": name, "ids": "direct"} for name in ("user", "item")]}
    made = sections(tmp_path, columns=columns, tables={"list": RECIPE["tables"]["list"][:2]}) | {"data": data}
    found = resolve(decode(made, ""))
    kept = set(table.filter(pc.field("user") < 25)["row"].to_pylist())
    ends = [BY_ROW.get(name, 0) if name in borders else None for name in ("valid_from", "test_from")]
    begin = [end for end in ends if end is not None]
    assert keys(found, "train") == {key for key in kept if key < begin[0]}
    valid = {key for key in kept if ends[0] is not None and key >= ends[0] and (ends[1] is None or key < ends[1])}
    assert keys(found, "valid") == valid
    assert keys(found, "test") == {key for key in kept if ends[1] is not None and key >= ends[1]}


def test_shares_by_time_read_no_row_groups_of_others(tmp_path):
    found = resolved(tmp_path, data={"share": BY_ROW, "valid_share": 0.0})
    parts = (found.rows.train, found.rows.valid, found.rows.test)
    assert [len(part.reader.splits()) for part in parts] == [3, 2, 1]  # of four row groups of 500 rows


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ({"column": "row"}, "data.share: 'row' without valid_from and test_from: expected one or both"),
        (
            {"column": "row", "valid_from": 3, "test_from": 3},
            "valid_from=3 and test_from=3: expected valid_from before",
        ),
        (
            {"column": "row", "valid_from": 3, "test_from": "4"},
            "test_from='4': expected two whole numbers or two times",
        ),
        ({"column": "rom", "test_from": 3}, "rows.parquet: no column 'rom'; did you mean 'row'?"),
        (
            {"column": "row", "test_from": "May"},
            "column 'row' holds int64, but is compared with 'May': expected a whole",
        ),
        (
            {"column": "row", "test_from": 9000},
            "no row has row >= 9000; column 'row' goes from 0 to 1999: expected another",
        ),
        ({"column": "row", "valid_from": 0}, "no row has row < 0; column 'row' goes from 0 to 1999: expected another"),
    ],
)
def test_times_that_give_no_shares(tmp_path, share, message):
    said = refused(tmp_path, data={"share": share, "valid_share": 0.0})
    assert "data.share" in said
    assert message in said


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("share", "message"),
    [
        (
            {"column": "row", "test_from": 9000},
            "no row has row >= 9000; column 'row' goes from 0 to 699: expected another",
        ),
        ({"column": "row", "valid_from": 9, "test_from": 700}, "no row has row >= 700; column 'row' goes from 0 to"),
        (
            {"column": "row", "valid_from": 9, "test_from": 11},
            "no row has row >= 9 and row < 11; column 'row' goes from 0 to 699: expected another time",
        ),
        ({"column": "day", "test_from": "2030-01-01"}, "column 'day' goes from 2024-05-01 "),
    ],
)
def test_borders_that_no_row_lies_between(tmp_path, kind, share, message):
    """In a file whose statistics do not say so, as its rows are in no order, or it has none."""
    table = WORLD.rows(0, 700).drop_columns(["logit", "seen"])
    day = [datetime.datetime(2024, 5, 1) + datetime.timedelta(hours=row) for row in range(700)]
    table = table.append_column("day", pa.array(day)).filter(pc.field("row") != 9).filter(pc.field("row") != 10)
    mixed = table.take(np.random.default_rng(0).permutation(len(table)))
    path = tmp_path / f"mixed.{kind}"
    csv.write_csv(mixed, path) if kind == "csv" else pq.write_table(mixed, path)
    data = {"dataset": f"{kind}:{path}", "share": share, "valid_share": 0.0}
    columns = {"sparse": [{"column": name, "ids": "direct"} for name in ("user", "item")]}
    made = sections(tmp_path, columns=columns, tables={"list": RECIPE["tables"]["list"][:2]}) | {"data": data}
    with pytest.raises(DataError, match=r"data\.share: ") as error:
        resolve(decode(made, ""))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_shares_by_time_beside_named_rows(tmp_path):
    write_rows(tmp_path / "t.parquet", 100, first=6000)
    data = {"share": BY_ROW, "test": f"parquet:{tmp_path / 't.parquet'}"}
    message = refused(tmp_path, data=data)
    assert "data.share.test_from=1700: data.test or the dataset has test rows already: expected one" in message
    found = resolved(tmp_path, data=data | {"share": {"column": "row", "valid_from": 1200}})
    assert keys(found, "train") == set(range(1200))
    assert keys(found, "test") == set(range(6000, 6100))


def test_files_for_the_parts(tmp_path):
    write_rows(tmp_path / "v.parquet", 100, first=5000)
    write_rows(tmp_path / "t.parquet", 100, first=6000)
    data = {"valid": f"parquet:{tmp_path / 'v.parquet'}", "test": f"parquet:{tmp_path / 't.parquet'}"}
    found = resolved(tmp_path, data=data)
    assert keys(found, "train") == set(range(2000))  # shares are for what is missing only
    assert keys(found, "valid") == set(range(5000, 5100))
    assert keys(found, "test") == set(range(6000, 6100))
    # Naming rows to test on used to cost the last tenth of the others, which are often the newest.
    found = resolved(tmp_path, data={"test": data["test"], "valid_share": 0.0})
    assert keys(found, "train") == set(range(2000))
    assert keys(found, "valid") == set()


def test_columns_and_tables_are_looked_for_where_none_are_given(tmp_path):
    write_rows(tmp_path / "rows.parquet")
    plain = {"data": sections(tmp_path)["data"], "name": "small"}
    found = resolve(decode(plain, "")).recipe
    assert {s.column for s in found.columns.sparse} == {"user", "item", "seen"}
    assert {t.name for t in found.tables.list} == {"user", "item", "seen"}
    assert found.columns.labels == ("label",)
    changed = plain | {"tables": {"all": {"dim": 4}, "each": {"user": {"rows": 7}}}}
    assert {t.name: (t.rows, t.dim) for t in resolve(decode(changed, "")).tables} == {
        "user": (7, 4),
        "item": (480, 4),
        "seen": (320, 4),
    }


def test_columns_that_are_given_need_no_look(tmp_path, monkeypatch):
    """Nor a column that is called label."""
    write_rows(tmp_path / "rows.parquet", bought=lambda rows: rows["label"])
    monkeypatch.setattr("rowwise.ingest.datasets.files.inspect", None)
    found = resolved(tmp_path, columns={"labels": ["bought"]})
    assert found.tasks == ("bought",)


def test_the_label_of_the_columns_is_the_one_to_look_with(tmp_path):
    write_rows(tmp_path / "rows.parquet", bought=lambda rows: rows["label"], label=["no"] * 2000)
    found = resolved(tmp_path, columns={"labels": ["bought"]}, tables={"list": []})
    assert len(found.tables) == 3


def test_resolved_again_is_the_same(tmp_path):
    first = resolved(tmp_path, tables={"all": {"dim": 4}}, model={"bottom": [8]}).recipe
    text = write(first, defaults=True)
    again = resolve(decode(parse(text, ""), "")).recipe
    assert again == first
    assert write(again, defaults=True) == text


def test_paths_are_made_absolute(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.parquet")
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    data = {"dataset": "parquet:rows.parquet", "test": "parquet:rows.parquet"}
    found = resolve(recipe(tmp_path, data=data, model="own.py:Mine")).recipe
    assert found.data.dataset == found.data.test == f"parquet:{tmp_path}/rows.parquet"
    assert found.data.folder == "data"  # where nothing of it is looked for
    assert use_absolute_paths(Data(dataset="criteo")).folder == f"{tmp_path}/data"
    assert found.model.module == f"{tmp_path}/own.py:Mine"


def test_the_saved_recipe_makes_the_same_run(tmp_path, monkeypatch, threads):
    threads(1)
    run, result = trained(tmp_path)
    monkeypatch.chdir("/")
    again = TrainingRun.start(read(run.folder.path / "recipe.yaml"), tmp_path / "again")
    assert again.go().test == result.test
    assert again.folder.path == tmp_path / "again" / "small" / "1"
    assert same(saved(run.folder.path), saved(again.folder.path))
    assert (again.folder.path / "recipe.yaml").read_text() == (run.folder.path / "recipe.yaml").read_text()


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["dlrm", "deepfm", "dcn", "wide_deep"])
@pytest.mark.parametrize("columns", [{"labels": ["label"]}, {"labels": ["label", "other"]}, {"dense": []}])
def test_models_of_columns(tmp_path, kind, columns):
    write_rows(tmp_path / "rows.parquet", other=lambda rows: rows["label"])
    found = resolved(tmp_path, model={"kind": kind}, columns=columns)
    model = make_model(found)
    batch = next(iter(evaluation_batches(found, found.rows.train)))
    outcome = make_objective(found, model)(batch)
    assert outcome.logits_BK.shape == (len(batch.labels_BK), len(found.tasks))
    assert outcome.logits_BK.isfinite().all()
    assert outcome.loss.isfinite()
    # The first weights follow from the seed.
    assert same(model.state_dict(), make_model(found).state_dict())


def test_a_model_of_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    module = f"{tmp_path / 'own.py'}:Mine"
    run, result = trained(tmp_path, model={"kind": "own", "module": module, "args": {"width": 9}})
    assert run.model.width == 9
    assert result.test["label"]["auc"] > 0.5
    assert (run.folder.path / "code" / "own.py").read_text() == OWN
    assert resolve(decode({**sections(tmp_path), "model": module}, "")).recipe.model.module == module


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("own.py:Mime", r"own\.py has no torch module 'Mime'; it has Mine"),
        ("own.py:NotOne", r"own\.py has no torch module 'NotOne'; it has Mine"),
        ("none.py:Mine", r"none\.py: no such file"),
        ("own.py", r"'own\.py': expected path\.py:Class, or a mapping with kind: dlrm"),
        ("dlrm", r"'dlrm': expected path\.py:Class, or a mapping with kind: dlrm"),
        ("broken.py:Mine", r"broken\.py cannot be imported: "),
        ("needs.py:Mine", r"needs\.py cannot be imported: No module named 'not_there'"),
    ],
)
def test_a_model_of_ones_own_that_is_wrong(tmp_path, monkeypatch, model, message):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("class Mine(:")
    (tmp_path / "needs.py").write_text("import not_there")
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.parquet")
    with pytest.raises(SpecError, match=message):
        dry_run(decode({**sections(tmp_path), "model": model}, ""))


def test_a_model_of_ones_own_with_wrong_arguments(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    write_rows(tmp_path / "rows.parquet")
    model = {"kind": "own", "module": f"{tmp_path / 'own.py'}:Mine", "args": {"wdith": 3}}
    with pytest.raises(SpecError, match=r"keyword argument 'wdith'.*"):
        dry_run(decode({**sections(tmp_path), "model": model}, ""))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"dataset": "syntetic"}}, "no dataset 'syntetic'"),
        ({"data": {"dataset": "parquet:none.parquet"}}, "none.parquet: no such file or folder"),
        ({"data": {"dataset": "movielens-100k", "folder": "nowhere"}}, "rowwise data get movielens-100k"),
        ({"data": {"rows": 5}}, "data.rows and data.test_rows are for synthetic data"),
        ({"data": {"test": "nonsense"}}, "data.test='nonsense': expected parquet:PATH or csv:PATH, such as parquet:"),
        (
            {"data": {"valid": "nope.csv"}},
            "data.valid='nope.csv': expected parquet:PATH or csv:PATH, such as csv:nope.csv",
        ),
        ({"data": {"test": "parquet:nope"}}, "nope: no such file or folder"),
        ({"data": {"dataset": "synthetic", "rows": 0}}, "data.rows=0: expected at least 1"),
        ({"columns": {"labels": []}}, "columns.labels is empty: expected at least one label column"),
        ({"columns": {"labels": ["lable"]}}, "rows.parquet: no column 'lable'; did you mean 'label'?"),
        ({"columns": {"dense": [{"column": "d3"}]}}, "no column 'd3'; did you mean"),
        ({"columns": {"dense": [{"column": "seen"}]}}, "column 'seen' holds list<element: int64>: expected numbers"),
        (
            {"columns": {"sparse": [{"column": "d0"}]}},
            "column 'd0' has no table 'd0', and no number of rows for one: expected columns.",
        ),
        ({"columns": {"sparse": [{"column": "user", "table": "item"}]}}, "table 'item' has features item, not 'user'"),
        ({"tables": {"each": {"usr": {"rows": 3}}}}, "tables.each: no table usr: expected some of user, item, seen"),
        ({"tables": {"all": {"rows": 0}}}, "expected at least one row"),
        ({"tables": {"each": {"item": {"dim": 4}}}}, "table 'item' has dim 4: expected 8"),
        ({"train": {"task_weights": [1, 2]}}, "train.task_weights has 2 values: expected one for each of label"),
        ({"evaluate": {"metric": "acu"}}, "evaluate.metric='acu' is not measured: expected one of ne, loss, auc"),
        ({"evaluate": {"task": "y"}}, "evaluate.task='y' is not a label: expected one of label"),
        ({"evaluate": {"slices": ["usr"]}}, "evaluate.slices: no feature usr: expected some of user, item, seen"),
        ({"train": {"optimizer": {"kind": "adam", "lr": -1.0}}}, "train.optimizer.lr=-1.0: expected a finite number"),
        ({"train": {"device": "gpu"}}, "train.device='gpu': expected cpu or cuda"),
        ({"model": {"bottom": [0]}}, "model.bottom: 0 is the width of a layer"),
        ({"init_from": "nowhere"}, "nowhere is not a checkpoint"),
    ],
    ids=str,
)
def test_what_is_refused_before_anything_is_made(tmp_path, changes, message):
    write_rows(tmp_path / "rows.parquet")
    assert message in refused(tmp_path, **changes)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RowwiseError):
        TrainingRun.start(recipe(tmp_path, **changes), tmp_path / "runs")
    assert sorted(tmp_path.iterdir()) == before


def test_a_look_ahead(tmp_path):
    write_rows(tmp_path / "rows.parquet")
    # Tables that no machine could hold.
    made = recipe(tmp_path, tables={"each": {"user": {"rows": 10**11}}}, data={"valid_share": 0})
    found = dry_run(made)
    assert (found.dense, found.sparse, found.labels, found.tables) == (2, 3, ("label",), 3)
    assert found.splits == {"train": 4, "test": 4}
    assert found.largest == "user"
    assert found.rows_bytes == (10**11 + 30 + 20) * 8 * 4
    assert found.state_bytes == (10**11 + 30 + 20) * 4
    mlp = sum(p.numel() for sizes in ((2, 8, 8), (8 + 6, 8, 1)) for p in Mlp(sizes).parameters())
    assert found.dense_parameters == mlp
    assert found.dense_bytes == mlp * 4 * 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.parquet"]


def test_a_look_ahead_tells_what_a_run_takes(tmp_path):
    run = TrainingRun.start(recipe(tmp_path), tmp_path / "runs")
    assert make_outlook(run.resolved, run.model, run.plan, run.comm.topology) == dry_run(recipe(tmp_path))
    slots = [slots["sum"] for slots in run.model.embeddings.optimizer_state().values()]
    assert sum(x.numel() * 4 for x in slots) == dry_run(recipe(tmp_path)).state_bytes


def test_a_precision_that_this_processor_lacks_is_replaced_in_every_file(tmp_path):
    bf16 = {"train": {"precision": "bf16", "epochs": 1}}
    want, lines = replace_unsupported(recipe(tmp_path, **bf16).train, read_processor())
    found = dry_run(recipe(tmp_path, **bf16))
    assert (found.precision, found.notes) == (want.precision, lines)
    run, _ = trained(tmp_path, **bf16)
    assert read(run.folder.path / "recipe.yaml").train.precision == want.precision
    said = run.folder.path / "warnings.txt"
    assert (said.read_text().splitlines() if said.exists() else []) == list(lines)
    assert json.loads((run.folder.path / "env.json").read_text())["lacks"] == list(Environment.read("").lacks)
    told = []
    evaluate(run.folder.path, warn=told.append)
    assert told == []  # what was trained in fp32 is measured in fp32


def test_bf16_in_software_where_it_is_forced(tmp_path):
    bits = []
    for precision in ("fp32", "bf16_always"):
        run, _ = trained(tmp_path, train={"precision": precision, "epochs": 1, "steps": 3})
        assert read(run.folder.path / "recipe.yaml").train.precision == precision
        bits.append(saved(run.folder.path))
    assert not same(*bits)


def test_fp8_on_a_processor(tmp_path):
    """Eight bits change the weights, two runs have the same bits, and the run says that they are emulated."""
    bits = []
    wide = {"model": {"kind": "dlrm", "bottom": [16], "top": [32, 16]}}
    for precision in ("bf16_always", "fp8", "fp8"):
        run, result = trained(tmp_path, **wide, train={"precision": precision, "epochs": 1, "steps": 3})
        assert math.isfinite(result.best.value)
        bits.append(saved(run.folder.path))
    assert not same(bits[0], bits[1])
    assert same(bits[1], bits[2])
    assert "emulated" in (run.folder.path / "warnings.txt").read_text()
