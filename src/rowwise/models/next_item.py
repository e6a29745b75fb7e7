"""Next-item recommendation: a list of items is encoded, and all items are scored as its next one.

    score(i | list) = encoder(list)[last place] . item_i

The encoder reads the same item vectors that are scored: the rows of one table, which may be sharded. A lookup has the
lists as samples, and the items to score as one more sample.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.base.errors import SpecError
from rowwise.models.histories import HistoryEncoder, histories_of, items_of, newest, positions_of, sample_of_each
from rowwise.models.inputs import Ids
from rowwise.tables.batch import Batch, Jagged
from rowwise.tables.ids.make import AnyTables
from rowwise.tables.spec import Pooling, Table


class Places(NamedTuple):
    """The positions of a batch's histories, each with its next item."""

    lengths_B: Tensor  # lengths of the histories
    vectors_ND: Tensor  # output of the encoder at each position
    next_N: Tensor  # the row of the next item
    next_ND: Tensor  # its vector


class NextItem(nn.Module):
    """Scores of all items of a table as the next one of each list.

    Args:
        embeddings: one table with one feature, the lists, and pooling: sequence. Each row is an item.
        encoder: of the lists, with the table's dim.
    """

    def __init__(self, embeddings: AnyTables, encoder: HistoryEncoder) -> None:
        """Shares `embeddings` with the caller."""
        super().__init__()
        self.table = _only_table(embeddings.tables)
        if self.table.dim != encoder.dim:
            raise SpecError(
                f"table {self.table.name!r} has dim {self.table.dim} and the encoder dim {encoder.dim}", "equal dims"
            )
        self.embeddings, self.encoder = embeddings, encoder
        (self.feature,) = self.table.feature_names

    def forward(self, batch: Batch | Ids, scored_C: Tensor | None = None) -> tuple[Places, Tensor]:
        """The places of lists without their last items, and the vectors [C, D] of items to score, by default all.

        Reads the last item of each list and the newest `encoder.length` items before it.
        """
        items_M, lists_B, places_N, lengths_B = histories_of(*self._items(batch), self.encoder.length)
        x_MD, scored_CD = self._look_up(items_M, lists_B, scored_C)
        # Ids may be on the host of a GPU; the rest runs on the vectors' device.
        items_M, places_N, lengths_B = (x.to(x_MD.device) for x in (items_M, places_N, lengths_B))
        vectors_ND, next_N = self.encoder(x_MD[places_N], lengths_B), self.rows_of(items_M[places_N + 1])
        return Places(lengths_B, vectors_ND, next_N, x_MD[places_N + 1]), scored_CD

    def scores(self, batch: Batch | Ids) -> Tensor:
        """Scores [B, rows of the table] of all items, by the newest `encoder.length` items of each whole list.

        An empty list scores all items 0.
        """
        lists_BD, items_RD = self._encode(batch, None)
        return lists_BD @ items_RD.t()

    def vectors(self, batch: Batch | Ids) -> Tensor:
        """The vectors [B, D] of whole lists, whose dots with those of items are `scores`."""
        return self._encode(batch, torch.empty(0))[0]

    def cut_vectors(self, batch: Batch | Ids) -> Tensor:
        """The vectors [B, D] of lists, about half of them cut to lengths that depend on their own items only.

        For tests that a list's bits do not depend on the lengths of the other lists.
        """
        items_N, lengths_B = self._items(batch)
        list_N, sums_B = sample_of_each(lengths_B), torch.zeros_like(lengths_B)
        sums_B.index_add_(0, list_N, items_N.to(lengths_B))
        cut_B = lengths_B.where(sums_B % 2 == 0, (sums_B // 2 % lengths_B.clamp(min=1) + 1).minimum(lengths_B))
        kept_N = items_N[positions_of(lengths_B) < cut_B[list_N]]
        return self.vectors(Jagged(features=(self.feature,), values_N=kept_N, lengths_FB=cut_B))

    def item_vectors(self, batch: Batch | Ids) -> Tensor:
        """The vectors [N, D] of the items of all lists, one list after the other."""
        return self._look_up(*self._items(batch), torch.empty(0))[0]

    def logits(self, batch: Batch | Ids) -> Tensor:
        """The score [B, 1] of each list's last item by those before it; 0 for a list of fewer than two items."""
        places, _ = self(batch, torch.empty(0))
        return last_of_each((places.vectors_ND * places.next_ND).sum(1, keepdim=True), places.lengths_B)

    def _encode(self, batch: Batch | Ids, scored_C: Tensor | None) -> tuple[Tensor, Tensor]:
        """The vectors [B, D] of whole lists, and those of items to score; see `_look_up`."""
        items_N, lengths_B = newest(*self._items(batch), self.encoder.length)
        x_ND, scored_CD = self._look_up(items_N, lengths_B, scored_C)
        lengths_B = lengths_B.to(x_ND.device)
        return last_of_each(self.encoder(x_ND, lengths_B), lengths_B), scored_CD

    def _items(self, batch: Batch | Ids) -> tuple[Tensor, Tensor]:
        return items_of(Jagged.from_keyed(batch.sparse if isinstance(batch, Batch) else batch), self.feature)

    def rows_of(self, items_N: Tensor) -> Tensor:
        """The row of each item of a list that was looked up: the last one, if the table maps unknown ids to it."""
        rows = self.table.rows
        return items_N.long().where((items_N >= 0) & (items_N < rows), rows - 1)

    def _look_up(self, items_N: Tensor, lengths_B: Tensor, scored_C: Tensor | None) -> tuple[Tensor, Tensor]:
        """The vectors [N, D] of the items of lists, and those [C, D] of the items to score, by default all."""
        scored_C = torch.arange(self.table.rows, device=items_N.device) if scored_C is None else scored_C
        ids_N = torch.cat([items_N, scored_C.to(items_N)])
        bags_B = torch.cat([lengths_B, lengths_B.new_tensor([len(scored_C)])])
        vectors = self.embeddings(Jagged(features=(self.feature,), values_N=ids_N, lengths_FB=bags_B))
        x_ND = vectors[self.feature]
        return x_ND[: len(items_N)], x_ND[len(items_N) :]


def last_of_each(x_ND: Tensor, lengths_B: Tensor) -> Tensor:
    """The vector [B, D] of the last place of each history; 0 for an empty one."""
    filled_B = lengths_B > 0
    last_UD = x_ND[lengths_B.cumsum(0)[filled_B] - 1]
    return x_ND.new_zeros(len(lengths_B), x_ND.shape[1]).masked_scatter(filled_B.unsqueeze(1), last_UD)


def softmax_loss(places: Places, items_RD: Tensor) -> Tensor:
    """-log softmax over all items, of the item that follows each place [N]."""
    return F.cross_entropy((places.vectors_ND @ items_RD.t()).float(), places.next_N, reduction="none")


def sampled_softmax_loss(places: Places, drawn_CD: Tensor, drawn_C: Tensor, rows: int) -> Tensor:
    """-log softmax of the item that follows each place [N], over it and sampled negatives.

    The C items are drawn from all rows with equal probabilities, so each counts as rows / C items: the log Q
    correction of a sampled softmax. A draw that equals the next item is masked.

    Args:
        places: of the histories.
        drawn_CD: vectors of the drawn items.
        drawn_C: their rows.
        rows: items of the table.
    """
    positive_N = (places.vectors_ND * places.next_ND).sum(1).float()
    negatives_NC = (places.vectors_ND @ drawn_CD.t()).float() + math.log(rows / len(drawn_C))
    negatives_NC = negatives_NC.masked_fill(places.next_N.unsqueeze(1) == drawn_C, -torch.inf)
    return torch.cat([positive_N.unsqueeze(1), negatives_NC], 1).logsumexp(1) - positive_N


def mean_over_lists(loss_N: Tensor, lengths_B: Tensor, weights_B: Tensor | None = None) -> Tensor:
    """The mean over lists of the weight times the mean over a list's places; a list without places counts as 0.

    Divided by the number of lists, so that a list's share does not depend on other lists or ranks.
    """
    share_B = 1 / lengths_B.clamp(min=1) if weights_B is None else weights_B / lengths_B.clamp(min=1)
    return (loss_N * share_B[sample_of_each(lengths_B)]).sum() / len(lengths_B)


def _only_table(tables: Sequence[Table]) -> Table:
    if len(tables) != 1 or len(tables[0].feature_names) != 1:
        listing = ", ".join(name for table in tables for name in table.feature_names) or "none"
        raise SpecError(f"features {listing}", "one table with one feature, the lists of items")
    (table,) = tables
    if table.pooling is not Pooling.SEQUENCE:
        raise SpecError(
            f"table {table.name!r} has pooling {table.pooling}", "pooling: sequence, one vector for each item"
        )
    if table.managed is not None:
        raise SpecError(f"table {table.name!r} is managed", "a row for each item, as all are scored")
    return table
