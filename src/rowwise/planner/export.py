"""A plan in TorchRec's words: for each table its sharding type, kernel, and shards with their ranks.

TorchRec finds the rank of a row by dividing by ceil(rows / ranks), so rows are cut anew in blocks of that: our plan
says which ranks have a part, and theirs are as even as can be but for the last. Everything else is taken over as it is,
or refused, by name and with a way out: TorchRec has a class for each layout, and no runtime for other tiles.

Known limits: reading it back as tiles.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from rowwise.errors import SpecError
from rowwise.plan import Plan, Tile
from rowwise.planner.layouts import COLUMN_WISE, REPLICATED, ROW_WISE, TABLE_WISE
from rowwise.row_optimizers import couples_columns
from rowwise.spec import Pooling, RowType, Table, Topology, Value
from rowwise.textfile import decode_json

FORMAT = "torchrec-sharding-1"
EASY = tuple(
    layout.name for layout in (TABLE_WISE, COLUMN_WISE, ROW_WISE, REPLICATED)
)  # ours, that go over to TorchRec if they can at all
CUT_ROWS = ("row_wise", "table_row_wise")  # theirs
TRAINED = (RowType.FP32, RowType.FP16, RowType.BF16)
ALIGNED = 4  # columns that its kernels move at once


class TorchRecShard(Value, frozen=True):
    """A rectangle on a rank."""

    offsets: tuple[int, int]
    sizes: tuple[int, int]
    rank: int


class TorchRecTable(Value, frozen=True):
    """The sharding of one table, in words of TorchRec."""

    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...]
    shards: tuple[TorchRecShard, ...]  # none where all ranks have a copy
    cache_load_factor: float | None = None  # share of the rows that the device holds, if they live in the host's memory


class TorchRecPlan(Value, frozen=True, kw_only=True):
    """The TorchRec plan of all tables, and the changes that it needed."""

    format: str = FORMAT
    world: int
    local_world: int  # ranks of a host
    tables: dict[str, TorchRecTable]
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str | bytes) -> "TorchRecPlan":
        try:
            plan = decode_json(text, cls)
        except msgspec.DecodeError as error:
            raise SpecError(f"not a sharding plan for TorchRec: {error}") from None
        if plan.format != FORMAT:
            raise SpecError(f"a sharding plan of format {plan.format!r}: want {FORMAT!r}, as this version writes it")
        return plan


def torchrec_json(plan: Plan, tables: Sequence[Table], topology: Topology | None = None) -> str:
    """The plan for TorchRec; `topology` unless all ranks are on one host."""
    topology = topology or Topology(devices=plan.world)
    if topology.world != plan.world:
        raise SpecError(f"a plan for {plan.world} ranks on a topology of {topology.world}: want as many")
    plan.validate(tables)
    tiles: dict[str, list[Tile]] = defaultdict(list)
    for tile in plan.tiles:
        tiles[tile.table].append(tile)
    made: dict[str, TorchRecTable] = {}
    notes: list[str] = []
    for table in tables:
        made[table.name] = _Export(table, tiles[table.name], topology).made()
    _check_means(tables, made)
    for table in tables:
        notes += _notes(table, tiles[table.name], made[table.name], plan)
    found = TorchRecPlan(world=plan.world, local_world=topology.devices, tables=made, notes=tuple(notes))
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


class _Export:
    """One table's tiles in words of TorchRec."""

    def __init__(self, table: Table, tiles: Sequence[Tile], topology: Topology) -> None:
        self.table, self.topology = table, topology
        self.tiles = sorted(tiles, key=lambda tile: (tile.cols, tile.rows))
        self.by_cols: dict[tuple[int, int], list[Tile]] = defaultdict(list)
        for tile in self.tiles:
            self.by_cols[tile.cols].append(tile)

    def made(self) -> TorchRecTable:
        """TorchRec's, or why there is none."""
        self._check_table()
        whole = all(tile.rows == (0, self.table.rows) for tile in self.tiles)
        if whole and len(self.tiles) > 1 and len(self.by_cols) == 1:
            if self.tiles[0].tier != "device":
                raise self._refused(f"is copied on the {self.tiles[0].tier}", "has copies on devices only")
            return TorchRecTable("data_parallel", "dense", tuple(range(self.topology.world)), ())
        if not whole and any(len(tiles) == 1 for tiles in self.by_cols.values()):
            raise self._refused("has rows that are cut in some columns only", "cuts the same rows in all columns")
        if whole:
            sharding_type = "table_wise" if len(self.tiles) == 1 else "column_wise"
            shards = [TorchRecShard(_at(tile), _size(tile), tile.rank) for tile in self.tiles]
        else:
            sharding_type = self._cut_rows()
            shards = [shard for tiles in self.by_cols.values() for shard in self._blocks(tiles)]
        kernel, share = self._kernel()
        return TorchRecTable(sharding_type, kernel, tuple(s.rank for s in shards), tuple(shards), share)

    def _check_table(self) -> None:
        table = self.table
        if table.row_type not in TRAINED:
            raise self._refused(
                f"has rows of {table.row_type}", "trains rows of fp32 or fp16", "want another Table.row_type"
            )
        for tile in self.tiles:
            if (tile.cols[1] - tile.cols[0]) % ALIGNED:
                has = f"has {tile.cols[1] - tile.cols[0]} columns on rank {tile.rank}"
                raise self._refused(has, "wants multiples of 4", "want another Table.dim")

    def _kernel(self) -> tuple[str, float | None]:
        tiers = {tile.tier for tile in self.tiles}
        if tiers == {"device"}:
            return "fused", None
        if tiers != {"host"}:
            raise self._refused(f"lives on {' and '.join(sorted(tiers))}", "has rows on the device, or all on the host")
        rows = sum(tile.rows[1] - tile.rows[0] for tile in self.tiles)
        return "fused_uvm_caching", sum(tile.cache_rows for tile in self.tiles) / rows

    def _cut_rows(self) -> str:
        """The name of a layout that cuts rows; every group of columns is cut in the same way."""
        topology, groups = self.topology, list(self.by_cols.values())
        ranks = [tuple(tile.rank for tile in tiles) for tiles in groups]
        if len(groups) == 1 and ranks[0] == tuple(range(topology.world)):
            return self._pooled("row_wise")
        hosts = {tuple(topology.ranks_of(host)) for host in range(topology.hosts)}
        if any(some not in hosts for some in ranks):
            where = next(some for some in ranks if some not in hosts)
            has = f"has rows on ranks {', '.join(map(str, where))}"
            each = f"the {topology.devices} ranks of a host, or all {topology.world}"
            raise self._refused(has, f"cuts rows over {each}, in the order of their numbers")
        if len(groups) == 1:
            return self._pooled("table_row_wise")
        if len({end - begin for begin, end in self.by_cols}) > 1 or len(set(ranks)) < len(ranks):
            widths = ", ".join(str(end - begin) for begin, end in self.by_cols)
            raise self._refused(f"has a grid of {widths} columns", "wants equally many columns, each on its own host")
        return self._pooled("grid_shard")

    def _pooled(self, name: str) -> str:
        if self.table.pooling is Pooling.SEQUENCE and name != "row_wise":
            raise self._refused(f"is not pooled, and {name}", "does that with pooled tables only")
        return name

    def _blocks(self, tiles: Sequence[Tile]) -> list[TorchRecShard]:
        rows, parts, cols = self.table.rows, len(tiles), tiles[0].cols
        for number, tile in enumerate(tiles):
            if tile.rows != (rows * number // parts, rows * (number + 1) // parts):
                raise self._refused(f"has rows {tile.rows[0]}:{tile.rows[1]} on rank {tile.rank}", "cuts rows evenly")
        block = -(-rows // parts)
        if block * (parts - 1) >= rows:
            has = f"has {rows} rows for {parts} ranks"
            raise self._refused(has, f"cuts blocks of {block}, which leaves rank {tiles[-1].rank} with none")
        cuts = [(n * block, min((n + 1) * block, rows)) for n in range(parts)]
        return [
            TorchRecShard((begin, cols[0]), (end - begin, cols[1] - cols[0]), tile.rank)
            for (begin, end), tile in zip(cuts, tiles, strict=True)
        ]

    def _refused(self, has: str, theirs: str, way_out: str = "") -> SpecError:
        want = way_out or f"plan again with --layouts {','.join(EASY)} (constraints: layouts of this table)"
        return SpecError(f"table {self.table.name!r} {has}; TorchRec {theirs}: {want}")


def _check_means(tables: Sequence[Table], made: Mapping[str, TorchRecTable]) -> None:
    """Where rows are cut, pools are divided after they were added up; TorchRec then divides those of others, too."""
    whole = [t for t in tables if made[t.name].sharding_type not in CUT_ROWS and t.pooling is not Pooling.SEQUENCE]
    for table in tables:
        kind = made[table.name].sharding_type
        if table.pooling is not Pooling.MEAN or kind not in (*CUT_ROWS, "grid_shard"):
            continue
        want = (
            "want layouts table_wise, column_wise or replicated for it (constraints: layouts), or Table.pooling='sum'"
        )
        if kind == "grid_shard":
            raise SpecError(f"table {table.name!r} is averaged on a grid; TorchRec averages its parts: {want}")
        if whole:
            also = f"divides the sums of {whole[0].name!r}, whose rows are not"
            raise SpecError(f"table {table.name!r} is averaged and its rows are cut; TorchRec then also {also}: {want}")


def _at(tile: Tile) -> tuple[int, int]:
    return tile.rows[0], tile.cols[0]


def _size(tile: Tile) -> tuple[int, int]:
    return tile.rows[1] - tile.rows[0], tile.cols[1] - tile.cols[0]


def _notes(table: Table, tiles: Sequence[Tile], made: TorchRecTable, plan: Plan) -> list[str]:
    """What is not quite as it was."""
    notes: list[str] = []
    mine = {(tile.rank, _at(tile), _size(tile)) for tile in tiles}
    if made.shards and mine != {(shard.rank, shard.offsets, shard.sizes) for shard in made.shards}:
        notes.append(
            f"table {table.name!r}: rows are cut in blocks of {made.shards[0].sizes[0]}, as TorchRec finds them"
        )
    cut = any(tile.cols != (0, table.dim) for tile in tiles)
    if cut and couples_columns(table.optimizer) and table.name not in plan.approximate:
        kind = type(table.optimizer).__name__
        notes.append(f"table {table.name!r}: TorchRec keeps the state of {kind} for each piece of a row by itself")
    return notes
