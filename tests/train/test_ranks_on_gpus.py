"""Steps of ranks with a GPU each, without a GPU: what ranks on CPUs do, with the ids on the hosts.

On the pretended device (`pretend_gpu.py`) dense layers are computed by other operators than on the CPU, so their last
digits differ, as they do on a GPU.
"""

import copy
from threading import get_ident

import pytest
import torch
from clicks import DENSE, make_clicks, make_tables
from msgspec import structs
from pretend_gpu import DEVICE, PretendGpu, on_host, reads

from rowwise import (
    DIN,
    DLRM,
    Batch,
    Embeddings,
    Jagged,
    NextItem,
    Plan,
    Pooling,
    SASRec,
    SpecError,
    Table,
    Tower,
    TwoTower,
    make_embeddings,
)
from rowwise.ingest.batcher import Position
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard import shard
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.planning.planner import row_wise
from rowwise.recipes.device_tables import check_own_gpus, gpu_of_rank
from rowwise.tables.idmaps import DoubleHashIds, HashIds, QuotientRemainderIds
from rowwise.tables.spec import Topology
from rowwise.train.breakdown import Breakdown
from rowwise.train.evaluate import ClickEvaluator, Slicing
from rowwise.train.groups import UpdateGroups, check_and_pin
from rowwise.train.objective import Clicks, InBatch, NextItems
from rowwise.train.retrieve import NextItemEvaluator, RetrievalEvaluator
from rowwise.train.settings import DenseSgd, Training
from rowwise.train.step import StepContext, step

WORLD = 2
LISTS = Table(name="item", rows=40, dim=8, pooling=Pooling.SEQUENCE)


def make_lists(samples, seed):
    g = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(2, 7, (samples,), generator=g)
    items = torch.randint(40, (int(lengths_B.sum()),), generator=g)
    sparse = Jagged(features=("item",), values_N=items, lengths_FB=lengths_B)
    return Batch(dense_BF=torch.zeros(samples, 0), sparse=sparse, labels_BK=torch.ones(samples, 1))


def clicks_on(model, training, comm, batches):
    slicing = Slicing(("user",), 3)
    return Clicks(model), ClickEvaluator(model, lambda: batches, ("clicked",), training, slicing=slicing, comm=comm)


def items_on(model, training, comm, batches):
    streams = {"train_batches": lambda: batches, "query_batches": lambda: batches}
    return InBatch(model, "item", None, comm=comm), RetrievalEvaluator(
        model, "item", **streams, task="clicked", ks=(3,), comm=comm
    )


def lists_on(model, training, comm, batches):
    return NextItems(model), NextItemEvaluator(model, lambda: batches, "next", training, ks=(3,), comm=comm)


def make_towers():
    user, item, _ = make_tables()
    return TwoTower(Tower(Embeddings([user], seed=1), DENSE, (6, 5)), Tower(Embeddings([item], seed=2), 0, (5,)))


def make_din():
    """Both are looked up as sequences, the target as one of one id."""
    user, item, word = make_tables()
    tables = [user, structs.replace(item, pooling=Pooling.SEQUENCE), structs.replace(word, pooling=Pooling.SEQUENCE)]
    return DIN(Embeddings(tables, seed=1), DENSE, (8, 1), histories={"said": "item", "read": "item"}, attention=(8,))


def make_mapped():
    """Means, products and bags with fewer rows than ids."""
    user, item, word = make_tables()
    tables = [
        structs.replace(user, id_map=QuotientRemainderIds(rows=12, combine="product")),
        structs.replace(item, id_map=DoubleHashIds(rows=9)),
        structs.replace(word, id_map=HashIds(rows=6)),
    ]
    return DLRM(make_embeddings(tables, seed=1), DENSE, (16, 8), (16, 1))


KINDS = {
    "din": (make_din, make_clicks, clicks_on),
    "mapped": (make_mapped, make_clicks, clicks_on),
    "dlrm": (lambda: DLRM(Embeddings(make_tables(), seed=1), DENSE, (16, 8), (16, 1)), make_clicks, clicks_on),
    "two tower": (make_towers, make_clicks, items_on),
    "next item": (
        lambda: NextItem(Embeddings([LISTS], seed=1), SASRec(8, length=5, dropout=0.0)),
        make_lists,
        lists_on,
    ),
}
SETTINGS = {
    "plain": {},
    "clip, accumulate": {"clip": 0.05, "accumulate": 2},
    "late": {"staleness": 1},
    "elastic": {"determinism": "elastic", "virtual_shards": 4},
}


def make_model(kind):
    torch.manual_seed(0)
    return KINDS[kind][0]()


def to_gpu(model):
    """As `model.to(device)`, of parameters that may not change their class."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddings):
            module._parameters.clear()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.to(DEVICE)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


class Batches:
    """A batcher whose thread prepares batches for the device."""

    def __init__(self, batches, context):
        self._batches, self._context = batches, context

    def __iter__(self):
        return (check_and_pin(self._context, batch) for batch in self._batches)

    def state(self):
        return Position()


def trained(kind, settings, device):
    def rank(comm):
        model = copy.deepcopy(MODELS[kind])
        tables = [t for m in model.modules() if isinstance(m, Embeddings) for t in m.tables]
        tiles = tuple(tile for table in tables for tile in row_wise(table, range(WORLD)))
        shard(model, Plan(world=WORLD, tiles=tiles), comm, elastic=settings.determinism == "elastic")
        return run_steps(kind, model, settings, comm)

    def on_device(comm):
        with PretendGpu():
            return rank(comm)

    return on_device if device == "gpu" else rank


def run_steps(kind, model, settings, comm):
    _, make, objectives = KINDS[kind]
    if settings.device != "cpu":
        to_gpu(model)
    held_out = [make(12, seed=1 + comm.rank)]
    objective, evaluator = objectives(model, settings, comm, held_out)
    context = StepContext.create(model, objective, settings, Breakdown(), comm)
    assert context.runs_ahead == (settings.device != "cpu" and settings.determinism == "run")
    assert context.routes_on_host == (settings.device != "cpu")
    size = 1024 // WORLD if settings.determinism == "elastic" else 16
    batches = [make(size, seed=100 * number + comm.rank) for number in range(3 * settings.accumulate)]
    groups, told = UpdateGroups(Batches(batches, context), context), []
    for number in range(1, 4):
        torch.manual_seed(number)
        batches, before = groups.read().batches, reads[get_ident()]
        stepped = step(context, batches, number)
        if kind == "dlrm" and context.runs_ahead:  # batches of one update are concatenated, which needs their sizes
            assert reads[get_ident()] - before == (settings.accumulate > 1)
        assert groups.error is None
        told.append((stepped.loss, stepped.gradient_norm))
    for late in context.late.values():
        late.apply_all()
    rows = [on_host(held.rows) for m in model.modules() if isinstance(m, ShardedEmbeddings) for held in m.local_tiles()]
    return told, [on_host(p.detach()).clone() for p in context.dense] + rows, evaluator()


MODELS = {kind: make_model(kind) for kind in KINDS}


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_ranks_on_gpus_do_what_ranks_on_cpus_do(kind, changes):
    on_cpu, on_gpu = (
        run_threads(WORLD, trained(kind, Training(device=device, optimizer=DenseSgd(lr=0.1), **changes), name))
        for device, name in (("cpu", "cpu"), ("meta", "gpu"))
    )
    for (told, tensors, scores), (wanted, expected, best) in zip(on_gpu, on_cpu, strict=True):
        assert told == [pytest.approx(numbers, rel=1e-4) for numbers in wanted]
        torch.testing.assert_close(tensors, expected, rtol=1e-3, atol=1e-4)
        assert scores.tasks.keys() == best.tasks.keys()
        assert all(scores.tasks[task] == pytest.approx(values, abs=1e-3) for task, values in best.tasks.items())
        assert [(row.feature, row.value) for row in scores.slices] == [(row.feature, row.value) for row in best.slices]


class Rank:
    """Of a communicator, what the choice of a GPU reads."""

    def __init__(self, rank, topology):
        self.rank, self.topology, self.ranks = rank, topology, tuple(range(topology.world))


def test_each_rank_takes_a_gpu_of_its_host():
    hosts = Topology(hosts=2, devices=4)
    assert [gpu_of_rank("cuda", Rank(rank, hosts), 4) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert gpu_of_rank("cuda", Rank(6, hosts), 8) == 2
    assert gpu_of_rank("cuda", Rank(6, hosts), 1) == 0  # the launcher shows each rank one of its own
    with pytest.raises(SpecError, match=r"train.device='cuda' with 4"):
        gpu_of_rank("cuda", Rank(6, hosts), 2)
    with pytest.raises(SpecError, match=r"train.device='cuda:1' with 8"):
        gpu_of_rank("cuda:1", Rank(6, hosts), 4)


def test_ranks_that_share_a_gpu_are_named():
    check_own_gpus(["a", "b", "c"])
    with pytest.raises(SpecError, match="ranks 0 and 2"):
        check_own_gpus(["a", "b", "a"])
