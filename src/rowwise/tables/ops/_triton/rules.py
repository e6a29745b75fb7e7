"""Parts of the update kernel: the optimizers, by their numbers in `layout.RULES`.

The arithmetic is that of `tables/ops/reference/apply.py`, operation by operation. Columns past `dim` hold 0 in weights,
gradient and state.
"""

import triton
import triton.language as tl

from rowwise.tables.ops._triton.sums import column_sum
from rowwise.tables.ops.layout import RULES
from rowwise.tables.row_optimizers import Adagrad, Adam, Ftrl, Lamb, RowWiseAdagrad, RowWiseAdam, Sgd

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM, LAMB, FTRL = (
    tl.constexpr(RULES[kind]) for kind in (Sgd, Adagrad, RowWiseAdagrad, Adam, RowWiseAdam, Lamb, Ftrl)
)


@triton.jit
def read_state(own, d, mask, dim, has, RULE: tl.constexpr):
    """Two vectors and a number; those that the rule lacks are 0."""
    first = tl.zeros(d.shape, tl.float32)
    second = tl.zeros(d.shape, tl.float32)
    number = 0.0
    if RULE == ROWWISE_ADAGRAD:
        number = tl.load(own, mask=has, other=0.0)
    elif RULE == ADAGRAD or RULE == ADAM or RULE == ROWWISE_ADAM or RULE == LAMB or RULE == FTRL:
        first = tl.load(own + d, mask=mask, other=0.0)
        if RULE == ROWWISE_ADAM:
            number = tl.load(own + dim, mask=has, other=0.0)
        elif RULE != ADAGRAD:
            second = tl.load(own + dim + d, mask=mask, other=0.0)
    else:
        tl.static_assert(RULE == SGD, "an optimizer without kernels")
    return first, second, number


@triton.jit
def write_state(own, d, mask, dim, first, second, number, RULE: tl.constexpr):
    if RULE == ROWWISE_ADAGRAD:
        tl.store(own, number)
    elif RULE != SGD:
        tl.store(own + d, first, mask=mask)
        if RULE == ROWWISE_ADAM:
            tl.store(own + dim, number)
        elif RULE != ADAGRAD:
            tl.store(own + dim + d, second, mask=mask)


@triton.jit
def change(w, g, first, second, number, dim, hyper, BLOCK: tl.constexpr, RULE: tl.constexpr):
    """The new weights and state; `hyper`: the table's row of `hyper_TH`."""
    lr, eps, decay = tl.load(hyper), tl.load(hyper + 1), tl.load(hyper + 2)
    # Decay is added to the gradient before any statistic of it by these rules only.
    if RULE == SGD or RULE == ADAGRAD or RULE == ROWWISE_ADAGRAD:
        if decay != 0:
            g = g + w * decay
    if RULE == SGD:
        w = w - g * lr
    elif RULE == ADAGRAD:
        first = first + g * g
        w = w - tl.div_rn(g, tl.sqrt_rn(first) + eps) * lr
    elif RULE == ROWWISE_ADAGRAD:
        number = number + tl.div_rn(column_sum(g * g, BLOCK), dim.to(tl.float32))
        w = w - g * tl.div_rn(lr, tl.sqrt_rn(number) + eps)
    elif RULE == FTRL:
        l1, l2, beta = tl.load(hyper + 4), tl.load(hyper + 5), tl.load(hyper + 6)
        largest: tl.constexpr = 3.4028234663852886e38
        sums = tl.minimum(second + g * g, largest)
        after = tl.sqrt_rn(sums)
        first = first + g - tl.div_rn(after - tl.sqrt_rn(second), lr) * w
        shrunk = tl.where(first > l1, first - l1, tl.where(first < -l1, first + l1, 0.0))
        w = 0.0 - tl.div_rn(shrunk, tl.div_rn(after + beta, lr) + l2)
        second = sums
    else:
        beta1, beta2 = tl.load(hyper + 4), tl.load(hyper + 5)
        inverse1, inverse2 = tl.load(hyper + 6), tl.load(hyper + 7)
        first = first * beta1 + g * (1 - beta1)
        if RULE == ROWWISE_ADAM:
            mean = tl.div_rn(column_sum(g * g, BLOCK), dim.to(tl.float32))
            number = number * beta2 + mean * (1 - beta2)
            step = first * inverse1 * tl.div_rn(1.0, tl.sqrt_rn(number * inverse2) + eps)
            w = w - (step + w * decay) * lr
        else:
            second = second * beta2 + g * g * (1 - beta2)
            step = tl.div_rn(first * inverse1, tl.sqrt_rn(second * inverse2) + eps)
            step = step + w * decay
            if RULE == LAMB:
                length = tl.sqrt_rn(column_sum(w * w, BLOCK))
                size = tl.sqrt_rn(column_sum(step * step, BLOCK))
                infinite: tl.constexpr = float("inf")
                usable = (length > 0) & (size > 0) & (length < infinite) & (size < infinite)
                lr = lr * tl.where(usable, tl.div_rn(length, tl.where(usable, size, 1.0)), 1.0)
            w = w - step * lr
    return w, first, second, number
