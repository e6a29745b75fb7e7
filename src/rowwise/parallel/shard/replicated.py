"""`ReplicatedUpdate`: updates replicated tables, which stay equal on all ranks.

Each step takes the cheaper of two exchanges. An all-gather of the staged ids and gradients, after which every rank
applies all of them: the bits of one device. Or, for tables that are small beside the batch, a merge on each rank and an
all-reduce of the sums: equal on all ranks, but summed in another order than on one device.
"""

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from rowwise.base.errors import GradientError
from rowwise.parallel.comm.interface import Comm
from rowwise.tables.batch import Jagged
from rowwise.tables.ops.jagged import permute
from rowwise.tables.ops.layout import FeatureDescriptor, TableDescriptor, TableGroup
from rowwise.tables.ops.lookup import StagedGradients
from rowwise.tables.ops.merged import MergedGradients, apply_merged, merge_staged
from rowwise.tables.ops.tiles import Tiles
from rowwise.tables.ops.update import concat_staged, next_step, run_all, update
from rowwise.tables.spec import Pooling


@final
class ReplicatedUpdate:
    """Updates the replicated tables of this rank."""

    def __init__(self, tiles: Tiles, comm: Comm, *, elastic: bool) -> None:
        """`elastic`: always the all-gather, which gives the bits of one device."""
        self._tiles, self._comm, self._elastic = tiles, comm, elastic

    def update(self, samples: int, calls: int) -> None:
        """Apply the staged gradients of all ranks' `samples`; collective. `calls`: forward calls per batch."""
        run_all(partial(self._update, local, samples, calls) for local in self._tiles.take_kinds() if local)

    def _update(self, local: Sequence[StagedGradients], samples: int, calls: int) -> None:
        group = local[0].call.group
        tables = TableDescriptor.read(group.tables_TC)
        floats = sum(feature.dim for feature in FeatureDescriptor.read(group.features_FC))
        # All-gather receives a gradient per sample; a ring all-reduce sends each row's sums and its mark about twice.
        # `samples` is the global count, so all ranks choose alike.
        if self._elastic or samples * floats < 2 * sum(t.rows * (t.dim + 1) for t in tables):
            # For each batch the ranks in order: the samples of the global batch, as on one device.
            batches = [concat_staged(local[k : k + calls]) for k in range(0, len(local), calls)]
            update(self._tiles.arena, [s for batch in batches for s in self._gather_staged(group, batch)])
        else:
            self._reduce(group, concat_staged(local), tables)

    def _gather_staged(self, group: TableGroup, local: StagedGradients) -> list[StagedGradients]:
        """The staged gradients of each rank, in rank order."""
        names = tuple(dict.fromkeys(group.feature_names))
        jagged = permute(local.batch, names)
        parts = [jagged.lengths_FB.long(), jagged.values_N.long()]
        # Decided by the tables, not the batch: unused weights may be present on some ranks only.
        weighted = any(table.pooling is Pooling.WEIGHTED for table in group.tables)
        weights = jagged.weights_N if weighted else None
        sizes = torch.tensor([len(x) for x in parts] + [local.grad.numel()])
        world = len(self._comm.ranks)
        sizes_W = self._comm.all_gather(sizes, [3] * world, "counts").wait().view(world, 3).tolist()
        ids = self._gather(torch.cat(parts), [bags + n for bags, n, _ in sizes_W], "ids")
        grads = self._gather(local.grad.reshape(-1), [floats for _, _, floats in sizes_W], "copies")
        weights_W = None if weights is None else self._gather(weights, [n for _, n, _ in sizes_W], "ids")
        gathered: list[StagedGradients] = []
        for rank, (bags, n, _) in enumerate(sizes_W):
            lengths_FB, values_N = ids[rank].split([bags, n])
            weights_N = None if weights_W is None else weights_W[rank]
            rank_batch = Jagged(features=names, values_N=values_N, lengths_FB=lengths_FB, weights_N=weights_N)
            grad = grads[rank] if local.call.per_id else grads[rank].view(-1, group.columns)
            gathered.append(local.of_batch(rank_batch, grad))
        return gathered

    def _gather(self, tensor: Tensor, sizes_W: Sequence[int], purpose: str) -> Sequence[Tensor]:
        return self._comm.all_gather(tensor.contiguous(), sizes_W, purpose).wait().split(list(sizes_W))

    def _reduce(self, group: TableGroup, local: StagedGradients, tables: Sequence[TableDescriptor]) -> None:
        """All-reduce the merged gradients, then update each row that any rank touched."""
        sums: list[Tensor] = []
        for merged, table in zip(merge_staged(local), tables, strict=True):
            rows_RD1 = merged.grad_UD.new_zeros((table.rows, table.dim + 1))
            rows_RD1[merged.rows_U.long(), : table.dim] = merged.grad_UD
            # Marks a touched row, as a gradient of a touched row may be all zeros.
            rows_RD1[merged.rows_U.long(), table.dim] = 1.0
            sums.append(rows_RD1.flatten())
        totals = self._comm.all_reduce(torch.cat(sums), "copies").wait().split([len(x) for x in sums])
        summed: list[MergedGradients] = []
        bad: list[str] = []
        for flat, table, spec in zip(totals, tables, group.tables, strict=True):
            rows_RD1 = flat.view(table.rows, table.dim + 1)
            finite_R = rows_RD1.isfinite().all(1)
            bad += [f"table {spec.name!r}, row {int(row)}" for row in (~finite_R).nonzero().flatten()[:1]]
            rows_U = ((rows_RD1[:, table.dim] > 0) & finite_R).nonzero().flatten()
            summed.append(MergedGradients(rows_U=rows_U, grad_UD=rows_RD1[rows_U, : table.dim]))
        apply_merged(self._tiles.arena, summed, tables, next_step(self._tiles.arena, group))
        if bad:
            raise GradientError(
                f"{bad[0]}: its gradients do not add up to finite numbers, on this rank or another. Such rows were "
                f"left as they were; all others are updated"
            )
