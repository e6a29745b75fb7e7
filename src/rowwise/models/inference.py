"""A model in use: evaluation mode, no gradients, packed weights, and logits that do not depend on other rows.

[Note: Blocks of rows] Packed layers (`pack_layers`) add in one order, so a row has the same bits in any batch. A
matrix library has kernels for different numbers of rows, which add in different orders. So a row's last bits may
depend on how many rows are computed with it: oneDNN differs for a batch of 1, MKL also for batches of 2, 3, 5, 7, 9
and others. Vector code may treat the last elements of a tensor differently. A multiple of 16 rows never differed with
oneDNN, at any place of a row and with any number of threads. So batches of models with other products are padded to
such blocks, and `Linear` layers that cannot be packed (16 bits, GPUs) pad their own input, which has another number of
rows where a model works on items of histories. `choose_blocks` tests a model on given rows, without padding first. A
model that fails is computed in blocks of 16 rows, in larger ones, in blocks of one fixed size, then row by row.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.base.value import MAX_BATCH
from rowwise.models.mlp import PackedModule
from rowwise.tables.ops.float8 import float8_products
from rowwise.tables.ops.linear import BLOCK_ROWS
from rowwise.tables.spec import Value

LARGER_ROWS, FIXED_ROWS = 64, 256  # rows of a larger block, and of a block of fixed size
TESTED_ROWS = (16, 32, 48, 64, 80, 128, 256, 512, 1024, 4096)  # sizes of batches in which a model is tested
UNPADDED_ROWS = (*range(1, 34), 63, 100, 127, 130, 255, 300, 513, 1000)  # and, if it may not need padding, before these
TESTED_SHIFTS = (0, 1, 5, 18)  # places by which rows are moved between these batches
LARGE_ROWS, FEW_SHIFTS = 1024, (0, 1)  # for large batches, which repeat a row at many places, and odd sizes
STRIDE = 7  # between neighbours in half of these batches


class RowSpan(NamedTuple):
    """Rows of one batch."""

    begin: int
    end: int
    padding: int  # rows computed and dropped


class RowBlocks(Value, frozen=True):
    """How rows are cut into batches, so that a row has the same bits in each. See [Note: Blocks of rows]."""

    kind: Literal["padded", "fixed", "alone"] = "padded"
    rows: int = BLOCK_ROWS  # a batch is padded to a multiple of these

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_BATCH:
            raise SpecError(f"blocks of {self.rows} rows", f"1 to {MAX_BATCH}")

    def cut(self, rows: int, max_rows: int) -> Iterator[RowSpan]:
        """Cut `rows` rows into batches of at most `max_rows` rows, or of one block."""
        step = {"padded": max(1, max_rows), "fixed": self.rows, "alone": 1}[self.kind]
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield RowSpan(begin, end, -(end - begin) % self.rows)

    def describe(self) -> str:
        match self.kind:
            case "padded" if self.rows == 1:
                return "a row has the same bits in any batch"
            case "padded":
                return f"batches are padded to a multiple of {self.rows} rows"
            case "fixed":
                return f"rows are computed in blocks of {self.rows}, as batches of other sizes change their last bits"
            case "alone":
                return "each row is computed alone, as its logits depend on the rows beside it"


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No gradients, and the model in evaluation mode; restores the mode of each module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def inference_mode(model: nn.Module, device: str = "cpu", precision: str = "fp32") -> Iterator[None]:
    """`evaluation_mode` and `autocast`, with packed `Linear` layers whose rows have the same bits in any batch.

    Weights must not change inside it. Inside another one of the model it changes nothing.
    """
    unpacked = [module for module in _packed_modules(model) if not module.frozen]
    with evaluation_mode(model), autocast(device, precision):
        try:
            if unpacked:
                pack(model)
            yield
        finally:
            for module in unpacked:
                module.frozen, module.packed = False, None


def pack(model: nn.Module) -> None:
    """Pack copies of the weights of layers, chains of layers as one; the weights must not change afterwards."""
    for module in _packed_modules(model):
        module.frozen = True
    _pack(model)


def _pack(module: nn.Module) -> None:
    if not isinstance(module, PackedModule) or not module.pack():
        for child in module.children():
            _pack(child)


def _packed_modules(model: nn.Module) -> list[PackedModule]:
    return [module for module in model.modules() if isinstance(module, PackedModule)]


@contextmanager
def autocast(device: str, precision: str) -> Iterator[None]:
    """16 or 8 bits for dense products, unless the precision is fp32; autocast keeps sums and logarithms in float32."""
    with ExitStack() as stack:
        if precision != "fp32":
            stack.enter_context(torch.autocast(torch.device(device).type, torch.bfloat16))
        if precision == "fp8":
            stack.enter_context(float8_products(torch.device(device)))
        yield


def choose_blocks(logits_of: Callable[[Sequence[int]], Tensor], rows: int) -> RowBlocks:
    """The smallest blocks in which no row's bits depend on the other rows.

    Args:
        logits_of: computes rows of a sample by their numbers, in one batch, in `inference_mode`.
        rows: the size of the sample; more kinds of rows test more.
    """
    if not _differ(logits_of, rows, UNPADDED_ROWS + TESTED_ROWS):
        return RowBlocks(rows=1)
    for multiple in (BLOCK_ROWS, LARGER_ROWS):
        if not _differ(logits_of, rows, [size for size in TESTED_ROWS if size % multiple == 0]):
            return RowBlocks(rows=multiple)
    if not _differ(logits_of, rows, (FIXED_ROWS,)):
        return RowBlocks(kind="fixed", rows=FIXED_ROWS)
    return RowBlocks(kind="alone")


def _shifts(size: int, rows: int) -> Sequence[int]:
    """The places by which rows are moved in batches of a size; each row is also alone."""
    if size == 1:
        return range(rows)
    return TESTED_SHIFTS if size < LARGE_ROWS and size % BLOCK_ROWS == 0 else FEW_SHIFTS


def _differ(logits_of: Callable[[Sequence[int]], Tensor], rows: int, sizes: Sequence[int]) -> bool:
    """Whether a row's bits differ between batches of these sizes, or between places in them."""
    first_RK: Tensor | None = None
    seen_R = torch.zeros(rows, dtype=torch.bool)
    for size in sizes:
        for shift in _shifts(size, rows):
            rows_B = (torch.arange(size) + shift) % rows
            if shift % 2 and size > 1:  # other neighbours, too
                rows_B = rows_B * STRIDE % rows
            bits_BK = logits_of(rows_B.tolist()).float().contiguous().view(torch.int32)
            first_RK = bits_BK.new_empty(rows, bits_BK.shape[1]) if first_RK is None else first_RK
            new_B = ~seen_R[rows_B]
            first_RK[rows_B[new_B]] = bits_BK[new_B]
            seen_R[rows_B] = True
            if not torch.equal(first_RK[rows_B], bits_BK):
                return True
    return False
