"""Networks for exchanges: seconds of each rank to send and receive vectors, and its waits for other ranks.

NeuroShard's models of communication: forward, from each rank's columns and how much later it begins than the first;
backward, from columns alone. Here one small network serves any rank of any number of ranks: its inputs are that rank's
amounts, and mean and maximum over all ranks. It corrects a nominal time (a start, bytes at a price, and the wait for
the rank that begins last) by a factor. Layouts are ignored.
"""

from typing import NamedTuple

import numpy as np

from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.network import MAX_DEVIATIONS, check_shapes
from rowwise.tables.spec import Value

REACH = 2.0  # largest logarithm of the factor
FLOAT_bytes, MILLI = 4, 1e-3
FEATURES = 10  # of `exchange_features`


class Amounts(NamedTuple):
    """Bytes that each rank sends and receives in an exchange."""

    dim_W: Floats  # columns of vectors that each rank looks up for a sample
    ids_W: Floats  # that each rank receives
    batch: int  # samples of all ranks
    skew_W: Floats  # seconds by which each rank begins later than the first


class ExchangeNetwork(Value, frozen=True, kw_only=True):
    """Weights of the network of one exchange of a step."""

    start_s: float  # nominal seconds of an exchange
    byte_s: float  # nominal seconds of a byte of vectors
    id_s: float  # nominal seconds of an id
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    inner: tuple[tuple[float, ...], ...]  # features x hidden
    inner_offset: tuple[float, ...]
    outer: tuple[float, ...]
    outer_offset: float

    def __post_init__(self) -> None:
        hidden = len(self.inner_offset)
        check_shapes(self, mean=(FEATURES,), scale=(FEATURES,), inner=(FEATURES, hidden), outer=(hidden,))

    def __call__(self, amounts: Amounts) -> Floats:
        """Seconds of each rank, from when it begins."""
        return self.transfer_s(amounts) + waits_s(amounts.skew_W)

    def transfer_s(self, amounts: Amounts) -> Floats:
        """Seconds of each rank without the wait for the rank that begins last."""
        input_WF = np.clip(
            (exchange_features(amounts) - np.array(self.mean)) / np.array(self.scale), -MAX_DEVIATIONS, MAX_DEVIATIONS
        )
        hidden_WH = np.maximum(input_WF @ np.array(self.inner) + np.array(self.inner_offset), 0.0)
        factor_W = np.exp(REACH * np.tanh(hidden_WH @ np.array(self.outer) + self.outer_offset))
        return nominal_s(amounts, (self.start_s, self.byte_s, self.id_s)) * factor_W


class WireCost(Value, frozen=True, kw_only=True):
    """The time that a narrow wire adds to an exchange in one direction: coding at both ends, less the bytes saved."""

    start_s: float  # for a message to each other rank, and one from it
    vector_s: float  # of a vector that leaves its rank
    float_s: float  # of each of its floats; below 0 where the saved bytes are worth more

    def seconds(self, messages: float, vectors_W: Floats, floats_W: Floats) -> Floats:
        return messages * self.start_s + vectors_W * self.vector_s + floats_W * self.float_s


class NarrowWires(Value, frozen=True, kw_only=True):
    """Added costs by type of the wire."""

    fp16: WireCost
    bf16: WireCost
    int8: WireCost


class Exchanges(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Networks of all exchanges of a step."""

    route: ExchangeNetwork
    forward: ExchangeNetwork
    backward: ExchangeNetwork
    narrow: NarrowWires | None = (
        None  # None if not measured; then rates price coding, and fewer bytes count as fewer columns
    )
    error: float  # mean absolute relative error of their sum, on exchanges held out
    samples: int


def exchange_features(amounts: Amounts) -> Floats:
    """Features (W, F) of each rank."""
    dim_W, ids_W = amounts.dim_W, amounts.ids_W
    world = len(dim_W)
    shared = (dim_W.mean(), dim_W.max(), ids_W.mean(), ids_W.max(), amounts.batch, world)
    mean_dim, max_dim, mean_ids, max_ids, batch, ranks = (np.full(world, np.log1p(value)) for value in shared)
    late_W, wait_W = np.log1p(amounts.skew_W / MILLI), np.log1p(waits_s(amounts.skew_W) / MILLI)
    columns = (np.log1p(dim_W), mean_dim, max_dim, np.log1p(ids_W), mean_ids, max_ids, batch, ranks, late_W, wait_W)
    return np.stack(columns, axis=1)


def waits_s(seconds_W: Floats) -> Floats:
    """Seconds that each rank waits for the last, if `seconds_W` is their time since they last met."""
    return seconds_W.max() - seconds_W


def nominal_s(amounts: Amounts, prices: tuple[float, float, float]) -> Floats:
    """Seconds of each rank by prices alone; bytes that it sends and receives count half each."""
    start, byte, id_ = prices
    remote = (len(amounts.dim_W) - 1) / len(amounts.dim_W)
    vectors_W = (amounts.dim_W + amounts.dim_W.mean()) / 2 * amounts.batch * FLOAT_bytes * remote
    ids_W = (amounts.ids_W + amounts.ids_W.mean()) / 2 * remote
    return start + byte * vectors_W + id_ * ids_W
