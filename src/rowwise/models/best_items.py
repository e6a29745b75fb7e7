"""The best items of many users: an exhaustive search in blocks, with the items, order and bits of `nearest_items`.

[Note: Proposals] A matrix product proposes a few more items than are asked for, in blocks that stay in cache. Dots in a
fixed order of sums then rank the proposals. An item that was not proposed has a product of at most the least proposed
one, and rounding moves a dot of D numbers by at most D / 2**24 |u| |i|. If the last answer exceeds that bound, no item
is missing. Otherwise, as with equal items, the user's items are searched by `nearest_items`.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor

from rowwise.base.errors import BatchError
from rowwise.models.retrieval import nearest_items
from rowwise.tables.ops.interact import dots

USERS = 512  # of a block
ITEMS = 4096  # of a block, whose products are 8 MiB; a multiple of WORD
WORD = 8  # products that are skipped at once
MARGIN = 8, 8  # further proposals: at least 8, and an eighth of k
MERGED = 2  # waiting proposals for each one kept, before they are merged


class SeenItems(NamedTuple):
    """Items that are left out of each user's answer."""

    starts_U1: Tensor  # of each user in items_N, and the end
    items_N: Tensor  # ascending for each user

    def of_users(self, begin: int, end: int) -> "SeenItems":
        starts_U1 = self.starts_U1[begin : end + 1]
        return SeenItems(starts_U1 - starts_U1[0], self.items_N[int(starts_U1[0]) : int(starts_U1[-1])])

    def of_user(self, user: int) -> Tensor:
        return self.items_N[int(self.starts_U1[user]) : int(self.starts_U1[user + 1])]


class BestItems(NamedTuple):
    """Items of each user, best first; a user with fewer items than k has -1 and -inf behind them."""

    places_UK: Tensor
    dots_UK: Tensor


@torch.no_grad()
def best_items(users_UD: Tensor, items_ID: Tensor, k: int, seen: SeenItems | None = None) -> BestItems:
    """The k items with the largest dots for each user, ties in item order.

    Args:
        users_UD: finite vectors in 32 bits on the CPU.
        items_ID: finite vectors of at least one item.
        k: items of a user, at most; fewer are left if there are fewer.
        seen: items to leave out.
    """
    if k < 1 or users_UD.dim() != 2 or items_ID.dim() != 2 or users_UD.shape[1] != items_ID.shape[1]:
        shapes = f"got users {tuple(users_UD.shape)}, items {tuple(items_ID.shape)}, k={k}"
        raise BatchError(shapes, "[U, D], [I, D], and a k of at least 1")
    search = _Search(items_ID, min(k, len(items_ID)))
    parts = [
        search.block(users_UD[begin : begin + USERS], None if seen is None else seen.of_users(begin, begin + USERS))
        for begin in range(0, len(users_UD), USERS)
    ]
    if not parts:
        return BestItems(torch.empty(0, search.k, dtype=torch.int64), torch.empty(0, search.k))
    return BestItems(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


@final
class _Search:
    """Searches items for blocks of users ([Note: Proposals])."""

    def __init__(self, items_ID: Tensor, k: int) -> None:
        self.k, self._items_ID = k, items_ID
        self._proposed = min(len(items_ID), k + max(MARGIN[0], k // MARGIN[1]))
        rounding = items_ID.shape[1] / 2**24
        self._bound = 2 * rounding * float(torch.linalg.vector_norm(items_ID, dim=1).max())  # of two sums

    def block(self, users_UD: Tensor, seen: SeenItems | None) -> BestItems:
        products_UM, places_UM = self._propose(users_UD, seen)
        least_U = products_UM.amin(1)
        places_UM = places_UM.sort(1).values  # ties in item order
        dots_UM = dots(users_UD, self._items_ID, places_UM.clamp(min=0))
        dots_UM.masked_fill_(places_UM < 0, -torch.inf)
        order_UK = dots_UM.argsort(dim=1, descending=True, stable=True)[:, : self.k]
        dots_UK, places_UK = dots_UM.gather(1, order_UK), places_UM.gather(1, order_UK)
        if self._proposed < len(self._items_ID):
            slack_U = self._bound * torch.linalg.vector_norm(users_UD, dim=1)
            open_U = (least_U > -torch.inf) & (dots_UK[:, -1] <= least_U + slack_U)
            for user in open_U.nonzero()[:, 0].tolist():
                among_A = None if seen is None else self._allowed(seen.of_user(user))
                dots_K, places_K = nearest_items(users_UD[user], self._items_ID, self.k, among_A)
                dots_UK[user, : len(dots_K)], places_UK[user, : len(dots_K)] = dots_K, places_K
        return BestItems(places_UK, dots_UK)

    def _allowed(self, seen_N: Tensor) -> Tensor:
        allowed_I = torch.ones(len(self._items_ID), dtype=torch.bool)
        allowed_I[seen_N] = False
        return allowed_I.nonzero()[:, 0]

    def _propose(self, users_UD: Tensor, seen: SeenItems | None) -> tuple[Tensor, Tensor]:
        """The largest products of each user, and the places of their items; -inf and -1 where no items are left."""
        best = _Proposals(len(users_UD), self._proposed)
        hidden = None if seen is None else _Hidden(seen)
        for begin in range(0, len(self._items_ID), ITEMS):
            products_UC = users_UD @ self._items_ID[begin : begin + ITEMS].t()
            if hidden is not None:
                hidden.mask(products_UC, begin)
            best.add(products_UC, begin)
        best.merge()
        return best.products_UM, best.places_UM


class _Hidden:
    """The seen items of a block of users, by item."""

    def __init__(self, seen: SeenItems) -> None:
        users_N = torch.arange(len(seen.starts_U1) - 1).repeat_interleave(seen.starts_U1.diff())
        self._items_N, order_N = seen.items_N.sort()
        self._users_N = users_N[order_N]

    def mask(self, products_UC: Tensor, begin: int) -> None:
        ends = torch.tensor([begin, begin + products_UC.shape[1]])
        first, last = torch.searchsorted(self._items_N, ends).tolist()
        products_UC[self._users_N[first:last], self._items_N[first:last] - begin] = -torch.inf


class _Proposals:
    """The largest products so far; later ones wait until there are enough to merge."""

    def __init__(self, users: int, count: int) -> None:
        self.products_UM = torch.full((users, count), -torch.inf)
        self.places_UM = torch.full((users, count), -1, dtype=torch.int64)
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []  # users, products and places
        self._rows = 0

    def add(self, products_UC: Tensor, begin: int) -> None:
        users, columns = products_UC.shape
        count = self.products_UM.shape[1]
        if begin == 0 or columns % WORD:
            top_UT, chosen_UT = products_UC.topk(min(count, columns), 1, sorted=False)
            fresh = (top_UT > self.products_UM.amin(1, keepdim=True)).nonzero()
            products_H, places_H = top_UT[fresh[:, 0], fresh[:, 1]], chosen_UT[fresh[:, 0], fresh[:, 1]]
            self._wait(fresh[:, 0], products_H, places_H + begin)
        else:
            larger_UC = products_UC > self.products_UM.amin(1, keepdim=True)
            words_H = larger_UC.view(torch.int64).view(-1).nonzero()[:, 0]  # most words have none
            rows_HW = products_UC.view(-1, WORD)[words_H]
            word, column = larger_UC.view(-1, WORD)[words_H].nonzero(as_tuple=True)
            flat_H = words_H[word] * WORD + column
            self._wait(flat_H // columns, rows_HW[word, column], flat_H % columns + begin)
        if begin == 0 or self._rows > MERGED * users * count:
            self.merge()

    def _wait(self, users_H: Tensor, products_H: Tensor, places_H: Tensor) -> None:
        if len(users_H):
            self._waiting.append((users_H, products_H, places_H))
            self._rows += len(users_H)

    def merge(self) -> None:
        """Keep the largest of the kept and the waiting products."""
        if not self._waiting:
            return
        users_H, products_H, places_H = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting.clear()
        self._rows = 0
        users_H, order_H = users_H.sort(stable=True)
        users, count = self.products_UM.shape
        counts_U = users_H.bincount(minlength=users)
        columns_H = torch.arange(len(users_H)) - (counts_U.cumsum(0) - counts_U)[users_H] + count
        width = count + int(counts_U.max())
        products_UW = torch.full((users, width), -torch.inf)
        places_UW = torch.full((users, width), -1, dtype=torch.int64)
        products_UW[:, :count], places_UW[:, :count] = self.products_UM, self.places_UM
        products_UW[users_H, columns_H], places_UW[users_H, columns_H] = products_H[order_H], places_H[order_H]
        self.products_UM, kept_UM = products_UW.topk(count, 1, sorted=False)
        self.places_UM = places_UW.gather(1, kept_UM)
