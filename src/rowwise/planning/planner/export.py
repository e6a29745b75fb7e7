"""Exports a plan to TorchRec: for each table its sharding type, compute kernel, and shards with their ranks.

TorchRec finds the rank of a row by dividing by ceil(rows / ranks), so rows are cut anew in blocks of that size; our
plan only decides which ranks have a part. Everything else is exported as it is, or refused with the table's name and a
way out: TorchRec has a class for each layout, and runs no other tiles. The limits are those of TorchRec 1.8.0, none of
whose code is used here; `rowwise.recipes.torchrec` makes its objects. Not supported: reading the file back as tiles.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from rowwise.base.errors import SpecError
from rowwise.base.value import parse_json
from rowwise.parallel.plan import Plan, Tile, tiles_by_table
from rowwise.planning.planner.layouts import COLUMN_WISE, REPLICATED, ROW_WISE, TABLE_WISE
from rowwise.tables.row_optimizers import needs_full_rows
from rowwise.tables.spec import Pooling, RowType, Table, Topology, Value

FORMAT = "torchrec-sharding-1"
PORTABLE = tuple(
    layout.name for layout in (TABLE_WISE, COLUMN_WISE, ROW_WISE, REPLICATED)
)  # layouts of ours that TorchRec has, too
CUT_ROWS = ("row_wise", "table_row_wise")  # TorchRec's sharding types
TRAINED = (RowType.FP32, RowType.FP16, RowType.BF16)
ALIGNED = 4  # columns that TorchRec's kernels move at once


class TorchRecShard(Value, frozen=True):
    """A rectangle of a table on a rank."""

    offsets: tuple[int, int]
    sizes: tuple[int, int]
    rank: int


class TorchRecTable(Value, frozen=True):
    """Sharding of one table."""

    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...]
    shards: tuple[TorchRecShard, ...]  # none for data_parallel
    cache_load_factor: float | None = None  # share of the rows cached on the device, for rows in host memory


class TorchRecPlan(Value, frozen=True, kw_only=True):
    """Sharding of all tables, and notes on what differs from our plan."""

    format: str = FORMAT
    world: int
    local_world: int  # ranks of a host
    tables: dict[str, TorchRecTable]
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str | bytes) -> "TorchRecPlan":
        plan = parse_json(text, cls, "a sharding plan for TorchRec")
        if plan.format != FORMAT:
            raise SpecError(f"a sharding plan of format {plan.format!r}", f"{FORMAT!r}, as this version writes it")
        return plan


def torchrec_json(plan: Plan, tables: Sequence[Table], topology: Topology | None = None) -> str:
    """The plan as JSON for TorchRec; `topology` is needed unless all ranks are on one host."""
    topology = topology or Topology(devices=plan.world)
    if topology.world != plan.world:
        raise SpecError(
            f"a plan for {plan.world} ranks on a topology of {topology.world}", f"a topology of {plan.world}"
        )
    plan.validate(tables)
    tiles, notes = tiles_by_table(plan), list[str]()
    exported = {table.name: _Export(table, tiles[table.name], topology).convert() for table in tables}
    _check_means(tables, exported)
    for table in tables:
        notes += _differences(table, tiles[table.name], exported[table.name], plan)
    plan_out = TorchRecPlan(world=plan.world, local_world=topology.devices, tables=exported, notes=tuple(notes))
    return msgspec.json.format(msgspec.json.encode(plan_out), indent=2).decode() + "\n"


class _Export:
    """Converts the tiles of one table."""

    def __init__(self, table: Table, tiles: Sequence[Tile], topology: Topology) -> None:
        self.table, self.topology = table, topology
        self.tiles = sorted(tiles, key=lambda tile: (tile.cols, tile.rows))
        self.by_cols: dict[tuple[int, int], list[Tile]] = defaultdict(list)
        for tile in self.tiles:
            self.by_cols[tile.cols].append(tile)

    def convert(self) -> TorchRecTable:
        self._check_table()
        whole = all(tile.rows == (0, self.table.rows) for tile in self.tiles)
        if whole and len(self.tiles) > 1 and len(self.by_cols) == 1:
            if self.tiles[0].tier != "device":
                raise self._error(f"is replicated on the {self.tiles[0].tier}", "replicates on devices only")
            return TorchRecTable("data_parallel", "dense", tuple(range(self.topology.world)), ())
        if not whole and any(len(tiles) == 1 for tiles in self.by_cols.values()):
            raise self._error("has rows that are cut in some columns only", "cuts the same rows in all columns")
        if whole:
            sharding_type = "table_wise" if len(self.tiles) == 1 else "column_wise"
            shards = [TorchRecShard(_offsets(tile), _sizes(tile), tile.rank) for tile in self.tiles]
        else:
            sharding_type = self._row_sharding_type()
            shards = [shard for tiles in self.by_cols.values() for shard in self._row_blocks(tiles)]
        kernel, share = self._kernel()
        return TorchRecTable(sharding_type, kernel, tuple(s.rank for s in shards), tuple(shards), share)

    def _check_table(self) -> None:
        table = self.table
        if table.row_type not in TRAINED:
            raise self._error(f"has rows of {table.row_type}", "trains rows of fp32 or fp16", "change Table.row_type")
        for tile in self.tiles:
            if (tile.cols[1] - tile.cols[0]) % ALIGNED:
                has = f"has {tile.cols[1] - tile.cols[0]} columns on rank {tile.rank}"
                raise self._error(has, "needs multiples of 4", "change Table.dim")

    def _kernel(self) -> tuple[str, float | None]:
        tiers = {tile.tier for tile in self.tiles}
        if tiers == {"device"}:
            return "fused", None
        if tiers != {"host"}:
            raise self._error(f"lives on {' and '.join(sorted(tiers))}", "has rows on the device, or all on the host")
        rows = sum(tile.rows[1] - tile.rows[0] for tile in self.tiles)
        return "fused_uvm_caching", sum(tile.cache_rows for tile in self.tiles) / rows

    def _row_sharding_type(self) -> str:
        """The type of sharding that cuts rows; TorchRec cuts every group of columns in the same way."""
        topology, groups = self.topology, list(self.by_cols.values())
        ranks = [tuple(tile.rank for tile in tiles) for tiles in groups]
        if len(groups) == 1 and ranks[0] == tuple(range(topology.world)):
            return self._check_pooled("row_wise")
        hosts = {tuple(topology.ranks_of(host)) for host in range(topology.hosts)}
        if any(group not in hosts for group in ranks):
            where = next(group for group in ranks if group not in hosts)
            has = f"has rows on ranks {', '.join(map(str, where))}"
            allowed = f"the {topology.devices} ranks of a host, or all {topology.world}"
            raise self._error(has, f"cuts rows over {allowed}, in the order of their numbers")
        if len(groups) == 1:
            return self._check_pooled("table_row_wise")
        if len({end - begin for begin, end in self.by_cols}) > 1 or len(set(ranks)) < len(ranks):
            widths = ", ".join(str(end - begin) for begin, end in self.by_cols)
            raise self._error(f"has a grid of {widths} columns", "needs equally many columns, each on its own host")
        return self._check_pooled("grid_shard")

    def _check_pooled(self, name: str) -> str:
        if self.table.pooling is Pooling.SEQUENCE and name != "row_wise":
            raise self._error(f"is not pooled, and {name}", "does that with pooled tables only")
        return name

    def _row_blocks(self, tiles: Sequence[Tile]) -> list[TorchRecShard]:
        """Shards of ceil(rows / ranks) rows, as TorchRec cuts them."""
        rows, parts, cols = self.table.rows, len(tiles), tiles[0].cols
        for number, tile in enumerate(tiles):
            if tile.rows != (rows * number // parts, rows * (number + 1) // parts):
                raise self._error(f"has rows {tile.rows[0]}:{tile.rows[1]} on rank {tile.rank}", "cuts rows evenly")
        block = -(-rows // parts)
        if block * (parts - 1) >= rows:
            has = f"has {rows} rows for {parts} ranks"
            raise self._error(has, f"cuts blocks of {block}, which leaves rank {tiles[-1].rank} with none")
        cuts = [(n * block, min((n + 1) * block, rows)) for n in range(parts)]
        return [
            TorchRecShard((begin, cols[0]), (end - begin, cols[1] - cols[0]), tile.rank)
            for (begin, end), tile in zip(cuts, tiles, strict=True)
        ]

    def _error(self, has: str, requirement: str, remedy: str = "") -> SpecError:
        hint = remedy or f"plan again with --layouts {','.join(PORTABLE)} (constraints: layouts of this table)"
        return SpecError(f"table {self.table.name!r} {has}; TorchRec {requirement}", hint=hint)


def _check_means(tables: Sequence[Table], exported: Mapping[str, TorchRecTable]) -> None:
    """Refuses mean pooling with cut rows where others are whole: TorchRec then divides the sums of all tables."""
    whole = [t for t in tables if exported[t.name].sharding_type not in CUT_ROWS and t.pooling is not Pooling.SEQUENCE]
    for table in tables:
        kind = exported[table.name].sharding_type
        if table.pooling is not Pooling.MEAN or kind not in (*CUT_ROWS, "grid_shard"):
            continue
        expected = "layouts table_wise, column_wise or replicated for it (constraints: layouts), or Table.pooling='sum'"
        if kind == "grid_shard":
            raise SpecError(f"table {table.name!r} is averaged on a grid; TorchRec averages its parts", expected)
        if whole:
            raise SpecError(
                f"table {table.name!r} is averaged and its rows are cut; TorchRec then also divides the sums of "
                f"{whole[0].name!r}, whose rows are not",
                expected,
            )


def _offsets(tile: Tile) -> tuple[int, int]:
    return tile.rows[0], tile.cols[0]


def _sizes(tile: Tile) -> tuple[int, int]:
    return tile.rows[1] - tile.rows[0], tile.cols[1] - tile.cols[0]


def _differences(table: Table, tiles: Sequence[Tile], exported: TorchRecTable, plan: Plan) -> list[str]:
    """Notes on what TorchRec does differently for this table."""
    notes: list[str] = []
    planned = {(tile.rank, _offsets(tile), _sizes(tile)) for tile in tiles}
    if exported.shards and planned != {(shard.rank, shard.offsets, shard.sizes) for shard in exported.shards}:
        notes.append(
            f"table {table.name!r}: rows are cut in blocks of {exported.shards[0].sizes[0]}, as TorchRec finds them"
        )
    cut = any(tile.cols != (0, table.dim) for tile in tiles)
    if cut and needs_full_rows(table.optimizer) and table.name not in plan.approximate:
        kind = type(table.optimizer).__name__
        notes.append(f"table {table.name!r}: TorchRec keeps the state of {kind} for each piece of a row by itself")
    return notes
