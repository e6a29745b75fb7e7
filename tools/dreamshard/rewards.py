"""Roll-outs of the policy on tasks, rewarded by the cost network alone, and the REINFORCE loss.

[Note: Estimated MDP] Each state is what the planner's own roll-out computes. The reward of a roll-out is minus the
predicted cost of the whole placement, as a share of an even rank's, minus a fine for bytes over the memory limit.
Rewards are compared among roll-outs of the same task only, so tasks of any size weigh alike. No cost model is called.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from dreamshard.networks import Networks
from dreamshard.tasks import Ints, Tasks
from rowwise.planning.planner.methods.dreamshard import (
    LAYERS,
    ItemDeck,
    Policy,
    PolicyStep,
    Reals,
    placement_order,
    roll_out,
)

FINE = 2.0  # for exceeding a rank's memory by all of it, in costs of an even rank
FORBIDDEN = -1e9  # logit of a rank without room
MIN_SPREAD = 1e-3  # least standard deviation of a task's rewards; below it, differences are noise


@dataclass(frozen=True, slots=True)
class RollOuts:
    """Roll-outs with the policy's inputs at each step. Tables of a task are in the order in which they were placed."""

    tasks: Tasks
    normal_EIF: Tensor
    unit_EI: Ints
    seen_EIUS: Tensor
    legal_EIU: Tensor
    reward_E: Reals


def policy_of(networks: Networks, scaling: tuple[Reals, Reals], unit_s: float = 1.0) -> Policy:
    """The current weights as the planner's numpy `Policy`."""
    layers = {name: (networks.weight[name].detach().numpy(), networks.bias[name].detach().numpy()) for name in LAYERS}
    return Policy(unit_s, *scaling, layers)


def world_factor(tasks: Tasks) -> Reals:
    """Factors (forward, links, backward) on predictions: only (W - 1) / W of the vectors leave a rank."""
    world = tasks.pool.world
    return np.array([1.0, (world - 1) / world, 1.0], dtype=np.float32)


def deck_of(policy: Policy, tasks: Tasks) -> tuple[ItemDeck, Tasks]:
    """The deck of these tasks, and the tasks with tables in placement order."""
    factor_C = world_factor(tasks)
    normal_EIF = policy.normal(tasks.pool.features_TF[tasks.index_EI]).astype(np.float32)
    loads_EIH = policy.loads(normal_EIF)
    single_EIC = policy.costs(loads_EIH) * factor_C
    order_EI = placement_order(single_EIC)
    ordered = tasks.of(order_EI)
    share_EI = ordered.pool.bytes_T[ordered.index_EI] / ordered.limit_E[:, None]
    deck = ItemDeck(
        loads_EIH=np.take_along_axis(loads_EIH, order_EI[..., None], axis=1),
        kinds_EIH=np.take_along_axis(policy.kinds(normal_EIF), order_EI[..., None], axis=1),
        single_EIC=np.take_along_axis(single_EIC, order_EI[..., None], axis=1),
        factor_EC=np.tile(factor_C, (tasks.count, 1)),
        share_EIM=share_EI[..., None],
        allowed_EIU=np.ones((*order_EI.shape, tasks.pool.world), dtype=bool),
    )
    return deck, ordered


def play(networks: Networks, policy: Policy, tasks: Tasks, rng: np.random.Generator) -> RollOuts:
    """One roll-out of each task, ranks sampled from the policy's softmax (by Gumbel noise)."""
    deck, ordered = deck_of(policy, tasks)
    steps: list[tuple[Reals, NDArray[np.bool_]]] = []

    def choose(step: PolicyStep) -> Ints:
        one_EUH = np.broadcast_to(deck.kinds_EIH[:, step.item, None], step.here_EUH.shape)
        legal_EU = step.legal_EU | ~step.legal_EU.any(1, keepdims=True)  # no rank has room: place anyway, and be fined
        wanted_EU = policy.logits(step.inputs_EUS, step.here_EUH, one_EUH) + rng.gumbel(size=legal_EU.shape)
        steps.append((step.inputs_EUS, legal_EU))
        return np.where(legal_EU, wanted_EU, -np.inf).argmax(1)

    unit_EI = roll_out(policy, deck, choose)
    return RollOuts(
        tasks=ordered,
        normal_EIF=torch.from_numpy(policy.normal(ordered.pool.features_TF[ordered.index_EI]).astype(np.float32)),
        unit_EI=unit_EI,
        seen_EIUS=torch.from_numpy(np.stack([seen for seen, _ in steps], axis=1)),
        legal_EIU=torch.from_numpy(np.stack([legal for _, legal in steps], axis=1)),
        reward_E=_rewards(networks, deck, unit_EI),
    )


def _rewards(networks: Networks, deck: ItemDeck, unit_EI: Ints) -> Reals:
    units = deck.allowed_EIU.shape[-1]
    here_EUI = (unit_EI[:, None] == np.arange(units)[:, None]).astype(np.float32)
    with torch.no_grad():
        loads_EUH = torch.from_numpy(here_EUI @ deck.loads_EIH)
        cost_EUC = networks.costs(loads_EUH) * torch.from_numpy(deck.factor_EC[:, None])
        overall_E = networks.overall(loads_EUH, cost_EUC).double().numpy()
    even_E = deck.single_EIC.sum((1, 2)) / units
    over_E = np.maximum(here_EUI @ deck.share_EIM[..., 0][..., None] - 1, 0).sum((1, 2))
    return -overall_E / even_E - FINE * over_E


def advantages(reward_E: Reals, each: int) -> Reals:
    """Rewards minus the mean of the task's roll-outs, in their standard deviations."""
    reward_BR = reward_E.reshape(-1, each)
    spread_B1 = np.maximum(reward_BR.std(1, keepdims=True), MIN_SPREAD)
    return ((reward_BR - reward_BR.mean(1, keepdims=True)) / spread_B1).reshape(-1)


def logits_of(networks: Networks, played: RollOuts) -> Tensor:
    """The policy's logits (E, I, U), computed again with gradients."""
    units, items = played.legal_EIU.shape[-1], played.legal_EIU.shape[1]
    kinds_EIH = networks.kinds(played.normal_EIF)
    placed_EIU1 = one_hot(torch.from_numpy(played.unit_EI), units)[..., None]
    placed_EIUH = placed_EIU1 * kinds_EIH[:, :, None]
    here_EIUH = (placed_EIUH.cumsum(1) - placed_EIUH) * (units / items)
    one_EIUH = kinds_EIH[:, :, None].expand_as(here_EIUH)
    logit_EIU = networks.logits(played.seen_EIUS, here_EIUH, one_EIUH)
    return logit_EIU.masked_fill(~played.legal_EIU, FORBIDDEN)


def policy_loss(networks: Networks, played: RollOuts, each: int, entropy_price: float) -> tuple[Tensor, float]:
    """The REINFORCE loss with an entropy bonus, and the mean entropy of a choice."""
    log_EIU = logits_of(networks, played).log_softmax(-1)
    entropy = -(log_EIU.exp() * log_EIU).sum(-1).mean()
    taken_EI = log_EIU.gather(-1, torch.from_numpy(played.unit_EI)[..., None])[..., 0]
    better_E = torch.from_numpy(advantages(played.reward_E, each)).float()
    return -(better_E[:, None] * taken_EI).mean() - entropy_price * entropy, float(entropy.detach())
