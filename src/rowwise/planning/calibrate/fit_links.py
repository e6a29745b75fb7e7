"""Fits latency and rates of links to exchanges of the runtime.

The formula is that of `Roofline.links_s`, which rates plans: a latency for each collective, then a price for each byte
of ids and of vectors of the rank with most. Prices include packing and unpacking, so the wire itself is faster. Several
collectives at once are not modelled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from rowwise.base.quantity import round_digits
from rowwise.planning.calibrate.samples import LinkSample
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.hardware import Hardware, LinkRates
from rowwise.planning.perf.roofline import COLLECTIVES, FLOAT_bytes
from rowwise.planning.planner.layouts import layout_named

MIN_EXCHANGES = 10  # exchanges that fitting needs
NEGLIGIBLE_s = 1e-15  # least price of a byte
MAX_id_bytes = 1000  # of the all-to-all: the most that an id may cost
USUAL_id_bytes = 8


@dataclass(frozen=True, slots=True)
class FittedLinks:
    """A profile with rates of links, the number of exchanges they are fitted to, and the error on those."""

    hardware: Hardware
    count: int
    error: float | None


def fit_links(samples: Sequence[LinkSample], hardware: Hardware) -> FittedLinks:
    """Fits the links inside a host; with too few measurements, the profile keeps its rates."""
    unskewed = [s for s in samples if max(s.skew_W) == 0]
    if len(unskewed) < MIN_EXCHANGES:
        return FittedLinks(hardware, len(samples), None)
    amount_SK = np.array([list_amounts(s) for s in unskewed])
    measured_S = np.array([step_s(s) for s in unskewed])
    price_K = _fit_prices(amount_SK, measured_S)
    if price_K[1] > MAX_id_bytes * price_K[2]:  # the two are collinear: an id then costs as much as its bytes
        amount_SK[:, 2] += USUAL_id_bytes * amount_SK[:, 1]
        amount_SK[:, 1] = 0.0
        price_K = _fit_prices(amount_SK, measured_S)
        price_K[1] = USUAL_id_bytes * price_K[2]
    error = float(np.mean(np.abs(amount_SK @ price_K - measured_S) / measured_S))
    start, id_s, *byte_s = price_K.tolist()
    moved, reduced, copied = (max(price, NEGLIGIBLE_s) for price in byte_s)
    link = LinkRates(
        latency_s=round_digits(start / COLLECTIVES),
        all_to_all_Bps=round_digits(1 / moved),
        reduce_scatter_Bps=round_digits(1 / reduced),
        all_reduce_Bps=round_digits(1 / copied),
    )
    profile = structs.replace(hardware, host=link, network=link, id_bytes=max(1, round(id_s / moved)))
    return FittedLinks(profile, len(samples), error)


def list_amounts(sample: LinkSample) -> list[float]:
    """Amounts that prices multiply: 1 start, ids, bytes of all-to-all, of reduce-scatter and of all-reduce."""
    remote = (len(sample.dim_W) - 1) / len(sample.dim_W)
    if sample.copied:
        return [1.0, 0.0, 0.0, 0.0, 2.0 * FLOAT_bytes * sample.copied * remote]
    vectors = 2.0 * FLOAT_bytes * sample.batch * max(sample.dim_W) * remote
    is_reduced = layout_named(sample.layout).exchange == "all_to_all_sum"
    return [1.0, max(sample.ids_W) * remote, *((0.0, vectors) if is_reduced else (vectors, 0.0)), 0.0]


def step_s(sample: LinkSample) -> float:
    """Seconds of all exchanges of a step, on the slowest rank."""
    parts_W = zip(sample.route_W, sample.exchange_W, sample.return_W, strict=True)
    return max(map(sum, parts_W))


def _fit_prices(amount_SK: Floats, measured_S: Floats) -> Floats:
    """Non-negative least squares of relative errors, reweighted so that outliers count less."""
    from scipy.optimize import nnls

    scaled_SK = amount_SK / measured_S[:, None]
    weight_S = np.ones(len(measured_S))
    unit_K = np.maximum(scaled_SK.max(0), 1e-300)
    price_K = np.zeros(amount_SK.shape[1])
    assert (measured_S > 0).all()
    for _ in range(20):
        price_K = nnls(scaled_SK / unit_K * weight_S[:, None], weight_S)[0] / unit_K
        error_S = np.abs(scaled_SK @ price_K - 1)
        weight_S = 1 / np.sqrt(np.maximum(error_S, 0.02))
    return price_K
