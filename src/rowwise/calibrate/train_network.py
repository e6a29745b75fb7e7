"""Training of set networks, in torch; what comes out is arrays that `perf.network` evaluates without it.

A network learns seconds from sets of tables, in relative error, so small sets count as much as large ones. With
`bounded`, weights of phi are squares and so never negative. Full batches or parts of them, Adam with a falling rate,
and the weights that were best on sets kept back. Known limits: GPUs, as networks are small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rowwise.perf.access import Floats
from rowwise.perf.network import FAR, REACH, Form, SetNetwork

MILLI = 1e-3
LEAST = 1e-6  # milliseconds; of nothing at all a norm has no slope
ALIKE = 1e-3  # deviation of a feature that does not vary
KEPT_BACK = 0.1  # of the sets, to choose the best weights by


@dataclass(frozen=True, slots=True)
class Sets:
    """Sets of tables one after another, and the seconds of each."""

    features_NF: Floats
    work_NK: Floats
    begin_S1: np.ndarray
    seconds_S: Floats

    def __len__(self) -> int:
        return len(self.seconds_S)

    def take(self, index_S: np.ndarray) -> "Sets":
        spans = [np.arange(self.begin_S1[s], self.begin_S1[s + 1]) for s in index_S]
        rows = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
        begins = np.concatenate([[0], np.cumsum([len(span) for span in spans])]).astype(np.int64)
        return Sets(self.features_NF[rows], self.work_NK[rows], begins, self.seconds_S[index_S])


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """The size of a network, and how it is trained."""

    form: Form = "scaled"
    bounded: bool = True
    hidden: int = 64
    loads: int = 32  # of the published form; of the other, as many as there are kinds of work
    hinges: int = 32
    steps: int = 2000
    batch: int = 512
    rate: float = 5e-3
    decay: float = 1e-4
    seed: int = 0


Tell = Callable[[float], None]  # the share that is done


class _Net(nn.Module):
    def __init__(self, sets: Sets, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        features = sets.features_NF.shape[1]
        loads = sets.work_NK.shape[1] if shape.form == "scaled" else shape.loads
        self.register_buffer("mean", floats(sets.features_NF.mean(0)))
        deviation_F = sets.features_NF.std(0)
        self.register_buffer("scale", floats(np.where(deviation_F > ALIKE, deviation_F, 1.0)))
        self.register_buffer("varies", floats(deviation_F > ALIKE)[:, None])
        self.inner, self.outer = nn.Linear(features, shape.hidden), nn.Linear(shape.hidden, loads)
        self.hinge, self.out = nn.Linear(loads, shape.hinges), nn.Parameter(torch.full((shape.hinges,), 0.1))
        self.constant = nn.Parameter(torch.tensor(-3.0))  # log of milliseconds
        self.power = nn.Parameter(torch.tensor(-1.0))  # log of what it is over 1
        self.gain = nn.Parameter(torch.zeros(loads))  # logarithms
        if shape.form == "scaled":
            whole_S = np.add.reduceat(sets.work_NK.sum(1), sets.begin_S1[:-1])
            nn.init.constant_(self.gain, float(np.log(np.median(sets.seconds_S / np.maximum(whole_S, 1e-12)))))
            nn.init.zeros_(self.outer.weight)
            nn.init.zeros_(self.outer.bias)
            with torch.no_grad():
                self.hinge.bias.copy_(-torch.rand(shape.hinges) * float(np.median(sets.seconds_S)) / MILLI * 4)
                self.out.mul_(0.3)

    def psi(self, features_NF: Tensor, work_NK: Tensor) -> Tensor:
        """Loads; in milliseconds where they are times."""
        given_NF = ((features_NF - self.mean) / self.scale).clamp(-FAR, FAR)
        out_NK = self.outer(torch.relu(self.inner(given_NF)))
        if self.shape.form == "published":
            return torch.relu(out_NK)
        return work_NK / MILLI * torch.exp(self.gain + REACH * torch.tanh(out_NK))

    def layers(self) -> tuple[Tensor, Tensor]:
        """Weights of hinges and what each adds."""
        if self.shape.bounded:
            return self.hinge.weight.square(), self.out.square()
        return self.hinge.weight, self.out

    def forward(self, features_NF: Tensor, work_NK: Tensor, set_N: Tensor, sets: int) -> Tensor:
        """Milliseconds of each set."""
        psi_NK = self.psi(features_NF, work_NK)
        sum_SK = psi_NK.new_zeros(sets, psi_NK.shape[1]).index_add_(0, set_N, psi_NK)
        weight_HK, out_H = self.layers()
        hinged_SH = torch.relu(sum_SK @ weight_HK.T + self.hinge.bias)
        added_S = (hinged_SH - torch.relu(self.hinge.bias)) @ out_H
        whole_S = self._norm(sum_SK) if self.shape.form == "scaled" else 0.0
        return torch.exp(self.constant) + whole_S + added_S

    def _norm(self, sum_SK: Tensor) -> Tensor:
        power = 1 + torch.exp(self.power)
        some_SK = sum_SK.clamp(min=LEAST)
        top_S1 = some_SK.max(1, keepdim=True).values.detach()
        return top_S1[:, 0] * ((some_SK / top_S1) ** power).sum(1) ** (1 / power)

    def export(self) -> SetNetwork:
        weight_HK, out_H = self.layers()
        scaled = self.shape.form == "scaled"
        return SetNetwork(
            form=self.shape.form,
            mean=decimals(self.mean),
            scale=decimals(self.scale),
            inner=matrix(self.inner.weight.T * self.varies),  # of what was always the same nothing was learned
            inner_offset=decimals(self.inner.bias),
            outer=matrix(self.outer.weight.T),
            outer_offset=decimals(self.outer.bias),
            gain=decimals(self.gain.exp()),
            hinge=matrix(weight_HK / MILLI if scaled else weight_HK),
            hinge_offset=decimals(self.hinge.bias),
            hinge_out=decimals(out_H * MILLI),
            constant_s=float(self.constant.detach().exp()) * MILLI,
            power=float(f"{1 + float(self.power.detach().exp()):.6g}") if scaled else 1.0,
        )


def train_network(sets: Sets, shape: NetworkShape, tell: Tell = lambda share: None) -> SetNetwork:
    """The network that predicts the seconds of such sets; the same one for the same sets and shape."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        order = np.random.default_rng(shape.seed).permutation(len(sets))
        kept = max(1, int(len(sets) * KEPT_BACK))
        net = _Net(sets.take(order[kept:]), shape)
        return _fitted(net, _Batches(sets.take(order[kept:]), shape), _Batches(sets.take(order[:kept]), shape), tell)


class _Batches:
    """Sets of tables as tensors, and where each set begins."""

    def __init__(self, sets: Sets, shape: NetworkShape) -> None:
        self._rng, self.shape, self.sets = np.random.default_rng(shape.seed + 1), shape, sets
        self._whole = self.tensors(sets)

    @staticmethod
    def tensors(sets: Sets) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        set_N = np.repeat(np.arange(len(sets)), np.diff(sets.begin_S1))
        features, work, ms = (floats(part) for part in (sets.features_NF, sets.work_NK, sets.seconds_S / MILLI))
        return features, work, torch.from_numpy(set_N), ms

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All, or as many as a step takes."""
        if len(self.sets) <= self.shape.batch * 2:
            return self._whole
        return self.tensors(self.sets.take(self._rng.integers(0, len(self.sets), self.shape.batch)))

    def error(self, net: _Net, *, whole: bool = False) -> Tensor:
        """The mean absolute relative error."""
        features, work, number, ms = self._whole if whole else self.draw()
        return ((net(features, work, number, len(ms)) - ms).abs() / ms).mean()


def _fitted(net: _Net, seen: _Batches, kept: _Batches, tell: Tell) -> SetNetwork:
    shape = net.shape
    optimizer = torch.optim.AdamW(net.parameters(), lr=shape.rate, weight_decay=shape.decay)
    falling = torch.optim.lr_scheduler.OneCycleLR(optimizer, shape.rate, total_steps=shape.steps, pct_start=0.1)
    best, least = net.export(), float("inf")
    for step in range(shape.steps):
        optimizer.zero_grad()
        seen.error(net).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        falling.step()
        if step % 20 == 19:
            with torch.no_grad():
                error = float(kept.error(net, whole=True))
            if error < least:
                best, least = net.export(), error
            tell((step + 1) / shape.steps)
    return best


def floats(array: Floats) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def decimals(tensor: Tensor) -> tuple[float, ...]:
    # The shortest decimals that are these 32-bit numbers.
    return tuple(float(str(value)) for value in tensor.detach().numpy().astype(np.float32))


def matrix(tensor: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(decimals(row) for row in tensor)


def predicted_s(network: SetNetwork, sets: Sets) -> Floats:
    """Seconds of each set, as a planner sees them."""
    sum_SK = np.add.reduceat(network.psi(sets.features_NF, sets.work_NK), sets.begin_S1[:-1], axis=0)
    return network.phi(sum_SK)


def error_of(predicted_S: Floats, measured_S: Floats) -> float:
    """The mean absolute relative error."""
    return float(np.mean(np.abs(predicted_S - measured_S) / measured_S))


def tau_of(predicted_S: Sequence[float] | Floats, measured_S: Sequence[float] | Floats) -> float:
    from scipy.stats import kendalltau

    return float(kendalltau(np.asarray(predicted_S), np.asarray(measured_S)).statistic)
