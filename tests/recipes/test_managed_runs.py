"""Runs with managed tables: on one rank and several, saved, continued, predicted with, and what their folder has."""

import csv

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq
from small import recipe, same, saved, sections, tensors, train_on_ranks, write_rows

from rowwise import CheckpointError, DataError, ManagedEmbeddings, Plan, SpecError
from rowwise.base.errors import TableMemoryError
from rowwise.checkpoint.export import export_parquet, export_torch, own_names, torchrec_names
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.rewrite import retype_tables, rewrite
from rowwise.parallel.comm.thread import run_threads
from rowwise.planning.planner import row_wise
from rowwise.recipes.compose import resolve
from rowwise.recipes.outlook import dry_run
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.sharding import tables_of
from rowwise.recipes.text import decode
from rowwise.recipes.trained import load_trained, predict_rows
from rowwise.train.saved import CheckpointFolder

pytestmark = pytest.mark.usefixtures("models_one_after_the_other")

MANAGED = {"user": {"admit": 2, "evict": "lfu"}, "seen": {"ttl_steps": 6}}
ROWS = {"user": 200, "seen": 130}
IDS = 900


def far_ids(table):
    """Users whose head moves, as 64-bit ids of both signs."""
    draws = np.random.default_rng(0)
    count = table.num_rows
    drifting = (IDS * draws.random(count) ** 3 + np.arange(count) / 8).astype(np.uint64)
    return pa.array((drifting * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))


def managed_recipe(folder, managed=MANAGED, rows=ROWS, **changes):
    made = sections(folder, **changes)
    tables = [dict(table) for table in made["tables"]["list"]]
    for table in tables:
        if table["name"] in managed:
            table |= {"managed": managed[table["name"]], "rows": rows[table["name"]]}
    made["tables"] = {"list": tables}
    if not (folder / "rows.parquet").exists():
        write_rows(folder / "rows.parquet", user=far_ids)
    return decode(made, "small.yaml")


def train(folder, **changes):
    run = TrainingRun.start(managed_recipe(folder, **changes), folder / "runs")
    return run, run.go()


def lines_of(run, name):
    return list(csv.DictReader((run / name).read_text().splitlines()))


def evicted(run, table="user"):
    return lines_of(run, f"evicted_ids.{table}.csv")


def test_a_run_learns_and_is_continued_exactly(tmp_path):
    whole, result = train(tmp_path, train={"epochs": 3}, save={"every": 5})
    half, _ = train(tmp_path, train={"epochs": 1})
    again = TrainingRun.resume(half.folder.path, ["train.epochs=3"])
    again.go()
    assert result.test["label"]["auc"] > 0.5
    assert same(saved(whole.folder.path), saved(half.folder.path))
    assert evicted(whole.folder.path) == evicted(half.folder.path) != []
    user = [row for row in lines_of(whole.folder.path, "managed.csv") if row["table"] == "user"][-1]
    assert int(user["admitted"]) - int(user["evicted"]) == int(user["in_use"]) <= int(user["rows"])
    assert int(user["evicted"]) == len(evicted(whole.folder.path))
    given = set(pq.read_table(tmp_path / "rows.parquet")["user"].to_pylist())
    assert {int(row["id"]) for row in evicted(whole.folder.path)} <= given


def test_predictions_do_not_change_the_map(tmp_path):
    run, _ = train(tmp_path)
    _, model = load_trained(run.folder.path)
    (module,) = (m for m in model.modules() if isinstance(m, ManagedEmbeddings))
    trained_ids = run.model.state_dict()["embeddings.ids.user"]
    assert torch.equal(module.state_dict()["ids.user"], trained_ids)
    assert (trained_ids != -1).any()
    assert predict_rows(run.folder.path, tmp_path / "p.parquet") == predict_rows(
        run.folder.path, tmp_path / "q.parquet"
    )
    assert pq.read_table(tmp_path / "p.parquet").equals(pq.read_table(tmp_path / "q.parquet"))


@pytest.mark.slow
def test_elastic_runs_have_the_same_bits_and_continue_on_fewer_ranks(tmp_path):
    how = {"batch": 1024, "epochs": 2, "determinism": "elastic", "virtual_shards": 4}
    alone, _ = train(tmp_path, train=how)
    stored = tables_of(alone.model)

    def plan_for(world):
        tiles = [tile for table in stored for tile in row_wise(table, range(world if table.rows > 9 else 1))]
        file = tmp_path / f"plan{world}.json"
        file.write_text(Plan(world=world, tiles=tuple(tiles)).to_json())
        return str(file)

    for world in (2, 4):
        changes = {"train": how, "plan": plan_for(world)}
        path = train_on_ranks(world, managed_recipe(tmp_path, **changes), tmp_path / "runs")[0][1]
        assert same(tensors(path), tensors(alone.folder.path))
        assert sorted(map(str, evicted(alone.folder.path))) == sorted(map(str, evicted(path)))
    more = TrainingRun.resume(alone.folder.path, ["train.epochs=3"])
    more.go()
    changes = ["train.epochs=3", f"plan={plan_for(2)}"]
    run_threads(2, lambda comm: TrainingRun.resume(path, changes, comm=comm).go(), timeout_s=120)
    assert same(tensors(path), tensors(alone.folder.path))


def test_a_checkpoint_is_resharded_and_exported_with_its_ids(tmp_path):
    run, _ = train(tmp_path, train={"epochs": 1})
    checkpoint = CheckpointFolder(run.folder.path / "ckpt").open()
    tables = retype_tables(checkpoint, None, {})
    tiles = [tile for table in tables.values() for tile in row_wise(table, range(3 if table.rows > 9 else 1))]
    for state in (True, False):
        out = tmp_path / f"out{state}"
        rewrite(checkpoint, out, Plan(world=3, tiles=tuple(tiles)), tables, state=state, tell=None)
        ids = Checkpoint.open(out).load("rows/embeddings.stored.user/id")
        assert torch.equal(ids, checkpoint.load("rows/embeddings.stored.user/id"))
    (file,) = export_parquet(checkpoint, tmp_path / "parquet", ["user"], state=True)
    table, rows = pq.read_table(file), (ids != -1).nonzero().flatten()
    assert table["id"].to_pylist() == ids[rows].tolist()
    vectors = checkpoint.load("model/embeddings.stored.user")[rows]
    assert np.array_equal(np.array(table["vector"].to_pylist(), np.float32), vectors.numpy())
    export_torch(checkpoint, tmp_path / "m.pt", own_names(checkpoint))
    _, model = load_trained(run.folder.path)
    model.load_state_dict(torch.load(tmp_path / "m.pt"))
    with pytest.raises(CheckpointError, match="table 'user' is managed"):
        torchrec_names(checkpoint, ["user"])


def test_columns_name_their_policy(tmp_path):
    columns = {"sparse": [{"column": "user", "ids": "direct", "rows": 200, "dim": 4, "managed": {"admit": 3}}]}
    write_rows(tmp_path / "rows.parquet", user=far_ids)
    made = recipe(tmp_path, columns=columns, tables={"list": []}, model={"kind": "wide_deep", "deep": [4]})
    (table,) = resolve(made).tables
    assert table.managed.admit == 3
    assert table.rows == 200  # in two buckets
    run = TrainingRun.start(made, tmp_path / "runs")
    run.go()
    assert {t.name for t in tables_of(run.model)} == {"user", "user_wide"}
    assert dry_run(made).rows == 200


def test_hashed_text_is_62_bits(tmp_path):
    names = pa.array([f"name {k % 700}" for k in range(2000)])
    write_rows(tmp_path / "rows.parquet", user=lambda table: names)
    sparse = {"column": "user", "rows": 200, "dim": 4, "managed": {}}
    made = recipe(tmp_path, columns={"sparse": [sparse]}, tables={"list": []}, model={"kind": "deepfm", "deep": [4]})
    run = TrainingRun.start(made, tmp_path / "runs")
    run.go()
    ids = next(x for name, x in run.model.state_dict().items() if name.endswith("ids.user"))
    assert int(ids.max()) > 1 << 55
    assert int(ids.min()) == -1


def test_too_little_memory_asks_for_fewer_rows(tmp_path):
    made = managed_recipe(tmp_path, rows={"user": 300_000, "seen": 200_000}, memory="5MB", disk=None)
    with pytest.raises(TableMemoryError, match=r"table .*; or ranks") as caught:
        TrainingRun.start(made, tmp_path / "runs")
    assert "compress" not in str(caught.value)


def test_what_columns_refuse(tmp_path):
    write_rows(tmp_path / "rows.parquet", user=far_ids)
    sparse = {"column": "user", "vocabulary": "v.txt", "managed": {}}
    with pytest.raises(SpecError, match="'user': managed"):
        recipe(tmp_path, columns={"sparse": [sparse]})
    with pytest.raises(SpecError, match="evict"):
        managed_recipe(tmp_path, {"user": {"evict": "fifo"}})
    with pytest.raises(DataError, match="0 to 49"):
        train(tmp_path, managed={})


@pytest.mark.slow
def test_increments_have_the_ids_that_changed(tmp_path):
    """Many rows, of which a step changes a few: then checkpoints are increments, with the bits of full ones."""
    policy, folders = {"user": {"admit": 2, "evict": "lfu", "ttl_steps": 30}}, []
    for incremental in (True, False):
        changes = {"train": {"batch": 16, "epochs": 2}, "save": {"every": 5, "incremental": incremental, "keep": 4}}
        made = managed_recipe(tmp_path, policy, {"user": 6000}, **changes)
        run = TrainingRun.start(made, tmp_path / "runs")
        run.go()
        folders.append(run.folder.path)
    assert len(CheckpointFolder(folders[0] / "ckpt").open().manifest.chain_bytes) > 1
    assert same(*(tensors(folder, state=False) for folder in folders))
    assert evicted(folders[0]) == evicted(folders[1]) != []


def test_ids_are_not_quantised(tmp_path):
    run, _ = train(tmp_path, train={"epochs": 1}, save={"bits": 8})
    saved_ids = CheckpointFolder(run.folder.path / "ckpt").open().load("rows/embeddings.stored.user/id")
    assert torch.equal(saved_ids, run.model.state_dict()["embeddings.ids.user"])
