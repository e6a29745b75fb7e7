"""`shard` makes a model run on several ranks: the same names, rows, state and training, whatever was trained before."""

import copy

import pytest
import torch
from clicks import DENSE, make_clicks
from msgspec import structs
from parallel.shard import jobs
from parallel.shard.equal import SEED, Step, given, look_up, make_steps, place, rows_apart
from parallel.shard.layout_cases import CASES
from torch import nn
from torch.nn import functional as F

from rowwise import (
    DLRM,
    Adam,
    Batch,
    Constant,
    DeepFM,
    Embeddings,
    Normal,
    Plan,
    Pooling,
    RowType,
    RowWiseAdagrad,
    Sgd,
    SpecError,
    Table,
    Topology,
    Tower,
    TwoTower,
    Uniform,
    Wire,
)
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.apply import shard
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.planning.planner.layouts import table_wise
from rowwise.tables.ops.jagged import split
from rowwise.tables.spec import Codecs

WORLD = Topology(hosts=2, devices=2)
OPTIMIZERS = (Sgd(lr=0.1), RowWiseAdagrad(lr=0.1, clip=0.5), Adam(lr=0.01))
LAYOUTS = ("row-wise", "column-wise", "grid", "replicated", "all on the last rank")


def make_tables():
    """Of as many kinds as they can be in all of the models."""
    names = {"user": ("user",), "item": ("item",), "word": ("said", "read")}
    return [
        Table(name=name, rows=30, dim=8, features=features, pooling=pooling, optimizer=optimizer, init=Uniform(0.1))
        for (name, features), optimizer, pooling in zip(names.items(), OPTIMIZERS, list(Pooling)[:3], strict=True)
        for pooling in [Pooling.MEAN if pooling is Pooling.WEIGHTED else pooling]
    ]


def dlrm():
    return DLRM(Embeddings(make_tables(), seed=1), DENSE, bottom=(6, 8), top=(5, 1))


def deepfm():
    return DeepFM(Embeddings(make_tables(), seed=1), DENSE, deep=(5, 1))


def two_tower():
    tables = make_tables()
    user = Tower(Embeddings(tables[:1], seed=1), 1, (5, 4))
    return TwoTower(user, Tower(Embeddings(tables[1:], seed=2), DENSE - 1, (5, 4)))


MODELS = (dlrm, deepfm, two_tower)


def with_tables(model):
    return {path: m for path, m in model.named_modules() if isinstance(m, Embeddings | ShardedEmbeddings)}


def make(model):
    torch.manual_seed(0)
    return model()


def plan_of(model, layout, topology=WORLD):
    tables = [table for module in with_tables(model).values() for table in module.tables]
    return place(tables, layout, topology)


def cut(batch, sizes_W, rank):
    first = sum(sizes_W[:rank])
    span = slice(first, first + sizes_W[rank])
    sparse = split(batch.sparse, sizes_W)[rank]
    return Batch(dense_BF=batch.dense_BF[span], sparse=sparse, labels_BK=batch.labels_BK[span])


def train(model, batches, samples, comm=None):
    """Steps of descent on the mean over all samples of all ranks; gives the logits."""
    dense = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    logits = []
    for batch in batches:
        logits.append(model(batch))
        optimizer.zero_grad()
        (F.binary_cross_entropy_with_logits(logits[-1], batch.labels_BK, reduction="sum") / samples).backward()
        for p in dense if comm else ():
            p.grad = comm.all_reduce(p.grad.flatten(), "dense").wait().view(p.shape)
        optimizer.step()
        for module in with_tables(model).values():
            module.update()
    return [x.detach() for x in logits]


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_models_train_sharded_as_they_do_unsharded(model, layout):
    sizes_W, batches = (10, 3, 0, 19), [make_clicks(32, seed=seed) for seed in range(5)]
    whole = make(model)
    models = [copy.deepcopy(whole) for _ in range(4)]  # made here, as threads share torch's generator
    wanted = train(whole, batches, 32)

    def rank(comm):
        mine = models[comm.rank]
        assert shard(mine, plan_of(mine, layout), comm) is mine
        found = train(mine, [cut(batch, sizes_W, comm.rank) for batch in batches], 32, comm)
        for logits, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(logits, want.split(sizes_W)[comm.rank], rtol=1e-4, atol=1e-5)
        pairs = zip(with_tables(mine).items(), with_tables(whole).items(), strict=True)
        for (path, module), (same, before) in pairs:
            assert path == same
            assert not list(rows_apart(module, before, limit=1e-4))

    run_threads(WORLD, rank, timeout_s=60)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_dense_parameters_keep_their_names_and_are_the_same_objects(model):
    made = make(model)
    plan, tables = plan_of(made, "row-wise", Topology()), {t.name for m in with_tables(made).values() for t in m.tables}
    before = {name: p for name, p in made.named_parameters() if name.rpartition(".")[2] not in tables}
    names = set(made.state_dict())
    shard(made, plan, solo())
    after = dict(made.named_parameters())
    assert after.keys() == names == made.state_dict().keys()  # with one rank, those of tables too
    assert all(after[name] is before[name] for name in before)
    assert not [module for module in made.modules() if isinstance(module, Embeddings)]


class Holder(nn.Module):
    """A model that is nothing but its tables."""

    def __init__(self, tables):
        super().__init__()
        self.embeddings = Embeddings(tables, seed=SEED)


KINDS = (
    (RowType.FP32, None, 12, "row-wise adagrad"),
    (RowType.FP32, None, 8, "ftrl"),
    (RowType.FP16, None, 20, "adam"),
    (RowType.FP16, None, 16, "row-wise adam"),
    (RowType.BF16, None, 16, "lamb"),
    (RowType.INT8, 16, 64, "adagrad, clip"),
    (RowType.INT8, 16, 40, "row-wise adagrad, decay, clip"),
    (RowType.INT8, None, 24, "adam, clip"),
)


def kinds_of_tables():
    return [
        Table(
            name=f"t{k}",
            rows=331,
            dim=dim,
            row_type=row_type,
            column_group=group,
            optimizer=jobs.OPTIMIZERS[optimizer],
            pooling=list(Pooling)[k % 4],
            init=(Uniform(1.0), Normal(0.5), Constant(0.25))[k % 3],
        )
        for k, (row_type, group, dim, optimizer) in enumerate(KINDS)
    ]


def go_on(module, steps):
    for step in steps:
        given(look_up(module, step), step).backward()
        module.update()


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", CASES)
def test_a_model_that_was_trained_before_goes_on_as_if_it_had_not_been_cut(layout):
    """Rows, optimizer state and the count of steps come along, and the random bits of later roundings."""
    tables = kinds_of_tables()
    steps = make_steps(tables, [(5, 9, 0, 6)] * 6)
    model = Holder(tables)
    go_on(model.embeddings, steps[:3])
    models = [copy.deepcopy(model) for _ in range(4)]
    go_on(model.embeddings, steps[3:])

    def rank(comm):
        before = list(rows_apart(shard(models[comm.rank], plan_of(model, layout), comm).embeddings, halfway))
        go_on(models[comm.rank].embeddings, [step.of(comm.rank) for step in steps[3:]])
        return before + list(rows_apart(models[comm.rank].embeddings, model.embeddings))

    halfway = copy.deepcopy(models[0].embeddings)
    assert not [text for texts in run_threads(WORLD, rank, timeout_s=60) for text in texts]


@pytest.mark.few(6)
@pytest.mark.parametrize("layout", CASES)
def test_every_rank_can_fill_its_rows_by_itself(layout):
    tables = kinds_of_tables()
    whole = Embeddings(tables, seed=5)

    def rank(comm):
        sharded = ShardedEmbeddings(tables, place(tables, layout, WORLD), comm)
        sharded.fill(5)
        return list(rows_apart(sharded, whole))

    assert not [text for texts in run_threads(WORLD, rank, timeout_s=60) for text in texts]


def test_tables_whose_statistics_are_kept_by_piece_are_tables_of_their_own():
    """Approximate ones: each piece is what a table of its columns would be."""
    table = Table(name="t", rows=50, dim=24, optimizer=RowWiseAdagrad(lr=0.1, clip=2.0), init=Constant(0.5))
    plan = place([table], "column-wise", WORLD)
    plan = Plan(world=4, tiles=plan.tiles, approximate=("t",))
    steps = make_steps([table], [(5, 9, 0, 6)] * 3)

    def rank(comm):
        model = shard(Holder([table]), plan, comm)
        go_on(model.embeddings, [step.of(comm.rank) for step in steps])
        assert not comm.sent.total("row sums")
        ((tile, rows, state),) = [(h.tile, h.rows, h.state) for h in model.embeddings.local_tiles()]
        columns = slice(*tile.cols)
        piece = structs.replace(table, dim=columns.stop - columns.start)
        alone = Embeddings([piece])
        go_on(alone, [Step(batch=s.batch, ups={"": s.ups[""][:, columns]}, sizes_W=s.sizes_W) for s in steps])
        assert torch.equal(rows, alone.table("t"))
        assert torch.equal(state["sum"], alone.optimizer_state()["t"]["sum"])

    run_threads(WORLD, rank, timeout_s=60)


def test_what_cannot_be_sharded_is_refused_and_left_as_it_was():
    tables = make_tables()
    model, plan = Holder(tables), place(tables, "row-wise", Topology())
    before = model.embeddings
    with pytest.raises(SpecError, match="module that holds them"):
        shard(before, plan, solo())
    with pytest.raises(SpecError, match=r"table 'word' .*"):
        shard(model, Plan(world=1, tiles=plan.tiles[:2]), solo())
    with pytest.raises(SpecError, match="plan is for 2"):
        shard(model, place(tables, "row-wise", Topology(devices=2)), solo())
    with pytest.raises(SpecError, match="results need an exact"):
        shard(model, plan, solo(), wire=Wire(host=Codecs(forward=RowType.INT8)), elastic=True)
    assert model.embeddings is before


def test_modules_are_found_wherever_they_are_and_one_of_two_names_stays_one():
    tables = make_tables()
    model = nn.ModuleDict({"list": nn.ModuleList([nn.Sequential(Embeddings(tables[:1])), Embeddings(tables[1:])])})
    model["again"] = model["list"][1]
    shard(model, place(tables, "row-wise", Topology()), solo())
    assert isinstance(model["list"][0][0], ShardedEmbeddings)
    assert isinstance(model["list"][1], ShardedEmbeddings)
    assert model["again"] is model["list"][1]
    assert len(with_tables(model)) == 2


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_has_the_rows_of_a_rank_and_gives_them_back(assign):
    """Whatever torch does to parameters: rows keep their type, and what is loaded is what is trained."""
    tables = [*kinds_of_tables(), Table(name="forward", rows=9, dim=4)]

    def rank(comm):
        model = shard(Holder(tables), place(tables, ["row-wise"] * 8 + ["replicated"], WORLD), comm)
        assert "embeddings.forward" in model.state_dict()
        assert f"embeddings.t0[{331 * comm.rank // 4}:{331 * (comm.rank + 1) // 4}, 0:12]" in model.state_dict()
        saved = {name: x.clone() for name, x in model.state_dict().items()}
        for held in model.embeddings.local_tiles():
            held.rows.zero_()
        model.half().load_state_dict(saved, assign=assign)
        return list(rows_apart(model.embeddings, Embeddings(tables, seed=SEED)))

    assert not [text for texts in run_threads(WORLD, rank, timeout_s=60) for text in texts]


def test_it_says_what_a_rank_holds():
    (table, *_) = make_tables()
    model = shard(Holder([table]), Plan(world=1, tiles=table_wise(table, 0)), solo())
    assert str(model.embeddings) == "ShardedEmbeddings(user[0:30, 0:8] on rank 0)"


def test_tables_that_are_nowhere_are_filled_as_they_would_have_been():
    tables = [
        Table(name="users", rows=3000, dim=16, row_type=row_type, init=init, optimizer=RowWiseAdagrad(initial=0.5))
        for row_type, init in ((RowType.FP32, Uniform()), (RowType.INT8, Normal(std=0.1)))
    ]
    for table in tables:
        plan = Plan(world=3, tiles=CASES["row-wise"](table, Topology(devices=3)))

        def held(comm, device, table=table, plan=plan):
            model = shard(nn.Sequential(Embeddings([table], seed=5, device=device)), plan, comm)
            return [(piece.tile, piece.rows.clone(), piece.state["sum"].clone()) for piece in model[0].local_tiles()]

        nowhere, somewhere = (run_threads(3, lambda comm, device=d: held(comm, device)) for d in ("meta", "cpu"))
        for found, wanted in zip(nowhere, somewhere, strict=True):
            assert [tile for tile, _, _ in found] == [tile for tile, _, _ in wanted]
            assert all(
                torch.equal(a, b) for x, y in zip(found, wanted, strict=True) for a, b in zip(x[1:], y[1:], strict=True)
            )


def test_a_table_that_no_machine_holds_can_be_described_and_planned():
    table = Table(name="huge", rows=1 << 38, dim=128)
    assert Embeddings([table], device="meta").table("huge").shape == (1 << 38, 128)
