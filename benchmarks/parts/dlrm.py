"""The DLRM that benchmarks of a step train: its sizes, and its dense layers in plain torch."""

from itertools import pairwise

import torch
from torch import Tensor, nn

FEATURES, DENSE, DIM = 26, 13, 64
BOTTOM, TOP = (512, 256, DIM), (512, 512, 256, 1)
WIDTH = DIM + FEATURES * (FEATURES + 1) // 2


class TorchInteraction(nn.Module):
    """The usual form: all pairs of a sample as a matrix, of which the lower triangle is picked."""

    def __init__(self, vectors: int):
        super().__init__()
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1))

    def forward(self, dense_BD: Tensor, pooled_BS: Tensor) -> Tensor:
        pooled_BFD = pooled_BS.view(len(dense_BD), -1, dense_BD.shape[1])
        x_BTD = torch.cat([dense_BD.unsqueeze(1), pooled_BFD], dim=1)
        dots_BTT = torch.bmm(x_BTD, x_BTD.transpose(1, 2))
        return torch.cat([dense_BD, dots_BTT[:, self.pairs[0], self.pairs[1]]], dim=1)


def linears(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear)]


def torch_mlp(sizes: tuple[int, ...], relu_last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for k, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(fan_in, fan_out))
        if relu_last or k < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)
