"""Tables that every rank holds: looked up at home, and updated alike everywhere.

All ranks have to apply the same sums. Two ways lead there, and each step takes the one that moves less: gather what
every rank staged, ids and gradients, and update with all of it, bit for bit as one device would; or, for tables that
are small beside the batch, merge at home and add the merged gradients up (all-reduce), whose sums are in another order.
"""

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.comm.seam import Comm
from rowwise.errors import GradientError
from rowwise.ops.jagged import permute
from rowwise.ops.layout import FeatureRow, TableGroup, TableRow
from rowwise.ops.lookup import LookupCall, StagedGradients
from rowwise.ops.merged import MergedGradients, apply, merge
from rowwise.ops.tiles import Tiles
from rowwise.ops.update import join_staged, next_step, run_all, update
from rowwise.spec import Pooling


@final
class CopiesUpdate:
    """Updates the copies of a rank."""

    def __init__(self, tiles: Tiles, comm: Comm, *, elastic: bool) -> None:
        """`elastic`: only the way that gives the bits of one device."""
        self._tiles, self._comm, self._elastic = tiles, comm, elastic

    def update(self, samples: int, calls: int) -> None:
        """Apply what all ranks staged for so many samples; `calls` of a batch were one batch in pieces."""
        staged = self._tiles.staged
        self._tiles.discard()
        groups = ([s for s in staged if s.call.per_id == per_id] for per_id in (False, True))
        run_all(partial(self._update, mine, samples, calls) for mine in groups if mine)

    def _update(self, mine: Sequence[StagedGradients], samples: int, calls: int) -> None:
        group = mine[0].call.group
        tables = TableRow.read(group.tables_TC)
        floats = sum(feature.dim for feature in FeatureRow.read(group.features_FC))
        if self._elastic or samples * floats < 2 * sum(t.rows * (t.dim + 1) for t in tables):
            # Rank after rank for each batch, as if one device had met them so.
            batches = [join_staged(mine[k : k + calls]) for k in range(0, len(mine), calls)]
            update(self._tiles.arena, [s for batch in batches for s in self._gathered(group, batch)])
        else:
            self._reduce(group, join_staged(mine), tables)

    def _gathered(self, group: TableGroup, mine: StagedGradients) -> list[StagedGradients]:
        """What each rank staged."""
        names = tuple(dict.fromkeys(group.feature_names))
        jagged = permute(Jagged.from_keyed(mine.call.jagged), names)
        parts = [jagged.lengths_FB.long(), jagged.values_N.long()]
        # Weights that nobody needs may be there on some ranks only.
        weighted = any(table.pooling is Pooling.WEIGHTED for table in group.tables)
        weights = permute(_weighted(mine), names).weights_N if weighted else None
        sizes = torch.tensor([len(x) for x in parts] + [mine.grad.numel()], device=parts[0].device)
        world = len(self._comm.ranks)
        sizes_W = self._comm.all_gather(sizes, [3] * world, "counts").wait().view(world, 3).tolist()
        ids = self._gather(torch.cat(parts), [bags + n for bags, n, _ in sizes_W], "ids")
        grads = self._gather(mine.grad.reshape(-1), [floats for _, _, floats in sizes_W], "copies")
        kept = None if weights is None else self._gather(weights, [n for _, n, _ in sizes_W], "ids")
        found: list[StagedGradients] = []
        for rank, (bags, n, _) in enumerate(sizes_W):
            lengths_FB, values_N = ids[rank].split([bags, n])
            weights_N = None if kept is None else kept[rank]
            theirs = Jagged(features=names, values_N=values_N, lengths_FB=lengths_FB, weights_N=weights_N)
            offsets = torch.ops.rowwise.offsets(lengths_FB)
            call = LookupCall(group, group.for_sources(names), theirs, offsets, mine.call.per_id)
            grad = grads[rank] if mine.call.per_id else grads[rank].view(-1, group.columns)
            found.append(StagedGradients(call=call, weights=weights_N, grad=grad))
        return found

    def _gather(self, mine: Tensor, sizes_W: Sequence[int], what: str) -> Sequence[Tensor]:
        return self._comm.all_gather(mine.contiguous(), sizes_W, what).wait().split(list(sizes_W))

    def _reduce(self, group: TableGroup, mine: StagedGradients, tables: Sequence[TableRow]) -> None:
        """Add up, and apply to each row that any rank touched."""
        sums: list[Tensor] = []
        for merged, table in zip(merge(mine), tables, strict=True):
            rows_RD1 = merged.grad_UD.new_zeros((table.rows, table.dim + 1))
            rows_RD1[merged.rows_U.long(), : table.dim] = merged.grad_UD
            rows_RD1[merged.rows_U.long(), table.dim] = 1.0  # touched
            sums.append(rows_RD1.flatten())
        total = self._comm.all_reduce(torch.cat(sums), "copies").wait().split([len(x) for x in sums])
        found: list[MergedGradients] = []
        bad: list[str] = []
        for flat, table, spec in zip(total, tables, group.tables, strict=True):
            rows_RD1 = flat.view(table.rows, table.dim + 1)
            finite_R = rows_RD1.isfinite().all(1)
            bad += [f"table {spec.name!r}, row {int(row)}" for row in (~finite_R).nonzero().flatten()[:1]]
            rows_U = ((rows_RD1[:, table.dim] > 0) & finite_R).nonzero().flatten()
            found.append(MergedGradients(rows_U=rows_U, grad_UD=rows_RD1[rows_U, : table.dim]))
        apply(self._tiles.arena, found, tables, next_step(self._tiles.arena, group))
        if bad:
            raise GradientError(
                f"{bad[0]}: its gradients do not add up to finite numbers, on this rank or another. Such rows were "
                f"left as they were; all others are updated"
            )


def _weighted(staged: StagedGradients) -> Jagged:
    jagged = staged.call.jagged
    return Jagged(
        features=jagged.features, values_N=jagged.values_N, lengths_FB=jagged.lengths_FB, weights_N=staged.weights
    )
