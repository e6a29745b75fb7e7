"""A step of a plan rank by rank, with the networks for exchanges: who waits for whom.

The search's cost adds the most that any rank computes to the most that any rank sends. NeuroShard's estimate is finer:
each rank's own lookup, exchange (for which it waits until the slowest has looked up), return and update in a row, and
then the slowest of these. It is no sum of pieces, so the search cannot use it; forecasts do, and the best few plans are
ordered by it. Its own file because it reads plans, whoever made them.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rowwise.perf.access import Floats, Workload
from rowwise.perf.exchange import Amounts, Exchanges
from rowwise.plan import Plan
from rowwise.spec import Pooling, Table


def exchanges_s(
    exchanges: Exchanges, plan: Plan, workloads: Sequence[Workload], batch: int, lookup_W: Floats
) -> Floats:
    """Seconds of each rank for all that travels, with the wait for ranks that look up longer."""
    dim_W, ids_W = amounts_of(plan, workloads, batch)
    together = Amounts(dim_W, ids_W, batch, np.zeros(plan.world))
    apart = together._replace(skew_W=lookup_W - lookup_W.min())
    return exchanges.route(together) + exchanges.forward(apart) + exchanges.backward(together)


def amounts_of(plan: Plan, workloads: Sequence[Workload], batch: int) -> tuple[Floats, Floats]:
    """Columns that each rank makes for all samples, and ids that it gets for that; copies make nothing that travels."""
    known = {w.table.name: w for w in workloads}
    tiles = defaultdict(list)
    for tile in plan.tiles:
        tiles[tile.table].append(tile)
    dim_W, ids_W = np.zeros(plan.world), np.zeros(plan.world)
    for name, parts in tiles.items():
        table, access = known[name].table, known[name].access
        if len(parts) > 1 and all(_is_whole(table, tile.rows, tile.cols) for tile in parts):
            continue
        bags = access.pooling if table.pooling is Pooling.SEQUENCE else len(table.feature_names)
        for tile in parts:
            dim_W[tile.rank] += bags * (tile.cols[1] - tile.cols[0])
            ids_W[tile.rank] += access.pooling * batch * (tile.rows[1] - tile.rows[0]) / table.rows
    return dim_W, ids_W


def _is_whole(table: Table, rows: tuple[int, int], cols: tuple[int, int]) -> bool:
    return rows == (0, table.rows) and cols == (0, table.dim)
