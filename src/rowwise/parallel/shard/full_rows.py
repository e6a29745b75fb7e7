"""`FullRowUpdate`: updates column-cut tables whose optimizer needs statistics of full rows, by exchanging partial sums.

Row-wise optimizers, LAMB and clipping need sums over all columns of a row. Each rank sums its own columns as far as
the tree of [Note: Column sums] in `tables/ops/_cpp/simd.h` stays inside them, the ranks with columns of the same rows
exchange these partial sums, and each finishes the tree: the same bits as one device. What remains is a plain SGD step,
which the kernel applies and rounds. Such tables cost a few more passes over their gradients.

From `ops`: `MergedGradients` are the touched rows of a piece and their summed gradients. A `RowRule` is an optimizer in
two parts: `terms` gives the values to sum over each row, `finish` the step that follows from the sums. A `Node` is an
aligned range of columns, the unit in which rows are summed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from rowwise.base.errors import GradientError
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.shard.routes import PieceGroup, RankPiece, Routes
from rowwise.tables.ops import rowtype
from rowwise.tables.ops.layout import RULES, TableDescriptor
from rowwise.tables.ops.merged import MergedGradients, apply_merged, merge_staged
from rowwise.tables.ops.reference.apply import REFERENCE, RowRule, root
from rowwise.tables.ops.tiles import Tiles
from rowwise.tables.ops.tree import Node, nodes_of, sum_nodes
from rowwise.tables.ops.update import concat_staged, next_step, reorder_by_rank
from rowwise.tables.row_optimizers import KernelHyperparameters, Sgd
from rowwise.tables.spec import Table

_RowRange = tuple[int, tuple[int, int]]  # index of the table, and first and last row + 1
WEIGHT_DECAY, CLIP = (KernelHyperparameters._fields.index(name) for name in ("weight_decay", "clip"))


@final
@dataclass(slots=True, kw_only=True)
class _PieceUpdate:
    """The state of one piece's update between merging and applying."""

    rank_piece: RankPiece
    full_table: Table
    tiles: Tiles
    index: int  # among the tables of its tiles
    table: TableDescriptor
    hyper: Tensor
    random: Tensor
    merged: MergedGradients
    bad_row: int | None = None  # index in the full table of a row whose gradient is not finite
    new_state: Tensor | None = None  # state [U, floats] after `terms`; `finish` stores it, without the bad rows

    @property
    def rows(self) -> _RowRange:
        return self.rank_piece.table, self.rank_piece.tile.rows

    @property
    def rule(self) -> RowRule:
        rule = REFERENCE[type(self.full_table.optimizer)]
        assert isinstance(rule, RowRule), rule
        return rule

    def weights(self) -> Tensor:
        """The touched rows as floats [U, D]."""
        table = self.tiles.arena.tables[self.index]
        stored = self.tiles.arena.table(self.index)[self.merged.rows_U.long()]
        return rowtype.unpack(stored, table.dim, table.row_type, table.column_group)

    def state(self) -> Tensor:
        """The optimizer state of all rows [R, floats], a view."""
        t = self.table
        return self.tiles.arena.state[t.state_base : t.state_base + t.rows * t.state_width].view(t.rows, -1)

    def terms(self) -> Tensor:
        """The values [U, D, n] that the rule sums over each row."""
        rule, merged, weight_decay = self.rule, self.merged, self.hyper[WEIGHT_DECAY]
        # L2 goes into the gradient before any sum is taken of it, as in the kernel.
        if rule.decays_gradient and weight_decay != 0:
            merged.grad_UD += self.weights() * weight_decay
        values, self.new_state, merged.grad_UD = rule.terms(
            self.weights, self.state()[merged.rows_U.long()], merged.grad_UD, self.hyper
        )
        return values

    def finish(self, totals_Un: Tensor) -> None:
        """Rewrite the rest of the update as an SGD step on `merged.grad_UD`, given the sums over full rows."""
        assert self.new_state is not None
        merged = self.merged
        step = self.rule.finish(self.new_state, merged.grad_UD, totals_Un, self.full_table.dim, self.hyper)
        self.state()[merged.rows_U.long()] = step.s_MW
        merged.grad_UD = step.g_MD
        # The state is written here; the kernel only has to take w -= lr * (g + weight_decay * w), in its own rounding.
        self.table = self.table._replace(rule=RULES[Sgd])
        weight_decay = 0.0 if step.weight_decay is None else float(step.weight_decay)
        self.hyper = torch.tensor(KernelHyperparameters(lr=float(step.lr), weight_decay=weight_decay))

    def drop_rows(self, bad_U: Tensor) -> None:
        """Exclude these rows from the update: they keep their weights and state."""
        if bool(bad_U.any()):
            self.bad_row = self.rank_piece.tile.rows[0] + int(self.merged.rows_U[bad_U][0])
            self.merged = MergedGradients(rows_U=self.merged.rows_U[~bad_U], grad_UD=self.merged.grad_UD[~bad_U])
            self.new_state = None if self.new_state is None else self.new_state[~bad_U]


@final
class FullRowUpdate:
    """Updates the pieces of a rank whose rows have columns on other ranks."""

    def __init__(self, routes: Routes, comm: Comm, groups: Sequence[tuple[PieceGroup, Tiles]]) -> None:
        """`groups`: the groups of this rank that need full rows."""
        self._comm, self._groups = comm, groups
        # Of all ranks: every rank must enter the same exchanges.
        self._owners = routes.column_owners
        optimizers = [routes.tables[k].optimizer for k, _ in self._owners]
        self._clips = any(optimizer.clip is not None for optimizer in optimizers)
        self._sums = any(optimizer.sums_columns for optimizer in optimizers)

    def update(self, calls: int, device: torch.device) -> None:
        """Apply the staged gradients; collective, even for a rank without pieces. `calls`: forward calls per batch.

        `device`: of the rows of all ranks.
        """
        # Sorted, so that two ranks list their shared rows in the same order: messages carry no names.
        pieces = sorted(self._merge(calls), key=lambda piece: piece.rank_piece)
        if self._clips:  # an exchange of its own, before that of the optimizer, whose sums are of clipped gradients
            clipped = [piece for piece in pieces if piece.full_table.optimizer.clip is not None]
            for piece, totals in self._row_totals(
                clipped, [(p.merged.grad_UD**2).unsqueeze(2) for p in clipped], device
            ):
                _clip_rows(piece, totals[:, 0])
        if self._sums:
            by_row = [piece for piece in pieces if piece.full_table.optimizer.sums_columns]
            for piece, totals in self._row_totals(by_row, [piece.terms() for piece in by_row], device):
                piece.finish(totals)
        self._apply(pieces)

    def _merge(self, calls: int) -> list[_PieceUpdate]:
        pieces: list[_PieceUpdate] = []
        for group, tiles in self._groups:
            arena = tiles.arena
            for tables, staged in zip((tiles.pooled, tiles.sequence), tiles.take_kinds(), strict=True):
                if not staged:
                    continue
                hyper_TH, keys_T = next_step(arena, tables)
                merged = merge_staged(concat_staged(reorder_by_rank(staged, calls)))
                descriptors = TableDescriptor.read(tables.tables_TC)
                for k, index in enumerate(tables.members_T.tolist()):
                    pieces.append(
                        _PieceUpdate(rank_piece=group.pieces[index], full_table=arena.pieces[index].full_table,
                                     tiles=tiles, index=index, table=descriptors[k], hyper=hyper_TH[k],
                                     random=keys_T[k], merged=merged[k])
                    )  # fmt: skip
        return pieces

    def _row_totals(
        self, pieces: Sequence[_PieceUpdate], values: Sequence[Tensor], device: torch.device
    ) -> Iterator[tuple[_PieceUpdate, Tensor]]:
        """For each piece, the sums [U, n] over all columns of its rows; `values` [U, D, n] are of its own columns.

        All ranks with columns of a row were sent the same ids for it, so their U rows are the same, in the same order.
        """
        sums: dict[_RowRange, list[tuple[Node, Tensor]]] = {piece.rows: [] for piece in pieces}
        shapes: dict[_RowRange, tuple[int, int]] = {}
        send_W: list[list[Tensor]] = [[] for _ in self._comm.ranks]
        for piece, x in zip(pieces, values, strict=True):
            nodes = _node_sums(piece.rank_piece, x)
            sums[piece.rows] += nodes
            shapes[piece.rows] = len(x), x.shape[2]
            for rank in {tile.rank for tile in self._owners[piece.rows]} - {self._comm.rank}:
                send_W[rank] += [total.reshape(-1) for _, total in nodes]
        for rows, nodes in self._exchange_node_sums(send_W, shapes, device):
            sums[rows] += nodes
        full = {rows: sum_nodes([node for node, _ in nodes], [x for _, x in nodes]) for rows, nodes in sums.items()}
        for piece in pieces:
            totals = full[piece.rows]
            # A gradient that is not finite was marked NaN, which reaches the sums on all ranks: all drop the same rows.
            bad_U = totals.isnan().any(1)
            piece.drop_rows(bad_U)
            yield piece, totals if piece.bad_row is None else totals[~bad_U]

    def _exchange_node_sums(
        self, send_W: list[list[Tensor]], shapes: dict[_RowRange, tuple[int, int]], device: torch.device
    ) -> Iterator[tuple[_RowRange, list[tuple[Node, Tensor]]]]:
        """Exchange node sums with the ranks that hold other columns of the same rows; yields the received sums."""
        expected_W: list[list[tuple[_RowRange, Node]]] = [[] for _ in self._comm.ranks]
        for rows in shapes:
            for tile in self._owners[rows]:
                if tile.rank != self._comm.rank:
                    expected_W[tile.rank] += [(rows, node) for node in nodes_of(*tile.cols)]
        send_sizes = [sum(x.numel() for x in blocks) for blocks in send_W]
        recv_sizes = [sum(math.prod(shapes[rows]) for rows, _ in nodes) for nodes in expected_W]
        # No headers: shapes are known here, as every owner of a row range merged the same rows of it.
        flat = torch.cat([x for blocks in send_W for x in blocks] or [torch.empty(0, device=device)])
        received = self._comm.all_to_all(flat, send_sizes, recv_sizes, "row sums").wait()
        at = 0
        for rows, node in (item for nodes in expected_W for item in nodes):
            size = math.prod(shapes[rows])
            yield rows, [(node, received[at : at + size].view(shapes[rows]))]
            at += size

    def _apply(self, pieces: Sequence[_PieceUpdate]) -> None:
        for _, tiles in self._groups:
            own = [piece for piece in pieces if piece.tiles is tiles]
            if own:
                hyper_and_keys = torch.stack([p.hyper for p in own]), torch.stack([p.random for p in own])
                apply_merged(tiles.arena, [p.merged for p in own], [p.table for p in own], hyper_and_keys)
        for piece in pieces:
            if piece.bad_row is not None:
                raise GradientError(
                    f"table {piece.full_table.name!r}, row {piece.bad_row}: its gradients do not add up to finite "
                    f"numbers, here or on a rank that has other columns of it. Such rows were left as they were; all "
                    f"others are updated"
                )


def _node_sums(rank_piece: RankPiece, values_UDn: Tensor) -> list[tuple[Node, Tensor]]:
    """The sum [U, n] of each tree node inside this piece's columns."""
    sums: list[tuple[Node, Tensor]] = []
    at = 0
    for node in nodes_of(*rank_piece.tile.cols):
        part = values_UDn[:, at : at + (1 << node.level)]
        at += 1 << node.level
        while part.shape[1] > 1:  # pairwise, as in the kernel: a node's columns are a power of two
            part = part[:, 0::2] + part[:, 1::2]
        sums.append((node, part[:, 0]))
    return sums


def _clip_rows(piece: _PieceUpdate, total_U: Tensor) -> None:
    clip, norm_U = piece.hyper[CLIP], root(total_U)
    piece.merged.grad_UD *= torch.where(norm_U > clip, clip / norm_U, 1.0).unsqueeze(1)
    piece.hyper = piece.hyper.clone()  # a view of the table group's numbers, which later steps use too
    piece.hyper[CLIP] = 0.0  # disabled: the kernel would clip by the norm of one piece's columns
