"""FinalMLP: two MLPs over two gated views of the input, joined by a bilinear form.

The model of "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction" (Mao et al. 2023, arXiv 2304.00902):

    x      = flatten [v_0, pooled rows of all features]
    g_s    = 2 sigmoid(MLP(c_s))                     c_s: a learned vector for each stream s = 1, 2, no feature
    o_s    = deep_s(g_s * x)
    logits = w_1 o_1 + w_2 o_2 + b + sum over heads h of o_1h W_h o_2h
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.models.dlrm import Vector
from rowwise.models.fields import FieldModel
from rowwise.models.mlp import Linear, Mlp, Norm
from rowwise.tables.ids.make import AnyTables


class FinalMLP(FieldModel):
    """FinalMLP (Mao et al. 2023): two MLPs over gated inputs, w_1 o_1 + w_2 o_2 + b + sum_h o_1h W_h o_2h.

    Args:
        embeddings: pooled tables of one dim.
        dense_features: dense numbers per sample.
        first: sizes of the first MLP's layers, all with a ReLU.
        second: sizes of the second MLP's layers.
        tasks: number of logits.
        heads: parts of both outputs, multiplied part by part.
        gate: width of the gates' hidden layer.
        dropout: rate on both MLPs' hidden layers.
        norm: "batch" or "layer" normalisation of their layers; None for none.
    """

    def __init__(  # noqa: PLR0913 - a model's hyperparameters
        self,
        embeddings: AnyTables,
        dense_features: int,
        first: Sequence[int] = (256, 64),
        second: Sequence[int] = (256, 64),
        *,
        tasks: int = 1,
        heads: int = 2,
        gate: int = 64,
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        super().__init__(embeddings, dense_features)
        if not first or not second:
            raise SpecError(f"first={tuple(first)}, second={tuple(second)}", "at least one size of each")
        if heads < 1 or first[-1] % heads or second[-1] % heads:
            raise SpecError(f"heads={heads}", f"a divisor of the last sizes, {first[-1]} and {second[-1]}")
        inputs, self.heads = self.fields * self.dim, heads
        self.gates = nn.ModuleList(nn.Sequential(Vector(self.dim), Mlp((self.dim, gate, inputs))) for _ in range(2))
        self.streams = nn.ModuleList(
            Mlp((inputs, *sizes), relu_last=True, dropout=dropout, norm=norm) for sizes in (first, second)
        )
        self.linear = Linear(first[-1] + second[-1], tasks)
        shape = (heads, first[-1] // heads, second[-1] // heads * tasks)
        self.bilinear = nn.Parameter(torch.randn(shape) / (shape[1] * second[-1]) ** 0.5)

    def logits(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, K]."""
        x_BS = x_BMD.flatten(1)
        gates = (2 * gate(x_BS[:1]).sigmoid() for gate in self.gates)  # the same for each sample
        out = [stream(x_BS * gate_1S) for stream, gate_1S in zip(self.streams, gates, strict=True)]
        first_BHI, second_BHJ = (o.unflatten(1, (self.heads, -1)) for o in out)
        mapped_HBKJ = (first_BHI.transpose(0, 1) @ self.bilinear).unflatten(2, (-1, second_BHJ.shape[2]))
        products_BK = torch.einsum("hbkj,bhj->bk", mapped_HBKJ, second_BHJ)
        return self.linear(torch.cat(out, 1)) + products_BK
