"""The interface of cost models: pieces of tables in, loads out, and the cost of a sum of loads as data.

[Note: Cost] A piece of a table on a rank has a vector of K loads (seconds that it would hold each resource for). Loads
of one rank add up; the rank's fused operators then take `phi` of the sum, which is convex and grows with every
load but is not additive: a device that waits for memory computes meanwhile. A step takes

    F = max over ranks of phi(sum of loads) + max over ranks of (sum of seconds on links),

because ranks meet before and after the exchange. `phi` is data, not code: the search evaluates it in C, numpy here
is its reference, and bounds rely on its being convex. Models by published rates, by measured rates and by learned
networks implement this interface.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rowwise.parallel.plan import Tier
from rowwise.planning.perf.access import Curves, Floats
from rowwise.tables.spec import Topology, VectorExchange, Wire

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Hinges:
    """A layer of a network: the sum over hinges of out * max(0, weights . loads + offset); 0 at no load."""

    weights_HK: Floats
    offsets_H: Floats
    outs_H: Floats

    def __call__(self, load_NK: Floats) -> Floats:
        raised = np.maximum(load_NK @ self.weights_HK.T + self.offsets_H, 0.0)
        return raised @ self.outs_H - self.value_at_zero

    def gradient(self, load_NK: Floats) -> Floats:
        """Derivatives by each load."""
        rises = (load_NK @ self.weights_HK.T + self.offsets_H > 0) * self.outs_H
        return rises @ self.weights_HK

    @property
    def value_at_zero(self) -> float:
        return float(np.maximum(self.offsets_H, 0.0) @ self.outs_H)

    @property
    def is_convex(self) -> bool:
        """Whether the layer is convex and never falls with more load."""
        return bool((self.weights_HK >= 0).all() and (self.outs_H >= 0).all())


@dataclass(frozen=True, slots=True)
class Phi:
    """constant + the sum over groups of neighbouring loads of their p-norm (p = 1 is the sum) + hinges.

    Groups may end before the loads do; the rest is for the hinges, which get all loads.
    """

    constant: float
    ends: tuple[int, ...]  # where each group ends; the first begins at 0
    powers: tuple[float, ...]
    hinges: Hinges | None = None

    @property
    def width(self) -> int:
        return self.ends[-1] if self.hinges is None else self.hinges.weights_HK.shape[1]

    @property
    def is_convex(self) -> bool:
        """Whether bounds hold; see [Note: Bounds]."""
        return self.hinges is None or self.hinges.is_convex

    def __call__(self, load_NK: Floats) -> Floats:
        """Seconds for sums of loads; the constant at no load."""
        total, begin = np.full(load_NK.shape[:-1], self.constant), 0
        for end, power in zip(self.ends, self.powers, strict=True):
            total = total + _norm(load_NK[..., begin:end], power)
            begin = end
        # Negative weights may give a negative sum; seconds are not.
        return total if self.hinges is None else np.maximum(total + self.hinges(load_NK), 0.0)

    def gradient(self, load_NK: Floats) -> Floats:
        """Derivatives by each load; where a group is all 0, as if its loads were equal."""
        slope, begin = np.zeros_like(load_NK), 0
        for end, power in zip(self.ends, self.powers, strict=True):
            part = load_NK[..., begin:end]
            norm = _norm(part, power)[..., None]
            even = (end - begin) ** (1 / power - 1)
            ratio = np.divide(part, norm, out=np.zeros_like(part), where=norm > 0)
            slope[..., begin:end] = np.where(norm > 0, ratio ** (power - 1), even)
            begin = end
        return slope if self.hinges is None else slope + self.hinges.gradient(load_NK)


@dataclass(frozen=True, slots=True)
class CostStage:
    """A stage of a step that the runtime times, with the indices of its loads."""

    name: str
    loads: tuple[int, ...]
    constant: float

    def seconds(self, phi: Phi, load_NK: Floats) -> Floats:
        """The stage's part of phi; stages share no group and no hinge."""
        own_NK = np.zeros_like(load_NK)
        own_NK[..., self.loads] = load_NK[..., self.loads]
        return self.constant + phi(own_NK) - phi.constant


def _norm(part: Floats, power: float) -> Floats:
    if power == 1:
        return part.sum(-1)
    top = part.max(-1, keepdims=True)  # factored out, or small loads to a high power would underflow to 0
    scaled = np.divide(part, top, out=np.zeros_like(part), where=top > 0)
    return top[..., 0] * (scaled**power).sum(-1) ** (1 / power)


@dataclass(frozen=True, slots=True)
class Shards:
    """Pieces of tables that are cut and exchanged alike, as arrays over pieces."""

    exchange: VectorExchange
    table_N: Ints
    row_parts: int  # number of pieces along the rows
    rows_N: Floats  # of the piece
    dim_N: Floats  # of the piece
    bags_N: Floats  # vectors per sample: one for each feature, one for each id of a sequence
    row_bytes_N: Floats  # stored bytes of the piece's part of a row
    state_bytes_N: Floats
    share: float  # of a step's samples looked up in it: 1, or 1 / W for a replica, which serves its own rank
    tier: Tier
    cached: float  # share of the rows cached in a tier above
    cache_tier: Tier = "device"  # the tier of the cache


class AccessCounts(NamedTuple):
    """Ids, distinct rows and vectors of a step, for each piece."""

    ids_N: Floats
    distinct_N: Floats  # rows that are read
    written_N: Floats  # rows that are written: a replica writes those of all ranks
    vectors_N: Floats

    @classmethod
    def of(cls, shards: Shards, curves: Curves) -> "AccessCounts":
        samples = curves.batch * shards.share
        unique_T = curves.unique_T if shards.share == 1 else curves.unique_of(shards.share)
        return cls(
            curves.pooling_T[shards.table_N] * samples / shards.row_parts,
            np.minimum(unique_T[shards.table_N] / shards.row_parts, shards.rows_N),
            np.minimum(curves.unique_T[shards.table_N] / shards.row_parts, shards.rows_N),
            shards.bags_N * samples,
        )


class CostModel(Protocol):
    """Prices pieces of tables. See [Note: Cost]."""

    @property
    def phi(self) -> Phi: ...

    @property
    def name(self) -> str:
        """The name in plans and reports."""
        ...

    @property
    def wire(self) -> Wire:
        """Types of vectors on links."""
        ...

    @property
    def stages(self) -> tuple[CostStage, ...]:
        """The stages of a step with their parts of phi; empty if the model has none."""
        ...

    def on(self, topology: Topology) -> "CostModel":
        """The same model on another topology."""
        ...

    def loads(self, shards: Shards, curves: Curves) -> Floats:
        """Loads (N, K) of each piece on its rank."""
        ...

    def links_s(self, shards: Shards, curves: Curves) -> Floats:
        """Seconds (N) on links, of each piece on its rank."""
        ...
