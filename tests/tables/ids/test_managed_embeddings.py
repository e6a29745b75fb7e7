"""Managed tables in a model: the vectors of ids, on one rank and several, saved and restored by any plan."""

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import nn

from rowwise import (
    Adam,
    BatchError,
    CheckpointError,
    Constant,
    Embeddings,
    Jagged,
    Managed,
    ManagedEmbeddings,
    Normal,
    Plan,
    Pooling,
    RowWiseAdagrad,
    SpecError,
    StateError,
    Table,
    Tile,
    make_embeddings,
)
from rowwise.base.errors import AgreedError
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard import shard
from rowwise.planning.planner import column_wise, replicated, row_wise, table_wise
from rowwise.tables.idmaps import HashIds
from rowwise.tables.ops.jagged import share
from rowwise.train.snapshot import collect, restore, restore_model, warm_start

FAR = 1 << 62


class Net(nn.Module):
    """Tables alone; `train_on` needs no more."""

    def __init__(self, tables, **more):
        super().__init__()
        self.embeddings = make_embeddings(tables, **more)


def make_tables(rows=256, **managed):
    return (
        Table(
            name="item",
            rows=rows,
            dim=8,
            features=("clicked", "seen"),
            pooling=Pooling.MEAN,
            optimizer=Adam(lr=0.1),
            init=Normal(std=1.0),
            managed=Managed(**managed),
        ),
        Table(name="user", rows=rows, dim=4, optimizer=RowWiseAdagrad(lr=0.1), managed=Managed(admit=2, evict="lfu")),
        Table(name="words", rows=rows, dim=4, pooling=Pooling.SEQUENCE, managed=Managed(ttl_steps=3)),
        Table(name="day", rows=7, dim=4, init=Normal(std=1.0)),
    )


def make_batch(seed, samples=24, ids=3000):
    """Skewed ids whose head moves with the seed."""
    draws = random.Random(seed)
    features = ("day", "words", "clicked", "user", "seen")
    lengths = {feature: [draws.randrange(0, 3) for _ in range(samples)] for feature in features}
    lengths["day"] = [1] * samples

    def draw(feature):
        number = int(ids * draws.random() ** 4) + 9 * seed
        return number % 7 if feature == "day" else (number * 0x9E3779B97F4A7C15) % (1 << 64) - (1 << 63)

    return Jagged.from_lists({f: [[draw(f) for _ in range(n)] for n in of_bags] for f, of_bags in lengths.items()})


def part(batch, rank, world):
    """The samples of a rank."""
    bounds = [batch.batch_size * w // world for w in range(world + 1)]
    return batch.of_samples(torch.arange(bounds[rank], bounds[rank + 1]))


def squares(vectors):
    return (vectors.matrix_BS**2).sum() + sum((x**2).sum() for x in vectors.sequences.values())


def train_on(net, batches, rank=0, world=1):
    for batch in batches:
        squares(net.embeddings(part(batch, rank, world))).backward()
        net.embeddings.stored.update()


def state_of(net):
    """All rows and their state, by name."""
    stored = net.embeddings.stored
    state = {f"{t.name}/rows": stored.table(t.name).clone() for t in stored.tables}
    return state | {f"{t}/{k}": x.clone() for t, of in stored.optimizer_state().items() for k, x in of.items()}


def merged(nets):
    """The state of the ranks' tiles, put together."""
    whole = {}
    for net in nets:
        for local in net.embeddings.stored.local_tiles():
            for name, x in {"rows": local.rows, **local.state}.items():
                whole.setdefault(f"{local.tile.table}/{name}", {})[local.tile.rows[0]] = x
    return {
        k: next(iter(x.values())) if k.endswith("/step") else torch.cat([x[b] for b in sorted(x)])
        for k, x in whole.items()
    }


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def plan_of(tables, world, how=row_wise):
    return Plan(world=world, tiles=tuple(tile for t in tables for tile in how(t, range(world))))


def trained_on_ranks(tables, plan, batches, device="cpu", **settings):
    """The state of all ranks that trained on their samples of these batches."""

    def rank(comm):
        net = shard(Net(tables, seed=5, device=device), plan, comm, **settings)
        train_on(net, batches, comm.rank, plan.world)
        return net

    return merged(run_threads(plan.world, rank))


BATCHES = [make_batch(seed) for seed in range(30)]


@pytest.fixture(scope="module")
def trained():
    """On one rank."""
    net = Net(make_tables(), seed=5)
    train_on(net, BATCHES)
    return net


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), pooling=st.sampled_from((Pooling.SUM, Pooling.MEAN, Pooling.SEQUENCE)))
def test_ids_that_fit_train_as_rows_of_a_plain_table(seed, pooling):
    draws = random.Random(seed)
    ids = [draws.randrange(-FAR, FAR) for _ in range(50)]
    table = Table(name="t", rows=4000, dim=4, pooling=pooling, init=Constant(value=0.5), optimizer=Adam(lr=0.1))
    managed = make_embeddings([structs.replace(table, managed=Managed())])
    plain = Embeddings([table])
    for step in range(4):
        picked = [draws.randrange(50) for _ in range(30)]
        lengths = torch.tensor([3] * 10)
        both = []
        for module, values in ((managed, [ids[k] for k in picked]), (plain, picked)):
            vectors = module(Jagged(features=("t",), values_N=torch.tensor(values), lengths_FB=lengths))
            x = vectors.sequences["t"] if pooling is Pooling.SEQUENCE else vectors.matrix_BS
            (x**2).sum().backward()
            (module.stored if module is managed else plain).update()
            both.append(x.detach())
        assert torch.equal(*both), step


def test_a_batch_of_training_is_looked_up_again_in_evaluation(trained):
    net = copy.deepcopy(trained)
    rows = net.embeddings.stored.optimizer_state()["item"]["id"].clone()
    net.eval()
    first = net.embeddings(BATCHES[-1])
    net.embeddings(make_batch(999))
    with torch.no_grad():
        net.train().embeddings(make_batch(998))
    net.eval()
    assert torch.equal(rows, net.embeddings.stored.optimizer_state()["item"]["id"])
    assert torch.equal(first.matrix_BS, trained.embeddings.eval()(BATCHES[-1]).matrix_BS)
    trained.train()


def test_counters_and_evicted_ids():
    net = Net(make_tables(rows=128), seed=5)
    net.embeddings.keeps_evicted = True
    train_on(net, BATCHES)
    counters, evicted = net.embeddings.counters, net.embeddings.take_evicted()
    assert counters["item"].admitted == counters["item"].in_use + counters["item"].evicted
    assert len(evicted["item"]) == counters["item"].evicted > 0
    assert counters["user"].rejected > 0
    assert counters["words"].expired > 0
    assert net.embeddings.take_evicted() == {}


def test_a_new_id_begins_as_a_fresh_row():
    """The id that took the row of another one has the row's first values and no state of the optimizer."""
    table = Table(name="t", rows=2, dim=4, init=Normal(std=1.0), optimizer=Adam(lr=0.5), managed=Managed())
    net, first = Net([table], seed=1), Net([table], seed=1).embeddings.stored.table("t").clone()

    def vectors(id_):
        return net.embeddings(Jagged.from_lists({"t": [[id_]]}))

    for id_ in (7, 7, -9):
        x = vectors(id_).matrix_BS
        if id_ == -9:
            assert torch.equal(x[0], first[1])
            assert not net.embeddings.stored.optimizer_state()["t"]["exp_avg"].any()
        x.sum().backward()
        net.embeddings.stored.update()


def test_state_dicts_and_copies_have_the_ids(trained):
    other = Net(make_tables(), seed=9)
    other.load_state_dict(copy.deepcopy(trained.state_dict()))
    want = trained.embeddings.eval()(BATCHES[3]).matrix_BS
    trained.train()
    assert torch.equal(other.embeddings.eval()(BATCHES[3]).matrix_BS, want)
    without = {name: x for name, x in trained.state_dict().items() if "ids." not in name}
    with pytest.raises(StateError, match="table 'item' is managed"):
        other.load_state_dict(without)


def test_shared_bags_count_for_each_sample():
    one, other = (Net(make_tables(), seed=2) for _ in range(2))
    copies = torch.arange(12).repeat_interleave(2)
    for seed in range(6):
        batch = make_batch(seed, samples=12).of_samples(copies)
        train_on(one, [batch])
        squares(other.embeddings(share(batch, ("clicked", "day", "seen")))).backward()
        other.embeddings.stored.update()
    assert equal(state_of(one), state_of(other))


@pytest.mark.few(2)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_give_the_bits_of_one(trained, world):
    tables = make_tables()
    found = trained_on_ranks(tables, plan_of(tables, world), BATCHES, "meta", elastic=True)
    assert equal(found, state_of(trained))


@pytest.mark.slow
def test_saved_by_four_ranks_and_continued_by_three(tmp_path, trained):
    tables = make_tables()

    def begin(comm):
        net = shard(Net(tables, seed=5), plan_of(tables, 4), comm, elastic=True)
        train_on(net, BATCHES[:17], comm.rank, 4)
        write(tmp_path / "ckpt", *collect(net, {}, comm), comm)

    def go_on(comm):
        net = shard(Net(tables, seed=5), plan_of(tables, 3), comm, elastic=True)
        train_on(net, BATCHES[:2], comm.rank, 3)  # its maps are made again
        restore(Checkpoint.open(tmp_path / "ckpt"), net, {}, comm)
        train_on(net, BATCHES[17:], comm.rank, 3)
        return net

    run_threads(4, begin)
    assert equal(merged(run_threads(3, go_on)), state_of(trained))
    alone = Net(tables, seed=3)
    train_on(alone, BATCHES[:2])  # its map is made again
    restore_model(Checkpoint.open(tmp_path / "ckpt"), alone)
    full = Net(tables, seed=3)
    restore(Checkpoint.open(tmp_path / "ckpt"), full, {})
    assert torch.equal(alone.eval().embeddings(BATCHES[9]).matrix_BS, full.eval().embeddings(BATCHES[9]).matrix_BS)


def test_pieces_of_one_rank():
    """A rank with several tiles of a table, and ranks without any."""
    tables = make_tables()[:1]
    multiple = tables[0].row_multiple
    cuts = [(0, multiple), (multiple, 3 * multiple), (3 * multiple, 256)]
    plan = Plan(
        world=3,
        tiles=tuple(Tile(table="item", rank=r, rows=c, cols=(0, 8)) for r, c in zip((2, 0, 2), cuts, strict=True)),
    )
    one = Net(tables, seed=5)
    train_on(one, BATCHES[:9])

    assert equal(trained_on_ranks(tables, plan, BATCHES[:9], elastic=True), state_of(one))


def test_a_bad_batch_of_one_rank_raises_on_all():
    tables = make_tables()

    def rank(comm):
        net = shard(Net(tables), plan_of(tables, 2), comm)
        batch = part(BATCHES[0], comm.rank, 2)
        if comm.rank:
            batch = Jagged.from_lists({"day": [[1]]})
        kind, match = (BatchError, "lacks clicked") if comm.rank else (AgreedError, "rank 1 .*lacks clicked")
        with pytest.raises(kind, match=match):
            net.embeddings(batch)
        train_on(net, BATCHES[:1], comm.rank, 2)

    run_threads(2, rank)


def test_a_step_begins_with_all_its_batches():
    """Then its parts only look up, and two batches are what one of all their samples is."""
    one, other = (Net(make_tables(), seed=2) for _ in range(2))
    for batch in BATCHES[:5]:
        parts = [part(batch, k, 2) for k in range(2)]
        other.embeddings.begin_step(parts)
        one.embeddings.begin_step([batch])
        for net, batches in ((one, [batch]), (other, parts)):
            for each in batches:
                squares(net.embeddings(each)).backward()
            net.embeddings.stored.update()
            net.embeddings.end_step()
    assert equal(state_of(one), state_of(other))
    one.embeddings.begin_step([BATCHES[7]])
    with pytest.raises(StateError, match="ids that begin_step"):
        one.embeddings(BATCHES[8])


@pytest.mark.parametrize(
    ("tiles", "match"),
    [
        (lambda t: column_wise(t, [0, 1]), "is managed: expected tiles of all 8 columns"),
        (lambda t: replicated(t, [0, 1]), "is managed, and replicated: expected each row on one rank"),
        (lambda t: [Tile(table="item", rank=0, rows=r, cols=(0, 8)) for r in ((0, 30), (30, 256))], "multiples of 64"),
        (lambda t: [Tile(table="item", rank=0, rows=(0, 256), cols=(0, 8), tier="disk")], "expected tier 'device'"),
    ],
)  # fmt: skip
def test_plans_that_cut_buckets_are_refused(tiles, match):
    tables = make_tables()[:1]
    with pytest.raises(SpecError, match=match):
        Plan(world=2, tiles=tuple(tiles(tables[0]))).validate(tables)


def test_rows_of_other_ids_are_refused(tmp_path, trained):
    mapped = Table(name="item", rows=1000, dim=8, id_map=HashIds(rows=256))
    write(tmp_path / "ckpt", *collect(trained, {}))
    saved = Checkpoint.open(tmp_path / "ckpt")
    for match, tables in (
        ("table 'item' is managed and has 256 rows, but 512 in this model", make_tables(rows=512)),
        ("table 'item' is managed, but not in this model", [mapped]),
    ):
        for load in (lambda net: warm_start(saved, net), lambda net: restore(saved, net, {})):
            with pytest.raises(CheckpointError, match=match):
                load(Net(tables))
    net = Net(make_tables(), seed=8)
    assert not warm_start(saved, net).new
    assert equal(state_of(net), state_of(trained))


def test_what_is_not_possible_is_refused():
    table = make_tables()[0]
    with pytest.raises(SpecError, match="table 'item' is managed"):
        Embeddings([table])
    mapped = Table(name="a", rows=9, dim=4, id_map=HashIds(rows=3))
    with pytest.raises(SpecError, match="'item' of the same"):
        make_embeddings([table, mapped])
    with pytest.raises(SpecError, match="table 'a' is managed"):
        Table(name="a", rows=9, dim=4, id_map=HashIds(rows=3), managed=Managed())
    assert isinstance(make_embeddings([table]), ManagedEmbeddings)


def test_table_wise_ranks_own_whole_tables():
    tables = make_tables()
    plan = Plan(world=2, tiles=tuple(tile for k, t in enumerate(tables) for tile in table_wise(t, k % 2)))
    one = Net(tables, seed=5)
    train_on(one, BATCHES[:9])
    found, want = trained_on_ranks(tables, plan, BATCHES[:9]), state_of(one)
    names = [name for name in want if name.endswith(("/id", "/used", "/count", "/seen"))]
    assert all(torch.equal(found[name], want[name]) for name in names)
