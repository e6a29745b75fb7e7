"""Training of the networks for exchanges; see `perf.exchange` for what they are.

Nominal prices are fitted first, then a network learns the factor that is left, in relative error. The same
measurements give the same network.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rowwise.calibrate.samples import LinkSample
from rowwise.calibrate.train_network import ALIKE, decimals, floats, matrix
from rowwise.perf.access import Floats
from rowwise.perf.exchange import REACH, Amounts, ExchangeNetwork, Exchanges, exchange_features, nominal_s, waits_s
from rowwise.perf.network import FAR

HELD_OUT = 7  # every seventh exchange is never learned from
FEWEST = 40
HIDDEN, STEPS, RATE, DECAY, SEED = 24, 500, 1e-2, 1e-3, 0
LEAST_s = 1e-6


def train_exchanges(samples: Sequence[LinkSample], tell: Callable[[float], None]) -> Exchanges | None:
    """The networks of all exchanges of a step; none from too few measurements."""
    some = [s for s in samples if not s.copied]
    if len(some) < FEWEST:
        return None
    known = [s for s in some if s.number % HELD_OUT]
    parts: dict[str, Callable[[LinkSample], Sequence[float]]] = {
        "route": lambda s: s.route_W,
        "forward": lambda s: s.exchange_W,
        "backward": lambda s: s.return_W,
    }
    made: dict[str, ExchangeNetwork] = {}
    for index, (name, taken) in enumerate(parts.items()):
        made[name] = _trained([(amounts_of(s, name), np.array(taken(s))) for s in known])
        tell((index + 1) / len(parts))
    errors = []
    for s in some:
        if s.number % HELD_OUT == 0:
            predicted_W = sum(network(amounts_of(s, name)) for name, network in made.items())
            measured_W = sum(np.array(taken(s)) for taken in parts.values())
            errors.append(np.abs(predicted_W - measured_W) / measured_W)
    route, forward, backward = (made[name] for name in parts)
    error = float(np.mean(errors))
    return Exchanges(route=route, forward=forward, backward=backward, error=error, samples=len(some))


def amounts_of(sample: LinkSample, name: str) -> Amounts:
    """What ranks had to exchange; only forward do they begin at different times."""
    dim_W, ids_W, skew_W = (np.array(part, dtype=float) for part in (sample.dim_W, sample.ids_W, sample.skew_W))
    return Amounts(dim_W, ids_W, sample.batch, skew_W if name == "forward" else np.zeros_like(skew_W))


def _trained(pairs: Sequence[tuple[Amounts, Floats]]) -> ExchangeNetwork:
    measured_N = np.concatenate([seconds for _, seconds in pairs])
    waits_N = np.concatenate([waits_s(amounts.skew_W) for amounts, _ in pairs])
    own_N = np.maximum(measured_N - waits_N, 0.1 * measured_N)
    prices = _prices(pairs, own_N)
    nominal_N = np.concatenate([nominal_s(amounts, prices) for amounts, _ in pairs])
    features_NF = np.concatenate([exchange_features(amounts) for amounts, _ in pairs])
    mean_F, deviation_F = features_NF.mean(0), features_NF.std(0)
    scale_F = np.where(deviation_F > ALIKE, deviation_F, 1.0)
    inner, outer = _fitted(floats(np.clip((features_NF - mean_F) / scale_F, -FAR, FAR)), nominal_N, waits_N, measured_N)
    start_s, byte_s, id_s = prices
    return ExchangeNetwork(
        start_s=start_s,
        byte_s=byte_s,
        id_s=id_s,
        mean=decimals(floats(mean_F)),
        scale=decimals(floats(scale_F)),
        inner=matrix(inner.weight.T * floats(deviation_F > ALIKE)[:, None]),  # as in `train_network`
        inner_offset=decimals(inner.bias),
        outer=decimals(outer.weight[0]),
        outer_offset=decimals(outer.bias)[0],
    )


def _prices(pairs: Sequence[tuple[Amounts, Floats]], own_N: Floats) -> tuple[float, float, float]:
    from scipy.optimize import nnls

    unit = np.eye(3)
    parts = [np.concatenate([nominal_s(a, tuple(unit[k])) for a, _ in pairs]) for k in range(3)]
    amount_NK = np.stack(parts, axis=1) / own_N[:, None]
    most_K = np.maximum(amount_NK.max(0), 1e-300)
    start, byte, one = (nnls(amount_NK / most_K, np.ones(len(own_N)))[0] / most_K).tolist()
    return max(start, LEAST_s), byte, one


def _fitted(given_NF: Tensor, nominal_N: Floats, waits_N: Floats, measured_N: Floats) -> tuple[nn.Linear, nn.Linear]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        inner, outer = nn.Linear(given_NF.shape[1], HIDDEN), nn.Linear(HIDDEN, 1)
    nn.init.zeros_(outer.weight)
    nn.init.zeros_(outer.bias)
    share_N, wait_N = floats(nominal_N / measured_N), floats(waits_N / measured_N)
    optimizer = torch.optim.AdamW([*inner.parameters(), *outer.parameters()], lr=RATE, weight_decay=DECAY)
    falling = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        factor_N = torch.exp(REACH * torch.tanh(outer(torch.relu(inner(given_NF)))[:, 0]))
        (share_N * factor_N + wait_N - 1).abs().mean().backward()
        optimizer.step()
        falling.step()
    return inner, outer
