"""Steps of a model whose dense parameters are sharded, on ranks that are processes."""

import torch
from clicks import DENSE, make_clicks, make_tables
from msgspec import structs
from trainings import work_of

from rowwise import (
    DCN,
    DHEN,
    DLRM,
    PLE,
    AutoInt,
    DeepFM,
    Embeddings,
    FinalMLP,
    MaskNet,
    MMoE,
    WideDeep,
    Wukong,
    XDeepFM,
)
from rowwise.parallel.plan import Plan
from rowwise.parallel.shard import shard
from rowwise.planning.planner import table_wise
from rowwise.tables.row_optimizers import Sgd
from rowwise.train.dense_parallel import ShardedConstruction, local_part, shard_dense, shards_of, unit_shapes
from rowwise.train.settings import DenseAdam
from rowwise.train.snapshot import collect
from rowwise.train.step import step

DIM = 8
MODELS = {
    "dlrm": lambda e: DLRM(e, DENSE, (64, DIM), (128, 1)),
    "deepfm": lambda e: DeepFM(e, DENSE, (128, 1)),
    "wide_deep": lambda e: WideDeep(e, DENSE, (128, 1)),
    "dcn": lambda e: DCN(e, DENSE, (128, 1), gated=True, structure="parallel"),
    "dhen": lambda e: DHEN(e, DENSE, (128, 1), layers=3, interactions=("cross", "attention", "dot")),
    "wukong": lambda e: Wukong(e, DENSE, (128, 1), vectors=6),
    "masknet": lambda e: MaskNet(e, DENSE, (128, 1)),
    "final_mlp": lambda e: FinalMLP(e, DENSE),
    "autoint": lambda e: AutoInt(e, DENSE),
    "xdeepfm": lambda e: XDeepFM(e, DENSE),
    "mmoe": lambda e: MMoE(e, DENSE, 1),
    "ple": lambda e: PLE(e, DENSE, 1, levels=2),
}


def make(comm, parallel, name):
    tables = [structs.replace(table, optimizer=Sgd(lr=0.1)) for table in make_tables(DIM)]
    construction = ShardedConstruction(comm, shards_of(parallel, comm.topology))
    torch.manual_seed(3)
    with construction:
        model = MODELS[name](Embeddings(tables, seed=1, device="meta"))
    every = [t for m in model.modules() if isinstance(m, Embeddings) for t in m.tables]
    world = len(comm.ranks)
    tiles = tuple(tile for k, table in enumerate(every) for tile in table_wise(table, k % world))
    shard(model, Plan(world=world, tiles=tiles), comm)
    shapes = unit_shapes(model)
    shard_dense(model, parallel, comm, construction)
    return model, shapes


def train_after_an_error(comm, parallel, fails):
    """Losses and norms of steps, before which the backward of another has raised."""
    model, _ = make(comm, parallel, "dhen")
    context = work_of(model, comm, optimizer=DenseAdam(lr=1e-3), dense_parallel=parallel)
    if fails:
        layer = next(module for module in model.modules() if "weight" in module._parameters)
        hook = layer.register_forward_hook(lambda _module, _inputs, out: out.register_hook(fail) and None)
        raised = False
        try:
            step(context, [make_clicks(16, seed=comm.rank)], 1)
        except ArithmeticError:
            raised = True
        assert raised
        hook.remove()
    results = [step(context, [make_clicks(16, seed=100 * number + comm.rank)], number) for number in (1, 2)]
    return [(result.loss, result.gradient_norm) for result in results]


def fail(_gradient):
    raise ArithmeticError("the backward of a layer")


def train(comm, parallel, name="dhen", steps=5, clip=None, optimizer=DenseAdam(lr=1e-3)):  # noqa: B008 - frozen
    """Losses, norms, bytes of a step, and the parameters at the start and the end by their parts on this rank."""
    model, shapes = make(comm, parallel, name)
    context = work_of(model, comm, optimizer=optimizer, clip=clip, dense_parallel=parallel)
    first = parts_of(model, comm)
    found = []
    for number in range(1, steps + 1):
        if number == steps:
            before = comm.sent.total("dense")
        result = step(context, [make_clicks(16, seed=100 * number + comm.rank)], number)
        found.append((result.loss, result.gradient_norm))
    sent = comm.sent.total("dense") - before
    numbers = [t for p in context.dense for t in (p, p.grad, *context.optimizer.state.get(p, {}).values())]
    held = sum(local_part(t.detach()).numel() * t.element_size() for t in numbers if t is not None)
    with torch.no_grad():
        logits = model(make_clicks(8, seed=1))
    last = parts_of(model, comm, context.optimizer)
    return {
        "found": found,
        "sent": sent,
        "shapes": shapes,
        "first": first,
        "last": last,
        "logits": logits,
        "held": held,
    }


def train_all(comm, parallel):
    return {name: train(comm, parallel, name, 3, 0.05) for name in MODELS}


def parts_of(model, comm, optimizer=None):
    """What this rank would write to a checkpoint."""
    shards, _ = collect(model, {} if optimizer is None else {"dense": optimizer}, comm)
    chosen = [s for s in shards if s.name.startswith(("model/", "optimizer/"))]
    return {(s.name, s.rows): (s.shape, s.tensor.clone()) for s in chosen if s.tensor.numel()}


def joined(results, which):
    """The whole tensors, from the parts of all ranks."""
    parts = {}
    for result in results:
        for (name, rows), (shape, tensor) in result[which].items():
            whole = parts.setdefault(name, torch.full(shape if shape else (1,), float("nan")))
            whole[rows[0] : rows[1]] = tensor.view(whole[rows[0] : rows[1]].shape)
    return parts


def memory(comm, parallel, layers, width):
    """How much more memory the construction of a model took at most than it held before."""
    import resource

    make(comm, parallel, "dlrm")  # imports what sharding needs
    tables = make_tables(DIM)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    construction = ShardedConstruction(comm, shards_of(parallel, comm.topology))
    with construction:
        model = DCN(Embeddings(tables, device="meta"), DENSE, (*[width] * layers, 1), crosses=1)
    every = [t for m in model.modules() if isinstance(m, Embeddings) for t in m.tables]
    shard(model, Plan(world=len(comm.ranks), tiles=tuple(x for t in every for x in table_wise(t, 0))), comm)
    shard_dense(model, parallel, comm, construction)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    held = sum(local_part(p.detach()).numel() for p in model.parameters() if p.requires_grad)
    return taken * 1024, held * 4
