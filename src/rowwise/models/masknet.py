"""MaskNet: the input, multiplied by masks computed from the input itself.

The model of "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by Instance-Guided Mask"
(Wang et al. 2021, arXiv 2102.07619):

    x        = flatten [v_0, pooled rows of all features]
    mask     = W_2 relu(W_1 x + b_1) + b_2
    block(y) = relu(LayerNorm(W (mask * y)))
    parallel: logits = MLP([block_1(e), ..., block_K(e)])          e: x with each vector normalised by a LayerNorm
    serial:   logits = MLP(block_K(... block_1(e)))
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.models.fields import FieldModel
from rowwise.models.mlp import Linear, Mlp, Norm
from rowwise.tables.ids.make import AnyTables

MaskStructure = Literal["parallel", "serial"]


class MaskBlock(nn.Module):
    """relu(LayerNorm(W (mask * y))), with a mask made of x.

    Args:
        inputs: width of x.
        width: width of y.
        out: width of the result.
        reduction_ratio: width of the mask's hidden layer, in widths of y.
    """

    def __init__(self, inputs: int, width: int, out: int, reduction_ratio: int = 2) -> None:
        super().__init__()
        self.mask = Mlp((inputs, reduction_ratio * width, width))
        self.map, self.norm = Linear(width, out, bias=False), nn.LayerNorm(out)

    def forward(self, x_BS: Tensor, y_BS: Tensor) -> Tensor:
        """[B, inputs] and [B, width] to [B, out]."""
        return self.norm(self.map(self.mask(x_BS) * y_BS)).relu()


class MaskNet(FieldModel):
    """MaskNet (Wang et al. 2021): blocks relu(LayerNorm(W (mask(x) * y))), parallel or serial, then an MLP.

    Args:
        embeddings: pooled tables of one dim.
        dense_features: dense numbers per sample.
        top: sizes of the layers over the blocks; the last is the number of logits.
        blocks: sizes of the blocks.
        structure: "parallel" or "serial".
        reduction_ratio: width of a mask's hidden layer, in widths of the masked input.
        dropout: rate on the MLP's hidden layers.
        norm: "batch" or "layer" normalisation of its hidden layers; None for none.
    """

    def __init__(  # noqa: PLR0913 - a model's hyperparameters
        self,
        embeddings: AnyTables,
        dense_features: int,
        top: Sequence[int] = (256, 1),
        *,
        blocks: Sequence[int] = (64, 64, 64),
        structure: MaskStructure = "parallel",
        reduction_ratio: int = 2,
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        super().__init__(embeddings, dense_features)
        if structure not in get_args(MaskStructure):
            raise SpecError(f"structure={structure!r}", f"one of {', '.join(get_args(MaskStructure))}")
        if not blocks:
            raise SpecError("blocks=()", "the size of at least one block")
        self.serial, inputs = structure == "serial", self.fields * self.dim
        widths = [inputs, *blocks[:-1]] if self.serial else [inputs] * len(blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(self.dim) for _ in range(self.fields))
        self.blocks = nn.ModuleList(
            MaskBlock(inputs, w, out, reduction_ratio) for w, out in zip(widths, blocks, strict=True)
        )
        self.top = Mlp((blocks[-1] if self.serial else sum(blocks), *top), dropout=dropout, norm=norm)

    def logits(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, K]."""
        x_BS = x_BMD.flatten(1)
        y_BS = torch.cat([norm(x_BD) for norm, x_BD in zip(self.norms, x_BMD.unbind(1), strict=True)], 1)
        if not self.serial:
            return self.top(torch.cat([block(x_BS, y_BS) for block in self.blocks], 1))
        for block in self.blocks:
            y_BS = block(x_BS, y_BS)
        return self.top(y_BS)
