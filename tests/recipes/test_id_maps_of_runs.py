"""Runs whose tables have id maps: on one rank and several, saved, gone on with, predicted with; and what is refused."""

import shutil

import numpy as np
import pytest
import torch
from pyarrow import parquet as pq
from small import same, saved, sections, train_on_ranks, write_rows
from tables.ids.maps import make_maps

from rowwise import CheckpointError, Plan, SpecError
from rowwise.checkpoint.rewrite import retype_tables, rewrite
from rowwise.planning.planner import row_wise, table_wise
from rowwise.planning.planner.machines import machine_named
from rowwise.recipes.compose import resolve
from rowwise.recipes.outlook import dry_run
from rowwise.recipes.plan import plan_inputs
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.sharding import tables_of
from rowwise.recipes.text import decode
from rowwise.recipes.trained import load_trained, predict_rows
from rowwise.tables.ids.arrays import entry_map, make_folds
from rowwise.tables.ids.embeddings import MappedEmbeddings
from rowwise.tables.ids.file import save
from rowwise.train.saved import CheckpointFolder

IDS = {"user": 50, "item": 30, "seen": 20}
HASH = {"kind": "hash", "rows": 9, "seed": 1}
FOLDS, SEED = 3, 5


pytestmark = pytest.mark.usefixtures("models_one_after_the_other")


def learned(ids, rows=6, seed=0):
    """A map with folds, as learned ones are."""
    generator = np.random.default_rng(seed)
    one, *others = (entry_map(ids, generator.integers(0, rows, ids), rows) for _ in range(1 + FOLDS))
    return make_folds(one, others, ("user", "item", "seen"), SEED)


def with_maps(folder, maps, **changes):
    """The small recipe with maps: rules as they are, others as files."""
    made = sections(folder, **changes)
    tables = [dict(table) for table in made["tables"]["list"]]
    for table in tables:
        one = maps.get(table["name"])
        if one is not None and not isinstance(one, dict):
            file = folder / f"{table['name']}.idmap"
            save(file, table["name"], one)
            one = {"kind": "stored", "file": str(file)}
        if one is not None:
            table["id_map"] = one
    made["tables"] = {"list": tables}
    if not (folder / "rows.parquet").exists():
        write_rows(folder / "rows.parquet")
    return decode(made, "small.yaml")


MAPS = {"user": HASH, "item": learned(30), "seen": make_maps(20)["mixed"]}


def run_of(folder, maps=MAPS, **changes):
    run = TrainingRun.start(with_maps(folder, maps, **changes), folder / "runs")
    return run, run.go()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("model", [{"kind": "dlrm", "bottom": [8], "top": [8]}, {"kind": "wide_deep", "deep": [8]}])
def test_a_run_with_maps_learns_and_is_the_same_twice(tmp_path, model):
    """Wide parts, whose tables are of single weights, have the maps as well."""
    first, result = run_of(tmp_path, model=model)
    again, _ = run_of(tmp_path, model=model)
    assert result.test["label"]["auc"] > 0.6
    assert same(saved(first.folder.path), saved(again.folder.path))
    names = {table.name: table.rows for table in tables_of(first.model)}
    assert names["user"] == 9
    assert names["item"] == 6
    assert ("user_wide" in names) == (model["kind"] == "wide_deep")
    assert names.get("user_wide", 9) == 9


@pytest.mark.slow
def test_a_run_keeps_its_maps_and_goes_on_without_the_files(tmp_path):
    whole, _ = run_of(tmp_path)
    half, _ = run_of(tmp_path, train={"epochs": 1})
    for file in tmp_path.glob("*.idmap"):
        file.unlink()
    moved = tmp_path / "elsewhere"
    shutil.move(half.folder.path, moved)
    again = TrainingRun.resume(moved, ["train.epochs=2"])
    again.go()
    assert same(saved(whole.folder.path), saved(moved))
    assert predict_rows(moved, tmp_path / "p.parquet") == predict_rows(whole.folder.path, tmp_path / "q.parquet")
    assert pq.read_table(tmp_path / "p.parquet").equals(pq.read_table(tmp_path / "q.parquet"))


@pytest.mark.slow
def test_what_is_served_is_the_map_of_all_samples(tmp_path):
    """Maps of folds are for training: predictions are those of the one map, and of the rows that were trained."""
    run, result = run_of(tmp_path, {"item": learned(30)})
    _, model = load_trained(run.folder.path)
    (module,) = (m for m in model.modules() if isinstance(m, MappedEmbeddings))
    rows_N = module.mapped["item"].look_up_rows(torch.arange(30))[:, 0]
    assert torch.equal(module.weights("item"), module.stored.weights("item")[rows_N])
    assert result.test["label"]["count"] > 0
    model.eval()
    weights = [module.mapped["item"].get_buffer(f"words_{k}") for k in range(FOLDS)]
    before = predict_rows(run.folder.path, tmp_path / "p.parquet")
    assert len(weights) == FOLDS
    assert before == result.test["label"]["count"]


@pytest.mark.slow
@pytest.mark.parametrize("determinism", ["run", "elastic"])
def test_rows_cut_among_four_ranks_are_rows_on_one(tmp_path, determinism):
    """Elastic training gives the same bits; the default gives sums in another order."""
    how = {"batch": 1024, "epochs": 2, "determinism": determinism}
    how |= {"virtual_shards": 4} if determinism == "elastic" else {}
    alone, _ = run_of(tmp_path, train=how)
    stored = {table.name: table for table in tables_of(alone.model)}
    tiles = [
        t
        for name, table in stored.items()
        for t in (row_wise(table, range(4)) if table.rows > 4 else table_wise(table, 1))
    ]
    (tmp_path / "plan.json").write_text(Plan(world=4, tiles=tuple(tiles)).to_json())
    made = with_maps(tmp_path, MAPS, train=how, plan=str(tmp_path / "plan.json"))
    paths = [path for _, path in train_on_ranks(4, made, tmp_path / "ranks")]
    mine, theirs = load_trained(alone.folder.path)[1], load_trained(paths[0])[1]
    for name, tensor in mine.state_dict().items():
        other = theirs.state_dict()[name]
        if determinism == "elastic" or not tensor.is_floating_point():
            assert torch.equal(tensor, other), name
        else:
            assert torch.allclose(tensor, other, atol=1e-4), name
    # What four ranks have saved, one goes on with, and the other way round.
    again = TrainingRun.resume(paths[0], ["train.epochs=3", "plan=null"])
    again.go()
    assert again.trainer.progress.finished


@pytest.mark.slow
def test_a_checkpoint_with_a_map_is_resharded(tmp_path):
    """Written anew as three ranks would have, it has the map, and is what a model starts from."""
    run, _ = run_of(tmp_path)
    checkpoint = CheckpointFolder(run.folder.path / "ckpt").open()
    tables = retype_tables(checkpoint, None, {})
    tiles = [tile for table in tables.values() for tile in row_wise(table, range(3 if table.rows > 3 else 1))]
    rewrite(checkpoint, tmp_path / "out", Plan(world=3, tiles=tuple(tiles)), tables, state=True, tell=None)
    warm = TrainingRun.start(with_maps(tmp_path, MAPS, init_from=str(tmp_path / "out")), tmp_path / "runs")
    assert not warm.match.skipped
    assert not warm.match.new
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, warm.model.state_dict()[name]), name


def test_another_map_is_refused_by_name(tmp_path):
    run, _ = run_of(tmp_path, {"user": HASH})
    start = str(run.folder.path)
    with pytest.raises(CheckpointError, match="1 saved and 2"):
        TrainingRun.start(with_maps(tmp_path, {"user": HASH | {"seed": 2}}, init_from=start), tmp_path / "runs")
    with pytest.raises(CheckpointError, match=r"id map: .*method 'hash'"):
        TrainingRun.start(with_maps(tmp_path, {"user": learned(50)}, init_from=start), tmp_path / "runs")
    with pytest.raises(CheckpointError, match="table 'user' was trained"):
        TrainingRun.start(with_maps(tmp_path, {"item": HASH}, init_from=start), tmp_path / "runs")
    with pytest.raises(CheckpointError, match="table 'item' was trained"):
        TrainingRun.start(with_maps(tmp_path, {"user": HASH, "item": HASH}, init_from=start), tmp_path / "runs")
    warm = TrainingRun.start(with_maps(tmp_path, {"user": HASH}, init_from=start), tmp_path / "runs")
    assert "model/embeddings.stored.user" in warm.match.loaded


def test_the_map_of_another_table_or_size_is_refused_by_name(tmp_path):
    save(tmp_path / "user.idmap", "user", learned(50))
    rule = {"kind": "stored", "file": str(tmp_path / "user.idmap")}
    with pytest.raises(SpecError, match=r"'item': id_map: .*is"):
        resolve(with_maps(tmp_path, {"item": rule}))
    with pytest.raises(SpecError, match="read as an id"):
        resolve(with_maps(tmp_path, {"user": {"kind": "stored", "file": str(tmp_path / "none.idmap")}}))
    pinned = resolve(with_maps(tmp_path, {"user": learned(50)})).recipe
    save(tmp_path / "user.idmap", "user", learned(50, seed=1))
    with pytest.raises(SpecError, match=r"id map of .*digest"):
        resolve(pinned)


def test_plans_and_outlooks_are_of_the_rows_that_are_stored(tmp_path):
    made = with_maps(tmp_path, MAPS)
    tables = {one.table.name: one.table.rows for one in plan_inputs(made, machine_named("2xcpu")).workloads}
    assert tables["user"] == 9
    assert {"seen-0", "seen-1", "seen-2"} <= set(tables)
    ahead = dry_run(made)
    assert ahead.rows == sum(tables.values())
    assert ahead.tables == len(tables)
