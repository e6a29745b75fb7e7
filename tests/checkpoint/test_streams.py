"""Rows that are no tensor are saved, restored and sharded as views of memory are, to the bit, in runs."""

from contextlib import contextmanager

import pytest
import torch
from checkpoint.made import bits as bits_of
from checkpoint.made import drawn
from checkpoint.memory_rows import streamed
from checkpoint.plans import Net, contents, differences, empty, make_plan, track
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from problems import make_problem

from rowwise import Adam, Lamb, Plan, RowWiseAdagrad, Sgd, StateError, Table
from rowwise.checkpoint import windows
from rowwise.checkpoint.delta import round_shards
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import FileSizes, write
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard import apply
from rowwise.parallel.shard.apply import copy_tables, shard
from rowwise.planning.planner.layouts import column_wise, row_wise
from rowwise.tables.ops.jagged import split
from rowwise.tables.spec import TRAINED_TYPES
from rowwise.train.saved import CheckpointFolder, CheckpointReduction
from rowwise.train.snapshot import collect, restore, restore_model, warm_start

SIZES = FileSizes(700, 5000)
DRAW = {"seed": st.integers(0, 1 << 16), "world": st.integers(1, 4), "bits": st.sampled_from([None, 8, 4])}
TABLES = (
    Table(name="a", rows=900, dim=8, optimizer=RowWiseAdagrad(lr=0.1)),
    Table(name="b", rows=700, dim=12, row_type="fp16", optimizer=Adam(lr=0.1)),
    Table(name="c", rows=500, dim=32, row_type="int8", column_group=16, optimizer=Lamb(lr=0.1)),
    Table(name="d", rows=300, dim=16, row_type="bf16", optimizer=Sgd(lr=0.1)),
)


@contextmanager
def small_runs():
    """Runs of few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "WINDOW_bytes", 2000)
        patch.setattr(apply, "RUN_bytes", 1000)
        yield


def tensors(module):
    views = [x for tile in module.local_tiles() for x in (tile.rows, *tile.state.values())]
    return [bits_of(torch.cat([x.flatten()])) for x in views]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@given(**DRAW, share=st.integers(1, 2))
def test_what_is_written_from_streams_is_what_is_written_from_views(tmp_path_factory, seed, world, bits, share):
    folder = tmp_path_factory.mktemp("streams")
    chance, trained, plan = drawn(seed, world)
    other = make_plan(chance, trained.tables, 5 - world)
    types = [chance.choice(TRAINED_TYPES if t.dim % 8 == 0 else TRAINED_TYPES[:3]) for t in trained.tables]
    retyped = [
        structs.replace(t, row_type=kind, column_group=None) for t, kind in zip(trained.tables, types, strict=True)
    ]
    retyped_plan = make_plan(chance, retyped, 5 - world)

    def choose(tile):
        return (tile.rows[0] + tile.rank) % share == 0

    def save(comm):
        model, optimizers = trained.by(plan, comm)
        for name in ("views", "streams"):
            with streamed(model.embeddings, choose if name == "streams" else lambda tile: False):
                shards, data = collect(model, optimizers, comm)
                write(folder / name, round_shards(shards, bits), data, comm, sizes=SIZES)

    def read(comm):
        model, optimizers = empty(trained.tables, other, comm)
        with streamed(model.embeddings, choose):
            restore(streams, model, optimizers, comm)
        found = [] if bits else differences(model.embeddings, trained.model.embeddings)
        with streamed(model.embeddings, choose):
            copy_tables(trained.model.embeddings, model.embeddings)
        found += differences(model.embeddings, trained.model.embeddings)
        results = []
        for take in (lambda tile: False, choose):
            model = shard(Net(retyped), retyped_plan, comm)
            with streamed(model.embeddings, take):
                match = warm_start(streams, model)
            results.append((match, tensors(model.embeddings)))
        (match, want), (match_of_streams, got) = results
        return found + ([] if match == match_of_streams and same(want, got) else ["warm start"])

    with small_runs():
        run_threads(world, save)
        views, streams = (Checkpoint.open(folder / name) for name in ("views", "streams"))
        without_random = [{n: x for n, x in c.manifest.tensors.items() if n[:4] != "rng/"} for c in (views, streams)]
        assert without_random[0] == without_random[1]  # with a checksum of each chunk
        assert views.manifest.files.keys() == streams.manifest.files.keys()
        assert [text for found in run_threads(5 - world, read) for text in found] == []


@given(**DRAW, background=st.booleans())
def test_increments_of_streams_are_the_changed_rows(tmp_path_factory, seed, world, bits, background):
    folder = tmp_path_factory.mktemp("streams")
    chance, _, _ = drawn(seed, 1)
    plan, other = make_plan(chance, TABLES, world), make_plan(chance, TABLES, 5 - world)

    def train(comm):
        model = shard(Net(TABLES), plan, comm)
        track(model)
        reduction = CheckpointReduction(bits=bits or 32)
        full = CheckpointFolder(folder / "full", comm, reduction=reduction)
        less = CheckpointFolder(
            folder / "less", comm, background=background, reduction=reduction._replace(incremental=True)
        )
        for step in range(3):
            whole = make_problem(TABLES, 4 * world, 2, seed + step).jagged
            vectors = model.embeddings(split(whole, [4] * world)[comm.rank])
            vectors.matrix_BS.square().sum().backward()
            model.embeddings.update()
            full.save(step, *collect(model, {}, comm))
            with streamed(model.embeddings, lambda tile: tile.rank % 2 == 0):
                less.save(step, *collect(model, {}, comm))
        less.wait()

    def read(comm):
        found = []
        for checkpoint, share in ((full, 0), (less, 1)):
            model = shard(Net(TABLES), other, comm)
            with streamed(model.embeddings, lambda tile, share=share: share > 0):
                restore_model(checkpoint, model)
            found.append(tensors(model.embeddings))
        return same(*found)

    with small_runs():
        run_threads(world, train)
        full, less = (CheckpointFolder(folder / name).open() for name in ("full", "less"))
        assert len(less.manifest.chain_bytes) == 3
        less.verify()
        want, got = contents(full), contents(less)
        assert want.keys() == got.keys()
        assert all(torch.equal(bits_of(want[name]), bits_of(got[name])) for name in want)
        assert all(run_threads(5 - world, read))


@pytest.mark.slow
def test_runs_are_of_bounded_size(tmp_path):
    """Also where a plan of columns reads what a plan of rows has written."""
    table, comm = Table(name="t", rows=5000, dim=16, optimizer=Adam()), solo()
    saved = CheckpointFolder(tmp_path, reduction=CheckpointReduction(incremental=True))
    plans = [Plan(world=1, tiles=tuple(layout(table, [0, 0]))) for layout in (row_wise, column_wise)]
    model, other = (shard(Net((table,)), plan, comm) for plan in plans)
    with small_runs(), pytest.MonkeyPatch.context() as patch, streamed(model.embeddings) as sizes:
        patch.setattr("rowwise.checkpoint.write.SIZES", FileSizes(1500, 1 << 20))
        (arena,) = model.embeddings.arenas
        arena.track()
        saved.save(1, *collect(model, {}))
        assert max(sizes) <= 1500
        assert sum(sizes) == 3 * 5000 * 16 * 4
        arena.touched.marks_R[::5] = 1
        saved.save(2, *collect(model, {}))
        assert max(sizes) <= 1500
        assert sum(sizes) == 3 * 6000 * 16 * 4
        with streamed(other.embeddings) as written:
            marks = other.embeddings.arenas[0].track()
            marks.clear()
            restore(saved.open(), other, {})
            assert marks.marks_R.all()  # the next checkpoint has all rows
            assert max(written) <= 2000
            assert sum(written) == 3 * 5000 * 16 * 4
            copy_tables(Net((table,)).embeddings, other.embeddings)
            assert max(written) <= 2000


def test_a_save_in_the_background_has_streams_as_they_were(tmp_path):
    """A rank with streams writes before it goes on; a rank without them copies."""
    table = Table(name="t", rows=30, dim=4)
    plan = Plan(world=2, tiles=tuple(row_wise(table, range(2))))

    def run(comm):
        model = shard(Net((table,)), plan, comm)
        saved = CheckpointFolder(tmp_path, comm, background=True)
        (tile,) = model.embeddings.local_tiles()
        with streamed(model.embeddings, lambda tile: tile.rank == 0):
            for step in range(3):
                tile.rows.fill_(step)
                saved.save(step, *collect(model, {}, comm))
                tile.rows.fill_(-1)
        saved.wait()

    run_threads(2, run)
    for step in range(3):
        rows = Checkpoint.open(tmp_path / f"step-{step:09}").load("model/embeddings.t")
        assert torch.equal(rows, torch.full((30, 4), float(step)))


def test_there_is_no_state_dict_of_a_stream():
    table = Table(name="t", rows=30, dim=4)
    model = shard(Net((table,)), Plan(world=1, tiles=tuple(row_wise(table, [0]))), solo())
    state = model.state_dict()
    with streamed(model.embeddings):
        with pytest.raises(StateError, match=r"^state_dict\(\): table 't'"):
            model.state_dict()
        with pytest.raises(StateError, match="table 't' has rows"):
            model.load_state_dict(state)
