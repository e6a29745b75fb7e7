"""Reference of the dense operators: DLRM's interaction, layers, sums of pairs, dot products, a ReLU's gradient.

Native sums of the interaction and of layers may round differently; those of pairs and dot products have the same bits.
"""

import torch
from torch import Tensor

from rowwise.tables.ops.reference.sums import column_sum


def interact(dense: Tensor, pooled: Tensor) -> Tensor:
    """The dense vector, then the dots of vectors (1, 0), (2, 0), (2, 1), (3, 0), ...; the dense vector is number 0."""
    x_BTD = _vectors(dense, pooled)
    # Without autocast, which would multiply in 16 bits.
    with torch.autocast(dense.device.type, enabled=False):
        dots_BTT = x_BTD @ x_BTD.transpose(1, 2)
    rows, columns = _pairs(x_BTD)
    return torch.cat([dense, dots_BTT[:, rows, columns]], dim=1)


def interact_grad(dense: Tensor, pooled: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both inputs: that of a vector sums the other vectors, times the gradients of the dots."""
    x_BTD = _vectors(dense, pooled)
    rows, columns = _pairs(x_BTD)
    grad_BTT = grad.new_zeros(len(dense), x_BTD.shape[1], x_BTD.shape[1])
    grad_BTT[:, rows, columns] = grad[:, dense.shape[1] :]
    with torch.autocast(dense.device.type, enabled=False):
        grad_BTD = (grad_BTT + grad_BTT.transpose(1, 2)) @ x_BTD
    return grad[:, : dense.shape[1]] + grad_BTD[:, 0], grad_BTD[:, 1:].flatten(1)


def layers(x: Tensor, layers: Tensor, weights: Tensor, pooled: Tensor | None = None, first: int = 0) -> Tensor:
    """x [B, inputs] through linear layers with ReLUs; with `pooled`, through `interact` before layer `first`.

    `layers` [L, 3]: inputs, outputs, whether a ReLU follows. `weights`: of each layer, for each 16 outputs a line of
    biases, then a line for each input.
    """
    begin = 0
    for number, (inputs, outputs, relu) in enumerate(layers.tolist()):
        if pooled is not None and number == first:
            x = interact(x, pooled)
        panels = -(-outputs // 16)
        end = begin + panels * 16 * (inputs + 1)
        lines_IO = weights[begin:end].view(panels, inputs + 1, 16).transpose(0, 1).flatten(1)[:, :outputs]
        begin = end
        with torch.autocast(x.device.type, enabled=False):
            x = x @ lines_IO[1:] + lines_IO[0]
        if relu:
            x = x.relu()
    return x


def dots(query: Tensor, rows: Tensor, places: Tensor | None = None) -> Tensor:
    """Dot products of a vector [D] with rows [R, D], or with those at places; each is summed as a tree over columns.

    With vectors [Q, D] and places [Q, N], those of each vector with its own rows.
    """
    products = (rows if places is None else rows[places]) * query.unsqueeze(-2)
    return column_sum(products.flatten(0, -2)).view(products.shape[:-1])


def pair_sums(offset: Tensor, pooled: Tensor) -> Tensor:
    """(|s|^2 - sum of |v|^2) / 2 of each sample, where s is the offset and all vectors v of `pooled` added up."""
    sum_BD, squares_BD = offset, torch.zeros_like(offset)
    for v_BD in pooled.split(offset.shape[1], 1):
        sum_BD, squares_BD = sum_BD + v_BD, squares_BD + v_BD * v_BD
    return column_sum(sum_BD * sum_BD - squares_BD) * 0.5


def pair_sums_grad(offset: Tensor, pooled: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both inputs: s for the offset, s - v for a vector v, times that of the sample."""
    sum_BD = offset
    for v_BD in pooled.split(offset.shape[1], 1):
        sum_BD = sum_BD + v_BD
    grads = [(sum_BD - v_BD) * grad.unsqueeze(1) for v_BD in pooled.split(offset.shape[1], 1)]
    return sum_BD * grad.unsqueeze(1), torch.cat(grads, 1)


def relu_grad(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient below a ReLU whose output is `out`, and its transpose; NaN lets its gradient through."""
    masked = grad.masked_fill(out <= 0, 0)
    return masked, masked.t().contiguous()


def _vectors(dense: Tensor, pooled: Tensor) -> Tensor:
    features = pooled.shape[1] // dense.shape[1]
    return torch.cat([dense.unsqueeze(1), pooled.view(dense.shape[0], features, dense.shape[1])], dim=1)


def _pairs(x_BTD: Tensor) -> Tensor:
    return torch.tril_indices(x_BTD.shape[1], x_BTD.shape[1], offset=-1, device=x_BTD.device)
