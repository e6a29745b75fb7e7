"""Jobs to hold sharded against unsharded: what there is to choose, and a job for each way of choosing."""

import random
from functools import partial
from itertools import cycle

import torch
from parallel.shard.equal import Job, given, make_steps, place, squares, train
from parallel.shard.layout_cases import CASES

from rowwise import (
    Adagrad,
    Adam,
    Ftrl,
    Lamb,
    Pooling,
    RowType,
    RowWiseAdagrad,
    RowWiseAdam,
    Schedule,
    Sgd,
    Table,
    Topology,
    Uniform,
    Wire,
)
from rowwise.tables.spec import Codecs, WireType

OPTIMIZERS = {
    "sgd": Sgd(lr=0.1),
    "sgd, decay, clip": Sgd(lr=0.1, weight_decay=0.02, clip=2.0),
    "adagrad": Adagrad(lr=0.1, initial=0.1, weight_decay=0.02),
    "adagrad, clip": Adagrad(lr=0.1, clip=2.0),
    "row-wise adagrad": RowWiseAdagrad(lr=0.1, schedule=Schedule(warmup_steps=3)),
    "row-wise adagrad, decay, clip": RowWiseAdagrad(lr=0.1, weight_decay=0.02, clip=2.0),
    "adam": Adam(lr=0.1, weight_decay=0.02),
    "adam, clip": Adam(lr=0.1, clip=2.0),
    "row-wise adam": RowWiseAdam(lr=0.1, weight_decay=0.02),
    "row-wise adam, clip": RowWiseAdam(lr=0.1, clip=2.0),
    "lamb": Lamb(lr=0.1, weight_decay=0.02),
    "lamb, clip": Lamb(lr=0.1, clip=2.0),
    "ftrl": Ftrl(lr=0.1, l1=0.05, l2=0.1),
    "ftrl, clip": Ftrl(lr=0.1, clip=2.0),
}
EVERY_OPTIMIZER = tuple(OPTIMIZERS.values())
ROWS = {  # row type, column group, dims
    "fp32": (RowType.FP32, None, (1, 4, 12, 20, 64)),
    "fp16": (RowType.FP16, None, (4, 10, 32)),
    "bf16": (RowType.BF16, None, (8, 12, 40)),
    "int8": (RowType.INT8, None, (16, 24)),
    "int8, groups": (RowType.INT8, 16, (32, 48, 40)),
}
ROWS_OF_COPIES = 601  # as many as make gathering cheaper than adding up, with two features and 542 samples
TABLE = {"layout": list(CASES), "pooling": list(Pooling), "optimizer": list(OPTIMIZERS), "rows": list(ROWS)}
WORLDS = {
    "alone": Topology(),
    "1": Topology(),
    "2": Topology(devices=2),
    "3": Topology(devices=3),
    "4": Topology(devices=4),
    "8": Topology(devices=8),
    "2x2": Topology(hosts=2, devices=2),
    "2x4": Topology(hosts=2, devices=4),
}
WORLD = {
    "world": list(WORLDS),
    "sizes": ["even", "uneven", "some empty", "blocks"],
    "determinism": ["run", "elastic", "elastic, squares"],
    "ids": [torch.int32, torch.int64],
}
Setting = dict[str, object]  # the choices made, in the order above


def draw(draws, choices, wanted=()) -> Setting:
    """A setting at random, with the wanted choices where they are of this kind."""
    setting = {name: draws.choice(values) for name, values in choices.items()}
    return setting | {name: value for name, value in wanted if name in choices}


def draw_table(draws, index, setting):
    """A table as it was chosen; what was not is drawn."""
    row_type, group, dims = ROWS[setting["rows"]]
    return Table(
        name=f"t{index}",
        rows=ROWS_OF_COPIES if setting["layout"] == "replicated" else draws.choice((9, 40, 331)),
        dim=draws.choice(dims),
        features=tuple(f"f{index}.{k}" for k in range(draws.randint(1, 2))),
        pooling=setting["pooling"],
        optimizer=OPTIMIZERS[setting["optimizer"]],
        row_type=row_type,
        column_group=group,
        init=Uniform(bound=1.0),
    )


def draw_tables(draws, layouts):
    """Any tables, in these layouts."""
    return tuple(draw_table(draws, k, draw(draws, TABLE) | {"layout": layout}) for k, layout in enumerate(layouts))


def draw_wire(draws, *, elastic):
    kinds = [WireType.FP32] if elastic else list(WireType)
    codecs = [Codecs(forward=draws.choice(kinds), backward=draws.choice(kinds)) for _ in range(2)]
    return Wire(host=codecs[0], network=codecs[1])


def table_for_each(rows, optimizers=EVERY_OPTIMIZER, kinds=((RowType.FP32, None, 16),), suffixes=()):
    """A table for each optimizer, with poolings and kinds of rows (type, column group, dim) in turn."""
    return tuple(
        Table(
            name=f"t{k}",
            rows=rows,
            dim=dim,
            features=tuple(f"t{k}.{suffix}" for suffix in suffixes),
            pooling=pooling,
            optimizer=optimizer,
            row_type=row_type,
            column_group=group,
            init=Uniform(bound=1.0),
        )
        for k, (optimizer, pooling, (row_type, group, dim)) in enumerate(zip(optimizers, cycle(Pooling), cycle(kinds)))
    )


def make_job(world, settings, seed, steps=5):
    """A job as it was chosen; what was not is drawn."""
    draws, topology = random.Random(seed), WORLDS[world["world"]]
    tables = [draw_table(draws, index, setting) for index, setting in enumerate(settings)]
    sizes_SW = [draw_sizes(draws, topology.world, world["sizes"]) for _ in range(steps)]
    return Job(
        tables=tuple(tables),
        plan=place(tables, [setting["layout"] for setting in settings], topology),
        steps=make_steps(tables, sizes_SW, seed, ids=world["ids"]),
        elastic=world["determinism"] != "run",
        script=partial(train, loss=squares if world["determinism"] == "elastic, squares" else given),
    )


def draw_sizes(draws, world, kind):
    """Samples of each rank: of more than one block of 256 together, where they are uneven."""
    if kind == "even":
        return (48 // world,) * world
    if kind == "blocks":  # whole ones, but for the last of all: repeated ids of sequences are sent once
        full = sorted(draws.sample(range(world), min(2, world)))
        return tuple(256 if rank in full else 30 * (rank == world - 1) for rank in range(world))
    cuts = sorted(draws.randint(0, 300) for _ in range(world - 1))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, 300], strict=True)]
    if 256 in sizes:  # a block that begins elsewhere than blocks do is merged in another order
        return draw_sizes(draws, world, kind)
    if kind == "some empty":
        empty = draws.sample(range(world), -(-world // 2))
        sizes = [0 if rank in empty else size // 8 for rank, size in enumerate(sizes)]
    return tuple(sizes)


def draw_job(seed, tables=6, **chosen):
    """Any world, but for what is chosen of it, and any tables, half the time all in one layout."""
    draws = random.Random(seed)
    one = [("layout", draws.choice(list(CASES)))] if seed % 2 else []
    world = draw(draws, WORLD) | chosen
    return world, [draw(draws, TABLE, one) for _ in range(tables)]
