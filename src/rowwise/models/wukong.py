"""Wukong: stacked factorization machines, each layer beside a linear map of its vectors.

The model of "Wukong: Towards a Scaling Law for Large-Scale Recommendation" (Zhang et al. 2024, arXiv 2403.02545):

    X_0      = [v_0, pooled rows of all features]
    X_(n+1)  = LayerNorm([FMB(X_n), W X_n] + shortcut(X_n))        FMB: `FactorizationInteraction`
    logits   = MLP(flatten X_N)

These are layers of `DHEN` with two kinds of interactions, concatenated.
"""

from collections.abc import Sequence

from rowwise.models.dhen import DHEN
from rowwise.models.mlp import Norm
from rowwise.tables.ids.make import AnyTables


class Wukong(DHEN):
    """Wukong (Zhang et al. 2024): X_(n+1) = LayerNorm([FMB(X_n), W X_n] + shortcut(X_n)), then an MLP.

    Args:
        embeddings: pooled tables of one dim.
        dense_features: dense numbers per sample.
        top: sizes of the layers over the last vectors; the last is the number of logits.
        layers: layers of factorization machines.
        vectors: of a sample after each layer, half of each kind; by default the number of features.
        rank: of the factorization machines.
        hidden: sizes of the hidden layers over the factorization machines.
        dropout: rate on the last MLP's hidden layers.
        norm: "batch" or "layer" normalisation of its hidden layers; None for none.
    """

    def __init__(  # noqa: PLR0913 - a model's hyperparameters
        self,
        embeddings: AnyTables,
        dense_features: int,
        top: Sequence[int] = (256, 1),
        *,
        layers: int = 2,
        vectors: int | None = None,
        rank: int = 8,
        hidden: Sequence[int] = (128,),
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        super().__init__(
            embeddings,
            dense_features,
            top,
            layers=layers,
            interactions=("factorization", "linear"),
            vectors=vectors,
            options={"factorization": {"rank": rank, "hidden": tuple(hidden)}},
            dropout=dropout,
            norm=norm,
        )
