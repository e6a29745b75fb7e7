"""Fits the rates of a roofline to measured sets: the fallback of a profile whose networks are not trusted.

Loads are amounts over rates, so amounts are computed once. The search is on a logarithmic scale, for the least mean
error.
"""

import numpy as np
from msgspec import structs

from rowwise.base.quantity import round_digits
from rowwise.planning.calibrate.set_arrays import MeasuredSets
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.hardware import Hardware
from rowwise.planning.perf.roofline import Roofline
from rowwise.tables.spec import Topology

FITTED = ("device_Bps", "cache_Bps", "launch_s", "forward_issue_s", "backward_issue_s")
TRIES = 600


def fit_rates(measured: MeasuredSets, hardware: Hardware) -> Hardware:
    from scipy.optimize import minimize

    unit = structs.replace(hardware, device_Bps=1.0, cache_Bps=1.0, forward_issue_s=1.0, backward_issue_s=1.0)
    model = Roofline(unit, Topology())
    amount_SK = np.array([model.loads(*pair).sum(0) for pair in measured.shards])

    def error(log_rates: Floats) -> float:
        device, cache, launch, forward, backward = np.exp(log_rates)
        price_K = np.array([1 / device, 1 / cache, forward, 1, 1 / device, 1 / cache, backward, 1])
        phi = structs.replace(hardware, launch_s=launch)
        predicted_S = Roofline(phi, Topology()).phi(amount_SK * price_K)
        return float(np.mean(np.abs(np.log(predicted_S / measured.sets.seconds_S))))

    start = np.log([getattr(hardware, name) for name in FITTED])
    fit = minimize(error, start, method="Nelder-Mead", options={"maxfev": TRIES, "xatol": 1e-3, "fatol": 1e-5})
    rates = dict(zip(FITTED, np.exp(fit.x).tolist(), strict=True))
    return structs.replace(hardware, **{name: round_digits(value) for name, value in rates.items()})
