"""DIEN: the interest that a history leads to, as it evolved towards the shown item.

The model of "Deep Interest Evolution Network for Click-Through Rate Prediction" (Zhou et al. 2019, arXiv 1809.03672):

    u_t    = sigmoid(W_u i_t + U_u h_(t-1) + b_u)           a GRU; r_t alike
    c_t    = tanh(W_c i_t + r_t * U_c h_(t-1) + b_c)
    h_t    = (1 - u_t) * h_(t-1) + u_t * c_t                extractor: i_t is the t-th vector e_t of the history
    a_t    = softmax_t(h_t W t)                             t: vector of the shown item
    g_t    = (1 - a_t u_t) * g_(t-1) + a_t u_t * c_t        AUGRU: a GRU over the h_t, its update gate scaled by a_t
    logits = top([dense numbers, pooled features, each t, each last g])
    loss   = loss of labels + auxiliary mean_samples sum_t -(log sigmoid(h_t e_(t+1)) + log sigmoid(-h_t n_t))

The auxiliary loss asks each h_t for the next item. n_t is a vector of the batch's histories at random; without its term
where that is the next item. Layers of the top have ReLUs.

[Note: Steps] Step t computes the lists with more than t items, the longest first: there is no padding, and a list has
the same bits beside longer ones.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.base.errors import SpecError
from rowwise.models.din import InterestModel, sum_by_sample
from rowwise.models.histories import items_of, positions_of
from rowwise.models.mlp import Linear, Norm
from rowwise.tables.batch import Jagged
from rowwise.tables.embedding import Vectors
from rowwise.tables.ids.make import AnyTables
from rowwise.tables.ops.pinned import copy_to

EXP_NUMBERS = 16_384  # exponentials of one call; torch divides larger tensors among threads at any place
VECTOR_NUMBERS = 64  # whole vector registers


class Gru(nn.Module):
    """A GRU over lists, whose update gate may be scaled at each item.

    Args:
        dim: of the items and of the states.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.input, self.recurrent = Linear(dim, 3 * dim), Linear(dim, 3 * dim, bias=False)

    def forward(self, x_ND: Tensor, sizes_T: Sequence[int], scales_N1: Tensor | None = None) -> Tensor:
        """The states [N, D] after each item; both in the order of `step_order`."""
        inputs_NC, dim = self.input(x_ND).float(), x_ND.shape[1]
        state_LD, states = inputs_NC.new_zeros(sizes_T[0], dim), list[Tensor]()
        scales = [None] * len(sizes_T) if scales_N1 is None else scales_N1.split(list(sizes_T))
        for input_LC, scale_L1 in zip(inputs_NC.split(list(sizes_T)), scales, strict=True):
            state_LD = state_LD[: len(input_LC)]
            recurrent_LC = self.recurrent(state_LD).float()
            gates_LC = (input_LC[:, : 2 * dim] + recurrent_LC[:, : 2 * dim]).sigmoid()
            update_LD, reset_LD = gates_LC.chunk(2, 1)
            candidate_LD = (input_LC[:, 2 * dim :] + reset_LD * recurrent_LC[:, 2 * dim :]).tanh()
            update_LD = update_LD if scale_L1 is None else update_LD * scale_L1
            state_LD = state_LD + update_LD * (candidate_LD - state_LD)
            states.append(state_LD)
        return torch.cat(states)


def step_order(lengths_B: Tensor) -> tuple[Tensor, list[int]]:
    """The items of lists by their places, those of the longest list first; and the number of lists at each place.

    Without items, one place with no lists: all layers take part in each backward.
    """
    rank_B, samples = torch.empty_like(lengths_B), len(lengths_B)
    rank_B[lengths_B.argsort(descending=True, stable=True)] = torch.arange(samples, device=lengths_B.device)
    places_N = positions_of(lengths_B)
    return (places_N * samples + rank_B.repeat_interleave(lengths_B)).argsort(), places_N.bincount(minlength=1).tolist()


class InterestEvolution(nn.Module):
    """Extractor, attention and AUGRU of one history.

    Args:
        dim: of a vector.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.extractor, self.attention, self.evolution = Gru(dim), Linear(dim, dim, bias=False), Gru(dim)

    def forward(self, target_BD: Tensor, history_ND: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """The last states [B, D] of the AUGRU, 0 for an empty history, and the extractor's states [N, D]."""
        order_N, sizes_T = step_order(lengths_B)
        back_N = torch.empty_like(order_N)
        back_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        states_ND = self.extractor(history_ND[order_N], sizes_T)[back_N]
        scores_N = (states_ND * self.attention(target_BD).float().repeat_interleave(lengths_B, 0)).sum(1)
        weights_N1 = softmax_by_sample(scores_N, lengths_B).unsqueeze(1)
        evolved_ND = self.evolution(states_ND[order_N], sizes_T, weights_N1[order_N])[back_N]
        is_last_N = positions_of(lengths_B) + 1 == lengths_B.repeat_interleave(lengths_B)
        return sum_by_sample(evolved_ND * is_last_N.unsqueeze(1), lengths_B), states_ND


def softmax_by_sample(scores_N: Tensor, lengths_B: Tensor) -> Tensor:
    """The softmax [N] over the items of each list; an item's bits do not depend on other lists."""
    most_B = torch.segment_reduce(scores_N.detach(), "max", lengths=lengths_B, unsafe=True)
    below_N = F.pad(scores_N - most_B.repeat_interleave(lengths_B), (0, -len(scores_N) % VECTOR_NUMBERS))
    powers_N = torch.cat([part.exp() for part in below_N.split(EXP_NUMBERS)])[: len(scores_N)]
    return powers_N / sum_by_sample(powers_N, lengths_B).repeat_interleave(lengths_B)


class DIEN(InterestModel):
    """DIEN (Zhou et al. 2019): a GRU over a history, and one whose updates are weighted by the target's attention.

    Histories are oldest first. A training step draws negatives with torch's generator.

    Args:
        embeddings: pooled tables, and sequence tables for histories and their targets.
        dense_features: dense numbers per sample.
        top: sizes of the layers over all vectors; the last is the number of logits.
        histories: the target feature of each history feature, as in `DIN`.
        auxiliary: factor of the auxiliary loss, which grows with the length of histories; 0 for none.
        dropout: rate on the top's hidden layers.
        norm: "batch" or "layer" normalisation of its hidden layers; None for none.
    """

    def __init__(  # noqa: PLR0913 - a model's hyperparameters
        self,
        embeddings: AnyTables,
        dense_features: int,
        top: Sequence[int] = (200, 80, 1),
        *,
        histories: Mapping[str, str] | None = None,
        auxiliary: float = 0.1,
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        """Shares `embeddings` with the caller."""
        super().__init__(embeddings, dense_features, top, histories, InterestEvolution, dropout, norm)
        if not 0 <= auxiliary < float("inf"):
            raise SpecError(f"auxiliary={auxiliary}", "a finite number, at least 0")
        self.auxiliary = auxiliary
        self._losses: list[Tensor] = []

    def interests(
        self, ids: Jagged, vectors: Vectors, targets: Mapping[str, Tensor], lengths: Mapping[str, Tensor]
    ) -> list[Tensor]:
        interests: list[Tensor] = []
        self._losses.clear()
        for evolve, (name, target) in zip(self.attention, self.histories.items(), strict=True):
            history_ND = vectors[name]
            lengths_B = copy_to(lengths[name].long(), history_ND.device)
            interest_BD, states_ND = evolve(targets[target], history_ND, lengths_B)
            interests.append(interest_BD)
            if self.auxiliary and self.training and torch.is_grad_enabled():
                ids_N = copy_to(items_of(ids, name)[0], history_ND.device)
                self._losses.append(self.auxiliary * next_item_losses(states_ND, history_ND, ids_N, lengths_B))
        return interests

    def take_auxiliary(self) -> Tensor | None:
        """The auxiliary losses [B] of the last forward in training, once; None without any."""
        total_B = torch.stack(self._losses).sum(0) if self._losses else None
        self._losses.clear()
        return total_B


def next_item_losses(states_ND: Tensor, history_ND: Tensor, ids_N: Tensor, lengths_B: Tensor) -> Tensor:
    """The log loss [B] of the next item and of a drawn one at each place of a list, summed over places."""
    has_next_N = positions_of(lengths_B) + 1 < lengths_B.repeat_interleave(lengths_B)
    next_N = torch.arange(len(ids_N), device=ids_N.device) + has_next_N  # of a last item: itself, without a term
    # On the CPU, whose generator is in checkpoints.
    drawn_N = copy_to(torch.randint(max(1, len(ids_N)), (len(ids_N),)), ids_N.device)
    is_other_N = ids_N[drawn_N] != ids_N[next_N]
    losses_N = F.softplus(-(states_ND * history_ND[next_N]).sum(1))
    losses_N = losses_N + F.softplus((states_ND * history_ND[drawn_N]).sum(1)) * is_other_N
    return sum_by_sample(losses_N * has_next_N, lengths_B)
