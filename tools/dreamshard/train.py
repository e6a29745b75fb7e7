"""The training loop: cost placements, fit the cost network to them, train the policy on the network's predictions.

The first placements are random; later ones are the policy's own, so the cost network is right where the policy looks.
The cost model gives targets for the cost network, never a reward ([Note: Estimated MDP] in `rewards`). The same seed
gives the same policy on the same machine, with one thread. Training runs for a fixed number of steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dreamshard.networks import COST_LAYERS, POLICY_LAYERS, Networks
from dreamshard.rewards import play, policy_loss, policy_of, world_factor
from dreamshard.tasks import CostedPlacements, Pool, draw, judge, scatter_some
from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Floats
from rowwise.planning.planner.methods.dreamshard import LAYERS, PolicyFile
from rowwise.planning.planner.problem import PlanRequest
from rowwise.tables.ops.threads import one_thread

STEPS_A_MINUTE = 200  # of the policy, with everything between them, on one core of a server
LEAST = 0.1  # of the mean rank's cost: errors of ranks with less are not counted as shares of their own cost
LONGEST = 1.0  # gradients longer than this are shortened


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTraining:
    """Numbers of steps, sizes of tasks, and learning rates."""

    iterations: int = 10
    groups: int = 120  # of placements costed in the first iteration; later ones cost a quarter
    group: int = 64
    cost_steps: int = 1500  # at first; a fifth in later iterations
    policy_steps: int = 100  # of each iteration
    tasks: int = 8  # of a step of the policy
    rollouts: int = 16  # of each task
    tables: tuple[int, int] = (10, 60)
    cost_rate: float = 2e-3
    policy_rate: float = 2e-3
    entropy_price: float = 1e-3

    def lasting(self, minutes: float) -> "PolicyTraining":
        """These settings with as many policy steps as take about so long."""
        return replace(self, policy_steps=max(1, round(minutes * STEPS_A_MINUTE / self.iterations)))


@dataclass(frozen=True, slots=True)
class PolicyProgress:
    """Errors and rewards after an iteration."""

    iteration: int
    cost_error: float  # of the cost network: root mean square, as a share of a rank's cost
    overall_error: float  # of whole placements
    reward: float  # mean of the policy's roll-outs
    entropy: float  # mean over choices


def train_policy(
    requests: Sequence[PlanRequest],
    settings: PolicyTraining,
    seed: int,
    progress: Callable[[PolicyProgress], None] | None = None,
    about: Mapping[str, str | int | float] | None = None,
) -> PolicyFile:
    """A policy for tables like those of the requests, each a pool on a number of ranks. One thread is used."""
    if not requests:
        raise SpecError("no requests: expected at least one pool of tables to train on")
    with one_thread():
        training = _Training.of([Pool.of(request) for request in requests], settings, seed)
        for iteration in range(settings.iterations):
            training.collect(iteration)
            errors = training.fit_costs(iteration)
            reward, entropy = training.fit_policy(iteration)
            if progress:
                progress(PolicyProgress(iteration, *errors, reward, entropy))
    trained: dict[str, str | int | float] = {
        "model": requests[0].model.name,
        "pools": len(requests),
        "tables": max(len(request.workloads) for request in requests),
        "seed": seed,
        "policy_steps": settings.iterations * settings.policy_steps,
    }
    return training.saved(trained | dict(about or {}))


@dataclass(slots=True)
class _Training:
    """State of a training: networks, optimizers, random numbers, costed placements."""

    pools: list[Pool]
    settings: PolicyTraining
    networks: Networks
    scaling: tuple[Floats, Floats]  # means and deviations of features
    unit_s: float
    rng: np.random.Generator
    judged: list[CostedPlacements]
    cost_adam: torch.optim.Adam
    policy_adam: torch.optim.Adam

    @classmethod
    def of(cls, pools: list[Pool], settings: PolicyTraining, seed: int) -> "_Training":
        features_TF = np.concatenate([pool.features_TF for pool in pools])
        single_TC = np.concatenate([pool.single_TC for pool in pools])
        networks = Networks(torch.Generator().manual_seed(seed))
        return cls(
            pools=pools,
            settings=settings,
            networks=networks,
            scaling=(features_TF.mean(0), np.maximum(features_TF.std(0), 1e-3)),
            unit_s=float(single_TC.sum(1).mean()),
            rng=np.random.default_rng(seed),
            judged=[],
            cost_adam=torch.optim.Adam(networks.parameters_of(COST_LAYERS), lr=settings.cost_rate),
            policy_adam=torch.optim.Adam(networks.parameters_of(POLICY_LAYERS), lr=settings.policy_rate),
        )

    def collect(self, iteration: int) -> None:
        """Add costed placements: random ones; from the second iteration on, every other group is the policy's."""
        settings = self.settings
        groups = settings.groups if not iteration else max(1, settings.groups // 4)
        for number in range(groups):
            if iteration and number % 2:
                pool = self.pools[self.rng.integers(len(self.pools))]
                tasks = draw(pool, self.rng, settings.group, int(self.rng.integers(*settings.tables, endpoint=True)))
                played = play(self.networks, policy_of(self.networks, self.scaling), tasks, self.rng)
                self.judged.append(judge(played.tasks, played.unit_EI))
            else:
                self.judged.append(scatter_some(self.pools, self.rng, settings.group, settings.tables[1]))

    def fit_costs(self, iteration: int) -> tuple[float, float]:
        """Train the cost network on the costed placements; gives errors of the last quarter of the steps."""
        settings = self.settings
        steps = settings.cost_steps if not iteration else max(1, settings.cost_steps // 5)
        top = settings.cost_rate * (1.0 if not iteration else 0.3)
        errors: list[tuple[float, float]] = []
        for step in range(steps):
            _set_rate(self.cost_adam, top * max(0.05, 1 - step / steps))
            # The policy will look where it looked lately: half of the steps train on its latest placements.
            recent = len(self.judged) - max(1, settings.groups // 4) if iteration and step % 2 else 0
            errors.append(self._cost_step(self.judged[self.rng.integers(recent, len(self.judged))]))
        last = np.array(errors[-max(1, steps // 4) :])
        return float(np.sqrt(last[:, 0].mean())), float(np.sqrt(last[:, 1].mean()))

    def _cost_step(self, judged: CostedPlacements) -> tuple[float, float]:
        tasks, networks = judged.tasks, self.networks
        mean_F, deviation_F = self.scaling
        normal_EIF = np.clip((tasks.pool.features_TF[tasks.index_EI] - mean_F) / deviation_F, -6, 6)
        here_EUI = (judged.unit_EI[:, None] == np.arange(tasks.pool.world)[:, None]).astype(np.float32)
        loads_EUH = torch.from_numpy(here_EUI) @ networks.loads(torch.from_numpy(normal_EIF).float())
        cost_EUC = networks.costs(loads_EUH) * torch.from_numpy(world_factor(tasks))
        true_EUC = torch.from_numpy(judged.cost_EUC / self.unit_s).float()
        true_EU1 = true_EUC.sum(-1, keepdim=True)
        scale_EU1 = true_EU1 + LEAST * true_EU1.mean(1, keepdim=True)
        cost_loss = ((cost_EUC - true_EUC) / scale_EU1).square().sum(-1).mean()
        true_E = torch.from_numpy(judged.overall_E / self.unit_s).float()
        overall_loss = (networks.overall(loads_EUH, cost_EUC) / true_E - 1).square().mean()
        _descend(self.cost_adam, cost_loss + overall_loss)
        return float(cost_loss.detach()), float(overall_loss.detach())

    def fit_policy(self, iteration: int) -> tuple[float, float]:
        """Train the policy on new tasks; gives mean reward and entropy of the last quarter of the steps."""
        settings = self.settings
        seen: list[tuple[float, float]] = []
        for step in range(settings.policy_steps):
            done = (iteration + step / settings.policy_steps) / settings.iterations
            _set_rate(self.policy_adam, settings.policy_rate * max(0.05, 1 - done))
            pool = self.pools[self.rng.integers(len(self.pools))]
            count = int(self.rng.integers(*settings.tables, endpoint=True))
            tasks = draw(pool, self.rng, settings.tasks, count).repeated(settings.rollouts)
            played = play(self.networks, policy_of(self.networks, self.scaling), tasks, self.rng)
            loss, entropy = policy_loss(self.networks, played, settings.rollouts, settings.entropy_price * (1 - done))
            _descend(self.policy_adam, loss)
            seen.append((float(played.reward_E.mean()), entropy))
        reward, entropy = np.array(seen[-max(1, len(seen) // 4) :]).mean(0)
        return float(reward), float(entropy)

    def saved(self, trained: Mapping[str, str | int | float]) -> PolicyFile:
        mean_F, deviation_F = self.scaling
        return PolicyFile(
            format="rowwise dreamshard 1",
            trained=trained,
            unit_s=self.unit_s,
            mean=tuple(float(f"{x:.6g}") for x in mean_F),
            deviation=tuple(float(f"{x:.6g}") for x in deviation_F),
            layers={name: self.networks.layer(name) for name in LAYERS},
        )


def _set_rate(adam: torch.optim.Adam, rate: float) -> None:
    for group in adam.param_groups:
        group["lr"] = rate


def _descend(adam: torch.optim.Adam, loss: torch.Tensor) -> None:
    adam.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(adam.param_groups[0]["params"], LONGEST)
    adam.step()
