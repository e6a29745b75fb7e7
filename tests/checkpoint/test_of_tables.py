"""Tables in a folder of their own: rows and optimizer state, from any plan to any other."""

import pytest
from parallel.shard.equal import make_sharded, make_steps, rows_apart, train
from table_state import everything, same
from torch import nn

from rowwise import Adam, CheckpointError, Embeddings, Plan, RowWiseAdagrad, Table
from rowwise.checkpoint.of_tables import load_tables, save_tables
from rowwise.parallel.comm.thread import run_threads
from rowwise.planning.planner.layouts import column_wise, replicated, row_wise

TABLES = (
    Table(name="a", rows=30, dim=8, optimizer=Adam(lr=0.1)),
    Table(name="b", rows=12, dim=4, optimizer=RowWiseAdagrad(lr=0.1)),
)


def trained():
    module = Embeddings(TABLES, seed=3)
    for _ in train(module, make_steps(TABLES, [[6], [7]])):
        pass
    return module


def test_one_rank(tmp_path):
    module, other = trained(), Embeddings(TABLES, seed=3)
    save_tables(nn.Sequential(module), tmp_path / "tables")
    load_tables(nn.Sequential(other), tmp_path / "tables")
    same(everything(other), everything(module))


def test_from_ranks_to_others(tmp_path):
    a, b = TABLES
    ranks = range(2)
    plans = [Plan(world=2, tiles=(*row_wise(a, ranks), *replicated(b, ranks)))]
    plans.append(Plan(world=2, tiles=(*column_wise(a, ranks), *row_wise(b, ranks))))
    module = trained()
    save_tables(nn.Sequential(module), tmp_path / "one")

    def rank(comm):
        first, second = (nn.Sequential(make_sharded(TABLES, plan, comm)) for plan in plans)
        load_tables(first, tmp_path / "one")
        save_tables(first, tmp_path / "two", comm)
        load_tables(second, tmp_path / "two")
        return [*rows_apart(first[0], module), *rows_apart(second[0], module)]

    assert run_threads(2, rank) == [[], []]


def test_tables_of_another_model(tmp_path):
    save_tables(nn.Sequential(trained()), tmp_path / "tables")
    with pytest.raises(CheckpointError, match=r"model/0\.c"):
        load_tables(nn.Sequential(Embeddings([Table(name="c", rows=4, dim=4)])), tmp_path / "tables")
    with pytest.raises(CheckpointError, match=r"tables.*exists"):
        save_tables(nn.Sequential(trained()), tmp_path / "tables")
