"""The interface of cost models: pieces of tables in, loads out, and what a sum of loads costs as data.

[Note: cost] A piece of a table on a rank has a vector of K loads (seconds that it would hold each resource for). Loads
of one rank add up; what the rank's fused operators then take is `phi` of the sum, which is convex and grows with every
load but is not additive: a device that waits for memory computes meanwhile. A step takes

    F = max over ranks of phi(sum of loads) + max over ranks of (sum of seconds on links),

because ranks meet before and after the exchange. `phi` is data, not code: the search evaluates it in C, numpy here
is its reference, and bounds rely on its being convex.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rowwise.perf.access import Curves, Floats
from rowwise.plan import Tier
from rowwise.spec import Topology, VectorExchange, Wire

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Hinges:
    """A layer of a network: the sum over hinges of out * max(0, weights . loads + offset), less what it is at 0."""

    weights_HK: Floats
    offsets_H: Floats
    outs_H: Floats

    def __call__(self, load_NK: Floats) -> Floats:
        """What it adds for sums of loads."""
        raised = np.maximum(load_NK @ self.weights_HK.T + self.offsets_H, 0.0)
        return raised @ self.outs_H - self.ground

    def gradient(self, load_NK: Floats) -> Floats:
        rises = (load_NK @ self.weights_HK.T + self.offsets_H > 0) * self.outs_H
        return rises @ self.weights_HK

    @property
    def ground(self) -> float:
        """What the layer gives where there is no load."""
        return float(np.maximum(self.offsets_H, 0.0) @ self.outs_H)

    @property
    def is_convex(self) -> bool:
        """Whether no load makes anything cheaper, and each costs more the more there is."""
        return bool((self.weights_HK >= 0).all() and (self.outs_H >= 0).all())


@dataclass(frozen=True, slots=True)
class Phi:
    """constant + the sum over groups of neighbouring loads of their p-norm (p = 1 is their sum) + hinges.

    Groups may end before the loads do; what is left is for the hinges, which see all.
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
        """Whether bounds hold; see [Note: bounds]."""
        return self.hinges is None or self.hinges.is_convex

    def __call__(self, load_NK: Floats) -> Floats:
        """What sums of loads cost; at no load at all, the constant."""
        total, begin = np.full(load_NK.shape[:-1], self.constant), 0
        for end, power in zip(self.ends, self.powers, strict=True):
            total = total + _norm(load_NK[..., begin:end], power)
            begin = end
        # Weights that may be negative may make a sum negative, which no time is.
        return total if self.hinges is None else np.maximum(total + self.hinges(load_NK), 0.0)

    def gradient(self, load_NK: Floats) -> Floats:
        """By each load; where a group is all 0, as if its loads were equal."""
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
    """A part of a step that runs time by itself: what its own loads cost."""

    name: str
    loads: tuple[int, ...]
    constant: float

    def seconds(self, phi: Phi, load_NK: Floats) -> Floats:
        """What of phi is this stage's; stages share no group and no hinge."""
        own_NK = np.zeros_like(load_NK)
        own_NK[..., self.loads] = load_NK[..., self.loads]
        return self.constant + phi(own_NK) - phi.constant


def _norm(part: Floats, power: float) -> Floats:
    if power == 1:
        return part.sum(-1)
    top = part.max(-1, keepdims=True)  # taken out, or small loads to a high power would be 0
    scaled = np.divide(part, top, out=np.zeros_like(part), where=top > 0)
    return top[..., 0] * (scaled**power).sum(-1) ** (1 / power)


@dataclass(frozen=True, slots=True)
class Shards:
    """Pieces of tables that are cut and exchanged alike, as arrays over pieces."""

    exchange: VectorExchange
    table_N: Ints
    row_parts: int  # into how many pieces rows are cut
    rows_N: Floats  # of the piece
    dim_N: Floats  # of the piece
    bags_N: Floats  # vectors that a sample gets from it: one for each feature, one for each id of a sequence
    row_bytes_N: Floats  # of the piece's part of a row, as it is stored
    state_bytes_N: Floats
    share: float  # of a step's samples that the rank looks up in it: all of them, or its own
    tier: Tier
    cached: float  # share of the rows that the tier above holds


class AccessCounts(NamedTuple):
    """Ids, distinct rows, written rows and vectors of each piece in a step."""

    ids_N: Floats
    distinct_N: Floats  # rows that are read
    written_N: Floats  # rows that are written: a copy takes those of all ranks
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
    """Predicts the seconds of pieces. See [Note: cost]."""

    @property
    def phi(self) -> Phi: ...

    @property
    def name(self) -> str:
        """For plans and reports."""
        ...

    @property
    def wire(self) -> Wire: ...

    @property
    def stages(self) -> tuple[CostStage, ...]:
        """The parts of phi, by stage of a step; none if it does not tell."""
        ...

    def on(self, topology: Topology) -> "CostModel":
        """The same model of as many devices as another topology has."""
        ...

    def loads(self, shards: Shards, curves: Curves) -> Floats:
        """Loads (N, K) of each piece on its rank."""
        ...

    def links_s(self, shards: Shards, curves: Curves) -> Floats:
        """Seconds (N) on links, of each piece on its rank."""
        ...
