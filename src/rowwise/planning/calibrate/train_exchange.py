"""Trains exchange networks; see `perf.exchange`.

Nominal prices are fitted first. Then a network learns the remaining factor by relative error. The same measurements
give the same network.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rowwise.planning.calibrate.samples import LinkSample
from rowwise.planning.calibrate.train_network import MIN_DEVIATION, to_decimals, to_matrix, to_tensor
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.exchange import (
    REACH,
    Amounts,
    ExchangeNetwork,
    Exchanges,
    exchange_features,
    nominal_s,
    waits_s,
)
from rowwise.planning.perf.network import MAX_DEVIATIONS

HELD_OUT = 7  # every seventh exchange is held out
MIN_EXCHANGES = 40  # that learning needs
HIDDEN, STEPS, RATE, DECAY, SEED = 24, 500, 1e-2, 1e-3, 0
MIN_s = 1e-6


def train_exchanges(samples: Sequence[LinkSample], report: Callable[[float], None]) -> Exchanges | None:
    """Networks for all exchanges of a step; None with too few measurements."""
    exchanges = [s for s in samples if not s.copied]
    if len(exchanges) < MIN_EXCHANGES:
        return None
    training = [s for s in exchanges if s.number % HELD_OUT]
    parts: dict[str, Callable[[LinkSample], Sequence[float]]] = {
        "route": lambda s: s.route_W,
        "forward": lambda s: s.exchange_W,
        "backward": lambda s: s.return_W,
    }
    networks: dict[str, ExchangeNetwork] = {}
    for index, (name, seconds_of) in enumerate(parts.items()):
        networks[name] = _train_network([(amounts_of(s, name), np.array(seconds_of(s))) for s in training])
        report((index + 1) / len(parts))
    errors = []
    for s in exchanges:
        if s.number % HELD_OUT == 0:
            predicted_W = sum(network(amounts_of(s, name)) for name, network in networks.items())
            measured_W = sum(np.array(seconds_of(s)) for seconds_of in parts.values())
            errors.append(np.abs(predicted_W - measured_W) / measured_W)
    route, forward, backward = (networks[name] for name in parts)
    error = float(np.mean(errors))
    return Exchanges(route=route, forward=forward, backward=backward, error=error, samples=len(exchanges))


def amounts_of(sample: LinkSample, name: str) -> Amounts:
    """The amounts of an exchange; ranks begin at different times in forward only."""
    dim_W, ids_W, skew_W = (np.array(part, dtype=float) for part in (sample.dim_W, sample.ids_W, sample.skew_W))
    return Amounts(dim_W, ids_W, sample.batch, skew_W if name == "forward" else np.zeros_like(skew_W))


def _train_network(pairs: Sequence[tuple[Amounts, Floats]]) -> ExchangeNetwork:
    measured_N = np.concatenate([seconds for _, seconds in pairs])
    waits_N = np.concatenate([waits_s(amounts.skew_W) for amounts, _ in pairs])
    own_N = np.maximum(measured_N - waits_N, 0.1 * measured_N)
    prices = _fit_prices(pairs, own_N)
    nominal_N = np.concatenate([nominal_s(amounts, prices) for amounts, _ in pairs])
    features_NF = np.concatenate([exchange_features(amounts) for amounts, _ in pairs])
    mean_F, deviation_F = features_NF.mean(0), features_NF.std(0)
    scale_F = np.where(deviation_F > MIN_DEVIATION, deviation_F, 1.0)
    inner, outer = _train_factor(
        to_tensor(np.clip((features_NF - mean_F) / scale_F, -MAX_DEVIATIONS, MAX_DEVIATIONS)),
        nominal_N,
        waits_N,
        measured_N,
    )
    start_s, byte_s, id_s = prices
    return ExchangeNetwork(
        start_s=start_s,
        byte_s=byte_s,
        id_s=id_s,
        mean=to_decimals(to_tensor(mean_F)),
        scale=to_decimals(to_tensor(scale_F)),
        inner=to_matrix(inner.weight.T * to_tensor(deviation_F > MIN_DEVIATION)[:, None]),  # as in `train_network`
        inner_offset=to_decimals(inner.bias),
        outer=to_decimals(outer.weight[0]),
        outer_offset=to_decimals(outer.bias)[0],
    )


def _fit_prices(pairs: Sequence[tuple[Amounts, Floats]], own_N: Floats) -> tuple[float, float, float]:
    from scipy.optimize import nnls

    unit = np.eye(3)
    parts = [np.concatenate([nominal_s(a, tuple(unit[k])) for a, _ in pairs]) for k in range(3)]
    amount_NK = np.stack(parts, axis=1) / own_N[:, None]
    max_K = np.maximum(amount_NK.max(0), 1e-300)
    start, byte, id_ = (nnls(amount_NK / max_K, np.ones(len(own_N)))[0] / max_K).tolist()
    return max(start, MIN_s), byte, id_


def _train_factor(
    features_NF: Tensor, nominal_N: Floats, waits_N: Floats, measured_N: Floats
) -> tuple[nn.Linear, nn.Linear]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        inner, outer = nn.Linear(features_NF.shape[1], HIDDEN), nn.Linear(HIDDEN, 1)
    nn.init.zeros_(outer.weight)
    nn.init.zeros_(outer.bias)
    nominal_ratio_N, wait_ratio_N = to_tensor(nominal_N / measured_N), to_tensor(waits_N / measured_N)
    optimizer = torch.optim.AdamW([*inner.parameters(), *outer.parameters()], lr=RATE, weight_decay=DECAY)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        factor_N = torch.exp(REACH * torch.tanh(outer(torch.relu(inner(features_NF)))[:, 0]))
        (nominal_ratio_N * factor_N + wait_ratio_N - 1).abs().mean().backward()
        optimizer.step()
        scheduler.step()
    return inner, outer
