"""Networks for exchanges: how long each rank takes to send and to get vectors, and waits for the others.

NeuroShard's models of communication: forward, from each rank's columns and how much later it begins than the first;
backward, from columns alone. Here one small network answers for any rank of any number of ranks: it sees that rank's
amounts beside the mean and the most of all, and corrects a nominal time (a start, bytes at a price, and the wait for
whoever begins last) by a factor. Known limits: layouts; all vectors are alike.
"""

from typing import NamedTuple

import numpy as np

from rowwise.perf.access import Floats
from rowwise.perf.network import FAR
from rowwise.spec import Value

REACH = 2.0  # logarithm of the largest factor
FLOAT_bytes, MILLI = 4, 1e-3


class Amounts(NamedTuple):
    """The vectors and ids that ranks exchange in a step."""

    dim_W: Floats  # columns of vectors that each makes
    ids_W: Floats  # that each gets
    batch: int  # samples of all ranks
    skew_W: Floats  # seconds that each begins later than the first


class ExchangeNetwork(Value, frozen=True, kw_only=True):
    """The numbers of one network, for one of the exchanges of a step."""

    start_s: float  # nominal: of an exchange,
    byte_s: float  # of a byte of vectors,
    id_s: float  # of an id
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    inner: tuple[tuple[float, ...], ...]  # features x hidden
    inner_offset: tuple[float, ...]
    outer: tuple[float, ...]
    outer_offset: float

    def __call__(self, amounts: Amounts) -> Floats:
        """Seconds of each rank, from when it begins."""
        return self.own_s(amounts) + waits_s(amounts.skew_W)

    def own_s(self, amounts: Amounts) -> Floats:
        given_WF = np.clip((exchange_features(amounts) - np.array(self.mean)) / np.array(self.scale), -FAR, FAR)
        hidden_WH = np.maximum(given_WF @ np.array(self.inner) + np.array(self.inner_offset), 0.0)
        factor_W = np.exp(REACH * np.tanh(hidden_WH @ np.array(self.outer) + self.outer_offset))
        return nominal_s(amounts, (self.start_s, self.byte_s, self.id_s)) * factor_W


class WireCost(Value, frozen=True, kw_only=True):
    """The time that a narrow wire adds to an exchange in one direction: coding at both ends, less the bytes saved."""

    start_s: float  # for a message to each other rank, and one from it
    vector_s: float  # of a vector that leaves its rank
    float_s: float  # of each of its floats; below 0 where the saved bytes are worth more

    def seconds(self, messages: int, vectors_W: Floats, floats_W: Floats) -> Floats:
        return messages * self.start_s + vectors_W * self.vector_s + floats_W * self.float_s


class NarrowWires(Value, frozen=True, kw_only=True):
    """By type of the wire."""

    fp16: WireCost
    bf16: WireCost
    int8: WireCost


class Exchanges(Value, frozen=True, kw_only=True, omit_defaults=True):
    """The networks for the exchanges of a step."""

    route: ExchangeNetwork
    forward: ExchangeNetwork
    backward: ExchangeNetwork
    narrow: NarrowWires | None = (
        None  # None: was not measured, so coding is by rates, and bytes are as those of fewer floats
    )
    error: float  # on exchanges that they had not seen, mean of the absolute relative error of all together
    samples: int


def exchange_features(amounts: Amounts) -> Floats:
    """Features (W, F) of each rank."""
    dim_W, ids_W = amounts.dim_W, amounts.ids_W
    world = len(dim_W)
    same = (dim_W.mean(), dim_W.max(), ids_W.mean(), ids_W.max(), amounts.batch, world)
    mean_dim, most_dim, mean_ids, most_ids, batch, ranks = (np.full(world, np.log1p(value)) for value in same)
    late_W, wait_W = np.log1p(amounts.skew_W / MILLI), np.log1p(waits_s(amounts.skew_W) / MILLI)
    columns = (np.log1p(dim_W), mean_dim, most_dim, np.log1p(ids_W), mean_ids, most_ids, batch, ranks, late_W, wait_W)
    return np.stack(columns, axis=1)


def waits_s(seconds_W: Floats) -> Floats:
    """How much each rank waits for the last one, of what they take from one collective to the next."""
    return seconds_W.max() - seconds_W


def nominal_s(amounts: Amounts, prices: tuple[float, float, float]) -> Floats:
    """Seconds of each rank if nothing but amounts mattered; what it sends and what it gets are half and half."""
    start, byte, one = prices
    away = (len(amounts.dim_W) - 1) / len(amounts.dim_W)
    vectors_W = (amounts.dim_W + amounts.dim_W.mean()) / 2 * amounts.batch * FLOAT_bytes * away
    ids_W = (amounts.ids_W + amounts.ids_W.mean()) / 2 * away
    return start + byte * vectors_W + one * ids_W
