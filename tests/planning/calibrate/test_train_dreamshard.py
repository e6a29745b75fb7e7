"""Training a placement policy: what it is judged by is the planner's own cost, and a few seconds of it already help."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from dreamshard.networks import POLICY_LAYERS, Networks
from dreamshard.rewards import FORBIDDEN, advantages, deck_of, logits_of, play, policy_loss, policy_of
from dreamshard.tasks import NO_HALF, Pool, draw, judge, scatter
from dreamshard.train import PolicyTraining, train_policy
from planning.planner.asked import question

from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Access
from rowwise.planning.perf.torchrec import TorchRecModel
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.methods import dreamshard
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.problem import NO_UNIT, Placement
from rowwise.tables.row_optimizers import Sgd
from rowwise.tables.spec import Table, Topology

WHOLE = Constraints(layouts={"*": ("table_wise",)})
TINY = PolicyTraining(
    iterations=2, groups=8, group=16, cost_steps=40, policy_steps=4, tasks=2, rollouts=6, tables=(4, 9), cost_rate=5e-3
)


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Small networks, and a machine that is busy with other tests."""
    threads(1)


def pool_question(devices, count=24, model=None):
    rng = np.random.default_rng(7)
    tables = [
        Table(name=f"t{i}", rows=int(10 ** rng.uniform(3, 6.5)), dim=int(rng.choice((8, 32, 128))))
        for i in range(count)
    ]
    access = [Access(pooling=float(10 ** rng.uniform(0, 1.7)), zipf_a=float(rng.uniform(0.2, 1.2))) for _ in tables]
    asked = question(tables, Topology(devices=devices), 1e12, access=access, constraints=WHOLE)
    return replace(asked, model=model) if model else asked


def scaling_of(pool):
    return pool.features_TF.mean(0), np.maximum(pool.features_TF.std(0), 1e-3)


@pytest.mark.parametrize("devices", [2, 5])
def test_placements_are_judged_as_the_planner_judges_them(devices):
    pool, rng = Pool.of(pool_question(devices)), np.random.default_rng(0)
    tasks = draw(pool, rng, 5, 9)
    judged = judge(tasks, scatter(tasks, rng))
    for task in range(5):
        workloads = [pool.problem.request.workloads[i] for i in tasks.index_EI[task]]
        asked = pool_question(devices)
        problem = make_problem(replace(asked, workloads=tuple(workloads)))
        placement = Placement(problem.item_begin[:-1], judged.unit_EI[task].astype(np.int32))
        assert (placement.unit_N != NO_UNIT).all()
        assert judged.overall_E[task] + problem.phi.constant == pytest.approx(problem.cost(placement), rel=1e-9)


def test_cut_tables_are_halves_with_the_same_rows_and_ids():
    def table_of(row):
        return Table(name=f"t{row}", rows=10**5 * (1 + row // 3), dim=(16, 32, 64)[row % 3], optimizer=Sgd())

    access = [Access(pooling=1 + row // 3) for row in range(24)]
    asked = question([table_of(row) for row in range(24)], Topology(devices=2), 1e12, access=access, constraints=WHOLE)
    pool = Pool.of(asked)
    assert pool.half_T.tolist() == [NO_HALF if row % 3 == 0 else row - 1 for row in range(24)]
    sizes = set()
    for seed in range(12):
        tasks = draw(pool, np.random.default_rng(seed), 5, 9)
        assert tasks.index_EI.shape == (5, 9)
        assert (pool.bytes_T[tasks.index_EI].max(1) < tasks.limit_E).all()
        sizes.add(max(np.bincount(task).max() for task in tasks.index_EI))
    assert {1, 2} <= sizes  # of uncut groups no two tables are alike


def test_the_gradient_is_of_what_the_roll_out_did():
    pool, rng = Pool.of(pool_question(3)), np.random.default_rng(1)
    networks = Networks(torch.Generator().manual_seed(3))
    policy = policy_of(networks, scaling_of(pool))
    tasks = draw(pool, rng, 4, 8)
    played = play(networks, policy, tasks, rng)
    wanted_EIU = logits_of(networks, played).detach().numpy()
    deck, _ = deck_of(policy, tasks)
    seen = []

    def choose(step):
        one = np.broadcast_to(deck.kinds_EIH[:, step.item, None], step.here_EUH.shape)
        seen.append(policy.logits(step.inputs_EUS, step.here_EUH, one))
        return played.unit_EI[:, step.item]

    dreamshard.roll_out(policy, deck, choose)
    legal = wanted_EIU != FORBIDDEN
    np.testing.assert_allclose(np.stack(seen, axis=1)[legal], wanted_EIU[legal], rtol=1e-3, atol=1e-4)


def test_roll_outs_compete_with_those_of_their_task_only():
    found = advantages(np.array([-1.0, -3.0, -1e3, -1e3]), 2)
    assert found.tolist() == [1, -1, 0, 0]


@pytest.mark.slow
def test_the_policy_follows_rewards():
    """From no preference at all, on one small pool, with rewards of the network alone."""
    pool, rng = Pool.of(pool_question(3)), np.random.default_rng(5)
    networks = Networks(torch.Generator().manual_seed(0))
    with torch.no_grad():
        networks.weight["straight"].zero_()
    adam = torch.optim.Adam(networks.parameters_of(POLICY_LAYERS), lr=3e-3)
    rewards = []
    for _ in range(60):
        tasks = draw(pool, rng, 4, 9).repeated(12)
        played = play(networks, policy_of(networks, scaling_of(pool)), tasks, rng)
        loss, _ = policy_loss(networks, played, 12, 1e-3)
        adam.zero_grad()
        loss.backward()
        adam.step()
        rewards.append(played.reward_E.mean())
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.1


@pytest.mark.slow
def test_a_short_training_is_repeatable_and_its_network_learns(tmp_path):
    shown = []
    questions = [pool_question(2), pool_question(3)]
    first = train_policy(questions, TINY, 5, shown.append, {"by": "a test"})
    assert msgspec.json.encode(train_policy(questions, TINY, 5)) == msgspec.json.encode(
        msgspec.structs.replace(first, trained={k: v for k, v in first.trained.items() if k != "by"})
    )
    assert first.trained["by"] == "a test"
    assert train_policy(questions, TINY, 6).layers != first.layers
    assert [p.iteration for p in shown] == [0, 1]
    short = []
    train_policy(questions, replace(TINY, cost_steps=2), 5, short.append)
    assert shown[-1].cost_error < 0.7 * short[-1].cost_error
    path = tmp_path / "policy.json"
    path.write_bytes(msgspec.json.encode(first))
    assert dreamshard.load_policy(path).unit_s == first.unit_s


@pytest.mark.slow
@pytest.mark.parametrize("torchrec", [False, True])
def test_a_minute_of_training_is_better_than_placing_at_random(torchrec):
    def asked(devices):
        return pool_question(devices, 40, TorchRecModel(Topology(devices=devices)) if torchrec else None)

    settings = PolicyTraining(iterations=3, groups=40, cost_steps=500, policy_steps=25, tables=(8, 20))
    policy = dreamshard.policy_of(train_policy([asked(2), asked(4)], settings, 0), "trained")
    pool, rng = Pool.of(asked(4)), np.random.default_rng(2)
    tasks = draw(pool, rng, 20, 16)
    deck, ordered = deck_of(policy, tasks)

    def choose(step):
        one = np.broadcast_to(deck.kinds_EIH[:, step.item, None], step.here_EUH.shape)
        return policy.logits(step.inputs_EUS, step.here_EUH, one).argmax(1)

    mine_E = judge(ordered, dreamshard.roll_out(policy, deck, choose)).overall_E
    random_E = np.min([judge(tasks, scatter(tasks, rng)).overall_E for _ in range(10)], axis=0)
    assert (mine_E / random_E).mean() < 0.9


def test_no_pool_is_refused():
    with pytest.raises(SpecError, match="least one pool"):
        train_policy([], TINY, 0)
    tables = [Table(name="a", rows=100, dim=8), Table(name="b", rows=100, dim=8)]
    together = question(tables, Topology(devices=2), 1e9, constraints=Constraints(together=(("a", "b"),)))
    with pytest.raises(SpecError, match="together: a pool"):
        train_policy([together], TINY, 0)
