"""Batches whose samples share bags, on several ranks: what comes out is that of the expanded batch, to the bit."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.shard.equal import make_sharded, outputs, place
from parallel.shard.jobs import WORLDS, draw_sizes, draw_tables
from parallel.shard.layout_cases import CASES
from shared_batches import draw_copies, make_shared

from rowwise import BatchError, IdError, Pooling, RowType, SpecError, Table, Topology, Uniform, Wire
from rowwise.base.errors import PeerError
from rowwise.parallel.comm.spawn import run_processes
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.rehearse import RehearsedRank, rehearse
from rowwise.tables.batch import SharedBags
from rowwise.tables.ops.jagged import split
from rowwise.tables.spec import Codecs


def trained(module, batches, seed):
    """What was looked up in each step, and updates whose gradients depend on it."""
    found = []
    for number, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(seed + number)  # ranks are threads, which share torch's own
        outs = outputs(module, batch)
        found.append({name: out.detach().clone() for name, out in outs.items()})
        wanted = {name: torch.rand(outs[name].shape, generator=generator) for name in sorted(outs)}
        sum(((outs[name] - wanted[name]) ** 2).sum() for name in sorted(outs)).backward()
        module.update()
    return found


def apart(tables, plan, batches_W, *, seed=0, **kinds):
    """What differs on any rank between batches that share bags and the same expanded, in words."""

    def rank(comm):
        modules = [make_sharded(tables, plan, comm, **kinds) for _ in range(2)]
        mine = batches_W[comm.rank]
        outs = trained(modules[0], mine, seed)
        wanted = trained(modules[1], [batch.expanded() for batch in mine], seed)
        found = []
        for number, (out, want) in enumerate(zip(outs, wanted, strict=True)):
            assert out.keys() == want.keys()
            found += [f"step {number}: {name!r}" for name in out if not torch.equal(out[name], want[name])]
        for one, other in zip(modules[0].local_tiles(), modules[1].local_tiles(), strict=True):
            found += [f"rows {one.tile}"] * (not torch.equal(one.rows, other.rows))
            found += [f"{k} of {one.tile}" for k in one.state if not torch.equal(one.state[k], other.state[k])]
        return found

    return rank


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    world=st.sampled_from([name for name in WORLDS if name != "8"]),
    sizes=st.sampled_from(["even", "uneven", "some empty", "blocks"]),
    elastic=st.booleans(),
    one_layout=st.booleans(),
)
def test_shared_is_expanded(seed, world, sizes, elastic, one_layout):
    draws, topology = random.Random(seed), WORLDS[world]
    layouts = [draws.choice(list(CASES)) for _ in range(4)]
    layouts = layouts[:1] * 4 if one_layout else layouts
    tables = draw_tables(draws, layouts)
    features = [f for t in tables for f in t.feature_names] + ["not used"]
    common = draws.sample(features, draws.randint(1, len(features)))
    batches_W = [[] for _ in range(topology.world)]
    for step in range(2):
        most = draws.choice((1, 12, 400))
        for rank, size in enumerate(draw_sizes(draws, topology.world, sizes)):
            batches_W[rank].append(
                make_shared(tables, common, draw_copies(draws, size, most), seed + 1000 * step + 10 * rank)
            )
    rank = apart(tables, place(tables, layouts, topology), batches_W, elastic=elastic, seed=seed)
    assert not any(run_threads(topology, rank, timeout_s=60))


def two_tables(**kinds):
    """The user's and the item's."""
    return [Table(name=name, rows=60, dim=8, init=Uniform(bound=1.0), **kinds) for name in ("user", "item")]


FOUR = Topology(hosts=2, devices=2)
SAMPLES_W = (30, 0, 7, 300)


def batches_of(tables, copies=10, common=("user",), samples_W=SAMPLES_W):
    """One step's, of each rank."""
    return [
        [make_shared(tables, common, [copies] * (n // copies) + [1] * (n % copies), 10 * rank)]
        for rank, n in enumerate(samples_W)
    ]


def test_ranks_that_do_not_share_alike_expand():
    """Also one that shares nothing, one that shares other features, and one of no samples."""
    tables = two_tables()
    batches_W = batches_of(tables)
    batches_W[0] = [batches_W[0][0].expanded()]
    batches_W[3] = batches_of(tables, common=("item",))[3]
    plan = place(tables, ["row-wise", "column-wise"], FOUR)
    assert not any(run_threads(FOUR, apart(tables, plan, batches_W), timeout_s=60))


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [RowType.FP16, RowType.BF16])
@pytest.mark.parametrize("layout", ["table-wise", "row-wise", "table-row-wise", "grid", "column-wise"])
def test_wires_of_16_bits_round_shared_vectors_alike(layout, kind):
    tables = two_tables()
    wire = Wire(host=Codecs(forward=kind, backward=kind), network=Codecs(forward=kind, backward=kind))
    plan = place(tables, layout, FOUR)
    assert not any(run_threads(FOUR, apart(tables, plan, batches_of(tables), wire=wire), timeout_s=60))


def test_a_wire_of_8_bits_carries_both_bag_sets():
    tables, kind = [*two_tables(), Table(name="wide", rows=60, dim=48)], RowType.INT8
    wire = Wire(host=Codecs(forward=kind), network=Codecs(forward=kind))

    def rank(comm):
        batch = batches_of(tables, common=("user", "wide"))[comm.rank][0]
        outs = []
        for settings_ in ({}, {"wire": wire}):
            module = make_sharded(tables, place(tables, "table-wise", FOUR), comm, **settings_)
            outs.append(module(batch).matrix_BS.detach())
        return float((outs[0] - outs[1]).abs().max()) if len(outs[0]) else 0.0

    assert max(run_threads(FOUR, rank, timeout_s=60)) < 0.05


def bytes_of(tables, layout, batches_W, *, expand):
    def rank(comm):
        module = make_sharded(tables, place(tables, layout, FOUR), comm)
        batch = batches_W[comm.rank][0]
        module(batch.expanded() if expand else batch).matrix_BS.sum().backward()
        return {what: sum(n for (w, *_), n in comm.sent.counts.items() if w == what) for what in WHAT}

    found = run_threads(FOUR, rank, timeout_s=60)
    return {what: sum(of_rank[what] for of_rank in found) for what in WHAT}


WHAT = ("counts", "ids", "pooled", "gradients")


def test_bytes_fall_by_how_often_samples_repeat():
    """Of what is shared; one number for each distinct sample comes with it, and gradients are of all samples."""
    tables = [Table(name=f"user{k}", rows=60, dim=8) for k in range(12)]
    names = tuple(table.name for table in tables)
    samples_W = (200, 100, 0, 300)
    batches_W = batches_of(tables, common=names, samples_W=samples_W)
    plain, shared = (bytes_of(tables, "table-wise", batches_W, expand=expand) for expand in (True, False))
    assert shared["counts"] == plain["counts"]
    assert shared["gradients"] == plain["gradients"]
    assert shared["pooled"] * 10 == plain["pooled"] > 0
    distinct = sum(n // 10 for n in samples_W[1:])  # of ranks that send to the first, which holds all
    assert (shared["ids"] - 4 * distinct) * 10 == plain["ids"]
    assert plain["ids"] / shared["ids"] > 9.5


def test_both_bag_sets_travel_together():
    """As many collectives as of a plain batch, where pooled vectors take one exchange."""
    tables, seat = two_tables(), RehearsedRank(FOUR, 1)
    batch = batches_of(tables)[3][0]
    for layout in ("table-wise", "column-wise", "row-wise"):
        plan = place(tables, layout, FOUR)
        shared, plain = rehearse(tables, plan, seat, batch), rehearse(tables, plan, seat, batch.expanded())
        assert [(c.purpose, c.collective) for c in shared.calls] == [(c.purpose, c.collective) for c in plain.calls]
        assert shared.visited == plain.visited
        assert shared.total_bytes() < plain.total_bytes()


def test_a_rank_whose_shared_ids_are_bad_says_so_of_its_samples():
    tables = two_tables()

    def rank(comm):
        batch = batches_of(tables)[comm.rank][0]
        if comm.rank == 3:
            inner = batch.shared.jagged
            batch = replace(batch, shared=replace(batch.shared, jagged=replace(inner, values_N=inner.values_N + 1000)))
        module = make_sharded(tables, place(tables, ["table-wise", "replicated"], FOUR), comm)
        wanted = IdError if comm.rank == 3 else PeerError
        messages = []
        for form in (batch, batch.expanded()):
            with pytest.raises(wanted) as raised:
                module(form)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]
        numbers = torch.zeros_like(batch.shared.inverse_B)
        batch = replace(batch, shared=SharedBags(jagged=batch.shared.jagged, inverse_B=numbers))
        with pytest.raises((BatchError, PeerError), match="0 or 1"):
            module(batch)

    run_threads(FOUR, rank, timeout_s=60)


@pytest.mark.filterwarnings("ignore::rowwise.UnknownIdWarning")
@pytest.mark.parametrize("layout", ["table-wise", "row-wise", "replicated"])
def test_unknown_ids_are_counted_once_for_each_sample(layout):
    tables = two_tables(unknown="last_row")
    larger = [Table(name=t.name, rows=90, dim=8) for t in tables]
    batches_W = batches_of(larger)
    plan = place(tables, layout, FOUR)
    assert not any(run_threads(FOUR, apart(tables, plan, batches_W), timeout_s=60))

    def rank(comm):
        modules = [make_sharded(tables, plan, comm) for _ in range(2)]
        batch = batches_W[comm.rank][0]
        for module, form in zip(modules, (batch, batch.expanded()), strict=True):
            module(form)
        return modules[0].unknown_ids == modules[1].unknown_ids, sum(modules[0].unknown_ids.values())

    found = run_threads(FOUR, rank, timeout_s=60)
    assert all(same for same, _ in found)
    assert found[3][1] > 10


def test_nothing_is_staged_without_gradients():
    tables = two_tables()

    def rank(comm):
        module = make_sharded(tables, place(tables, ["row-wise", "replicated"], FOUR), comm)
        batch = batches_of(tables)[comm.rank][0]
        with torch.no_grad():
            outs = [module(form).matrix_BS for form in (batch, batch.expanded())]
        assert torch.equal(*outs)
        assert not module.staged

    run_threads(FOUR, rank, timeout_s=60)


@pytest.mark.parametrize("elastic", [False, True])
def test_a_batch_in_pieces_is_one_batch_where_bags_are_shared(elastic):
    """Virtual shards: the batch of a rank is cut, and bags that are cut apart are in both pieces."""
    tables = two_tables()

    def rank(comm):
        modules = [make_sharded(tables, place(tables, ["row-wise", "replicated"], FOUR), comm, elastic=elastic)
                   for _ in range(2)]  # fmt: skip
        batch = batches_of(tables, samples_W=(512,) * 4, copies=7)[comm.rank][0]
        for module, form in zip(modules, (batch, batch.expanded()), strict=True):
            module.forwards_per_batch = 2
            for part in split(form, [256, 256]):
                (module(part).matrix_BS ** 2).sum().backward()
            module.update()
        pairs = zip(modules[0].arenas, modules[1].arenas, strict=True)
        return [torch.equal(a.rows, b.rows) and torch.equal(a.state, b.state) for a, b in pairs]

    assert all(all(found) for found in run_threads(FOUR, rank, timeout_s=60))


@pytest.mark.parametrize("layout", ["table-wise", "row-wise"])
def test_gradients_of_shared_weights_come_back(layout):
    tables = two_tables(pooling=Pooling.WEIGHTED)

    def rank(comm):
        module = make_sharded(tables, place(tables, layout, FOUR), comm)
        grads = []
        for expand in (False, True):
            batch = batches_of(tables)[comm.rank][0]
            weights = batch.shared.jagged.weights_N.requires_grad_()
            batch.weights_N.requires_grad_()
            out = module(batch.expanded() if expand else batch).matrix_BS
            (out**2).sum().backward()
            module.discard()
            grads.append((weights.grad, batch.weights_N.grad))
        return all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), float(grads[0][0].abs().sum())

    found = run_threads(FOUR, rank, timeout_s=60)
    assert all(same for same, _ in found)
    assert found[3][1] > 0


def processes_differ(comm):
    """On a rank that is a process."""
    tables = two_tables()
    plan = place(tables, ["row-wise", "table-wise"], Topology(devices=2))
    return apart(tables, plan, batches_of(tables, samples_W=(40, 33)))(comm)


@pytest.mark.dist
@pytest.mark.parametrize("shared_memory", [False, True])
def test_processes_share_as_threads_do(shared_memory):
    assert not any(run_processes(2, processes_differ, shared_memory=shared_memory, timeout_s=60))


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", [*CASES])
def test_merged_gradients_send_less_and_agree_to_rounding(layout):
    tables = [*two_tables(pooling=Pooling.MEAN), Table(name="both", rows=601, dim=8, features=("user.1", "item.1"))]
    common = ("user", "user.1")

    def rank(comm):
        plan = place(tables, layout, FOUR)
        modules = [make_sharded(tables, plan, comm) for _ in range(2)]
        modules[1].merge_shared = True
        sent = []
        for module in modules:
            before = sum(comm.sent.counts.values())
            for batch in batches_of(tables, common=common)[comm.rank] * 2:
                (module(batch).matrix_BS ** 2).sum().backward()
                module.update()
            sent.append(sum(comm.sent.counts.values()) - before)
        pairs = zip(modules[0].arenas, modules[1].arenas, strict=True)
        rows = [(a.rows.view(torch.float32), b.rows.view(torch.float32)) for a, b in pairs]
        return sent, max((float((a - b).abs().max()) for a, b in rows), default=0.0)

    sent, apart_ = zip(*run_threads(FOUR, rank, timeout_s=60), strict=True)
    exact, merged = map(sum, zip(*sent, strict=True))
    assert merged < exact or (layout == "replicated" and merged == exact)
    assert 0 < max(apart_) < 1e-4


def test_merged_gradients_are_no_elastic_results():
    tables = two_tables()

    def rank(comm):
        module = make_sharded(tables, place(tables, "row-wise", FOUR), comm, elastic=True)
        with pytest.raises(SpecError, match="expected merge_shared=False"):
            module.merge_shared = True
        module.merge_shared = False

    run_threads(FOUR, rank, timeout_s=60)
