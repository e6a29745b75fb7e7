"""Looked-up vectors to the samples' ranks, and their gradients back, as one step of autograd.

[Note: Everyone joins] A rank that holds no tile has nothing to send forward and nothing to update, and yet the others
wait for it, forward and backward. All exchanges therefore are in one function, which every rank applies once for each
batch; its output requires a gradient by way of an anchor, so that its backward runs on every rank, and all ranks meet
the same collectives in the same order.

[Note: Groups that are used] A backward that leads to no pooled vector stages nothing for pooled tables, so that an
update leaves them and their optimizer state alone; the same holds for sequences. Of several ranks each may use others:
a group counts as used if any rank uses it. Where a module has both, a backward begins by telling the others.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from rowwise.comm.seam import Comm
from rowwise.ops.kept import empty
from rowwise.ops.shared import Columns, Part, added_up, joined, picked, spread
from rowwise.shard.hosts import HostExchange
from rowwise.shard.ids import Routed
from rowwise.shard.perid import PerIdExchange
from rowwise.shard.pooled import PooledExchange
from rowwise.shard.routes import Routes
from rowwise.spec import Pooling, Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a rank looked up, or the gradients of that: of each way [G, columns], and of its own copies [B, columns]."""

    flat: Tensor
    host: Tensor
    copies: Tensor
    sequences: Tensor  # one after the other
    rows: Tensor  # of bags that whoever asked adds up: one after the other; their gradients are pooled [G, columns]

    def inputs(self) -> tuple[Tensor, ...]:
        """In the order in which autograd knows them."""
        return self.flat, self.host, self.copies, self.sequences, self.rows


class Used(NamedTuple):
    """What the losses of all ranks depend on. See [Note: Groups that are used]."""

    pooled: bool = True
    sequences: bool = True


ALL_USED = Used()


@final
class Exchange:
    """Moves vectors as the routes say."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, groups: tuple[Comm, Comm] | None = None) -> None:
        """Work out what does not depend on a batch; called by all ranks. `groups`: see `HostExchange`."""
        kinds = {table.pooling is Pooling.SEQUENCE for table in routes.tables}
        self._both = len(kinds) == 2  # pooled tables and sequences
        self.merges = False  # gradients of bags that samples share, before they travel
        self._routes, self._comm, self._wire = routes, comm, wire
        self._halves: dict[tuple[str, ...], tuple[Exchange, Exchange]] = {}  # by the features that are shared
        ways = {part.way for parts in routes.parts_W for part in parts}
        self._pooled = PooledExchange(routes, comm, wire, "flat")
        self._host = HostExchange(routes, comm, wire, groups) if "host" in ways else None
        self._sequences = PerIdExchange(routes, comm, wire, "flat")
        self._rows = PerIdExchange(routes, comm, wire, "rows")
        self._sums = PooledExchange(routes, comm, wire, "rows")  # of which only gradients travel
        self._copied = [
            routes.columns[f]
            for table in routes.copied
            if table.pooling is not Pooling.SEQUENCE
            for f in table.feature_names
        ]
        # A rank with some of the rows cannot know how many ids a bag has: those tables add up, and this divides.
        self._means = [
            (feature, table in routes.added_in_order)
            for table in routes.tables
            if table.pooling is Pooling.MEAN
            for feature in table.feature_names
            if len(routes.cuts[feature]) > 2
        ]

    def forward(self, routed: Routed, made: Made, more: Made | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The pooled features of this rank's batch [B, S], and the rows of its sequences.

        `more`: of the shared features, where `made` is of own ones.
        """
        if routed.halves is not None:
            assert more is not None
            return self._forward_halves(routed, routed.halves, (made, more))
        coming = self._pooled.send(routed, made.flat) if self._pooled.any else None
        return self._put(routed, made, None if coming is None else [blocks[0] for blocks in coming.wait()])

    def _forward_halves(
        self, routed: Routed, halves: tuple[Routed, Routed], made: tuple[Made, Made]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Those of own features and of shared ones, which are spread over the samples here."""
        moves = self._halves_for(routed.common)
        coming = None
        if self._pooled.any:
            pooled = [(move._pooled, half, x.flat) for move, half, x in zip(moves, halves, made, strict=True)]
            came = self._pooled.send_halves(pooled).wait()
            coming = [[blocks[k] for blocks in came] for k in range(2)]
        parts: list[Part] = []
        sequences: dict[str, Tensor] = {}
        for k, move in enumerate(moves):
            vectors, found = move._put(halves[k], made[k], None if coming is None else coming[k])
            sequences |= found
            parts.append(Part(vectors, self._columns_of(move._routes)))
        assert routed.asked.jagged.shared is not None
        return spread(parts[0], parts[1], routed.asked.jagged.shared.inverse_B), sequences

    def _put(self, routed: Routed, made: Made, coming: list[Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Everything where it belongs; pooled vectors are `coming` from each rank."""
        out_BS = empty((routed.asked.jagged.batch_size, self._routes.width), made.flat)
        at = 0
        for columns in self._copied:
            width = columns.stop - columns.start
            out_BS[:, columns] = made.copies[:, at : at + width]
            at += width
        if coming is not None:
            self._pooled.place(coming, out_BS)
        if self._host is not None:
            self._host.forward(routed, made.host, out_BS)
        for feature, inverse_B1, in_order in self._inverses(routed):
            if not in_order:
                out_BS[:, self._routes.columns[feature]] *= inverse_B1
        for feature, pooled in self._rows.pool(routed, self._rows.forward(routed, made.rows)).items():
            out_BS[:, self._routes.columns[feature]] = pooled
        sequences = self._sequences.forward(routed, made.sequences)
        for feature, repeats in routed.asked.repeats.items():
            sequences[feature] = repeats.expand(sequences[feature])
        return out_BS, sequences

    def used(self, mine: Used) -> Used:
        """What any rank uses; called by all."""
        if not self._both or len(self._comm.ranks) == 1:
            return mine
        flags_W2 = self._comm.all_gather(torch.tensor(mine), [2] * len(self._comm.ranks), "status").wait().view(-1, 2)
        return Used(*flags_W2.any(0).tolist())

    def backward_merged(self, routed: Routed, grad_BS: Tensor, grads: dict[str, Tensor], used: Used) -> list[Made]:
        """The same of own features, and of the distinct bags of shared ones. See [Note: Merged bags]."""
        shared, moves = routed.asked.jagged.shared, self._halves_for(routed.common)
        assert shared is not None
        assert routed.halves is not None
        own_BS, common_BS = (picked(grad_BS, self._columns_of(move._routes)) for move in moves)
        own = moves[0].backward(routed.halves[0], own_BS, grads, used)
        return [own, moves[1].backward(routed.halves[1], added_up(common_BS, shared), {})]

    def backward(self, routed: Routed, grad_BS: Tensor, grads: dict[str, Tensor], used: Used = ALL_USED) -> Made:
        """Take the gradients to whoever made the vectors; nothing for a group that nobody uses."""
        grads = {f: routed.asked.repeats[f].merge(g) if f in routed.asked.repeats else g for f, g in grads.items()}
        copies = torch.cat([grad_BS[:, columns] for columns in self._copied] or [grad_BS[:, :0]], 1)
        if self._means and used.pooled:
            grad_BS = grad_BS.clone()
            for feature, inverse_B1, _ in self._inverses(routed):
                grad_BS[:, self._routes.columns[feature]] *= inverse_B1
        none = grad_BS.new_empty((sum(routed.samples_W), 0))
        sequences, of_sequences = self._sequences, routed
        if routed.halves is not None:  # they are all of the own half
            sequences, of_sequences = self._halves_for(routed.common)[0]._sequences, routed.halves[0]
        return Made(
            flat=self._pooled.backward(routed, grad_BS) if self._pooled.any and used.pooled else none,
            host=none if self._host is None or not used.pooled else self._host.backward(routed, grad_BS),
            copies=copies,
            sequences=sequences.backward(of_sequences, grads) if used.sequences else none.flatten(),
            rows=self._sums.backward(routed, grad_BS) if self._sums.any and used.pooled else none,
        )

    def _halves_for(self, common: tuple[str, ...]) -> "tuple[Exchange, Exchange]":
        """Of own features, and of those that are shared."""
        if common not in self._halves:
            groups = None if self._host is None else self._host.groups
            own, shared = (Exchange(half, self._comm, self._wire, groups) for half in self._routes.halves(common))
            self._halves[common] = own, shared
        return self._halves[common]

    def _columns_of(self, half: Routes) -> tuple[Columns, ...]:
        """Where the columns of a half are among all."""
        found = ((own, self._routes.columns[feature]) for feature, own in half.columns.items())
        return joined([Columns(own.start, whole.start, own.stop - own.start) for own, whole in found])

    def _inverses(self, routed: Routed) -> list[tuple[str, Tensor, bool]]:
        """For each mean over cut rows: one over the ids of each bag [B, 1]."""
        found: list[tuple[str, Tensor, bool]] = []
        for feature, in_order in self._means:
            counts_B = routed.asked.jagged.lengths_of(feature)
            found.append((feature, (1.0 / counts_B.clamp(min=1).float()).unsqueeze(1), in_order))
        return found


Stage = Callable[[Routed, Sequence[Made]], Tensor | None]
Phase = Callable[[str], AbstractContextManager[None]]  # of a step: "route", "lookup", "exchange", "return"


def untimed(_phase: str) -> AbstractContextManager[None]:
    """Nobody wants to know what a phase takes."""
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What a rank has looked up for a batch, and what is to be done with gradients."""

    routed: Routed
    made: Sequence[Made]
    copied: Mapping[str, Tensor]  # sequences of copies, which do not travel
    stage: Stage
    phase: Phase = untimed


def exchange(moves: Exchange, lookup: Lookup, anchor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`Exchange.forward` with a gradient, which `stage` is told of. See [Note: Everyone joins]."""
    if not torch.is_grad_enabled():
        with lookup.phase("exchange"):
            out_BS, found = moves.forward(lookup.routed, *lookup.made)
        return out_BS, found | dict(lookup.copied)
    names: list[str] = []
    weights = lookup.routed.weights
    joins = anchor if weights is None else weights  # whose backward every rank has to run, too
    inputs = *lookup.made[0].inputs(), *lookup.copied.values()
    out_BS, *sequences = _Exchange.apply(anchor, joins, (moves, lookup, names), *inputs)
    return out_BS, dict(zip(names, sequences, strict=True))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> tuple[Tensor, ...]:
        ctx, _anchor, joins, (moves, lookup, names), *inputs = args
        ctx.set_materialize_grads(False)  # see [Note: Groups that are used]
        made = Made(**dict(zip(("flat", "host", "copies", "sequences", "rows"), inputs[:5], strict=True)))
        with lookup.phase("exchange"):
            out_BS, sequences = moves.forward(lookup.routed, made, *lookup.made[1:])
        copied = dict(zip(lookup.copied, (x.view_as(x) for x in inputs[5:]), strict=True))
        outputs = {"": out_BS} | sequences | copied
        names += list(outputs)[1:]
        ctx.kept = moves, lookup.routed, list(sequences), list(copied), lookup.stage, lookup.phase, joins
        ctx.shapes = [x.shape for x in outputs.values()]
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        moves, routed, names, copied, stage, phase, joins = ctx.kept
        with phase("return"):
            used = moves.used(Used(grad_outputs[0] is not None, any(x is not None for x in grad_outputs[1:])))
            given_or_0 = zip(grad_outputs, ctx.shapes, strict=True)
            grad_BS, *grads = (joins.new_zeros(s) if x is None else x.contiguous() for x, s in given_or_0)
            wanted = dict(zip(names, grads, strict=False))
            if moves.merges and routed.halves is not None and used.pooled:
                given = moves.backward_merged(routed, grad_BS, wanted, used)
            else:
                given = [moves.backward(routed, grad_BS, wanted, used)]
        learned = stage(routed, given) if used.pooled else None
        learned = torch.zeros_like(joins) if learned is None else learned
        own, of_copies = given[0], grads[len(names) :]
        pooled = (own.flat, own.host, own.copies) if used.pooled else (None,) * 3
        sequences = (own.sequences, None, *of_copies) if used.sequences else (None,) * (2 + len(copied))
        return None, learned, None, *pooled, *sequences
