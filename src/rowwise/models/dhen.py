"""DHEN: layers that hold several kinds of interactions, each over the outputs of all kinds in the previous layer.

The model of "DHEN: A Deep and Hierarchical Ensemble Network for Large-Scale Click-Through Rate Prediction"
(Zhang et al. 2022, arXiv 2203.11014):

    X_0      = [v_0, pooled rows of all features]        M vectors of dim D; v_0 of the dense numbers
    X_(n+1)  = LayerNorm(ensemble_i(interaction_i(X_n)) + shortcut(X_n))
    shortcut = X, or W X where the numbers of vectors differ
    logits   = MLP(flatten X_N)

The ensemble is a concatenation, a sum, or a sum with learned weights.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.models.fields import FieldModel
from rowwise.models.interactions import (
    AttentionInteraction,
    ConvolutionInteraction,
    CrossInteraction,
    DotInteraction,
    FactorizationInteraction,
    LinearInteraction,
)
from rowwise.models.mlp import Mlp, Norm, stack
from rowwise.tables.ids.make import AnyTables

Ensemble = Literal["concat", "sum", "weighted_sum"]
Interaction = Literal["attention", "convolution", "cross", "dot", "factorization", "linear"]
INTERACTIONS: Mapping[str, Callable[..., nn.Module]] = {
    "attention": AttentionInteraction,
    "convolution": ConvolutionInteraction,
    "cross": CrossInteraction,
    "dot": DotInteraction,
    "factorization": FactorizationInteraction,
    "linear": LinearInteraction,
}


class DhenLayer(nn.Module):
    """LayerNorm(ensemble of interactions + shortcut).

    Args:
        vectors: M, input vectors of a sample.
        out: L, output vectors; a concatenation gives each interaction an equal part of them.
        dim: of a vector.
        interactions: called with (vectors, out, dim) each.
        ensemble: how the interactions' vectors are combined.
    """

    def __init__(
        self,
        vectors: int,
        out: int,
        dim: int,
        interactions: Sequence[Callable[[int, int, int], nn.Module]],
        ensemble: Ensemble = "concat",
    ) -> None:
        super().__init__()
        if ensemble not in get_args(Ensemble):
            raise SpecError(f"ensemble={ensemble!r}", f"one of {', '.join(get_args(Ensemble))}")
        count = len(interactions)
        if not count or (ensemble == "concat" and out < count):
            raise SpecError(
                f"{count} interactions for {out} vectors", "at least one interaction, and a vector for each"
            )
        parts = [out // count + (k < out % count) if ensemble == "concat" else out for k in range(count)]
        self.interactions = nn.ModuleList(make(vectors, n, dim) for make, n in zip(interactions, parts, strict=True))
        self.shortcut = nn.Identity() if out == vectors else LinearInteraction(vectors, out, dim)
        self.norm = nn.LayerNorm(dim)
        self.concat = ensemble == "concat"
        self.weights = nn.Parameter(torch.ones(count)) if ensemble == "weighted_sum" else None

    def forward(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, L, D]."""
        outputs = [interaction(x_BMD) for interaction in self.interactions]
        if self.concat:
            y_BLD = torch.cat(outputs, 1)
        else:
            stacked = torch.stack(outputs)
            y_BLD = stacked.sum(0) if self.weights is None else torch.tensordot(self.weights, stacked, 1)
        return self.norm(y_BLD + self.shortcut(x_BMD))


class DHEN(FieldModel):
    """DHEN (Zhang et al. 2022): X_(n+1) = LayerNorm(ensemble_i(interaction_i(X_n)) + shortcut(X_n)), then an MLP.

    Args:
        embeddings: pooled tables of one dim.
        dense_features: dense numbers per sample.
        top: sizes of the layers over the last vectors; the last is the number of logits.
        layers: layers of interactions.
        interactions: kinds in each layer, or modules called with (vectors, out, dim).
        vectors: of a sample after each layer; by default the number of features.
        ensemble: "concat", "sum" or "weighted_sum" of a layer's interactions.
        options: further arguments of interactions, by kind.
        dropout: rate on the MLP's hidden layers.
        norm: "batch" or "layer" normalisation of its hidden layers; None for none.
    """

    def __init__(  # noqa: PLR0913 - a model's hyperparameters
        self,
        embeddings: AnyTables,
        dense_features: int,
        top: Sequence[int] = (256, 1),
        *,
        layers: int = 2,
        interactions: Sequence[Interaction | Callable[[int, int, int], nn.Module]] = ("cross", "linear"),
        vectors: int | None = None,
        ensemble: Ensemble = "concat",
        options: Mapping[str, Mapping[str, Any]] | None = None,
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        super().__init__(embeddings, dense_features)
        if layers < 1:
            raise SpecError(f"layers={layers}", "at least one")
        out = self.fields if vectors is None else vectors
        makers = [_maker(kind, options or {}) for kind in interactions]
        sizes = [self.fields, *[out] * layers]
        self.layers = stack(DhenLayer(sizes[k], out, self.dim, makers, ensemble) for k in range(layers))
        self.top = Mlp((out * self.dim, *top), dropout=dropout, norm=norm)

    def logits(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, K]."""
        return self.top(self.layers(x_BMD).flatten(1))


def _maker(
    kind: str | Callable[[int, int, int], nn.Module], options: Mapping[str, Mapping[str, Any]]
) -> Callable[[int, int, int], nn.Module]:
    if not isinstance(kind, str):
        return kind
    if kind not in INTERACTIONS:
        raise SpecError(f"interaction {kind!r}", f"one of {', '.join(INTERACTIONS)}")
    return partial(INTERACTIONS[kind], **options.get(kind, {}))
