"""A GPU's kernels beside those of the CPU: the same bits, for random problems and shapes that are cut into parts."""

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from problems import OPTIMIZERS, Problem, make_problem, problems, tables_of_row_types

from rowwise import Batch, Embeddings, Jagged, Plan, Pooling, RowWiseAdagrad, Sgd, Table
from rowwise.base.errors import DeviceError
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.plan import Tile
from rowwise.parallel.shard.apply import copy_tables
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.tables.ops.faults import FaultWord, check_faults
from rowwise.tables.ops.graph import Graph, aggregate
from rowwise.tables.ops.layout import FeatureDescriptor
from rowwise.tables.ops.linear import linear
from rowwise.tables.ops.reference import FeatureBags
from rowwise.tables.ops.update import next_step
from rowwise.train.on_device import DeviceCopies
from rowwise.train.snapshot import collect, restore

pytestmark = pytest.mark.gpu
ops = torch.ops.rowwise
HALVES = ((0, 1500), (1500, 3000))
RANDOM = settings(max_examples=2, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def on_gpu(x):
    return x.cuda() if isinstance(x, torch.Tensor) else x


def same(on_device: torch.Tensor, on_host: torch.Tensor) -> bool:
    got = on_device.cpu()
    shaped = got.dtype == on_host.dtype and got.shape == on_host.shape
    return shaped and torch.equal(got.contiguous().view(torch.uint8), on_host.contiguous().view(torch.uint8))


def bags_of(problem: Problem):
    arena = problem.arena()
    group, jagged = problem.group(arena), problem.jagged
    offsets = ops.offsets(jagged.lengths_FB)
    return (
        arena,
        group,
        FeatureBags(problem.sources(group), jagged.values_N, offsets, jagged.weights_N, jagged.batch_size),
    )


def check(problem: Problem, per_id: bool) -> None:
    arena, group, bags = bags_of(problem)
    rows, state = arena.rows.cuda(), arena.state.cuda()
    batch = [x.cuda() for x in bags[1:3]]
    if per_id:
        found = ops.gather(rows, bags.features, *batch, bags.batch)
        expected = ops.gather(arena.rows, *bags[:3], bags.batch)
    else:
        batch.append(bags.weights.cuda())
        found = ops.pool(rows, bags.features, *batch, bags.batch, group.columns)
        expected = ops.pool(arena.rows, *bags, group.columns)
    assert same(found, expected)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(problem.seed))
    if not per_id:
        found = ops.pool_weight_grad(rows, bags.features, *batch, grad.cuda(), bags.batch)
        assert same(found, ops.pool_weight_grad(arena.rows, *bags[:4], grad, bags.batch))
    weights = None if per_id else bags.weights
    for _ in range(2):
        hyper, keys = next_step(arena, group)
        step, host = (group.tables_TC, hyper, keys, bags.features), (bags.values, bags.offsets, weights, grad)
        ops.update(rows, state, *step, *map(on_gpu, host), bags.batch, per_id)
        ops.update(arena.rows, arena.state, *step, *host, bags.batch, per_id)
        check_faults(rows.device)
        assert same(state, arena.state)
        assert same(rows, arena.rows)


def check_random(number: int, strategy, per_id: bool) -> None:
    @RANDOM
    @seed(number)
    @given(problem=strategy)
    def run(problem):
        check(problem, per_id)

    run()


@pytest.mark.parametrize("number", range(12))
def test_pooled(number):
    check_random(number, problems(), per_id=False)


@pytest.mark.parametrize("number", range(4))
def test_sequences(number):
    check_random(number, problems(poolings=(Pooling.SEQUENCE,)), per_id=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_every_optimizer_and_row_type(optimizer):
    tables = tables_of_row_types(optimizer, 500, (20, 64, 16, 12, 128, 100))
    check(make_problem(tables, batch=2000, most=2, seed=1), per_id=False)


@pytest.mark.parametrize(("batch", "features", "most"), [(70_000, 1, 1), (2600, 1, 1), (30_000, 3, 4)])
def test_hot_rows(batch, features, most):
    """Rows that are cut into units, blocks of samples that miss one, several contributions of a sample."""
    names = tuple(f"f{k}" for k in range(features))
    table = Table(name="t", rows=40_000, dim=32, features=names, pooling=Pooling.MEAN, optimizer=RowWiseAdagrad())
    check(make_problem((table,), batch=batch, most=most, seed=3, hot=True), per_id=False)


def test_hundreds_of_tables():
    """Of several dims, empty and full."""
    tables = tuple(
        Table(name=f"t{k}", rows=1 + 37 * k, dim=(8, 64, 128)[k % 3], optimizer=RowWiseAdagrad()) for k in range(300)
    )
    check(make_problem(tables, batch=500, most=1, seed=4), per_id=False)


@pytest.mark.parametrize(("vectors", "dim"), [(2, 3), (5, 16), (27, 20), (27, 128), (40, 64), (300, 64)])
def test_interactions_are_close(vectors, dim):
    dense, pooled = torch.randn(300, dim), torch.randn(300, (vectors - 1) * dim)
    out, expected = ops.interact(dense.cuda(), pooled.cuda()), ops.interact(dense, pooled)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(expected)
    found = ops.interact_grad(dense.cuda(), pooled.cuda(), grad.cuda())
    for one, other in zip(found, ops.interact_grad(dense, pooled, grad), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", [None, "first", "spread", "stride"])
@pytest.mark.parametrize("dim", [5, 64, 130])
def test_sums_over_neighbours(how, dim):
    targets_E, sources_E = (torch.rand(50_000) ** 3 * 300).long(), torch.randint(400, (50_000,))
    found = []
    for device in ("cuda", "cpu"):
        graph = Graph.of_edges(targets_E.to(device), sources_E.to(device), (300, 400))
        vectors_SD = torch.randn(400, dim, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        out_TD = aggregate(graph if how is None else graph.sampled(32, how), vectors_SD)
        out_TD.square().sum().backward()
        found.append((out_TD.detach(), vectors_SD.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize(("dim", "group"), [(1, 0), (5, 0), (64, 0), (20, 16), (100, 48), (33, 16)])
def test_packed_rows(dim, group):
    rows = torch.randn(1000, dim) * torch.logspace(-30, 30, 1000).unsqueeze(1)
    packed = ops.pack(rows, group)
    assert same(ops.pack(rows.cuda(), group), packed)
    assert same(ops.unpack(packed.cuda(), dim, group), ops.unpack(packed, dim, group))


def test_a_resumed_optimizer_goes_on(tmp_path):
    """Fused steps count on the device of the parameters."""
    made = []
    for number in range(2):
        torch.manual_seed(number)
        model = torch.nn.Linear(5, 3).cuda()
        made.append((model, {"dense": torch.optim.AdamW(model.parameters(), fused=True)}))
    for step in range(4):
        for model, optimizers in made if step > 1 else made[:1]:
            optimizers["dense"].zero_grad()
            model(torch.ones(2, 5, device="cuda") * step).sum().backward()
            optimizers["dense"].step()
        if step == 1:
            write(tmp_path / "1", *collect(*made[0]))
            restore(Checkpoint.open(tmp_path / "1"), *made[1])
    assert same(made[1][0].weight, made[0][0].weight.cpu())


def test_a_copy_that_nothing_used_does_not_hide_those_after_it():
    copies = DeviceCopies(torch.device("cuda"))
    jagged = make_problem((Table(name="t", rows=10, dim=8, optimizer=Sgd()),), 6, 3, seed=2).jagged
    batches = [Batch(dense_BF=torch.rand(6, 2), sparse=jagged, labels_BK=torch.rand(6, 1)) for _ in range(3)]
    _, second, third = (copies.start(batch) for batch in batches)
    copies.wait_for([second])
    assert [copied for copied, _, _ in copies._started] == [third]
    assert same(second.dense_BF, batches[1].dense_BF)


def test_a_bad_id_touches_nothing_and_is_raised_later():
    arena, group, bags = bags_of(make_problem((Table(name="t", rows=10, dim=8, optimizer=Sgd()),), 6, 3, seed=2))
    values = bags.values.clone()
    first = FeatureDescriptor.read(bags.features)[0].source * bags.batch
    values[bags.offsets[first]] = 10
    rows = arena.rows.cuda()
    ops.pool(rows, bags.features, values.cuda(), bags.offsets.cuda(), None, bags.batch, group.columns)
    with pytest.raises(DeviceError, match="outside its table"):
        check_faults(rows.device)
    assert same(rows, arena.rows)
    check_faults(rows.device)


def test_a_row_whose_gradient_is_not_finite_keeps_its_value():
    arena, group, bags = bags_of(make_problem((Table(name="t", rows=50, dim=8, optimizer=Sgd()),), 6, 1, seed=2))
    feature = FeatureDescriptor.read(bags.features)[0]
    grad, row = torch.ones(bags.batch, group.columns), bags.ids(feature)[0]
    grad[bags.samples(feature)[0]] = float("nan")
    rows, state = arena.rows.cuda(), arena.state.cuda()
    hyper, keys = next_step(arena, group)
    batch = map(on_gpu, (bags.values, bags.offsets, None, grad))
    ops.update(rows, state, group.tables_TC, hyper, keys, bags.features, *batch, bags.batch, False)
    with pytest.raises(DeviceError, match="not finite"):
        check_faults(rows.device)
    before, after = (x.view(torch.float32).view(-1, 8) for x in (arena.rows, rows.cpu()))
    assert same(after[row], before[row])
    assert not torch.equal(after, before)


@pytest.mark.parametrize("columns", [13, 16, 479])
def test_products_in_16_bits_of_any_width(columns):
    """Factors are padded to a width that is fast; the products and gradients are those of torch."""
    layers = [torch.nn.Linear(columns, 24).cuda() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    inputs = [torch.randn(50, columns, device="cuda").requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    found = []
    for layer, x, product in zip(layers, inputs, (linear, torch.nn.functional.linear), strict=True):
        with torch.autocast("cuda", torch.bfloat16):
            out = product(x, layer.weight, layer.bias)
        out.float().square().sum().backward()
        found.append((out, x.grad, layer.weight.grad, layer.bias.grad))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("cached", [{"t0": 0, "t2": 64}, {f"t{k}": 400 for k in range(6)}])
def test_tables_in_host_memory(optimizer, cached):
    """Rows that a GPU caches have the bits of tables on the CPU, in lookups, after updates, and after a change here."""
    tables = tables_of_row_types(optimizer, 3000, (20, 5, 16, 12, 52, 100))
    plain, module = Embeddings(tables, seed=1), Embeddings(tables, seed=1).cache_on("cuda", cached)
    for step in range(6):
        batch = make_problem(tables, batch=150, most=2, seed=step).jagged
        vectors = [one(batch.to(one.device)).matrix_BS for one in (plain, module)]
        assert same(vectors[1], vectors[0])
        for one, found in zip((plain, module), vectors, strict=True):
            found.sum().backward()
            one.update()
        check_faults(module.device)
        if step == 3:
            for one in (plain, module):
                one.table("t0")[7] = 1
                one.arena.mark_all()
    for table in tables:
        assert same(module.table(table.name), plain.table(table.name))
        for name, state in plain.optimizer_state()[table.name].items():
            assert name == "step" or same(module.optimizer_state()[table.name][name], state)
    counters = module.arena.store.counters(0)
    assert counters.misses > 0
    assert counters.writes <= counters.evictions <= counters.misses


def test_tiles_of_a_rank_in_host_memory():
    """Ids are routed on the host; a table is in two tiles, one has few cached rows, and one is on the GPU."""
    tables = [Table(name=f"t{k}", rows=3000, dim=16, optimizer=RowWiseAdagrad(lr=0.1)) for k in range(3)]
    tiles = [Tile(table="t0", rank=0, rows=rows, cols=(0, 16), tier="host", cache_rows=200) for rows in HALVES]
    tiles += [Tile(table="t1", rank=0, rows=(0, 3000), cols=(0, 16), tier="host", cache_rows=64)]
    plan = Plan(world=1, tiles=(*tiles, Tile(table="t2", rank=0, rows=(0, 3000), cols=(0, 16))))
    plain, whole = Embeddings(tables, seed=1), Embeddings(tables, seed=1)
    sharded = ShardedEmbeddings(tables, plan, solo())
    copy_tables(whole, sharded)
    sharded.cache_on("cuda", samples=600)
    for step in range(6):
        batch = make_problem(tables, batch=150, most=2, seed=step).jagged
        vectors = [one(batch).matrix_BS for one in (plain, sharded)]
        for one, found in zip((plain, sharded), vectors, strict=True):
            found.sum().backward()
            one.update()
        check_faults(sharded.device)
    for local in sharded.local_tiles():
        assert same(local.rows, plain.table(local.tile.table)[slice(*local.tile.rows)])
    assert any(arena.store.counters(0).misses for arena in sharded.arenas if arena.store is not None)


def test_a_batch_with_more_rows_than_the_cache_has_slots():
    table = Table(name="t", rows=5000, dim=8, optimizer=Sgd())
    module = Embeddings([table]).cache_on("cuda", {"t": 32})
    before = module.table("t").clone()
    ids = torch.arange(4000, device="cuda")
    batch = Jagged(features=("t",), values_N=ids, lengths_FB=torch.ones_like(ids))

    def train():
        module(batch).matrix_BS.sum().backward()
        module.update()
        check_faults(module.device)

    with pytest.raises(DeviceError, match="rows of a table"):
        train()
    assert same(module.table("t"), before)


def test_a_gpu_without_a_number_is_the_current_one():
    """The end of a run checks `train.device`, and kernels know the GPU of their tensors."""
    assert FaultWord.of(torch.device("cuda")) is FaultWord.of(torch.zeros(1, device="cuda").device)
