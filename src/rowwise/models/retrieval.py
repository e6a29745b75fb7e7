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
    """The items that each user is scored against, if there are more than one per sample."""

    items_C: Tensor  # ids
    log_q_C: Tensor | None = None  # log-probability of each item in a batch; None for no correction
    first: int = 0  # index of the first sample's item; those of the next samples follow


def in_batch_softmax(
    logits_BC: Tensor,
    items: Tensor | Candidates,
    log_q_B: Tensor | None = None,
    weights_B: Tensor | None = None,
    hardest: int | None = None,
) -> Tensor:
    """The mean over samples i of -weight_i * log softmax(logits_i - log q)_i (Yi et al. 2019).

    The other items of the batch serve as negatives. Popular items are sampled more often, which would penalise them;
    subtracting log q from an item's logits, the sample's own item included, corrects it. A candidate with the id of
    sample i's item is no negative of i and is masked.

    Args:
        logits_BC: of user i with each candidate.
        items: id of each sample's item; these are the candidates, unless they are `Candidates`.
        log_q_B: log-probability of each item in a batch, as from `ItemFrequency`; None for no correction.
        weights_B: of the samples, the paper's rewards; by default 1.
        hardest: negatives per sample, those of the largest logits minus log q; by default all.
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
    """Logits minus log q, in at least 32 bits; -inf for other candidates with the id of the sample's own item."""
    items_C, log_q_C, first = candidates
    batch, count = len(logits_BC), len(items_C)
    if logits_BC.dim() != 2 or items_C.dim() != 1 or logits_BC.shape[1] != count or not 0 <= first <= count - batch:
        raise BatchError(
            f"got logits {tuple(logits_BC.shape)}, items {tuple(items_C.shape)} and first={first}",
            "[B, C], every user with every candidate, [C], and 0 to C - B",
        )
    for name, tensor, expected in (("log_q", log_q_C, count), ("weights", weights_B, batch)):
        if tensor is not None and tensor.shape != (expected,):
            raise BatchError(f"{name}: got {tuple(tensor.shape)}", f"({expected},)")
    if hardest is not None and hardest < 1:
        raise BatchError(f"hardest={hardest}", "at least one negative")
    logits_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
    same_BC = items_C[first : first + batch].unsqueeze(1) == items_C
    same_BC.diagonal(first).fill_(False)
    if log_q_C is None:
        return logits_BC.masked_fill(same_BC, -torch.inf)
    return (logits_BC - log_q_C).masked_fill_(same_BC, -torch.inf)


def _negatives(logits_BC: Tensor, candidates: Candidates, hardest: int | None) -> Tensor:
    """The logits of each sample's negatives; -inf for missing ones."""
    own_BC = torch.zeros_like(logits_BC, dtype=torch.bool)
    own_BC.diagonal(candidates.first).fill_(True)
    negatives_BC = logits_BC.masked_fill(own_BC, -torch.inf)
    if hardest is None or hardest >= negatives_BC.shape[1]:
        return negatives_BC
    return negatives_BC.topk(hardest, 1, sorted=False)[0]


@torch.no_grad()
def top_items(users_UD: Tensor, items_ID: Tensor, k: int, *, chunk: int = 65536) -> tuple[Tensor, Tensor]:
    """The k items of largest dot with each user, best first: dots [U, k] and places [U, k] among the items.

    Exact: scores all items, `chunk` at a time, so memory does not grow with their number.
    """
    if not 1 <= k <= len(items_ID):
        raise BatchError(f"k={k} of {len(items_ID)} items", f"1 to {len(items_ID)}")
    if chunk < 1:
        raise BatchError(f"chunk={chunk}", "at least one item at a time")
    best_UK = users_UD.new_empty(len(users_UD), 0)
    places_UK = torch.empty(len(users_UD), 0, dtype=torch.int64, device=users_UD.device)
    for begin in range(0, len(items_ID), chunk):
        dots_UC = users_UD @ items_ID[begin : begin + chunk].t()
        chunk_UC = torch.arange(begin, begin + dots_UC.shape[1], device=users_UD.device).expand(dots_UC.shape)
        candidates = torch.cat((best_UK, dots_UC), 1)
        best_UK, chosen_UK = candidates.topk(min(k, candidates.shape[1]), 1)
        places_UK = torch.cat((places_UK, chunk_UC), 1).gather(1, chosen_UK)
    return best_UK, places_UK


@torch.no_grad()
def nearest_items(query_D: Tensor, items_ID: Tensor, k: int, among_A: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k items of largest dot with a vector, best first, ties in item order: dots [k] and places [k].

    Each dot is summed in one order of its own. So its bits depend on neither the other items nor the processor, unlike
    in the matrix products of `top_items`.

    Args:
        query_D: a vector in 32 bits on the CPU.
        items_ID: vectors of items, as float32.
        k: number of items to return, at most all.
        among_A: places of the items to search, ascending and distinct; by default all.
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
    """The places of the k largest numbers, ascending; ties go to the first."""
    if k >= len(dots_N):
        return np.arange(len(dots_N))
    threshold = np.partition(dots_N, len(dots_N) - k)[len(dots_N) - k]
    above, equal = np.flatnonzero(dots_N > threshold), np.flatnonzero(dots_N == threshold)
    return np.sort(np.concatenate((above, equal[: k - len(above)])))
