"""A checkpoint written by one plan is read by any other, to the bit: rows, their state, and all that is dense."""

import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from checkpoint import checkpoint_ranks
from checkpoint.made import drawn, write_by
from checkpoint.memory_rows import streamed
from checkpoint.plans import Net, contents, differences, empty, make_plan
from msgspec import structs

from rowwise import CheckpointError, Plan, RowWiseAdagrad, Table, Tile
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.parallel.comm.spawn import run_processes
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.apply import shard
from rowwise.train.snapshot import collect, restore, warm_start

WORLDS = (1, 2, 3, 8)


def read(trained, plan, folder, world):
    """What is different on any rank."""

    def run(comm):
        model, optimizers = empty(trained.tables, plan, comm)
        restore(Checkpoint.open(folder), model, optimizers, comm)
        found = differences(model.embeddings, trained.model.embeddings)
        found += [n for n, x in trained.model.top.state_dict().items() if not torch.equal(x, model.top.state_dict()[n])]
        for mine, want in zip(model.top.parameters(), trained.model.top.parameters(), strict=True):
            mine, want = optimizers["dense"].state[mine], trained.optimizer.state[want]
            assert mine.keys() == want.keys()
            found += [name for name in want if not torch.equal(mine[name], want[name])]
        return found

    return [text for found in run_threads(world, run) for text in found]


def check(tmp_path, seed, worlds=WORLDS, **shape):
    chance, trained, plan = drawn(seed, 4, **shape)
    first = write_by(tmp_path / "four", trained, plan)
    first.verify()
    alone = tmp_path / "alone"
    write(alone, *collect(trained.model, {"dense": trained.optimizer}))
    one, four = contents(Checkpoint.open(alone)), contents(first)
    assert one.keys() == four.keys()
    for name in one:
        assert torch.equal(one[name], four[name]), name
    for world in worlds:
        plan = make_plan(chance, trained.tables, world)
        assert read(trained, plan, tmp_path / "four", world) == [], (seed, world)
    assert read(trained, None, tmp_path / "four", 1) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(6))
def test_four_ranks_save_and_any_number_reads(tmp_path, seed):
    check(tmp_path, seed)


@pytest.mark.dist
def test_real_processes_save_and_read(tmp_path):
    found = run_processes(3, checkpoint_ranks.save_and_read, tmp_path / "ckpt", 1, timeout_s=60)
    assert found == [[], [], []]
    Checkpoint.open(tmp_path / "ckpt").verify()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_plans(tmp_path, seed):
    check(tmp_path, seed, count=8, rows=3000)


@pytest.mark.parametrize("held_by", [nullcontext, streamed], ids=["memory", "streams"])
def test_a_plan_that_keeps_a_state_for_each_column_piece(tmp_path, held_by):
    """By the same plan what was there comes back; by another, that of a row's first columns."""
    table = Table(name="t", rows=30, dim=16, optimizer=RowWiseAdagrad(lr=0.1))
    tiles = [Tile(table="t", rank=rank, rows=(0, 30), cols=(rank * 8, rank * 8 + 8)) for rank in range(2)]
    plan = Plan(world=2, tiles=tuple(tiles), approximate=("t",))

    def run(comm):
        model = shard(Net((table,)), plan, comm)
        (held,) = model.embeddings.local_tiles()
        held.state["sum"].copy_(torch.arange(30.0) + 100 * comm.rank)
        with held_by(model.embeddings):
            write(tmp_path / "one", *collect(model, {}, comm), comm)
            held.state["sum"].zero_()
            restore(Checkpoint.open(tmp_path / "one"), model, {}, comm)
        return held.state["sum"].clone()

    first, second = run_threads(2, run)
    assert torch.equal(first, torch.arange(30.0))
    assert torch.equal(second, first + 100)
    alone = Net((table,))
    restore(Checkpoint.open(tmp_path / "one"), alone, {})
    assert torch.equal(alone.embeddings.optimizer_state()["t"]["sum"], first)
    write(tmp_path / "two", *collect(alone, {}))

    def read(comm):
        model = shard(Net((table,)), plan, comm)
        restore(Checkpoint.open(tmp_path / "two"), model, {}, comm)
        return model.embeddings.local_tiles()[0].state["sum"].clone()

    assert all(torch.equal(found, first) for found in run_threads(2, read))


def test_what_is_another_on_each_rank_comes_back_to_it(tmp_path):
    """Random numbers, and what lossy wires hold back; on fewer ranks new random numbers, and nothing held back."""
    one = threading.Lock()  # threads share torch's generator

    def save(comm):
        held = {0: torch.full((3, 2), comm.rank + 1.0)}
        with one:
            model = Net((Table(name="t", rows=8, dim=4),))  # draws its weights
            torch.manual_seed(comm.rank)
            parts, data = collect(model, {}, comm, held)
        write(tmp_path / "one", parts, data, comm)

    def read(comm):
        held = {5: torch.ones(1)}
        with one:
            model = Net((Table(name="t", rows=8, dim=4),))
            restore(Checkpoint.open(tmp_path / "one"), model, {}, comm, held)
            return torch.rand(4).tolist(), held

    run_threads(3, save)
    wanted = [torch.rand(4, generator=torch.Generator().manual_seed(rank)).tolist() for rank in range(3)]
    for rank, (numbers, held) in enumerate(run_threads(3, read)):
        assert numbers == wanted[rank]
        assert held.keys() == {0}
        assert torch.equal(held[0], torch.full((3, 2), rank + 1.0))
    again = run_threads(2, read)
    assert again[0][0] == wanted[0]
    assert again[1][0] not in wanted
    assert again == run_threads(2, read)
    assert not again[0][1]


@pytest.mark.parametrize("seed", range(3))
def test_a_warm_start_by_any_plan_is_that_of_one_device(tmp_path, seed):
    """Tables that have grown, that have other rows, and that are new; each rank is told the same."""
    chance, trained, plan = drawn(seed, 4)
    write_by(tmp_path / "one", trained, plan)
    grown = [structs.replace(trained.tables[0], rows=trained.tables[0].rows + 9)]
    kind = {"row_type": "bf16", "column_group": None}
    tables = (
        *grown,
        structs.replace(trained.tables[1], **kind),
        *trained.tables[2:4],
        Table(name="new", rows=20, dim=4),
    )
    whole = Net(tables)
    match = warm_start(Checkpoint.open(tmp_path / "one"), whole)
    assert next(iter(match.grown)) == "model/embeddings.t0"
    assert "model/embeddings.t4" in match.unused
    assert "model/embeddings.new" in match.new
    plan = make_plan(chance, tables, 3)

    def run(comm):
        model = shard(Net(tables), plan, comm)
        assert warm_start(Checkpoint.open(tmp_path / "one"), model) == match
        return differences(model.embeddings, whole.embeddings)

    assert run_threads(3, run) == [[], [], []]


def test_another_model_is_refused_on_all_ranks_alike(tmp_path):
    """Also on those that hold nothing of the table that does not fit."""
    tables = (Table(name="a", rows=10, dim=4), Table(name="b", rows=10, dim=4))
    other = (tables[0], Table(name="b", rows=11, dim=4))
    tiles = [Tile(table=t.name, rank=0, rows=(0, t.rows), cols=(0, 4)) for t in other]
    write(tmp_path / "one", *collect(Net(tables), {}))

    def run(comm):
        model = shard(Net(other), Plan(world=2, tiles=tuple(tiles)), comm)
        with pytest.raises(CheckpointError, match=r"\(10, 4\) of float32"):
            restore(Checkpoint.open(tmp_path / "one"), model, {}, comm)

    run_threads(2, run)


def test_ranks_that_do_not_share_the_same_are_told(tmp_path):
    def run(comm):
        with pytest.raises(CheckpointError, match="ranks 0 and 1"):
            write(tmp_path / "one", [LocalShard.whole(f"w{comm.rank}", torch.ones(3))], {}, comm)
        second = LocalShard(name="t", tensor=torch.ones(3, 2), shape=(6, 2), rows=(3, 6))
        with pytest.raises(CheckpointError, match=r"0: manifest.json: tensor 't'"):
            write(tmp_path / "one", [second] if comm.rank else [], {}, comm)
        first = replace(second, tensor=torch.ones(3, 2).half(), rows=(0, 3))
        with pytest.raises(CheckpointError, match=r"tensor 't' is .*float16.*"):
            write(tmp_path / "one", [second if comm.rank else first], {}, comm)
        assert list(tmp_path.iterdir()) == []

    run_threads(2, run)
