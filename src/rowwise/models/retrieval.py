"""Training and searching vectors of users and items: losses over the items of a batch, and the exact top k.

Functions of tensors, for any model that makes such vectors; `TwoTower` is one.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from rowwise.errors import BatchError


def in_batch_softmax(
    logits_BB: Tensor, items_B: Tensor, log_q_B: Tensor | None = None, weights_B: Tensor | None = None
) -> Tensor:
    """The mean over samples i of -weight_i * log softmax(logits_i - log q)_i (Yi et al. 2019).

    The other items of the batch stand for all that a user did not choose. Popular items are among them more often than
    others, and would be pushed away for that alone; taking log q away from an item's logits, the sample's own item
    included, corrects it. Where another sample has the same item as sample i, it is no negative of i and is left out.

    Args:
        logits_BB: of user i with item j, the item of sample j.
        items_B: id of each sample's item.
        log_q_B: log of how probable each item is in a batch, for instance by `ItemFrequency`; None: no correction.
        weights_B: of the samples, the paper's rewards; None: 1.
    """
    logits_BB = _corrected(logits_BB, items_B, log_q_B, weights_B)
    same_BB = (items_B.unsqueeze(1) == items_B).fill_diagonal_(False)
    own_B = torch.arange(len(items_B), device=items_B.device)
    loss_B = F.cross_entropy(logits_BB.masked_fill(same_BB, -torch.inf), own_B, reduction="none")
    return (loss_B if weights_B is None else loss_B * weights_B).mean()


def in_batch_bpr(
    logits_BB: Tensor, items_B: Tensor, log_q_B: Tensor | None = None, weights_B: Tensor | None = None
) -> Tensor:
    """The mean over i of weight_i * mean over j of -log sigmoid(logits_ii - logits_ij): BPR (Rendle et al. 2009).

    i are the samples, j those with another item; a sample without any has the loss 0. Arguments are those of
    `in_batch_softmax`.
    """
    logits_BB = _corrected(logits_BB, items_B, log_q_B, weights_B)
    other_BB = items_B.unsqueeze(1) != items_B
    worse_BB = F.softplus(logits_BB - logits_BB.diagonal().unsqueeze(1))
    loss_B = (worse_BB * other_BB).sum(1) / other_BB.sum(1).clamp(min=1)
    return (loss_B if weights_B is None else loss_B * weights_B).mean()


def _corrected(logits_BB: Tensor, items_B: Tensor, log_q_B: Tensor | None, weights_B: Tensor | None) -> Tensor:
    """The logits less log q, in at least 32 bits; raises for shapes that do not fit."""
    batch = len(items_B)
    if logits_BB.shape != (batch, batch) or items_B.dim() != 1:
        got = f"logits {tuple(logits_BB.shape)} and items {tuple(items_B.shape)}"
        raise BatchError(f"got {got}; want [B, B], every user with every item, and [B]")
    for name, given in (("log_q", log_q_B), ("weights", weights_B)):
        if given is not None and given.shape != items_B.shape:
            raise BatchError(f"{name}: got {tuple(given.shape)}, want ({batch},), one for each sample")
    logits_BB = logits_BB.to(torch.promote_types(logits_BB.dtype, torch.float32))
    return logits_BB if log_q_B is None else logits_BB - log_q_B


@torch.no_grad()
def top_items(users_UD: Tensor, items_ID: Tensor, k: int, *, chunk: int = 65536) -> tuple[Tensor, Tensor]:
    """The k items of largest dot with each user, best first: dots [U, k] and places [U, k] among the items.

    Exact: every item is looked at, `chunk` of them at a time, so memory does not grow with their number.
    """
    if not 1 <= k <= len(items_ID):
        raise BatchError(f"k={k} of {len(items_ID)} items: want between 1 and all of them")
    if chunk < 1:
        raise BatchError(f"chunk={chunk}: want at least one item at a time")
    best_UK = users_UD.new_empty(len(users_UD), 0)
    places_UK = torch.empty(len(users_UD), 0, dtype=torch.int64, device=users_UD.device)
    for begin in range(0, len(items_ID), chunk):
        dots_UC = users_UD @ items_ID[begin : begin + chunk].t()
        here_UC = torch.arange(begin, begin + dots_UC.shape[1], device=users_UD.device).expand(dots_UC.shape)
        candidates = torch.cat((best_UK, dots_UC), 1)
        best_UK, chosen_UK = candidates.topk(min(k, candidates.shape[1]), 1)
        places_UK = torch.cat((places_UK, here_UC), 1).gather(1, chosen_UK)
    return best_UK, places_UK
