"""Latency and rates of links, from exchanges of the real runtime: what a planner's seconds on links then are.

What is fitted is the same formula that plans are judged by (`Roofline.links_s`): to start, so much for each
collective; then bytes of ids and of vectors, each at its price, of the rank that has most. Packing and unpacking are
in these prices, so they are those of this runtime and not of a wire. Known limits: what exchanges of several
collectives at once have to do with each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from rowwise.calibrate.samples import LinkSample
from rowwise.perf.access import Floats
from rowwise.perf.hardware import Hardware, LinkRates
from rowwise.perf.roofline import COLLECTIVES, FLOAT_bytes
from rowwise.planner.layouts import layout_named

FEWEST = 10
NEGLIGIBLE_s = 1e-15  # a byte that costs less is free


@dataclass(frozen=True, slots=True)
class FittedLinks:
    """A profile with rates of links, how many exchanges they are from, and how wrong they are on those."""

    hardware: Hardware
    count: int
    error: float | None


def fit_links(samples: Sequence[LinkSample], hardware: Hardware) -> FittedLinks:
    """Rates of the links inside a host; where too little was measured, those that the profile has."""
    together = [s for s in samples if max(s.skew_W) == 0]
    if len(together) < FEWEST:
        return FittedLinks(hardware, len(samples), None)
    amount_SK = np.array([amounts(s) for s in together])
    measured_S = np.array([step_s(s) for s in together])
    price_K = _prices(amount_SK, measured_S)
    error = float(np.mean(np.abs(amount_SK @ price_K - measured_S) / measured_S))
    start, id_s, *byte_s = price_K.tolist()
    moved, reduced, copied = (max(price, NEGLIGIBLE_s) for price in byte_s)
    link = LinkRates(
        latency_s=_short(start / COLLECTIVES),
        all_to_all_Bps=_short(1 / moved),
        reduce_scatter_Bps=_short(1 / reduced),
        all_reduce_Bps=_short(1 / copied),
    )
    made = structs.replace(hardware, host=link, network=link, id_bytes=max(1, round(id_s / moved)))
    return FittedLinks(made, len(samples), error)


def amounts(sample: LinkSample) -> list[float]:
    """What prices are for: a start, ids, bytes of vectors both ways that are moved or added up, bytes of copies."""
    away = (len(sample.dim_W) - 1) / len(sample.dim_W)
    if sample.copied:
        return [1.0, 0.0, 0.0, 0.0, 2.0 * FLOAT_bytes * sample.copied * away]
    vectors = 2.0 * FLOAT_bytes * sample.batch * max(sample.dim_W) * away
    is_reduced = layout_named(sample.layout).exchange == "reduce_scatter"
    return [1.0, max(sample.ids_W) * away, *((0.0, vectors) if is_reduced else (vectors, 0.0)), 0.0]


def step_s(sample: LinkSample) -> float:
    """What all ranks take for all that travels in a step."""
    parts_W = zip(sample.route_W, sample.exchange_W, sample.return_W, strict=True)
    return max(map(sum, parts_W))


def _prices(amount_SK: Floats, measured_S: Floats) -> Floats:
    """None of them negative; least squares of relative errors, in which what is far off counts less each time."""
    from scipy.optimize import nnls

    scaled_SK = amount_SK / measured_S[:, None]
    weight_S = np.ones(len(measured_S))
    unit_K = np.maximum(scaled_SK.max(0), 1e-300)
    price_K = np.zeros(amount_SK.shape[1])
    assert (measured_S > 0).all()
    for _ in range(20):
        price_K = nnls(scaled_SK / unit_K * weight_S[:, None], weight_S)[0] / unit_K
        off_S = np.abs(scaled_SK @ price_K - 1)
        weight_S = 1 / np.sqrt(np.maximum(off_S, 0.02))
    return price_K


def _short(value: float) -> float:
    return float(f"{value:.4g}")
