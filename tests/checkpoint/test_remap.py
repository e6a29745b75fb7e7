"""A checkpoint whose table gets another id map: its rows and their state are what plain loops say, all else stays."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from checkpoint.made import same
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from problems import make_problem
from safetensors.numpy import save_file
from small import recipe
from tables.ids.maps import make_maps
from tables.ids.moved_rows import MOVABLE, by_loops, movable_to
from torch import nn

from rowwise import Adam, CheckpointError, DataError, Ftrl, Normal, RowType, RowWiseAdagrad, Sgd, SpecError, Table
from rowwise.checkpoint import windows as seen
from rowwise.checkpoint import write as writing
from rowwise.checkpoint.diff import diff
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.named import open_named
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.remap import remap
from rowwise.checkpoint.rewrite import retype_tables, rewrite
from rowwise.checkpoint.write import write
from rowwise.parallel.plan import Plan
from rowwise.planning.planner import column_wise, row_wise
from rowwise.recipes.compose import make_model
from rowwise.recipes.resolved import evaluation_batches
from rowwise.recipes.runs import TrainingRun
from rowwise.tables.idmaps import StoredIds
from rowwise.tables.ids import file as files
from rowwise.tables.ids.arrays import entry_map, make_folds, ranked_map
from rowwise.tables.ids.embeddings import MappedEmbeddings
from rowwise.tables.ids.rules import hash_map
from rowwise.tables.ops import rowtype
from rowwise.tables.spec import TRAINED_TYPES
from rowwise.train.snapshot import collect, restore_model, warm_start

IDS, DIM = 120, 16
ROW_TYPES = {kind: (kind, 16 if kind is RowType.INT8 else None) for kind in RowType}
OPTIMIZERS = (Sgd(lr=0.1), Adam(lr=0.1), RowWiseAdagrad(lr=0.1, initial=0.5), Ftrl(lr=0.1))


class Net(nn.Module):
    """Two tables, of which the first has a map, and a layer."""

    def __init__(self, id_map, kind=RowType.FP32, optimizer=OPTIMIZERS[2]):
        super().__init__()
        torch.manual_seed(0)
        row_type, group = ROW_TYPES[kind]
        how = {"dim": DIM, "row_type": row_type, "column_group": group, "optimizer": optimizer, "init": Normal(std=1.0)}
        tables = [Table(name="item", rows=IDS, **how), Table(name="few", rows=9, **how)]
        self.embeddings = MappedEmbeddings(tables, {"item": id_map}, seed=1)
        self.top = nn.Linear(3, 2)

    def steps(self, count=3):
        for step in range(count):
            vectors = self.embeddings(make_problem(self.embeddings.tables, 30, 4, step).jagged)
            vectors.matrix_BS.square().sum().backward()
            self.embeddings.stored.update()
        return self


def write_net(folder, id_map, **how):
    parts, data = collect(Net(id_map, **how).steps(), {})
    write(folder, parts, {"step": 7, **data})
    return Checkpoint.open(folder)


def moved(checkpoint, folder, new, table="item", **more):
    """With a map that was not a file before."""
    files.save(folder / "new.map", table, new)
    told = remap(checkpoint, folder / "out", table, folder / "new.map", **more)
    found = Checkpoint.open(folder / "out")
    found.verify()
    return found, told


def floats(checkpoint, name):
    entry, stored = checkpoint.entry(name), checkpoint.load(name)
    if entry.row_type is None:
        return stored.view(len(stored), -1).numpy()
    return rowtype.unpack(stored, entry.columns, entry.row_type, entry.column_group).numpy()


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    to=st.sampled_from(MOVABLE),
    other=st.integers(0, 20),
    kind=st.sampled_from(TRAINED_TYPES),
    optimizer=st.sampled_from(OPTIMIZERS),
    weigh=st.booleans(),
    cut=st.booleans(),
)
def test_rows_and_state_are_what_loops_say(tmp_path_factory, seed, to, other, kind, optimizer, weigh, cut):
    folder = tmp_path_factory.mktemp("remap")
    new = make_maps(IDS, seed + 1)[to]
    from_these = movable_to(new, IDS, seed, DIM)
    if not from_these:
        return
    old = from_these[other % len(from_these)]
    counts_N = np.random.default_rng(seed).integers(0, 5, IDS) if weigh else np.zeros(IDS, np.int64)
    save_file({"counts/item": counts_N}, folder / "probe.safetensors")
    checkpoint = write_net(folder / "first", old, kind=kind, optimizer=optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if cut:
            patch.setattr(writing, "SIZES", writing.FileSizes(500))
            patch.setattr(seen, "WINDOW_bytes", 900)
        found, _ = moved(checkpoint, folder, new, counts=folder / "probe.safetensors" if weigh else None)
    for index in range(len(new.shape.parts)):
        end = f"-{index}" if len(new.shape.parts) > 1 else ""
        names = [name for name in checkpoint.names() if f"stored.item{end}" in name and checkpoint.entry(name).shape]
        assert len(names) == 1 + {"Sgd": 0, "RowWiseAdagrad": 1}.get(type(optimizer).__name__, 2)
        for name in names:
            entry, state = found.entry(name), name.startswith("rows/")
            want, from_R = by_loops(old, new, index, floats(checkpoint, name), counts_N + 1, state)
            there = checkpoint.entry(name)
            assert (entry.row_type, entry.column_group) == (there.row_type, there.column_group)
            assert entry.shape == (len(want), *there.shape[1:])
            before, after = checkpoint.load(name), found.load(name)
            kept = [row for row, other in enumerate(from_R) if other >= 0]
            assert same(after[kept], before[[from_R[row] for row in kept]])
            want = torch.from_numpy(want).float().view(len(want), -1)
            if not state:
                want = rowtype.unpack(
                    rowtype.pack(want, kind, entry.column_group), entry.columns, kind, entry.column_group
                )
            others = [row for row, other in enumerate(from_R) if other < 0]
            near = {RowType.FP32: 1e-6, RowType.FP16: 5e-3, RowType.BF16: 5e-2, RowType.INT8: 5e-2}[kind]
            assert torch.allclose(torch.from_numpy(floats(found, name))[others], want[others], atol=near)
    rest = [name for name in checkpoint.names() if "item" not in name]
    assert rest
    assert all(same(found.load(name), checkpoint.load(name)) for name in rest)
    steps = [name for name in checkpoint.names() if "item" in name and name.endswith("/step")]
    assert all(found.load(name) == checkpoint.load(name) == 3 for name in steps)
    assert found.manifest.data == checkpoint.manifest.data
    restore_model(found, Net(new, kind=kind, optimizer=optimizer))


def folded(ids, seed=0):
    """Clusters, and for each fold other ones."""
    generator = np.random.default_rng(seed)
    return make_folds(
        entry_map(ids, generator.integers(0, 10, ids), 10),
        [entry_map(ids, generator.integers(0, 10, ids), 10) for _ in range(3)],
        ["item"],
        seed,
    )


@pytest.mark.parametrize("kind", [*make_maps(IDS), "folds"])
def test_the_same_map_gives_the_same_bits(tmp_path, kind):
    made = folded(IDS) if kind == "folds" else make_maps(IDS)[kind]
    checkpoint = write_net(tmp_path / "first", made, kind=RowType.INT8)
    found, (told,) = moved(checkpoint, tmp_path, made)
    assert not diff(checkpoint, found).any
    assert found.names() == checkpoint.names()
    assert (told.kept, told.rows, told.empty) == (made.shape.rows, made.shape.rows, 0)


def test_maps_of_folds_come_and_go(tmp_path):
    checkpoint = write_net(tmp_path / "first", folded(IDS))
    plain = entry_map(IDS, np.arange(IDS) % 7, 7)
    found, _ = moved(checkpoint, tmp_path, plain)
    assert not [name for name in found.names() if "words_" in name]
    (tmp_path / "again").mkdir()
    again, _ = moved(found, tmp_path / "again", folded(IDS, 3))
    assert len([name for name in again.names() if "words_" in name]) == 3
    model = Net(folded(IDS, 3))
    restore_model(again, model)
    assert warm_start(again, model).skipped == {}
    with pytest.raises(CheckpointError, match="another id map"):
        restore_model(again, Net(folded(IDS)))


def test_by_whom_it_was_written_does_not_matter(tmp_path):
    first = write_net(tmp_path / "first", make_maps(IDS)["hash"])
    tables = list(retype_tables(first, None, {}).values())
    tiles = [tile for table in tables for tile in (column_wise if table.name == "item" else row_wise)(table, range(3))]
    rewrite(
        first,
        tmp_path / "spread",
        Plan(world=3, tiles=tuple(tiles)),
        retype_tables(first, None, {}),
        state=True,
        tell=None,
    )
    spread = Checkpoint.open(tmp_path / "spread")
    outs = []
    for name, one in (("a", first), ("b", spread)):
        (tmp_path / name).mkdir()
        outs.append(moved(one, tmp_path / name, make_maps(IDS, 3)["listed"])[0])
    assert not diff(*outs).any


def clusters(rows_N, unseen_rows=0):
    return entry_map(len(rows_N), rows_N, int(rows_N.max()) + 1, unseen_rows=unseen_rows)


def with_map(folder, path, **changes):
    """The small recipe, whose users have a map."""
    made = recipe(folder, **changes)
    tables = tuple(
        structs.replace(table, id_map=StoredIds(file=str(path))) if table.name == "user" else table
        for table in made.tables.list
    )
    return structs.replace(made, tables=structs.replace(made.tables, list=tables))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dlrm", "deepfm"])
def test_a_run_goes_on_with_another_map(tmp_path, kind):
    changes = {"model": {"kind": kind}, "train": {"epochs": 1}}
    rows_N = np.arange(50) % 12
    other_N = np.where(rows_N < 6, 11 - rows_N, np.arange(50) // 9 % 6)  # ids of the first six stay together
    files.save(tmp_path / "old.map", "user", clusters(rows_N))
    files.save(tmp_path / "new.map", "user", clusters(other_N))
    first = TrainingRun.start(with_map(tmp_path, tmp_path / "old.map", **changes), tmp_path / "runs")
    first.go()
    checkpoint = open_named(first.folder.path)
    told = remap(checkpoint, tmp_path / "out", "user", tmp_path / "new.map")
    assert [one.table for one in told] == ["user", "user_wide"][: 1 + (kind == "deepfm")]
    assert all((one.rows, one.kept, one.empty) == (12, 6, 0) for one in told)
    second = with_map(tmp_path, tmp_path / "new.map", init_from=str(tmp_path / "out"), **changes)
    run = TrainingRun.start(second, tmp_path / "runs")
    models = [make_model(one.resolved).eval() for one in (first, run)]
    restore_model(checkpoint, models[0])
    match = warm_start(Checkpoint.open(tmp_path / "out"), models[1])
    assert (match.skipped, match.new, match.grown) == ({}, [], {})
    stay = torch.from_numpy(np.flatnonzero(rows_N < 6))
    same_logits = others = 0
    for batch in evaluation_batches(first.resolved, first.resolved.rows.test):
        with torch.no_grad():
            before, after = (model(batch) for model in models)
        stays_B = torch.isin(_users(batch).long(), stay)
        assert same(before[stays_B], after[stays_B])
        same_logits += int(stays_B.sum())
        others += int((before != after).sum())
    assert same_logits > 50
    assert others > 50
    result = run.go()
    assert result.status == "finished"
    assert result.test["label"]["auc"] > 0.5
    old = with_map(tmp_path, tmp_path / "old.map", init_from=str(tmp_path / "out"), **changes)
    with pytest.raises(CheckpointError, match="table 'user': another id"):
        TrainingRun.start(old, tmp_path / "runs").go()


def _users(batch):
    at = batch.sparse.features.index("user") * batch.sparse.batch_size
    begin = int(batch.sparse.lengths_FB[:at].sum())
    return batch.sparse.values_N[begin : begin + batch.sparse.batch_size]


@pytest.fixture
def first(tmp_path):
    return write_net(tmp_path / "first", hash_map(IDS, 20))


def test_maps_that_do_not_fit_are_refused_by_name(tmp_path, first):
    for new, said in (
        (hash_map(IDS + 1, 20), "expected that of table 'item' of 120 ids"),
        (ranked_map(IDS, [np.arange(5)], 3, dims=[None, 4]), r"table 'item' cannot have .*new\.map: .* one 2 of 16, 4"),
        (make_maps(IDS)["double_hash"], r"table 'item' cannot have .*new\.map: .* several rows of part 0"),
        (make_maps(IDS)["product"], "the new map multiplies rows"),
    ):
        with pytest.raises((CheckpointError, SpecError), match=said):
            moved(first, tmp_path, new)
        assert not (tmp_path / "out").exists()
    files.save(tmp_path / "new.map", "few", hash_map(IDS, 20))
    with pytest.raises(SpecError, match="map of table 'few'"):
        remap(first, tmp_path / "out", "item", tmp_path / "new.map")
    with pytest.raises(CheckpointError, match=r"'few' is not a table with an id map|table 'few' has no id map"):
        remap(first, tmp_path / "out", "few", tmp_path / "new.map")
    with pytest.raises(CheckpointError, match="table 'itm' is not a table with an id map"):
        remap(first, tmp_path / "out", "itm", tmp_path / "new.map")
    with pytest.raises(CheckpointError, match="first exists already"):
        remap(first, tmp_path / "first", "item", tmp_path / "new.map")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"counts/itm": np.ones(IDS, np.int64)}, "has no counts of table 'item'; did you mean 'itm'"),
        (
            {"counts/item": np.ones(IDS + 1, np.int64)},
            r"got int64 of shape \(121,\): expected a whole number for each of",
        ),
        ({"counts/item": np.full(IDS, -1)}, "expected a whole number for each of 120 ids"),
        ({"counts/item": np.ones(IDS)}, "got float64"),
        (None, "cannot be read"),
    ],
)
def test_counts_that_do_not_fit_are_refused(tmp_path, first, tensors, said):
    if tensors is not None:
        save_file(tensors, tmp_path / "probe.safetensors")
    with pytest.raises(DataError, match=said):
        moved(first, tmp_path, hash_map(IDS, 30), counts=tmp_path / "probe.safetensors")


def test_state_that_does_not_fit_is_refused(tmp_path):
    parts, data = collect(Net(hash_map(IDS, 20)).steps(), {})
    parts = [part for part in parts if part.name != "rows/embeddings.stored.item/sum"]
    write(tmp_path / "odd", [*parts, LocalShard.whole("rows/embeddings.stored.item/sum", torch.zeros(21))], data)
    with pytest.raises(CheckpointError, match=r"\(21,\) of float32"):
        moved(Checkpoint.open(tmp_path / "odd"), tmp_path, hash_map(IDS, 30))


def test_the_command(tmp_path, command, first):
    files.save(tmp_path / "new.map", "item", hash_map(IDS, 30, 4))
    save_file({"counts/item": np.arange(IDS)}, tmp_path / "probe.safetensors")
    code, out, _ = command(
        "ckpt", "remap", "first", "out", "--table", "item", "--map", "new.map", "--counts", "probe.safetensors"
    )
    assert code == 0
    assert "  item: 30 rows for 120 ids: " in out
    assert "train with a recipe that has this id_map: rowwise train RECIPE --init-from out" in out
    restore_model(Checkpoint.open(tmp_path / "out"), Net(hash_map(IDS, 30, 4)))
    code, out, err = command("ckpt", "remap", "first", "out", "--table", "item", "--map", "new.map")
    assert (code, out, err) == (2, "", "rowwise: out exists already; choose another name\n")


KILLED = """
import os, signal, sys
from pathlib import Path
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.remap import remap
folder = Path(sys.argv[1])
def tell(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
remap(Checkpoint.open(folder / "first"), folder / "out", "item", folder / "new.map", None, tell)
"""


@pytest.mark.slow
def test_a_killed_command_leaves_no_checkpoint_and_the_old_one_as_it_was(tmp_path, first):
    def content():
        return {path.name: hashlib.sha256(path.read_bytes()).digest() for path in first.folder.iterdir()}

    before = content()
    files.save(tmp_path / "new.map", "item", hash_map(IDS, 30, 4))
    found = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120)
    assert found.returncode == -9
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.part").exists()
    assert not (tmp_path / "out.part" / "manifest.json").exists()
    moved(first, tmp_path, hash_map(IDS, 30, 4))
    assert not (tmp_path / "out.part").exists()
    assert content() == before
