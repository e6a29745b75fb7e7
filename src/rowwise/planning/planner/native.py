"""The search's inner loop, which is in C: placements in, better placements out.

This is the planner's only call into compiled code. `PlacementProblem` guarantees the shapes of arrays; a call changes
copies only.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int32, c_int64, c_uint64, c_void_p
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowwise.base.library import Signatures, bind_library
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.cost import Hinges, Ints
from rowwise.planning.perf.links import LinkArrays
from rowwise.planning.planner.problem import NO_UNIT, Index, Placement, PlacementProblem

LIBRARY = "librowwise_plan.so"
UNBOUNDED = 1e300
MAX_LOADS, MAX_HINGES = 128, 256  # sizes of arrays in _c/plan.h


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("items", "options", "pieces", "hosts", "devices", "loads", "tiers", "groups")),
        ("item_begin", c_void_p), ("option_begin", c_void_p), ("option_unit_kind", c_void_p), ("piece_load", c_void_p),
        ("piece_link", c_void_p), ("piece_bytes", c_void_p), ("limit", c_void_p), ("item_rule", c_void_p),
        ("allowed", c_void_p), ("home", c_void_p), ("stay_bytes", c_void_p), ("group_end", c_void_p),
        ("group_power", c_void_p), ("constant", c_double), ("hinges", c_int32), ("hinge_weight", c_void_p),
        ("hinge_offset", c_void_p), ("hinge_out", c_void_p),
    ]  # fmt: skip


class _Effort(ctypes.Structure):
    _fields_ = [
        ("seed", c_uint64), ("moves", c_int64), ("hot", c_double), ("cold", c_double), ("limit_s", c_double),
        ("smooth", c_double), ("bytes_price", c_double),
    ]  # fmt: skip


class _AnnealResult(ctypes.Structure):
    _fields_ = [("cost", c_double), ("over", c_double), ("moves", c_int64), ("stopped", c_int32)]


class _Neuroshard(ctypes.Structure):
    _fields_ = [*((name, c_int32) for name in ("beam", "candidates", "depth", "grid")), ("widest", c_double)]


class _Links(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("hosts", "groups", "collective", "keep_first")),
        *((name, c_void_p) for name in ("latency", "rate", "group", "uplink")), ("size_bytes", c_double),
    ]  # fmt: skip


class AnnealingEffort(NamedTuple):
    """The length and the temperatures of annealing."""

    moves: int
    seed: int = 0
    hot: float = 0.02  # first temperature, as a share of the start's cost
    cold: float = 1e-5  # last temperature
    limit_s: float = 1e9
    smooth: float = 0.3  # share of a smooth maximum over ranks in the annealed cost; the rest is the maximum
    bytes_price: float = 0.0  # seconds of a step that a byte moved from its home costs


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


@functools.cache
def _library() -> Any:
    problem, links, effort, numbers = POINTER(_Problem), POINTER(_Links), POINTER(_Effort), c_void_p
    signatures: Signatures = {
        "rw_cost": (c_double, [problem, numbers, POINTER(c_double)]),
        "rw_anneal": (_AnnealResult, [problem, effort, numbers, numbers]),
        "rw_greedy": (c_int32, [problem, numbers, c_int32, c_int32, numbers, numbers, c_double, numbers]),
        "rw_neuroshard": (c_double, [problem, POINTER(_Neuroshard), numbers, c_int32, numbers, numbers, numbers]),
        "rw_order_seconds": (c_double, [links, numbers]),
        "rw_order_exact": (c_double, [links, numbers]),
        "rw_order_anneal": (c_double, [links, effort, numbers]),
    }
    return bind_library(LIBRARY, signatures)


def _parameters(effort: AnnealingEffort) -> _Effort:
    fields = effort._asdict() | {"limit_s": min(effort.limit_s, 1e9)}
    return _Effort(**fields)


class NativeProblem:
    """A problem as the C structure; keeps the arrays alive that its pointers point to."""

    def __init__(self, problem: PlacementProblem, homes: Homes | None = None) -> None:
        self.problem = problem
        phi, topology = problem.phi, problem.topology
        assert phi.width <= MAX_LOADS
        self._arrays: list[NDArray[Any]] = []
        self._struct = _Problem(
            items=len(problem.members),
            options=len(problem.option_kind),
            pieces=len(problem.pieces.link_N),
            hosts=topology.hosts,
            devices=topology.devices,
            loads=phi.width,
            tiers=len(problem.limit_M),
            groups=len(phi.ends),
            item_begin=self._pointer(problem.item_begin, np.int32),
            option_begin=self._pointer(problem.option_begin, np.int32),
            option_unit_kind=self._pointer(problem.unit_kind_O, np.uint8),
            piece_load=self._pointer(problem.pieces.load_NK, np.float64),
            piece_link=self._pointer(problem.pieces.link_N, np.float64),
            piece_bytes=self._pointer(problem.pieces.bytes_NM, np.float64),
            limit=self._pointer(problem.limit_M, np.float64),
            item_rule=self._pointer(problem.rule_I, np.int32),
            allowed=self._pointer(problem.allowed_RU, np.uint8),
            home=self._pointer(homes.unit_N, np.int32) if homes else None,
            stay_bytes=self._pointer(homes.stay_bytes_N, np.float64) if homes else None,
            group_end=self._pointer(np.array(phi.ends), np.int32),
            group_power=self._pointer(np.array(phi.powers), np.float64),
            constant=phi.constant,
            **self._hinges(phi.hinges),
        )

    def _hinges(self, hinges: Hinges | None) -> dict[str, int]:
        if hinges is None:
            return {"hinges": 0}
        assert len(hinges.outs_H) <= MAX_HINGES
        return {
            "hinges": len(hinges.outs_H),
            "hinge_weight": self._pointer(hinges.weights_HK.T, np.float64),
            "hinge_offset": self._pointer(hinges.offsets_H, np.float64),
            "hinge_out": self._pointer(hinges.outs_H, np.float64),
        }

    def _pointer(self, array: NDArray[Any], kind: Any) -> int:
        self._arrays.append(np.ascontiguousarray(array, dtype=kind))
        return self._arrays[-1].ctypes.data

    def cost(self, unit_of_N: Index) -> tuple[float, float]:
        """Seconds, and bytes over the limits as a share of them."""
        over, unit_N = c_double(), np.ascontiguousarray(unit_of_N, dtype=np.int32)
        return float(_library().rw_cost(self._struct, unit_N.ctypes.data, over)), over.value

    def candidate(self, placement: Placement) -> Candidate:
        return Candidate(placement, *self.cost(placement.unit_N), 0, False)

    def anneal(self, start: Placement, effort: AnnealingEffort) -> Candidate:
        """The best placement met while annealing. See [Note: Annealing] in `_c/anneal.c`."""
        choice_I, unit_N = start.choice_I.astype(np.int32), start.unit_N.astype(np.int32)
        result = _library().rw_anneal(self._struct, _parameters(effort), choice_I.ctypes.data, unit_N.ctypes.data)
        if result.cost < 0:
            raise MemoryError("the planner's search ran out of memory")
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

        A unit for each piece; None if a piece fits nowhere under `link_limit`, or may be nowhere.
        """
        measure = 1 if key_N is not None else 2 if scale is not None else 0
        order = np.ascontiguousarray(pieces, dtype=np.int32)
        key = None if key_N is None else np.ascontiguousarray(key_N, dtype=np.float64)
        scales = None if scale is None else np.ascontiguousarray(scale, dtype=np.float64)
        unit_N = np.full(self._struct.pieces, NO_UNIT, dtype=np.int32)
        done = _library().rw_greedy(
            self._struct,
            order.ctypes.data,
            len(order),
            measure,
            None if key is None else key.ctypes.data,
            None if scales is None else scales.ctypes.data,
            link_limit,
            unit_N.ctypes.data,
        )
        return unit_N if done == len(order) else None

    def neuroshard(self, halving_IL: Index, beam: int, candidates: int, depth: int, grid: int) -> "MethodResult":
        """NeuroShard's search; `halving_IL` is the piece of each item after L halvings, or -1."""
        parameters = _Neuroshard(beam, candidates, depth, grid, 1.5)
        table = np.ascontiguousarray(halving_IL, dtype=np.int32)
        room = len(self.problem.members) + depth + 1  # each halving makes one more shard
        piece, rank, count = np.zeros(room, np.int32), np.zeros(room, np.int32), c_int32()
        out = (piece.ctypes.data, rank.ctypes.data, ctypes.byref(count))
        cost = _library().rw_neuroshard(self._struct, parameters, table.ctypes.data, table.shape[1], *out)
        return MethodResult(piece[: count.value], rank[: count.value], cost if cost < UNBOUNDED else None)


class MethodResult(NamedTuple):
    """What a published method found: pieces, of an item perhaps of several sizes, their ranks, and their cost.

    `cost` is in seconds; None if the method found no placement that fits.
    """

    piece_S: Index
    rank_S: Index
    cost: float | None

    @classmethod
    def of(cls, problem: PlacementProblem, unit_N: Index | None) -> "MethodResult":
        """From a unit for each piece; None: the method found nothing."""
        if unit_N is None:
            return cls(np.zeros(0, np.int32), np.zeros(0, np.int32), None)
        pieces = np.flatnonzero(unit_N != NO_UNIT).astype(np.int32)
        cost, over = NativeProblem(problem).cost(unit_N)
        return cls(pieces, unit_N[pieces], None if over > 0 else cost)


class OrderProblem:
    """A network and a collective as the C structure, for searches of an order of hosts."""

    def __init__(self, net: LinkArrays, collective: int, size_bytes: float, *, keep_first: bool) -> None:
        """`collective`: its number in `_c/order.c`. `keep_first`: host 0 is first, and groups stay together."""
        kinds = (np.float64, np.float64, np.int32, np.float64)
        self._arrays = [np.ascontiguousarray(array, dtype=kind) for array, kind in zip(net, kinds, strict=True)]
        pointers = [array.ctypes.data for array in self._arrays]
        self._struct = _Links(net.hosts, len(net.uplink_G), collective, keep_first, *pointers, size_bytes)

    def seconds(self, order: Ints) -> float:
        order_H = np.ascontiguousarray(order, dtype=np.int32)
        return _check_memory(_library().rw_order_seconds(self._struct, order_H.ctypes.data))

    def exact(self, given: Ints) -> Ints:
        """The best of all orders of at most 8 hosts; the given one unless another is better."""
        order_H = given.astype(np.int32)
        _check_memory(_library().rw_order_exact(self._struct, order_H.ctypes.data))
        return order_H.astype(np.int64)

    def anneal(self, start: Ints, effort: AnnealingEffort) -> Ints:
        """The best order met while annealing."""
        order_H = start.astype(np.int32)
        _check_memory(_library().rw_order_anneal(self._struct, _parameters(effort), order_H.ctypes.data))
        return order_H.astype(np.int64)


def _check_memory(seconds: float) -> float:
    if seconds < 0:
        raise MemoryError("the planner's search ran out of memory")
    return seconds
