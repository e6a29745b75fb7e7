"""A table on two hosts of two devices in each layout, for what travels between them: how exact, and how many bytes."""

import torch

from rowwise import Pooling, Sgd, Table, Topology, Uniform
from rowwise.planning.planner.layouts import column_wise, grid, replicated, row_wise, table_row_wise, table_wise
from rowwise.tables.spec import WireType

WORLD = Topology(hosts=2, devices=2)
KINDS = tuple(WireType)


def codec_of(wire, sender, receiver, backward, world=WORLD):
    if sender == receiver:
        return WireType.FP32
    codecs = wire.codecs(world.link(sender, receiver))
    return codecs.backward if backward else codecs.forward


def make_table(pooling=Pooling.SUM, rows=60):
    """The rate makes of an update the sum of the gradients of each row."""
    return Table(
        name="t", rows=rows, dim=64, features=("x", "y"), pooling=pooling, optimizer=Sgd(lr=1.0), init=Uniform(1.0)
    )


SIZES_W = (5, 0, 9, 2)
LAYOUTS = {
    "table-wise": lambda table: table_wise(table, 2),
    "row-wise": lambda table: row_wise(table, range(4)),
    "column-wise": lambda table: column_wise(table, range(4)),
    "replicated": lambda table: replicated(table, range(4)),
    "table-row-wise": lambda table: table_row_wise(table, WORLD, 1),
    "grid": lambda table: grid(table, WORLD, range(2)),
}
FLAT, IN_HOSTS = ("table-wise", "row-wise", "column-wise"), ("table-row-wise", "grid")


def by_host(tiles):
    """The tiles of each host, and the columns that they have."""
    for host in range(WORLD.hosts):
        mine = [tile for tile in tiles if WORLD.host_of(tile.rank) == host]
        if mine:
            yield host, mine, slice(*mine[0].cols)


def ids_of(batch):
    """Those of the table's features."""
    return torch.cat([batch.ids_of("x"), batch.ids_of("y")])
