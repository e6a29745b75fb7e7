"""Updates of pieces whose columns depend on each other: what is summed over a row is summed over all its ranks.

A row-wise optimizer, LAMB and clipping need a sum over all columns of a row's gradient. Each rank adds up its own, as
far as the tree of [Note: Column sums] goes inside its columns; the ranks with columns of the same rows swap these
numbers, and each finishes the tree: the same bits as one device. What is left of the update is then a plain step,
which the kernel takes and rounds. Known limits: a few passes more over the gradients, only for tables that were cut
so.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from rowwise.comm.seam import Comm
from rowwise.errors import GradientError
from rowwise.ops import rowtype
from rowwise.ops.layout import RULES, TableRow
from rowwise.ops.merged import MergedGradients, apply, merge
from rowwise.ops.reference.apply import REFERENCE, RowRule, root
from rowwise.ops.tiles import Tiles
from rowwise.ops.tree import Node, complete_sum, nodes_of
from rowwise.ops.update import join_parts, join_staged, next_step
from rowwise.plan import Plan
from rowwise.row_optimizers import KernelHyperparameters, Sgd
from rowwise.shard.routes import PieceGroup, RankPiece, Routes, column_owners
from rowwise.spec import Table

_Rows = tuple[int, tuple[int, int]]  # of a table, by its number


@final
@dataclass(slots=True, kw_only=True)
class _Piece:
    """A piece of this rank while it is updated."""

    held: RankPiece
    whole: Table
    tiles: Tiles
    index: int  # among the tables of its tiles
    table: TableRow
    hyper: Tensor
    random: Tensor
    merged: MergedGradients
    bad_row: int | None = None  # of the whole table
    moved: Tensor | None = None  # the state [U, floats] that the rule goes on with, which a bad row does not take

    @property
    def rows(self) -> _Rows:
        return self.held.table, self.held.tile.rows

    @property
    def rule(self) -> RowRule:
        rule = REFERENCE[type(self.whole.optimizer)]
        assert isinstance(rule, RowRule), rule
        return rule

    def weights(self) -> Tensor:
        """The rows as floats [U, D]."""
        table = self.tiles.arena.tables[self.index]
        stored = self.tiles.arena.table(self.index)[self.merged.rows_U.long()]
        return rowtype.unpack(stored, table.dim, table.row_type, table.column_group)

    def state(self) -> Tensor:
        """Of all rows [R, floats]."""
        t = self.table
        return self.tiles.arena.state[t.state_base : t.state_base + t.rows * t.state_width].view(t.rows, -1)

    def terms(self) -> Tensor:
        """What the rule sums over a row [U, D, n]; L2 in the gradient comes before that."""
        rule, merged, weight_decay = self.rule, self.merged, self.hyper[2]
        if rule.decays_gradient and weight_decay != 0:
            merged.grad_UD += self.weights() * weight_decay
        values, self.moved, merged.grad_UD = rule.terms(
            self.weights, self.state()[merged.rows_U.long()], merged.grad_UD, self.hyper
        )
        return values

    def finish(self, totals_Un: Tensor) -> None:
        """With the sums, what is left is a plain step."""
        assert self.moved is not None
        merged = self.merged
        step = self.rule.finish(self.moved, merged.grad_UD, totals_Un, self.whole.dim, self.hyper)
        self.state()[merged.rows_U.long()] = step.s_MW
        merged.grad_UD = step.g_MD
        self.table = self.table._replace(rule=RULES[Sgd])
        weight_decay = 0.0 if step.weight_decay is None else float(step.weight_decay)
        self.hyper = torch.tensor(KernelHyperparameters(lr=float(step.lr), weight_decay=weight_decay))

    def drop(self, bad_U: Tensor) -> None:
        """Leave rows as they are."""
        if bool(bad_U.any()):
            self.bad_row = self.held.tile.rows[0] + int(self.merged.rows_U[bad_U][0])
            self.merged = MergedGradients(rows_U=self.merged.rows_U[~bad_U], grad_UD=self.merged.grad_UD[~bad_U])
            self.moved = None if self.moved is None else self.moved[~bad_U]


@final
class CoupledUpdate:
    """The pieces of a rank that are coupled to others, and who those are."""

    def __init__(self, routes: Routes, plan: Plan, comm: Comm, shelves: Sequence[tuple[PieceGroup, Tiles]]) -> None:
        """`shelves`: the coupled parts of this rank."""
        self._comm, self._shelves = comm, shelves
        self._tables = routes.tables
        coupled = {h.table for parts in routes.parts_W for part in parts if part.coupled for h in part.held}
        optimizers = [routes.tables[index].optimizer for index in coupled]
        self._clips = any(optimizer.clip is not None for optimizer in optimizers)
        self._sums = any(optimizer.sums_columns for optimizer in optimizers)
        self._owners = {
            (held.table, held.tile.rows): column_owners(plan, routes.tables[held.table], held.tile.rows)
            for part, _ in shelves
            for held in part.held
        }

    def update(self, calls: int) -> None:
        """Apply what was staged; every rank calls this as often as any other, with pieces or without."""
        pieces = sorted(self._merge(calls), key=lambda piece: piece.held)
        if self._clips:
            clipped = [piece for piece in pieces if piece.whole.optimizer.clip is not None]
            for piece, totals in self._totals(clipped, [(p.merged.grad_UD**2).unsqueeze(2) for p in clipped]):
                _clip(piece, totals[:, 0])
        if self._sums:
            by_row = [piece for piece in pieces if piece.whole.optimizer.sums_columns]
            for piece, totals in self._totals(by_row, [piece.terms() for piece in by_row]):
                piece.finish(totals)
        self._apply(pieces)

    def _merge(self, calls: int) -> list[_Piece]:
        pieces: list[_Piece] = []
        for part, tiles in self._shelves:
            staged, arena = tiles.staged, tiles.arena
            tiles.discard()
            for group, per_id in ((tiles.pooled, False), (tiles.sequence, True)):
                mine = [s for s in staged if s.call.per_id == per_id]
                if not mine:
                    continue
                hyper_TC, keys_T = next_step(arena, group)
                merged = merge(join_staged(join_parts(mine, calls) if calls > 1 else mine))
                tables = TableRow.read(group.tables_TC)
                for k, index in enumerate(group.members_T.tolist()):
                    held, whole = part.held[index], arena.pieces[index].whole
                    pieces.append(
                        _Piece(held=held, whole=whole, tiles=tiles, index=index, table=tables[k], hyper=hyper_TC[k],
                               random=keys_T[k], merged=merged[k])
                    )  # fmt: skip
        return pieces

    def _totals(self, pieces: Sequence[_Piece], values: Sequence[Tensor]) -> Iterator[tuple[_Piece, Tensor]]:
        """The sums [U, n] over all columns of the rows of each piece, of which this rank has values [U, D, n]."""
        found: dict[_Rows, list[tuple[Node, Tensor]]] = {piece.rows: [] for piece in pieces}
        shapes: dict[_Rows, tuple[int, int]] = {}
        sent: list[list[Tensor]] = [[] for _ in self._comm.ranks]
        for piece, x in zip(pieces, values, strict=True):
            nodes = _nodes(piece.held, x)
            found[piece.rows] += nodes
            shapes[piece.rows] = len(x), x.shape[2]
            for rank in {tile.rank for tile in self._owners[piece.rows]} - {self._comm.rank}:
                sent[rank] += [total.reshape(-1) for _, total in nodes]
        for rows, nodes in self._swap(sent, shapes):
            found[rows] += nodes
        whole = {
            rows: complete_sum([node for node, _ in parts], [x for _, x in parts]) for rows, parts in found.items()
        }
        for piece in pieces:
            totals = whole[piece.rows]
            bad_U = totals.isnan().any(1)
            piece.drop(bad_U)
            yield piece, totals if piece.bad_row is None else totals[~bad_U]

    def _swap(
        self, sent: list[list[Tensor]], shapes: dict[_Rows, tuple[int, int]]
    ) -> Iterator[tuple[_Rows, list[tuple[Node, Tensor]]]]:
        """The sums of the nodes that other ranks have of the same rows."""
        expected: list[list[tuple[_Rows, Node]]] = [[] for _ in self._comm.ranks]
        for rows in shapes:
            for tile in self._owners[rows]:
                if tile.rank != self._comm.rank:
                    expected[tile.rank] += [(rows, node) for node in nodes_of(*tile.cols)]
        sizes = [sum(x.numel() for x in blocks) for blocks in sent]
        receives = [sum(math.prod(shapes[rows]) for rows, _ in nodes) for nodes in expected]
        flat = torch.cat([x for blocks in sent for x in blocks] or [torch.empty(0)])
        came = self._comm.all_to_all(flat, sizes, receives, "row sums").wait()
        at = 0
        for rows, node in (item for nodes in expected for item in nodes):
            size = math.prod(shapes[rows])
            yield rows, [(node, came[at : at + size].view(shapes[rows]))]
            at += size

    def _apply(self, pieces: Sequence[_Piece]) -> None:
        for _, tiles in self._shelves:
            mine = [piece for piece in pieces if piece.tiles is tiles]
            if mine:
                numbers = torch.stack([p.hyper for p in mine]), torch.stack([p.random for p in mine])
                apply(tiles.arena, [p.merged for p in mine], [p.table for p in mine], numbers)
        for piece in pieces:
            if piece.bad_row is not None:
                raise GradientError(
                    f"table {piece.whole.name!r}, row {piece.bad_row}: its gradients do not add up to finite numbers, "
                    f"here or on a rank that has other columns of it. Such rows were left as they were; all others are "
                    f"updated"
                )


def _nodes(held: RankPiece, values_UDn: Tensor) -> list[tuple[Node, Tensor]]:
    """The sums [U, n] of the nodes that this piece's columns are made of."""
    found: list[tuple[Node, Tensor]] = []
    at = 0
    for node in nodes_of(*held.tile.cols):
        part = values_UDn[:, at : at + (1 << node.level)]
        at += 1 << node.level
        while part.shape[1] > 1:
            part = part[:, 0::2] + part[:, 1::2]
        found.append((node, part[:, 0]))
    return found


def _clip(piece: _Piece, total_U: Tensor) -> None:
    clip, length_U = piece.hyper[3], root(total_U)
    piece.merged.grad_UD *= torch.where(length_U > clip, clip / length_U, 1.0).unsqueeze(1)
    piece.hyper = piece.hyper.clone()
    piece.hyper[3] = 0.0
