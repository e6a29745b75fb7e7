"""From one plan to another, one rectangle after another: what moves, in which order, and what is dropped.

A move copies a rectangle (rows, columns, their optimizer state) to its target and then frees it at its source, so for
a while both have it. Moves of one round run at the same time: each target has room for all that comes in a round while
no source has yet freed anything. Where ranks are too full for that, a rectangle goes by way of a third rank.

Its own file because it needs two plans and the memory there is, not how either was found. Rows and optimizer state
count as memory; caches and what a step needs are taken to be empty, as plans change between steps. Gives up: shortest
schedules, and cutting a rectangle into smaller ones to squeeze it through.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from msgspec import structs

from rowwise.perf.memory import FLOAT_bytes
from rowwise.plan import TIERS, Plan, Tier, Tile
from rowwise.spec import Table, Value, state_slots

Span = tuple[int, int]
Place = tuple[int, Tier]


class Move(Value, frozen=True):
    """Rows and columns of a table from one rank to another, or to another tier of the same rank."""

    table: str
    rows: Span
    cols: Span
    source: int
    target: int
    bytes: int
    source_tier: Tier = "device"
    target_tier: Tier = "device"
    frees: bool = True  # at its source; not if the source goes on having it

    def __str__(self) -> str:
        where = f"{self.rows[0]}:{self.rows[1]}, {self.cols[0]}:{self.cols[1]}"
        tiers = "" if self.source_tier == self.target_tier else f" ({self.source_tier} to {self.target_tier})"
        return f"{self.table}[{where}] from rank {self.source} to {self.target}{tiers}, {self.bytes} bytes"


class Schedule(Value, frozen=True):
    """How to get there: first drops, then one round after another."""

    drops: tuple[Tile, ...] = ()  # that are needed no more where they are
    rounds: tuple[tuple[Move, ...], ...] = ()
    through_checkpoint: bool = False  # there is no order was found: save, and resume with the new plan
    reason: str = ""  # why, if so

    @property
    def moves(self) -> tuple[Move, ...]:
        """In order; this order is as good as rounds are."""
        return tuple(move for moves in self.rounds for move in moves)


@dataclass(frozen=True, slots=True)
class Needed:
    """What has to happen, in no order."""

    moves: tuple[Move, ...]
    drops: tuple[Tile, ...]

    @property
    def moved_bytes(self) -> int:
        """That go to another rank."""
        return sum(move.bytes for move in self.moves if move.source != move.target)


@dataclass(frozen=True, slots=True)
class Weight:
    """What a table's rectangles take: columns, and what optimizers keep once for a row, of which each piece has one."""

    table: Table
    column_bytes: float
    once_bytes: int

    @classmethod
    def of(cls, table: Table) -> "Weight":
        """Rows and optimizer state."""
        widths = [slot.width for slot in state_slots(table).values()]
        wide = sum(width == table.dim for width in widths)
        return cls(table, table.row_bytes / table.dim + FLOAT_bytes * wide, FLOAT_bytes * (len(widths) - wide))

    def __call__(self, rows: Span, cols: Span) -> int:
        """Bytes of a rectangle."""
        return ceil((rows[1] - rows[0]) * ((cols[1] - cols[0]) * self.column_bytes + self.once_bytes))


def overlap(a: Span, b: Span) -> Span | None:
    """What is in both."""
    begin, end = max(a[0], b[0]), min(a[1], b[1])
    return (begin, end) if begin < end else None


def needed(old: Plan, new: Plan, tables: Sequence[Table]) -> Needed:
    """What has to move. Tables that only `old` has are dropped; those that only `new` has come from elsewhere."""
    before, after = _by_table(old), _by_table(new)
    moves: list[Move] = []
    drops: list[Tile] = []
    for name, tiles in before.items():
        if name not in after:
            drops += tiles
    for table in tables:
        was, will = before.get(table.name, []), after[table.name]
        if was and was != will:
            found = _moves_of(table, was, will)
            moves += found
            drops += _drops_of(was, will, found)
    return Needed(tuple(moves), tuple(drops))


def _by_table(plan: Plan) -> dict[str, list[Tile]]:
    tiles: dict[str, list[Tile]] = defaultdict(list)
    for tile in plan.tiles:
        tiles[tile.table].append(tile)
    return tiles


def _moves_of(table: Table, was: Sequence[Tile], will: Sequence[Tile]) -> list[Move]:
    whole = (0, table.rows), (0, table.dim)
    copies = {tile.rank: tile for tile in was} if all((tile.rows, tile.cols) == whole for tile in was) else {}
    moves: list[Move] = []
    weight = Weight.of(table)
    for tile in will:
        for source in [copies[tile.rank]] if tile.rank in copies else was:
            rows, cols = overlap(source.rows, tile.rows), overlap(source.cols, tile.cols)
            if rows is None or cols is None or (source.rank, source.tier) == (tile.rank, tile.tier):
                continue
            moves.append(
                Move(
                    table=table.name,
                    rows=rows,
                    cols=cols,
                    source=source.rank,
                    target=tile.rank,
                    bytes=weight(rows, cols),
                    source_tier=source.tier,
                    target_tier=tile.tier,
                    frees=not any(_covers(t, source.rank, source.tier, rows, cols) for t in will),
                )
            )
    return moves


def _covers(tile: Tile, rank: int, tier: Tier, rows: Span, cols: Span) -> bool:
    return (
        (tile.rank, tile.tier) == (rank, tier) and overlap(tile.rows, rows) == rows and overlap(tile.cols, cols) == cols
    )


def _drops_of(was: Sequence[Tile], will: Sequence[Tile], moves: Sequence[Move]) -> list[Tile]:
    """What is neither where it will be, nor moved away: copies."""
    drops: list[Tile] = []
    for tile in was:
        left = [tile]
        stays = [(t.rows, t.cols) for t in will if (t.rank, t.tier) == (tile.rank, tile.tier)]
        goes = [(m.rows, m.cols) for m in moves if (m.source, m.source_tier) == (tile.rank, tile.tier) and m.frees]
        for rows, cols in stays + goes:
            left = [part for one in left for part in _without(one, rows, cols)]
        drops += [structs.replace(part, cache_rows=0) for part in left]
    return drops


def _without(tile: Tile, rows: Span, cols: Span) -> Iterator[Tile]:
    """What is left of a tile, as rectangles."""
    both_rows, both_cols = overlap(tile.rows, rows), overlap(tile.cols, cols)
    if both_rows is None or both_cols is None:
        yield tile
        return
    (top, bottom), (left, right) = both_rows, both_cols
    for some_rows, some_cols in (
        ((tile.rows[0], top), tile.cols),
        ((bottom, tile.rows[1]), tile.cols),
        (both_rows, (tile.cols[0], left)),
        (both_rows, (right, tile.cols[1])),
    ):
        if some_rows[0] < some_rows[1] and some_cols[0] < some_cols[1]:
            yield structs.replace(tile, rows=some_rows, cols=some_cols)


def schedule(old: Plan, need: Needed, tables: Sequence[Table], limits_bytes: Sequence[int]) -> Schedule:
    """An order in which no rank ever has more than the limits of its tiers, or why none was found.

    A rank that is over its limit before anything has moved gets nothing until it is not.
    """
    room = _Room(old, tables, limits_bytes)
    for tile in need.drops:
        room.give_back((tile.rank, tile.tier), room.freed(tile.table, (tile.rank, tile.tier), tile.rows, tile.cols))
    pending = dict(enumerate(sorted(need.moves, key=lambda m: (-m.bytes, m.table, m.target, m.rows, m.cols))))
    rounds: list[tuple[Move, ...]] = []
    staged: set[int] = set()
    while pending:
        taken = room.fitting(pending)
        if taken:
            rounds.append(tuple(room.carry_out(pending, taken)))
            continue
        aside = _aside(pending, room, staged)
        if aside is None:
            return Schedule(drops=need.drops, through_checkpoint=True, reason=_reason(pending, room))
        number, away = aside
        staged.add(number)
        rest = structs.replace(pending[number], source=away.target, source_tier=away.target_tier)
        pending[number] = away
        rounds.append(tuple(room.carry_out(pending, [number])))
        pending[number] = rest
    return Schedule(drops=need.drops, rounds=tuple(rounds))


class _Room:
    """Free bytes of each rank and tier while a schedule is carried out."""

    def __init__(self, old: Plan, tables: Sequence[Table], limits_bytes: Sequence[int]) -> None:
        self._weights = {table.name: Weight.of(table) for table in tables}
        self._whole = {(tile.table, (tile.rank, tile.tier), tile.cols) for tile in old.tiles}
        tiers = dict(zip(TIERS, limits_bytes, strict=False))
        self.free: dict[Place, float] = {
            (rank, tier): tiers.get(tier, 0) for rank in range(old.world) for tier in TIERS
        }
        for tile in old.tiles:
            if tile.table in self._weights:  # the memory of others is back already
                self.free[tile.rank, tile.tier] -= self._weights[tile.table](tile.rows, tile.cols)

    def give_back(self, place: Place, size: int) -> None:
        """Something is freed."""
        self.free[place] += size

    def freed(self, table: str, place: Place, rows: Span, cols: Span) -> int:
        """What freeing a rectangle gives back; what is kept once for a row stays until the last column has gone."""
        weight = self._weights.get(table)
        if weight is None:
            return 0
        once = (rows[1] - rows[0]) * weight.once_bytes
        return weight(rows, cols) - (0 if (table, place, cols) in self._whole else once)

    def fitting(self, pending: Mapping[int, Move]) -> list[int]:
        """Of moves in order: those that can be done at the same time."""
        left, taken = dict(self.free), list[int]()
        for number, move in pending.items():
            place = move.target, move.target_tier
            if move.bytes <= left[place]:
                left[place] -= move.bytes
                taken.append(number)
        return taken

    def carry_out(self, pending: dict[int, Move], taken: Sequence[int]) -> Iterator[Move]:
        """Moves are done, and no longer pending."""
        users = Counter(_source_of(move) for move in pending.values())
        for number in taken:
            move = pending.pop(number)
            self.free[move.target, move.target_tier] -= move.bytes
            self._whole.add((move.table, (move.target, move.target_tier), move.cols))
            users[_source_of(move)] -= 1
            if move.frees and users[_source_of(move)] == 0:
                place = move.source, move.source_tier
                self.give_back(place, self.freed(move.table, place, move.rows, move.cols))
                yield move
            else:
                yield structs.replace(move, frees=False)


def _source_of(move: Move) -> tuple[str, int, Tier, Span, Span]:
    return move.table, move.source, move.source_tier, move.rows, move.cols


def _aside(pending: Mapping[int, Move], room: _Room, staged: Collection[int]) -> tuple[int, Move] | None:
    """The smallest move that lets another one come where it leaves, to a third rank first: the one with most room."""
    for number in sorted(pending, key=lambda n: pending[n].bytes):
        move = pending[number]
        leaves = move.source, move.source_tier
        more = room.free[leaves] + room.freed(move.table, leaves, move.rows, move.cols)
        helps = any((m.target, m.target_tier) == leaves and m.bytes <= more for m in pending.values() if m is not move)
        thirds = [p for p in room.free if p[1] == move.source_tier and p[0] not in (move.source, move.target)]
        best = max(thirds, key=lambda place: room.free[place], default=None)
        if number in staged or not move.frees or not helps or best is None or room.free[best] < move.bytes:
            continue
        return number, structs.replace(move, target=best[0], target_tier=best[1])
    return None


def _reason(pending: Mapping[int, Move], room: _Room) -> str:
    move = min(pending.values(), key=lambda m: m.bytes - room.free[m.target, m.target_tier])
    free = max(0, int(room.free[move.target, move.target_tier]))
    return (
        f"{move}: {free} bytes are free on the {move.target_tier} of rank {move.target}, and no third rank has room"
        f" that would help; {len(pending)} moves wait; save a checkpoint and resume with the new plan, or leave room"
    )
