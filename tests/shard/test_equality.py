"""Sharded is unsharded: every layout, pooling, optimizer and row type, on every world, with batches of any sizes.

The fast test covers every pair of choices, those of a table with those of its world as well. The slow one draws from
all combinations, of which there are hundreds of thousands.
"""

import random
from functools import partial
from itertools import combinations, product

import pytest
import torch
from shard.equal import Job, given, make_steps, place, squares, train
from shard.layout_cases import CASES

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
)
from rowwise.comm.solo import solo
from rowwise.comm.thread import run_threads

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
ROWS = {  # row type, column group, dims
    "fp32": (RowType.FP32, None, (1, 4, 12, 20, 64)),
    "fp16": (RowType.FP16, None, (4, 10, 32)),
    "bf16": (RowType.BF16, None, (8, 12, 40)),
    "int8": (RowType.INT8, None, (16, 24)),
    "int8, groups": (RowType.INT8, 16, (32, 48, 40)),
}
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
    "sizes": ["even", "uneven", "some empty"],
    "determinism": ["run", "elastic", "elastic, squares"],
    "ids": [torch.int32, torch.int64],
}
Setting = dict[str, object]  # the choices made, in the order above


def pairs_of(world: Setting, table: Setting):
    """The pairs of choices that a table in a world makes."""
    return set(combinations((world | table).items(), 2))


def all_pairs():
    """In order."""
    for (a, ones), (b, others) in combinations((WORLD | TABLE).items(), 2):
        yield from product(product([a], ones), product([b], others))


def draw(draws, choices, wanted=()) -> Setting:
    """A setting at random, with the wanted choices where they are of this kind."""
    setting = {name: draws.choice(values) for name, values in choices.items()}
    return setting | {name: value for name, value in wanted if name in choices}


def covering(tables=8, tries=20):
    """Worlds with tables that make every pair of choices between them: the next is the best of some that help."""
    draws, left = random.Random(0), dict.fromkeys(all_pairs())
    while left:
        world = draw(draws, WORLD, draws.choice(list(left)))
        chosen: list[Setting] = []
        for _ in range(tables):
            near = [pair for pair in left if all(world.get(name, value) == value for name, value in pair)]
            aims = [draws.choice(near) if near else () for _ in range(tries)]
            candidates = [draw(draws, TABLE, aim) for aim in aims]
            chosen.append(max(candidates, key=lambda table: len(left.keys() & pairs_of(world, table))))
            for pair in pairs_of(world, chosen[-1]):
                left.pop(pair, None)
        yield world, chosen


def make_job(world, settings, seed, steps=5):
    """A job as it was chosen; what was not is drawn."""
    draws, topology = random.Random(seed), WORLDS[world["world"]]
    tables = []
    for index, setting in enumerate(settings):
        row_type, group, dims = ROWS[setting["rows"]]
        tables.append(
            Table(
                name=f"t{index}",
                # As many as make gathering cheaper than adding up, where there are copies.
                rows=331 if setting["layout"] == "replicated" else draws.choice((9, 40, 331)),
                dim=draws.choice(dims),
                features=tuple(f"f{index}.{k}" for k in range(draws.randint(1, 2))),
                pooling=setting["pooling"],
                optimizer=OPTIMIZERS[setting["optimizer"]],
                row_type=row_type,
                column_group=group,
                init=Uniform(bound=1.0),
            )
        )
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
    cuts = sorted(draws.randint(0, 300) for _ in range(world - 1))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, 300], strict=True)]
    if kind == "some empty":
        empty = draws.sample(range(world), -(-world // 2))
        sizes = [0 if rank in empty else size // 8 for rank, size in enumerate(sizes)]
    return tuple(sizes)


def check(world, settings, seed):
    job = make_job(world, settings, seed)
    whole = job.whole()
    if world["world"] == "alone":
        found = [whole.differences(solo())]
    else:
        found = run_threads(WORLDS[world["world"]], whole.differences, timeout_s=60)
    tables = [f"{table.rows} x {table.dim} {s}" for table, s in zip(job.tables, settings, strict=True)]
    assert not any(found), "\n".join([text for texts in found for text in texts][:20] + [str(world), *tables])


COVERING = list(covering())


def test_the_covering_jobs_make_every_pair_of_choices():
    made = {pair for world, tables in COVERING for table in tables for pair in pairs_of(world, table)}
    assert made >= set(all_pairs())


@pytest.mark.parametrize("number", range(len(COVERING)))
def test_sharded_is_unsharded(number):
    check(*COVERING[number], seed=number)


@pytest.mark.parametrize("layout", CASES)
def test_all_tables_in_one_layout(layout):
    draws = random.Random(layout)
    check(draw(draws, WORLD), [draw(draws, TABLE, [("layout", layout)]) for _ in range(6)], seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_a_large_sample_of_all_combinations(number):
    """A thousand worlds with 6,000 tables, half of which are in one layout; all of them would be 766,080."""
    draws = random.Random(number)
    for seed in range(25):
        one = [("layout", draws.choice(list(CASES)))] if seed % 2 else []
        check(draw(draws, WORLD), [draw(draws, TABLE, one) for _ in range(6)], seed=1000 * number + seed)
