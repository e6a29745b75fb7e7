"""The search's inner loop, which is in C: placements in, better placements out.

This is the planner's only call into compiled code. `PlacementProblem` guarantees the shapes of arrays; a call changes
copies only.
"""

from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_uint64
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowwise.base.library import CLibrary, Float64s, Int32s, NativeStruct, NeedsMemory, Uint8s
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.cost import Hinges, Ints
from rowwise.planning.perf.links import LinkArrays
from rowwise.planning.planner.problem import NO_UNIT, Index, Placement, PlacementProblem

UNBOUNDED = 1e300
OUT_OF_MEMORY = "the planner's search ran out of memory"
MAX_LOADS, MAX_HINGES = 128, 256  # sizes of arrays in _c/plan.h


class _Problem(NativeStruct):
    converts = True
    _fields_ = (
        *((name, c_int32) for name in ("items", "options", "pieces", "hosts", "devices", "loads", "tiers", "groups")),
        ("item_begin", Int32s), ("option_begin", Int32s), ("option_unit_kind", Uint8s), ("piece_load", Float64s),
        ("piece_link", Float64s), ("piece_bytes", Float64s), ("limit", Float64s), ("item_rule", Int32s),
        ("allowed", Uint8s), ("home", Int32s), ("stay_bytes", Float64s), ("group_end", Int32s),
        ("group_power", Float64s), ("constant", c_double), ("hinges", c_int32), ("hinge_weight", Float64s),
        ("hinge_offset", Float64s), ("hinge_out", Float64s),
    )  # fmt: skip


class _Effort(Structure):
    _fields_ = [
        ("seed", c_uint64), ("moves", c_int64), ("hot", c_double), ("cold", c_double), ("limit_s", c_double),
        ("smooth", c_double), ("bytes_price", c_double), ("timed", c_int32),
    ]  # fmt: skip


class _AnnealResult(Structure):
    _fields_ = [("cost", c_double), ("over", c_double), ("moves", c_int64), ("stopped", c_int32)]


class _Neuroshard(Structure):
    _fields_ = [*((name, c_int32) for name in ("beam", "candidates", "depth", "grid")), ("widest", c_double)]


class _Links(NativeStruct):
    converts = True
    _fields_ = (
        *((name, c_int32) for name in ("hosts", "groups", "collective", "keep_first")),
        ("latency", Float64s), ("rate", Float64s), ("group", Int32s), ("uplink", Float64s), ("size_bytes", c_double),
    )  # fmt: skip


class AnnealingEffort(NamedTuple):
    """The length and the temperatures of annealing."""

    moves: int
    seed: int = 0
    hot: float = 0.02  # first temperature, as a share of the start's cost
    cold: float = 1e-5  # last temperature
    limit_s: float = 1e9
    smooth: float = 0.3  # share of a smooth maximum over ranks in the annealed cost; the rest is the maximum
    bytes_price: float = 0.0  # seconds of a step that a byte moved from its home costs
    timed: bool = False  # whether cooling also follows the time, so that it ends before the limit does


class Homes(NamedTuple):
    """The units that hold pieces' rows now, and the bytes that stay if a piece goes there."""

    unit_N: Index
    stay_bytes_N: Floats


class Candidate(NamedTuple):
    """A placement with its cost."""

    placement: Placement
    cost: float
    over: float  # bytes over the memory limits, as shares of them, summed over ranks
    moves: int
    out_of_time: bool


_seconds = NeedsMemory(c_double, 0, OUT_OF_MEMORY)
library = CLibrary(
    "librowwise_plan.so",
    {
        "rw_cost": (c_double, [_Problem, Int32s, POINTER(c_double)]),
        "rw_anneal": (_AnnealResult, [_Problem, _Effort, Int32s, Int32s]),
        "rw_greedy": (c_int32, [_Problem, Int32s, c_int32, c_int32, Float64s, Float64s, c_double, Int32s]),
        "rw_neuroshard": (c_double, [_Problem, _Neuroshard, Int32s, c_int32, Int32s, Int32s, POINTER(c_int32)]),
        "rw_order_seconds": (_seconds, [_Links, Int32s]),
        "rw_order_exact": (_seconds, [_Links, Int32s]),
        "rw_order_anneal": (_seconds, [_Links, _Effort, Int32s]),
    },
)


def _parameters(effort: AnnealingEffort) -> _Effort:
    fields = effort._asdict() | {"limit_s": min(effort.limit_s, 1e9)}
    return _Effort(**fields)


def _hinge_fields(hinges: Hinges | None) -> dict[str, Any]:
    if hinges is None:
        return {}
    assert len(hinges.outs_H) <= MAX_HINGES
    return {
        "hinges": len(hinges.outs_H),
        "hinge_weight": hinges.weights_HK.T,
        "hinge_offset": hinges.offsets_H,
        "hinge_out": hinges.outs_H,
    }


class NativeProblem:
    """A problem as the C structure."""

    def __init__(self, problem: PlacementProblem, homes: Homes | None = None) -> None:
        self.problem = problem
        phi, topology = problem.phi, problem.topology
        assert phi.width <= MAX_LOADS
        self._struct = _Problem(
            items=len(problem.members),
            options=len(problem.option_kind),
            pieces=len(problem.pieces.link_N),
            hosts=topology.hosts,
            devices=topology.devices,
            loads=phi.width,
            tiers=len(problem.limit_M),
            groups=len(phi.ends),
            item_begin=problem.item_begin,
            option_begin=problem.option_begin,
            option_unit_kind=problem.unit_kind_O,
            piece_load=problem.pieces.load_NK,
            piece_link=problem.pieces.link_N,
            piece_bytes=problem.pieces.bytes_NM,
            limit=problem.limit_M,
            item_rule=problem.rule_I,
            allowed=problem.allowed_RU,
            home=homes.unit_N if homes else None,
            stay_bytes=homes.stay_bytes_N if homes else None,
            group_end=np.array(phi.ends),
            group_power=np.array(phi.powers),
            constant=phi.constant,
            **_hinge_fields(phi.hinges),
        )

    def cost(self, unit_of_N: Index) -> tuple[float, float]:
        """Seconds, and bytes over the limits as a share of them."""
        over, unit_N = c_double(), np.ascontiguousarray(unit_of_N, dtype=np.int32)
        return float(library.rw_cost(self._struct, unit_N, over)), over.value

    def candidate(self, placement: Placement) -> Candidate:
        return Candidate(placement, *self.cost(placement.unit_N), 0, False)

    def anneal(self, start: Placement, effort: AnnealingEffort) -> Candidate:
        """The best placement met while annealing. See [Note: Annealing] in `_c/anneal.c`."""
        choice_I, unit_N = start.choice_I.astype(np.int32), start.unit_N.astype(np.int32)
        result = library.rw_anneal(self._struct, _parameters(effort), choice_I, unit_N)
        if result.cost < 0:
            raise MemoryError(OUT_OF_MEMORY)
        return Candidate(Placement(choice_I, unit_N), result.cost, result.over, result.moves, bool(result.stopped))

    def greedy(
        self,
        pieces: NDArray[np.int64],
        *,
        key_N: Floats | None = None,
        scale: Sequence[float] | None = None,
        link_limit: float = UNBOUNDED,
    ) -> Index | None:
        """Places pieces in order, each where its rank then has least phi, sum of keys, or largest share of `scale`.

        Returns a unit for each piece; None if a piece fits on no allowed unit under `link_limit`.
        """
        measure = 1 if key_N is not None else 2 if scale is not None else 0
        order = np.ascontiguousarray(pieces, dtype=np.int32)
        key = None if key_N is None else np.ascontiguousarray(key_N, dtype=np.float64)
        scales = None if scale is None else np.ascontiguousarray(scale, dtype=np.float64)
        unit_N = np.full(self._struct.pieces, NO_UNIT, dtype=np.int32)
        done = library.rw_greedy(self._struct, order, len(order), measure, key, scales, link_limit, unit_N)
        return unit_N if done == len(order) else None

    def neuroshard(self, halving_IL: Index, beam: int, candidates: int, depth: int, grid: int) -> "MethodResult":
        """NeuroShard's search; `halving_IL` is the piece of each item after L halvings, or -1."""
        parameters = _Neuroshard(beam, candidates, depth, grid, 1.5)
        table = np.ascontiguousarray(halving_IL, dtype=np.int32)
        capacity = len(self.problem.members) + depth + 1  # each halving makes one more shard
        piece, rank, count = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32), c_int32()
        cost = library.rw_neuroshard(self._struct, parameters, table, table.shape[1], piece, rank, count)
        return MethodResult(piece[: count.value], rank[: count.value], cost if cost < UNBOUNDED else None)


class MethodResult(NamedTuple):
    """A published method's placement: pieces (of one item perhaps of several sizes), their ranks, and the cost.

    `cost` is in seconds; None if the method found no placement that fits.
    """

    piece_S: Index
    rank_S: Index
    cost: float | None

    @classmethod
    def of(cls, problem: PlacementProblem, unit_N: Index | None) -> "MethodResult":
        """From a unit for each piece; None if the method has no placement."""
        if unit_N is None:
            return cls(np.zeros(0, np.int32), np.zeros(0, np.int32), None)
        pieces = np.flatnonzero(unit_N != NO_UNIT).astype(np.int32)
        cost, over = NativeProblem(problem).cost(unit_N)
        return cls(pieces, unit_N[pieces], None if over > 0 else cost)


class OrderProblem:
    """A network and a collective as the C structure, for searches of an order of hosts."""

    def __init__(self, net: LinkArrays, collective: int, size_bytes: float, *, keep_first: bool) -> None:
        """`collective`: its number in `_c/order.c`. `keep_first`: host 0 is first, and groups stay together."""
        self._struct = _Links(net.hosts, len(net.uplink_G), collective, keep_first, *net, size_bytes)

    def seconds(self, order: Ints) -> float:
        order_H = np.ascontiguousarray(order, dtype=np.int32)
        return library.rw_order_seconds(self._struct, order_H)

    def exact(self, start: Ints) -> Ints:
        """The best order of at most 8 hosts, by exhaustive search; `start` unless another is better."""
        order_H = start.astype(np.int32)
        library.rw_order_exact(self._struct, order_H)
        return order_H.astype(np.int64)

    def anneal(self, start: Ints, effort: AnnealingEffort) -> Ints:
        """The best order met while annealing."""
        order_H = start.astype(np.int32)
        library.rw_order_anneal(self._struct, _parameters(effort), order_H)
        return order_H.astype(np.int64)
