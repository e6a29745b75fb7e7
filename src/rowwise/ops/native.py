"""`load`: loads the native operators, and registers their shapes, gradients and other devices with torch.

The package `rowwise.ops` calls it on import. `devices` says what the operators run on a GPU.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowwise.errors import NativeError
from rowwise.library import BUILD, find_library
from rowwise.ops.devices import gpu_operators
from rowwise.row_optimizers import OPTIMIZERS
from rowwise.spec import ROW_TYPES, RowType, row_bytes

LIBRARY = "librowwise_ops.so"
OPERATORS = (
    "offsets", "lengths", "in_range", "find_newer", "take", "bucketize", "expand", "spread", "deduplicate", "place",
    "pack_ids", "map_ids", "pool", "pool_weight_grad", "gather", "update", "mark", "touch", "rewrite", "fill_uniform",
    "fill_uniform_rows", "pack", "unpack", "pack4", "unpack4", "keep_largest", "interact", "interact_grad",
    "pair_sums", "pair_sums_grad", "dots", "relu_grad", "crc32", "publish", "wait_for", "zeros", "empty_bytes",
    "kept_bytes", "drop_kept", "isa", "limit_isa", "row_types", "optimizers",
)  # fmt: skip


@functools.cache
def load() -> None:
    """Load the library, then register shapes for torch.compile, gradients, and other devices."""
    path = find_library(LIBRARY)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        version = f"torch {torch.__version__}"
        raise NativeError(f"{path} does not load under {version} (2.11 or later is needed): {error}") from error
    check_library(torch.ops.rowwise, path)
    _register_shapes()
    _register_shapes_of_checkpoints()
    _register_shapes_of_dense()
    _register_shapes_of_jagged()
    _register_shapes_of_id_maps()
    _register_gradients()
    _register_devices()


def check_library(operators: Any, path: Path) -> None:
    """Raise if the library was built from other sources; `operators`: the namespace that has each by name."""
    other = f"{path} was built from other sources"
    missing = [name for name in OPERATORS if not hasattr(operators, name)]
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise NativeError(f"{other}: it has no operator {names}; {BUILD}")
    for what, records in (("row_types", ROW_TYPES), ("optimizers", OPTIMIZERS)):
        got, expected = getattr(operators, what)(), ",".join(records)
        if got != expected:
            raise NativeError(f"{other}: its {what} are {got}", expected, hint=BUILD)


def isa() -> str:
    """The instruction set in use: base, avx2 or avx512."""
    load()
    return str(torch.ops.rowwise.isa())


def _register_shapes() -> None:
    fake = torch.library.register_fake

    @fake("rowwise::offsets")
    def _(lengths: Tensor) -> Tensor:
        return lengths.new_empty(lengths.shape[0] + 1, dtype=torch.int64)

    @fake("rowwise::pool")
    def _(arena: Tensor, *args: Any) -> Tensor:
        *_, batch, columns = args
        return arena.new_empty((batch, columns), dtype=torch.float32)

    @fake("rowwise::pool_weight_grad")
    def _(arena: Tensor, features: Tensor, values: Tensor, *_: Any) -> Tensor:
        return arena.new_empty(values.shape, dtype=torch.float32)

    # The number of rows depends on the values of the lengths: a data-dependent size.
    @fake("rowwise::gather")
    def _(arena: Tensor, *_: Any) -> Tensor:
        return arena.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.float32)

    @fake("rowwise::pack")
    def _(rows: Tensor, group: int) -> Tensor:
        size = row_bytes(RowType.INT8, rows.shape[1], group)
        return rows.new_empty((rows.shape[0], size), dtype=torch.uint8)

    @fake("rowwise::unpack")
    def _(packed: Tensor, dim: int, group: int) -> Tensor:
        return packed.new_empty((packed.shape[0], dim), dtype=torch.float32)

    @fake("rowwise::update")
    def _(*_: Any) -> None:
        return None

    @fake("rowwise::fill_uniform")
    def _(*_: Any) -> None:
        return None

    @fake("rowwise::fill_uniform_rows")
    def _(*_: Any) -> None:
        return None


def _register_shapes_of_checkpoints() -> None:
    fake = torch.library.register_fake

    @fake("rowwise::mark")
    def _(*_: Any) -> None:
        return None

    @fake("rowwise::pack4")
    def _(rows: Tensor) -> Tensor:
        return rows.new_empty((rows.shape[0], 8 + -(-rows.shape[1] // 8) * 4), dtype=torch.uint8)

    @fake("rowwise::unpack4")
    def _(packed: Tensor, dim: int) -> Tensor:
        return packed.new_empty((packed.shape[0], dim), dtype=torch.float32)

    @fake("rowwise::keep_largest")
    def _(rows: Tensor, kept: int) -> Tensor:
        return rows.new_empty((rows.shape[0], 5 * kept), dtype=torch.uint8)


def _register_shapes_of_dense() -> None:
    fake = torch.library.register_fake

    @fake("rowwise::interact")
    def _(dense: Tensor, pooled: Tensor) -> Tensor:
        vectors = pooled.shape[1] // dense.shape[1] + 1
        return dense.new_empty((dense.shape[0], dense.shape[1] + vectors * (vectors - 1) // 2))

    @fake("rowwise::interact_grad")
    def _(dense: Tensor, pooled: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return dense.new_empty(dense.shape), pooled.new_empty(pooled.shape)

    @fake("rowwise::pair_sums")
    def _(offset: Tensor, pooled: Tensor) -> Tensor:
        return offset.new_empty(offset.shape[0])

    @fake("rowwise::pair_sums_grad")
    def _(offset: Tensor, pooled: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return offset.new_empty(offset.shape), pooled.new_empty(pooled.shape)

    @fake("rowwise::dots")
    def _(query: Tensor, rows: Tensor, places: Tensor | None = None) -> Tensor:
        return query.new_empty(rows.shape[0] if places is None else places.shape[0])

    @fake("rowwise::relu_grad")
    def _(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        return out.new_empty(out.shape), grad.new_empty(grad.shape[::-1])


def _register_shapes_of_jagged() -> None:
    fake, size = torch.library.register_fake, lambda: torch.library.get_ctx().new_dynamic_size()

    @fake("rowwise::lengths")
    def _(offsets: Tensor) -> Tensor:
        return offsets.new_empty(offsets.shape[0] - 1, dtype=torch.int64)

    @fake("rowwise::find_newer")
    def _(values: Tensor, *_: Any) -> Tensor:
        return values.new_empty(values.shape[0], dtype=torch.int64)

    @fake("rowwise::take")
    def _(values: list[Tensor], lengths: list[Tensor], weights: list[Tensor], segments: Tensor) -> tuple[Tensor, ...]:
        taken, bags = size(), size()
        wide, wide_lengths = (
            torch.int64 if any(x.dtype == torch.int64 for x in xs) else torch.int32 for xs in (values, lengths)
        )
        return (
            values[0].new_empty(taken, dtype=wide),
            lengths[0].new_empty(bags, dtype=wide_lengths),
            values[0].new_empty(taken if weights else 0, dtype=torch.float32),
            segments.new_empty(segments.shape[0] + 1),
        )

    @fake("rowwise::bucketize")
    def _(values: Tensor, lengths: Tensor, weights: Tensor | None, bounds: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.empty_like(values),
            lengths.new_empty((bounds.shape[1] - 1) * lengths.shape[0]),
            values.new_empty(0 if weights is None else values.shape[0], dtype=torch.float32),
            values.new_empty(values.shape[0], dtype=torch.int64),
            values.new_empty(bounds.shape[1], dtype=torch.int64),
        )

    @fake("rowwise::expand")
    def _(values: list[Tensor], lengths: list[Tensor], weights: list[Tensor], *args: Any) -> tuple[Tensor, ...]:
        samples, places, narrow = args
        expanded = size()
        wide, wide_lengths = (any(x.dtype == torch.int64 for x in xs) for xs in (values, lengths))
        return (
            values[0].new_empty(expanded, dtype=torch.int64 if wide and not narrow else torch.int32),
            lengths[0].new_empty(
                places.shape[0] * samples[0].shape[0], dtype=torch.int64 if wide_lengths else torch.int32
            ),
            values[0].new_empty(expanded if weights else 0, dtype=torch.float32),
        )

    @fake("rowwise::spread")
    def _(*_: Any) -> None:
        return None

    @fake("rowwise::deduplicate")
    def _(values: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
        distinct = size()
        return (
            values.new_empty(distinct),
            torch.empty_like(bounds),
            values.new_empty(values.shape[0], dtype=torch.int64),
            values.new_empty(distinct, dtype=torch.int64),
        )


def _register_shapes_of_id_maps() -> None:
    @torch.library.register_fake("rowwise::map_ids")
    def _(ids: Tensor, sections: Tensor, words: Tensor, known: int, columns: int) -> Tensor:
        return ids.new_empty((ids.shape[0], columns), dtype=torch.int64)


def _register_gradients() -> None:
    """In a lookup only per-id weights get gradients: rows are updated by `update`, never through autograd."""

    def setup_pool(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])

    def pool(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arena, features, values, offsets, weights = ctx.saved_tensors
        weight_grad = None
        if weights is not None:
            batch = grad.shape[0]
            weight_grad = torch.ops.rowwise.pool_weight_grad(
                arena, features, values, offsets, weights, grad.contiguous(), batch
            )
        return None, None, None, None, weight_grad, None, None

    def setup_interact(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def interact(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.rowwise.interact_grad(*ctx.saved_tensors, grad.contiguous())

    torch.library.register_autograd("rowwise::pool", pool, setup_context=setup_pool)

    def pair_sums(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.rowwise.pair_sums_grad(*ctx.saved_tensors, grad.contiguous())

    torch.library.register_autograd("rowwise::interact", interact, setup_context=setup_interact)
    torch.library.register_autograd("rowwise::pair_sums", pair_sums, setup_context=setup_interact)


def _register_devices() -> None:
    # The small tensors that describe tables stay on the CPU; torch picks the device of the large ones.
    for name, function in gpu_operators().items():
        torch.library.impl(f"rowwise::{name}", "CUDA", function)
