"""Training and searching vectors of users and items: losses over the items of a batch, and the exact top k.

Functions of tensors, for any model that makes such vectors; `TwoTower` is one.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rowwise.base.errors import BatchError
from rowwise.tables.ops.interact import dots


class Candidates(NamedTuple):
    """The items that each user is compared with, where they are more than those of the users' own samples."""

    items_C: Tensor  # ids
    log_q_C: Tensor | None = None  # log of how probable each item is in a batch; None: no correction
    first: int = 0  # the place of the first sample's item; those of the next samples follow


def in_batch_softmax(
    logits_BC: Tensor,
    items: Tensor | Candidates,
    log_q_B: Tensor | None = None,
    weights_B: Tensor | None = None,
    hardest: int | None = None,
) -> Tensor:
    """The mean over samples i of -weight_i * log softmax(logits_i - log q)_i (Yi et al. 2019).

    The other items of the batch stand for all that a user did not choose. Popular items are among them more often than
    others, and would be pushed away for that alone; taking log q away from an item's logits, the sample's own item
    included, corrects it. A candidate with the id of sample i's item is no negative of i and is left out.

    Args:
        logits_BC: of user i with each candidate.
        items: id of each sample's item; these are the candidates, unless `Candidates` are given.
        log_q_B: log of how probable each item is in a batch, for instance by `ItemFrequency`; None: no correction.
        weights_B: of the samples, the paper's rewards; None: 1.
        hardest: how many negatives of a sample count, those of the largest logits less log q; None: all.
    """
    candidates = _candidates(items, log_q_B)
    logits_BC = _corrected(logits_BC, candidates, weights_B, hardest)
    own_B = torch.arange(candidates.first, candidates.first + len(logits_BC), device=logits_BC.device)
    if hardest is not None:
        own_B1 = logits_BC.gather(1, own_B.unsqueeze(1))
        logits_BC, own_B = torch.cat((own_B1, _negatives(logits_BC, candidates, hardest)), 1), torch.zeros_like(own_B)
    loss_B = F.cross_entropy(logits_BC, own_B, reduction="none")
    return (loss_B if weights_B is None else loss_B * weights_B).mean()


def in_batch_bpr(
    logits_BC: Tensor,
    items: Tensor | Candidates,
    log_q_B: Tensor | None = None,
    weights_B: Tensor | None = None,
    hardest: int | None = None,
) -> Tensor:
    """The mean over i of weight_i * mean over j of -log sigmoid(logits_ii - logits_ij): BPR (Rendle et al. 2009).

    i are the samples, j their negatives; a sample without any has the loss 0. Arguments are those of
    `in_batch_softmax`.
    """
    candidates = _candidates(items, log_q_B)
    logits_BC = _corrected(logits_BC, candidates, weights_B, hardest)
    negatives_BN = _negatives(logits_BC, candidates, hardest)
    worse_BN = F.softplus(negatives_BN - logits_BC.diagonal(candidates.first).unsqueeze(1))
    loss_B = worse_BN.sum(1) / (negatives_BN > -torch.inf).sum(1).clamp(min=1)
    return (loss_B if weights_B is None else loss_B * weights_B).mean()


def _candidates(items: Tensor | Candidates, log_q_B: Tensor | None) -> Candidates:
    if isinstance(items, Tensor):
        return Candidates(items, log_q_B)
    if log_q_B is not None:
        raise BatchError("log_q is given beside Candidates", hint="pass it in them, as log_q_C")
    return items


def _corrected(logits_BC: Tensor, candidates: Candidates, weights_B: Tensor | None, hardest: int | None) -> Tensor:
    """Logits less log q, in at least 32 bits; -inf for other candidates with the id of the sample's own item."""
    items_C, log_q_C, first = candidates
    batch, count = len(logits_BC), len(items_C)
    if logits_BC.dim() != 2 or items_C.dim() != 1 or logits_BC.shape[1] != count or not 0 <= first <= count - batch:
        raise BatchError(
            f"got logits {tuple(logits_BC.shape)}, items {tuple(items_C.shape)} and first={first}",
            "[B, C], every user with every candidate, [C], and 0 to C - B",
        )
    for name, given, expected in (("log_q", log_q_C, count), ("weights", weights_B, batch)):
        if given is not None and given.shape != (expected,):
            raise BatchError(f"{name}: got {tuple(given.shape)}", f"({expected},)")
    if hardest is not None and hardest < 1:
        raise BatchError(f"hardest={hardest}", "at least one negative")
    logits_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
    same_BC = items_C[first : first + batch].unsqueeze(1) == items_C
    same_BC.diagonal(first).fill_(False)
    if log_q_C is None:
        return logits_BC.masked_fill(same_BC, -torch.inf)
    return (logits_BC - log_q_C).masked_fill_(same_BC, -torch.inf)


def _negatives(logits_BC: Tensor, candidates: Candidates, hardest: int | None) -> Tensor:
    """The logits of each sample's negatives; -inf where it has no more."""
    own_BC = torch.zeros_like(logits_BC, dtype=torch.bool)
    own_BC.diagonal(candidates.first).fill_(True)
    negatives_BC = logits_BC.masked_fill(own_BC, -torch.inf)
    if hardest is None or hardest >= negatives_BC.shape[1]:
        return negatives_BC
    return negatives_BC.topk(hardest, 1, sorted=False)[0]


@torch.no_grad()
def top_items(users_UD: Tensor, items_ID: Tensor, k: int, *, chunk: int = 65536) -> tuple[Tensor, Tensor]:
    """The k items of largest dot with each user, best first: dots [U, k] and places [U, k] among the items.

    Exact: every item is looked at, `chunk` of them at a time, so memory does not grow with their number.
    """
    if not 1 <= k <= len(items_ID):
        raise BatchError(f"k={k} of {len(items_ID)} items", f"1 to {len(items_ID)}")
    if chunk < 1:
        raise BatchError(f"chunk={chunk}", "at least one item at a time")
    best_UK = users_UD.new_empty(len(users_UD), 0)
    places_UK = torch.empty(len(users_UD), 0, dtype=torch.int64, device=users_UD.device)
    for begin in range(0, len(items_ID), chunk):
        dots_UC = users_UD @ items_ID[begin : begin + chunk].t()
        here_UC = torch.arange(begin, begin + dots_UC.shape[1], device=users_UD.device).expand(dots_UC.shape)
        candidates = torch.cat((best_UK, dots_UC), 1)
        best_UK, chosen_UK = candidates.topk(min(k, candidates.shape[1]), 1)
        places_UK = torch.cat((places_UK, here_UC), 1).gather(1, chosen_UK)
    return best_UK, places_UK


@torch.no_grad()
def nearest_items(query_D: Tensor, items_ID: Tensor, k: int, among_A: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k items of largest dot with a vector, best first, of equal ones the first: dots [k] and places [k].

    Each dot is summed in one order of its own. So its bits depend on neither the other items nor the processor, which
    is not so for the matrix products of `top_items`.

    Args:
        query_D: a vector in 32 bits on the CPU.
        items_ID: vectors of items, as float32.
        k: at most as many items are returned as there are.
        among_A: places of the items that are looked at, ascending, each once; None: all.
    """
    if query_D.dim() != 1 or items_ID.dim() != 2 or len(query_D) != items_ID.shape[1] or k < 1:
        raise BatchError(
            f"got query {tuple(query_D.shape)}, items {tuple(items_ID.shape)}, k={k}",
            "[D], [I, D], and a k of at least 1",
        )
    dots_N = dots(query_D, items_ID, among_A).numpy()
    chosen_K = largest(dots_N, k)
    order_K = torch.from_numpy(chosen_K[np.argsort(-dots_N[chosen_K], kind="stable")])
    return torch.from_numpy(dots_N)[order_K], order_K if among_A is None else among_A[order_K]


def largest(dots_N: np.ndarray, k: int) -> np.ndarray:
    """The places of the k largest numbers, of equal ones the first: ascending."""
    if k >= len(dots_N):
        return np.arange(len(dots_N))
    least = np.partition(dots_N, len(dots_N) - k)[len(dots_N) - k]
    above, equal = np.flatnonzero(dots_N > least), np.flatnonzero(dots_N == least)
    return np.sort(np.concatenate((above, equal[: k - len(above)])))
