"""AutoInt: layers of self-attention over the vectors of the features.

The model of "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks"
(Song et al. 2019, arXiv 1810.11921):

    X_0      = [v_0, pooled rows of all features]
    X_(n+1)  = relu(attention(X_n) + W X_n)          no scaling of the dots, no biases
    logits   = w flatten(X_N) + b, and deep(flatten X_0) where there is such an MLP (the paper's AutoInt+)

Here the dots are divided by the square root of a head's width, as in later attention.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.models.fields import FieldModel
from rowwise.models.interactions.attention import Attention
from rowwise.models.mlp import Linear, Mlp, Norm, stack
from rowwise.tables.ids.make import AnyTables


class AutoIntLayer(nn.Module):
    """relu(attention(X) + W X).

    Args:
        dim: of a vector.
        out: dim of an output vector.
        heads: attention heads, each with an equal part of a vector.
    """

    def __init__(self, dim: int, out: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, out, bias=False)
        self.shortcut = Linear(dim, out, bias=False)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """[B, M, dim] to [B, M, out]."""
        return (self.attention(x_BMD) + self.shortcut(x_BMD)).relu()


class AutoInt(FieldModel):
    """AutoInt (Song et al. 2019): X_(n+1) = relu(attention(X_n) + W X_n), then a linear layer, beside an MLP.

    Args:
        embeddings: pooled tables of one dim.
        dense_features: dense numbers per sample.
        deep: sizes of the MLP's layers; the last is the number of logits. A single size means no MLP.
        layers: attention layers.
        heads: attention heads, each with an equal part of a vector.
        width: numbers of a vector after a layer.
        dropout: rate on the MLP's hidden layers.
        norm: "batch" or "layer" normalisation of its hidden layers; None for none.
    """

    def __init__(  # noqa: PLR0913 - a model's hyperparameters
        self,
        embeddings: AnyTables,
        dense_features: int,
        deep: Sequence[int] = (256, 1),
        *,
        layers: int = 2,
        heads: int = 2,
        width: int = 32,
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        super().__init__(embeddings, dense_features)
        if layers < 1:
            raise SpecError(f"layers={layers}", "at least one")
        sizes = [self.dim, *[width] * layers]
        self.layers = stack(AutoIntLayer(sizes[k], width, heads) for k in range(layers))
        self.top = Linear(self.fields * width, deep[-1])
        inputs = self.fields * self.dim
        self.deep = Mlp((inputs, *deep), dropout=dropout, norm=norm) if len(deep) > 1 else None

    def logits(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, K]."""
        logits_BK = self.top(self.layers(x_BMD).flatten(1))
        return logits_BK if self.deep is None else logits_BK + self.deep(x_BMD.flatten(1))
