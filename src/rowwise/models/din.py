"""DIN: the history of a user, each item weighted by its relevance to the shown item.

The model of "Deep Interest Network for Click-Through Rate Prediction" (Zhou et al. 2018, arXiv 1706.06978):

    a_j    = unit([h_j, t, h_j - t, h_j * t])        t: vector of the shown item, h_j: of an item of the history; an MLP
    u      = sum_j a_j h_j                           the weights are not normalised, as in the paper
    logits = top([dense numbers, pooled features, each t, each u])

Here the unit reads both vectors, their difference and their product, and all layers have ReLUs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from rowwise.base.errors import BatchError, SpecError
from rowwise.models.inputs import Ids, unpack
from rowwise.models.mlp import Mlp, Norm
from rowwise.tables.batch import Batch, Jagged
from rowwise.tables.embedding import Vectors
from rowwise.tables.ids.make import AnyTables
from rowwise.tables.ops.pinned import copy_to
from rowwise.tables.spec import Pooling, Table


class TargetAttention(nn.Module):
    """sum_j a(h_j, t) h_j over the vectors of a history: `a` is an MLP over [h, t, h - t, h * t].

    Args:
        dim: of a vector.
        sizes: of the MLP's hidden layers.
    """

    def __init__(self, dim: int, sizes: Sequence[int] = (80, 40)) -> None:
        super().__init__()
        self.unit = Mlp((4 * dim, *sizes, 1))

    def forward(self, target_BD: Tensor, history_ND: Tensor, lengths_B: Tensor) -> Tensor:
        """[B, D] of a target for each sample and the vectors of all histories, one sample after the other."""
        lengths_B = copy_to(lengths_B, history_ND.device)
        target_ND = target_BD.repeat_interleave(lengths_B, 0, output_size=len(history_ND))
        pairs = torch.cat([history_ND, target_ND, history_ND - target_ND, history_ND * target_ND], 1)
        return sum_by_sample(self.unit(pairs) * history_ND, lengths_B)


def sum_by_sample(x_ND: Tensor, lengths_B: Tensor) -> Tensor:
    """The sum [B, D] of each sample's vectors; 0 for a sample without any."""
    return torch.segment_reduce(x_ND, "sum", lengths=copy_to(lengths_B, x_ND.device), unsafe=True, initial=0)


class InterestModel(nn.Module):
    """Base of models of histories: one vector for each history and its target, then an MLP over all.

    Args:
        embeddings: pooled tables, and sequence tables for histories and their targets.
        dense_features: dense numbers per sample.
        top: sizes of the layers over all vectors.
        histories: the target feature of each history feature.
        attend: makes the layers of a history from its dim.
        dropout: rate on the top's hidden layers.
        norm: normalisation of its hidden layers.
    """

    def __init__(  # noqa: PLR0913 - a model's hyperparameters
        self,
        embeddings: AnyTables,
        dense_features: int,
        top: Sequence[int],
        histories: Mapping[str, str] | None,
        attend: Callable[[int], nn.Module],
        dropout: float,
        norm: Norm | None,
    ) -> None:
        """Shares `embeddings` with the caller."""
        super().__init__()
        self.embeddings, self.dense_features = embeddings, dense_features
        self.histories = dict(histories or {})
        self.targets = tuple(dict.fromkeys(self.histories.values()))
        dims = _sequence_dims(embeddings.tables, self.histories)
        self.attention = nn.ModuleList(attend(dims[name]) for name in self.histories)
        pooled = sum(t.dim * len(t.feature_names) for t in embeddings.tables if t.pooling is not Pooling.SEQUENCE)
        inputs = dense_features + pooled + sum(dims[name] for name in (*self.targets, *self.histories))
        self.top = Mlp((inputs, *top), dropout=dropout, norm=norm)

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Logits [B, top[-1]] of a batch, or of dense numbers [B, dense_features] and sparse ids."""
        dense_BF, ids = unpack(batch, sparse, self.dense_features)
        vectors = self.embeddings(ids)  # first: their transfer overlaps with the layers below
        jagged = Jagged.from_keyed(ids)
        lengths = {name: jagged.lengths_of(name) for name in (*self.targets, *self.histories)}
        targets = {name: self._target(vectors, name, lengths[name]) for name in self.targets}
        interests = self.interests(jagged, vectors, targets, lengths)
        return self.top(torch.cat([dense_BF, vectors.values(), *targets.values(), *interests], 1))

    def interests(
        self, ids: Jagged, vectors: Vectors, targets: Mapping[str, Tensor], lengths: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """A vector [B, D] for each history."""
        return [
            attend(targets[target], vectors[name], lengths[name])
            for attend, (name, target) in zip(self.attention, self.histories.items(), strict=True)
        ]

    def _target(self, vectors: Vectors, name: str, lengths_B: Tensor) -> Tensor:
        """[B, D] of a target."""
        x_ND = vectors[name]
        if len(x_ND) > len(lengths_B) or (lengths_B.device.type == "cpu" and bool((lengths_B > 1).any())):
            sample = int((lengths_B > 1).nonzero()[0])
            raise BatchError(f"feature {name!r} has {int(lengths_B[sample])} ids in sample {sample}", "one target")
        return sum_by_sample(x_ND, lengths_B)


class DIN(InterestModel):
    """DIN (Zhou et al. 2018): a history's vectors, weighted by an MLP over them and the target's, then an MLP over all.

    Args:
        embeddings: pooled tables, and sequence tables for histories and their targets.
        dense_features: dense numbers per sample.
        top: sizes of the layers over all vectors; the last is the number of logits.
        histories: the target feature of each history feature, such as {"viewed_items": "item"}. A target has one id in
            each sample, or none: a vector of zeros. Both are in one table, or in tables of one dim. A second target in
            a sample is refused on a CPU; on a GPU, where the host would wait for it, only if ids outnumber the samples.
        attention: sizes of the hidden layers of the weights' MLP.
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
        attention: Sequence[int] = (80, 40),
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        """Shares `embeddings` with the caller."""
        attend = partial(TargetAttention, sizes=attention)
        super().__init__(embeddings, dense_features, top, histories, attend, dropout, norm)


def _sequence_dims(tables: Sequence[Table], histories: Mapping[str, str]) -> dict[str, int]:
    """The dim of each feature of a history, and of each target."""
    dims = {name: t.dim for t in tables if t.pooling is Pooling.SEQUENCE for name in t.feature_names}
    for history, target in histories.items():
        for name in (history, target):
            if name not in dims:
                names = ", ".join(map(repr, dims)) or "none"
                raise SpecError(
                    f"histories: {name!r}", "a feature of a table with pooling: sequence", hint=f"there are {names}"
                )
        if dims[history] != dims[target]:
            raise SpecError(
                f"histories: {history!r} has dim {dims[history]} and {target!r} {dims[target]}", "one dim for both"
            )
    unused = dims.keys() - histories.keys() - set(histories.values())
    if unused:
        raise SpecError(
            f"sequence feature {min(unused)!r} is neither a history nor a target", hint="name it in histories"
        )
    return dims
