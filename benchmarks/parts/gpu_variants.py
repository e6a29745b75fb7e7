"""Every variant of the kernels that the table of `specialise` chooses for the usual tables, by its name."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rowwise import Table
from rowwise.tables.ops._triton import (
    cache,
    contributions,
    graph,
    idmap,
    interact,
    jagged,
    lookup,
    quantise,
    rearrange,
    slots,
    specialise,
    update,
)
from rowwise.tables.ops._triton.operators import ONE_WARP, constants_of
from rowwise.tables.ops.layout import Choice, FeatureDescriptor, TableDescriptor, TablePiece, lay_out_tables, make_group
from rowwise.tables.ops.reference.idmap import SectionKind
from rowwise.tables.row_optimizers import OPTIMIZERS, RowWiseAdagrad
from rowwise.tables.spec import RowType

DIMS = (4, 16, 64, 128, 256)
POOLINGS = (1.0, 1.5, 20.0)
SAMPLED = 32  # edges into a node
VECTORS = 27  # of a sample: 26 features and the dense vector


class Variant(NamedTuple):
    name: str
    kernel: Any
    constants: dict[str, Any]
    type: RowType
    dim: int
    bucket: specialise.Bucket | None = None

    @property
    def multiplies(self) -> bool:
        """Whether sums are those of matrix products, which round as the device does."""
        return self.kernel in (interact.interact, interact.interact_grad)

    @property
    def of_ids(self) -> bool:
        """Whether a program has numbers of ids alone, which any order of warps may add up."""
        return self.name.startswith(("route ", "cache ", "batch "))

    @property
    def copies(self) -> bool:
        """Whether a program has a row of the wire."""
        return self.kernel in (quantise.pack, quantise.unpack, quantise.pack4, quantise.unpack4)

    @property
    def of_rows(self) -> bool:
        """Whether a program works on one row at a time."""
        return self.kernel in (update.apply, update.sum_units)


def _descriptors(row_type: RowType, dim: int, optimizer: Any) -> tuple[FeatureDescriptor, TableDescriptor]:
    table = TablePiece(*[Table(name="t", rows=100, dim=dim, row_type=row_type, optimizer=optimizer)] * 2)
    group = make_group([table], lay_out_tables([table])[0])
    return FeatureDescriptor.read(group.features_FC)[0], TableDescriptor.read(group.tables_TC)[0]


def variants() -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for row_type in RowType:
        for dim in DIMS:
            feature, _ = _descriptors(row_type, dim, RowWiseAdagrad())
            bucket = specialise.bucket_of(feature)
            named = f"{row_type.value} dim {dim}"
            lookups = ((*one, bucket) for one in _lookups(bucket))
            for kind, kernel, constants, its_bucket in (*lookups, *_updates(row_type, dim)):
                name = f"{kind} {named}"
                found[name] = Variant(name, kernel, constants, row_type, dim, its_bucket)
    return found | _variants_of_dense() | _variants_of_ids()


def _variants_of_dense() -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for dim in DIMS:
        for choice in Choice:
            name = f"sum_sampled {choice.name.lower()} dim {dim}"
            sums = {"WIDTH": SAMPLED, "CHOICE": int(choice), "RESCALED": True}
            sums |= specialise.sampled_constants(dim, SAMPLED)
            found[name] = Variant(name, graph.sum_sampled, sums, RowType.FP32, dim)
        for kernel in (interact.interact, interact.interact_grad):
            shape = specialise.interact_shape(VECTORS, nvidia=True)
            if shape is not None:
                name = f"{kernel.__name__} dim {dim}"
                found[name] = Variant(name, kernel, shape | {"dim": dim}, RowType.FP32, dim)
        for kernel in (quantise.pack, quantise.unpack):
            for group in (0, 16):
                name = f"{kernel.__name__} groups of {group or dim} dim {dim}"
                shape = ONE_WARP | {"GROUP": group, "BLOCK": specialise.power_of_two(dim)}
                found[name] = Variant(name, kernel, shape, RowType.INT8, dim)
        for kernel in (quantise.pack4, quantise.unpack4):
            name, block = f"{kernel.__name__} dim {dim}", specialise.power_of_two(max(8, dim))
            found[name] = Variant(name, kernel, ONE_WARP | {"BLOCK": block}, RowType.INT4, dim)
    return found


def _variants_of_ids() -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for what, some in (("route", _routes()), ("cache", _caches()), ("batch", _batches())):
        for kind, kernel, constants in some:
            found[f"{what} {kind}"] = Variant(f"{what} {kind}", kernel, constants, RowType.FP32, 128)
    return found


def _caches() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    warps = {"num_warps": specialise.TILE_WARPS}
    tiled = warps | {"TILE": specialise.TILE}
    yield "number_rows", cache.number_rows, warps | {"IDS": slots.IDS}
    yield "find_firsts", cache.find_firsts, tiled
    yield "find_rows", cache.find_rows, warps | {"ROWS": slots.ROWS}
    yield "choose_ways", cache.choose_ways, {"num_warps": 1}
    yield "enter", cache.enter, tiled
    yield "write_slots", cache.write_slots, tiled | {"CHANGES": 1}
    yield "count", cache.count, warps | {"COUNTS": 1, "TILE": slots.COUNTED}
    for unit in (1, 4):
        copies = {"UNIT": unit, "BLOCK": 128, "num_warps": 1}
        for out in (False, True):
            yield f"move {'out' if out else 'in'} {unit}", cache.move, copies | {"OUT": out}
        yield f"leave_overflow {unit}", cache.leave_overflow, copies


def _routes() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    warps = {"num_warps": specialise.TILE_WARPS}
    tiled = warps | {"TILE": specialise.TILE}
    for name in ("count_ids", "find_rows", "cut", "write_records"):
        yield name, getattr(contributions, name), tiled
    for pooling in POOLINGS:
        bags, ids = specialise.expand_shape(pooling)
        yield f"expand {pooling:g} ids", contributions.expand, warps | {"BAGS": bags, "IDS": ids}
    for name, per_id, scaled in (("pooled", False, False), ("scaled", False, True), ("per id", True, False)):
        shape = tiled | {"PER_ID": per_id, "SCALED": scaled, "HAS_WEIGHTS": scaled}
        yield f"locate {name}", contributions.locate, shape
    yield "find_bounds", contributions.find_bounds, {"num_warps": 1, "BOUNDS": specialise.BOUNDS}


def _batches() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    of_features = jagged.WARPS | {"IDS": jagged.IDS}
    for name in ("copy_segments", "place_ids", "write_ids"):
        yield name, getattr(rearrange, name), jagged.TILED | {"HAS_WEIGHTS": True}
    for name in ("find_bags", "find_buckets", "find_distinct", "write_distinct"):
        yield name, getattr(rearrange, name), jagged.TILED
    for name in ("find_outside", "find_newer"):
        yield name, getattr(rearrange, name), of_features
    for pooling in POOLINGS:
        bags, ids = specialise.expand_shape(pooling)
        shape = jagged.WARPS | {"BAGS": bags, "IDS": ids, "HAS_WEIGHTS": True}
        yield f"copy_bags {pooling:g} ids", rearrange.copy_bags, shape
    for kind in SectionKind:
        yield f"map_section {kind.name.lower()}", idmap.map_section, of_features | {"KIND": int(kind)}


def _lookups(bucket: specialise.Bucket) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    shared, align = constants_of(bucket), {"OUT_ALIGN": min(4, bucket.divisor)}
    for pooling in POOLINGS:
        tiles, bags, ids = specialise.lookup_shape(bucket, pooling)
        one = shared | align | {"BAGS": bags, "IDS": ids, "TILES": tiles, "HAS_WEIGHTS": False}
        yield f"pool {pooling:g} ids", lookup.pool, one
        if pooling > 2:
            yield "pool weighted", lookup.pool, one | {"HAS_WEIGHTS": True}
            yield "pool_weight_grad", lookup.pool_weight_grad, shared | align | {"BAGS": bags}
    yield "gather", lookup.gather, shared | align | {"IDS": specialise.lookup_shape(bucket, 1.0).bags}


def _updates(row_type: RowType, dim: int) -> Iterator[tuple[str, Any, dict[str, Any], specialise.Bucket]]:
    for name, kind in OPTIMIZERS.items() if row_type.facts.trained else ():
        if kind is not RowWiseAdagrad and dim not in (64, 128):
            continue
        bucket = specialise.bucket_of(_descriptors(row_type, dim, kind())[1])
        shared, grad_align = constants_of(bucket), min(4, bucket.divisor)
        sums = {"TERMS": specialise.TERMS, "GRAD_ALIGN": grad_align}
        one = shared | sums | {"RULE": bucket.rule, "STATE_ALIGN": specialise.state_align(bucket), "HAS_SLOTS": False}
        yield f"apply {name}", update.apply, one | {"UNITS": False, "SCALED": False}, bucket
        if kind is RowWiseAdagrad:
            yield f"apply {name} units", update.apply, one | {"UNITS": True, "SCALED": False}, bucket
            yield f"apply {name} scaled", update.apply, one | {"UNITS": False, "SCALED": True}, bucket
            of_units = {key: shared[key] for key in ("BLOCK", "DIVISOR", "num_warps", "enable_fp_fusion")}
            if row_type is RowType.FP32:
                more = {"TERMS": specialise.TERMS_OF_UNIT, "SCALED": False}
                yield "sum_units", update.sum_units, of_units | sums | more, bucket
