"""Trains set networks with torch; the result is arrays that `perf.network` evaluates without it.

A network learns the seconds of sets by relative error, so small sets weigh as much as large ones. With `bounded`, the
weights of phi are squares, so never negative. Training is AdamW with a one-cycle learning rate, on all sets or random
batches, and keeps the weights that are best on validation sets. It runs on the CPU, as networks are small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.network import MAX_DEVIATIONS, REACH, Form, SetNetwork

MS = 1e-3
MIN_ms = 1e-6  # milliseconds; the norm has no gradient at 0
MIN_DEVIATION = 1e-3  # features that vary less are ignored
VALIDATION_FRACTION = 0.1  # of the sets


@dataclass(frozen=True, slots=True)
class Sets:
    """Features of the tables of all sets, one set after another, and the seconds of each set."""

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
    """The shape of a network and the settings of its training."""

    form: Form = "scaled"
    bounded: bool = True
    hidden: int = 64
    loads: int = 32  # of the published form; the scaled one has one for each kind of work
    hinges: int = 32
    steps: int = 2000
    batch: int = 512
    rate: float = 5e-3
    decay: float = 1e-4
    seed: int = 0


ReportProgress = Callable[[float], None]  # the fraction done


class _Net(nn.Module):
    def __init__(self, sets: Sets, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        features = sets.features_NF.shape[1]
        loads = sets.work_NK.shape[1] if shape.form == "scaled" else shape.loads
        self.register_buffer("mean", to_tensor(sets.features_NF.mean(0)))
        deviation_F = sets.features_NF.std(0)
        self.register_buffer("scale", to_tensor(np.where(deviation_F > MIN_DEVIATION, deviation_F, 1.0)))
        self.register_buffer("varies", to_tensor(deviation_F > MIN_DEVIATION)[:, None])
        self.inner, self.outer = nn.Linear(features, shape.hidden), nn.Linear(shape.hidden, loads)
        self.hinge, self.out = nn.Linear(loads, shape.hinges), nn.Parameter(torch.full((shape.hinges,), 0.1))
        self.constant = nn.Parameter(torch.tensor(-3.0))  # log of milliseconds
        self.power = nn.Parameter(torch.tensor(-1.0))  # log of (power - 1)
        self.gain = nn.Parameter(torch.zeros(loads))  # logarithms
        if shape.form == "scaled":
            total_S = np.add.reduceat(sets.work_NK.sum(1), sets.begin_S1[:-1])
            nn.init.constant_(self.gain, float(np.log(np.median(sets.seconds_S / np.maximum(total_S, 1e-12)))))
            nn.init.zeros_(self.outer.weight)
            nn.init.zeros_(self.outer.bias)
            with torch.no_grad():
                self.hinge.bias.copy_(-torch.rand(shape.hinges) * float(np.median(sets.seconds_S)) / MS * 4)
                self.out.mul_(0.3)

    def psi(self, features_NF: Tensor, work_NK: Tensor) -> Tensor:
        """Loads; of the scaled form in milliseconds."""
        scaled_NF = ((features_NF - self.mean) / self.scale).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)
        out_NK = self.outer(torch.relu(self.inner(scaled_NF)))
        if self.shape.form == "published":
            return torch.relu(out_NK)
        return work_NK / MS * torch.exp(self.gain + REACH * torch.tanh(out_NK))

    def layers(self) -> tuple[Tensor, Tensor]:
        """The weights of hinges, and the factors of their outputs."""
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
        total_S = self._norm(sum_SK) if self.shape.form == "scaled" else 0.0
        return torch.exp(self.constant) + total_S + added_S

    def _norm(self, sum_SK: Tensor) -> Tensor:
        power = 1 + torch.exp(self.power)
        positive_SK = sum_SK.clamp(min=MIN_ms)
        top_S1 = positive_SK.max(1, keepdim=True).values.detach()
        return top_S1[:, 0] * ((positive_SK / top_S1) ** power).sum(1) ** (1 / power)

    def export(self) -> SetNetwork:
        """Weights as data, in seconds."""
        weight_HK, out_H = self.layers()
        scaled = self.shape.form == "scaled"
        return SetNetwork(
            form=self.shape.form,
            mean=to_decimals(self.mean),
            scale=to_decimals(self.scale),
            inner=to_matrix(self.inner.weight.T * self.varies),  # features that never varied get weight 0
            inner_offset=to_decimals(self.inner.bias),
            outer=to_matrix(self.outer.weight.T),
            outer_offset=to_decimals(self.outer.bias),
            gain=to_decimals(self.gain.exp()),
            hinge=to_matrix(weight_HK / MS if scaled else weight_HK),
            hinge_offset=to_decimals(self.hinge.bias),
            hinge_out=to_decimals(out_H * MS),
            constant_s=float(self.constant.detach().exp()) * MS,
            power=float(f"{1 + float(self.power.detach().exp()):.6g}") if scaled else 1.0,
        )


def train_network(sets: Sets, shape: NetworkShape, report: ReportProgress = lambda share: None) -> SetNetwork:
    """Train a network that predicts the seconds of sets; the same sets and shape give the same one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        permutation = np.random.default_rng(shape.seed).permutation(len(sets))
        count = max(1, int(len(sets) * VALIDATION_FRACTION))
        validation, training = sets.take(permutation[:count]), sets.take(permutation[count:])
        return _train(_Net(training, shape), _Batches(training, shape), _Batches(validation, shape), report)


class _Batches:
    """Sets as tensors, drawn in random batches."""

    def __init__(self, sets: Sets, shape: NetworkShape) -> None:
        self._rng, self.shape, self.sets = np.random.default_rng(shape.seed + 1), shape, sets
        self._all = self.tensors(sets)

    @staticmethod
    def tensors(sets: Sets) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        set_N = np.repeat(np.arange(len(sets)), np.diff(sets.begin_S1))
        features, work, ms = (to_tensor(part) for part in (sets.features_NF, sets.work_NK, sets.seconds_S / MS))
        return features, work, torch.from_numpy(set_N), ms

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All sets, or a random batch if there are many."""
        if len(self.sets) <= self.shape.batch * 2:
            return self._all
        return self.tensors(self.sets.take(self._rng.integers(0, len(self.sets), self.shape.batch)))

    def error(self, net: _Net, *, all_sets: bool = False) -> Tensor:
        features, work, number, ms = self._all if all_sets else self.draw()
        return ((net(features, work, number, len(ms)) - ms).abs() / ms).mean()


def _train(net: _Net, training: _Batches, validation: _Batches, report: ReportProgress) -> SetNetwork:
    shape = net.shape
    optimizer = torch.optim.AdamW(net.parameters(), lr=shape.rate, weight_decay=shape.decay)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, shape.rate, total_steps=shape.steps, pct_start=0.1)
    best, least = net.export(), float("inf")
    for step in range(shape.steps):
        optimizer.zero_grad()
        training.error(net).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 20 == 19:
            with torch.no_grad():
                error = float(validation.error(net, all_sets=True))
            if error < least:
                best, least = net.export(), error
            report((step + 1) / shape.steps)
    return best


def to_tensor(array: Floats) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def to_decimals(tensor: Tensor) -> tuple[float, ...]:
    """The shortest decimals that round to these 32-bit numbers."""
    return tuple(float(str(value)) for value in tensor.detach().numpy().astype(np.float32))


def to_matrix(tensor: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(to_decimals(row) for row in tensor)


def predict_s(network: SetNetwork, sets: Sets) -> Floats:
    """The seconds of each set, as a planner predicts them."""
    sum_SK = np.add.reduceat(network.psi(sets.features_NF, sets.work_NK), sets.begin_S1[:-1], axis=0)
    return network.phi(sum_SK)


def mean_relative_error(predicted_S: Floats, measured_S: Floats) -> float:
    return float(np.mean(np.abs(predicted_S - measured_S) / measured_S))


def kendall_tau(predicted_S: Sequence[float] | Floats, measured_S: Sequence[float] | Floats) -> float:
    from scipy.stats import kendalltau

    return float(kendalltau(np.asarray(predicted_S), np.asarray(measured_S)).statistic)
