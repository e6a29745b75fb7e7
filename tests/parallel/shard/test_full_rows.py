"""Columns of a row that are all on one rank are updated there, as the plain kernel does it: no rank is told a sum."""

from itertools import product

import pytest
from parallel.shard.equal import Job, make_steps

from rowwise import Adagrad, Lamb, Plan, Pooling, RowType, RowWiseAdagrad, RowWiseAdam, Table, Tile, Topology
from rowwise.parallel.comm.thread import run_threads

OPTIMIZERS = (RowWiseAdagrad(lr=0.1), RowWiseAdam(lr=0.1), Lamb(lr=0.1), Adagrad(lr=0.1, clip=0.5))
ROWS = 30


def tiles(*ranks):
    """(rows, columns, rank) of each."""
    return [Tile(table="t", rank=rank, rows=rows, cols=cols) for rows, cols, rank in ranks]


ALL, HEAD, TAIL = (0, ROWS), (0, 10), (10, ROWS)
ALONE = {
    "two pieces": tiles((ALL, (0, 16), 1), (ALL, (16, 48), 1)),
    "three pieces": tiles((ALL, (0, 16), 0), (ALL, (32, 48), 0), (ALL, (16, 32), 0)),
    "a rank for some rows": tiles((HEAD, (0, 32), 0), (HEAD, (32, 48), 0), (TAIL, (0, 16), 3), (TAIL, (16, 48), 3)),
    "in one host": tiles((HEAD, (0, 32), 2), (HEAD, (32, 48), 2), (TAIL, (0, 32), 3), (TAIL, (32, 48), 3)),
    "cut by another": tiles((ALL, (0, 16), 2), (HEAD, (16, 48), 2), (TAIL, (16, 48), 2)),
}
SOME = {
    "the other rows are on two ranks": tiles((ALL, (0, 16), 0), (HEAD, (16, 48), 0), (TAIL, (16, 48), 1)),
    "and in one host": tiles((HEAD, (0, 16), 0), (HEAD, (16, 48), 0), (TAIL, (0, 16), 0), (TAIL, (16, 48), 1)),
}
WORLD = Topology(hosts=2, devices=2)


def slow_but_few():
    """All combinations, of which a few are fast tests."""
    for name, optimizer, elastic in product((*ALONE, *SOME), OPTIMIZERS, (False, True)):
        fast = (elastic, name in SOME) == (isinstance(optimizer, RowWiseAdam), isinstance(optimizer, Lamb))
        marks = () if fast and name in ("cut by another", "in one host", "and in one host") else pytest.mark.slow
        yield pytest.param(name, optimizer, elastic, marks=marks)


@pytest.mark.parametrize(("name", "optimizer", "elastic"), list(slow_but_few()))
def test_the_bits_of_one_device_and_no_message(name, optimizer, elastic):
    kinds = [(Pooling.MEAN, RowType.FP32), (Pooling.SEQUENCE, RowType.INT8)]
    pooling, row_type = kinds[OPTIMIZERS.index(optimizer) % 2]
    group = 16 if row_type is RowType.INT8 else None
    table = Table(
        name="t", rows=ROWS, dim=48, pooling=pooling, optimizer=optimizer, row_type=row_type, column_group=group
    )
    plan = Plan(world=4, tiles=tuple((ALONE | SOME)[name]))
    whole = Job(tables=(table,), plan=plan, steps=make_steps([table], [(5, 9, 0, 6)] * 3), elastic=elastic).whole()

    def rank(comm):
        return whole.differences(comm), comm.sent.total("row sums")

    told = run_threads(WORLD, rank, timeout_s=60)
    assert not [text for texts, _ in told for text in texts]
    assert (sum(sent for _, sent in told) == 0) == (name in ALONE)
