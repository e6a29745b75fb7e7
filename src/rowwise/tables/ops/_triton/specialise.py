"""The constants of each launch, as pure functions of row formats and sizes: one table for all devices.

Tables of one `Bucket` share a launch. Programs have one warp where a row fits into it, so that no sum crosses a
barrier, and about 2 KB of rows in flight, within the 64 registers with which a multiprocessor holds 32 programs.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rowwise.tables.ops.layout import RULES, TYPES, FeatureDescriptor, TableDescriptor
from rowwise.tables.row_optimizers import RowWiseAdagrad, RowWiseAdam, Sgd
from rowwise.tables.spec import RowType

VECTOR = 16  # bytes of the widest load of a lane
WIDEST_ROW = 256  # columns of a warp
FULL_WARP = 64  # columns from which on each lane loads 8 bytes of a row
TERMS, TERMS_OF_UNIT = 2, 4  # gradients that a program of an update, or of parts of hot rows, loads together
TILE, TILE_WARPS, BOUNDS = 256, 4, 32  # bags or ids of a program of `route`, and its warps; buckets of a program
SMALLEST_PRODUCT, PART, MAX_VECTORS = 16, 16, 128  # rows, columns and again rows of a matrix product


class Bucket(NamedTuple):
    """Tables that one compiled kernel serves."""

    type: int
    block: int  # the next power of two of dim
    align: int  # bytes that divide every address of a row
    divisor: int  # columns that divide every dim
    scale_group: int
    rule: int = -1  # the optimizer, of updates


def bucket_of(descriptor: FeatureDescriptor | TableDescriptor) -> Bucket:
    dim, form = descriptor.dim, descriptor.format
    rule = descriptor.rule if isinstance(descriptor, TableDescriptor) else -1
    group = descriptor.scale_group if form.type is RowType.INT8 else 0
    return Bucket(descriptor.type, power_of_two(dim), align_of([form.bytes], VECTOR), align_of([dim], 16), group, rule)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def align_of(places: Iterable[int], limit: int = VECTOR // 4) -> int:
    """The largest power of two up to `limit` that divides all places."""
    return math.gcd(limit, *places)


def warps(bucket: Bucket) -> int:
    return max(1, bucket.block // WIDEST_ROW)


class LookupShape(NamedTuple):
    """A program's tiles of bags, one after the other; bags of a tile; ids of a bag whose rows are loaded together."""

    tiles: int
    bags: int
    ids: int


def lookup_shape(bucket: Bucket, pooling: float) -> LookupShape:
    """`pooling`: ids of a bag on average."""
    ids = 4 if pooling > 2 else 2 if pooling > 1 else 1
    row = bucket.block * (4 if TYPES[bucket.type] is RowType.FP32 else 2)
    bags = max(1, 512 // row) * (4 // ids)
    max_floats = 512 if ids == 1 else 1024  # floats of rows in flight: 16 or 32 registers
    while bags > 1 and (bags * bucket.block * ids > max_floats or (ids == 1 and bags > 4)):
        bags //= 2
    # With little to do for each bag, the feature's descriptor is read for several tiles.
    tiles = 1 if ids > 1 else 4 if bucket.block <= 64 else 2
    return LookupShape(tiles, min(16, bags), ids)


def sampled_constants(dim: int, pooling: float) -> dict[str, int]:
    """The constants of sums over edges, `pooling` of them into a node on average."""
    bucket = Bucket(TYPES.index(RowType.FP32), power_of_two(dim), align_of([4 * dim], VECTOR), align_of([dim], 16), 0)
    _, nodes, ids = lookup_shape(bucket, pooling)
    shape = {"DIM": dim, "BLOCK": bucket.block, "NODES": nodes, "IDS": ids}
    return shape | {"num_warps": warps(bucket), "enable_fp_fusion": False}


def expand_shape(pooling: float) -> tuple[int, int]:
    """Bags of a program, and ids of a bag at a time."""
    ids = min(16, power_of_two(max(1, round(pooling))))
    return TILE // ids, ids


def interact_shape(vectors: int, *, nvidia: bool) -> dict[str, int | str] | None:
    """The constants of an interaction; None if its vectors do not fit into the registers of eight warps.

    Tensor cores of NVIDIA multiply 10 bits of a fraction, so each float is split into three such parts.
    """
    height = max(SMALLEST_PRODUCT, power_of_two(vectors))
    if height > MAX_VECTORS:
        return None
    return {
        "VECTORS": height,
        "PART": PART,
        "PRECISION": "tf32x3" if nvidia else "ieee",
        "num_warps": max(1, min(8, height * height // 1024)),
    }


def loads_ahead(bucket: Bucket, capability: int) -> bool:
    """Whether an update loads a row while it works on the one before: where 64 registers hold both.

    `capability`: see `launch.capability_of`.
    """
    narrow = bucket.block <= FULL_WARP // 2
    if bucket.block >= WIDEST_ROW or (narrow and TYPES[bucket.type] is RowType.INT8):
        return False
    has_scalar_state = bucket.rule in (RULES[Sgd], RULES[RowWiseAdagrad])  # no vector of state
    return bucket.block <= FULL_WARP or has_scalar_state or capability < 100


def max_registers(bucket: Bucket, capability: int) -> int | None:
    """The limit of an update's registers on an NVIDIA GPU; None: the compiler's choice, at most 80 so far.

    The compiler takes more than 64 for rows that are loaded ahead, though it does not need them.
    """
    return 64 if capability and loads_ahead(bucket, capability) else None


def state_align(bucket: Bucket) -> int:
    """Floats that divide the place of every row's state."""
    if bucket.rule in (RULES[Sgd], RULES[RowWiseAdagrad], RULES[RowWiseAdam]):
        return 1
    return min(4, bucket.divisor)


def group_by_bucket(descriptors: Sequence[FeatureDescriptor | TableDescriptor]) -> dict[Bucket, list[int]]:
    """The indices of each bucket's descriptors."""
    indices: dict[Bucket, list[int]] = {}
    for index, descriptor in enumerate(descriptors):
        indices.setdefault(bucket_of(descriptor), []).append(index)
    return dict(sorted(indices.items()))
