"""Our copy of TorchRec's estimates is what its planner says."""

import random
from importlib.util import find_spec

import numpy as np
import pytest
from msgspec import structs
from planning.perf.asked import request_of

from rowwise import Sgd, Table, Topology
from rowwise.planning.perf import Access, TorchRecModel, Workload
from rowwise.planning.perf.hardware import hardware_named
from rowwise.planning.planner.options import make_problem

TORCHREC = pytest.mark.skipif(find_spec("torchrec") is None, reason="needs the extra 'peers'")
THEIRS = {
    "table_wise": "table_wise", "column_wise": "column_wise", "row_wise": "row_wise", "data_parallel": "replicated",
    "table_row_wise": "table_row_wise", "grid_shard": "grid",
}  # fmt: skip
SPLITS = (2, 3, 4)


def made_up(seed: int, count: int = 12) -> list[Workload]:
    """Tables of one or two features; dims that their cuts of columns divide."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        features = tuple(f"f{i}.{k}" for k in range(draw.randint(1, 2)))
        pooling = len(features) * draw.choice((0.25, 0.9, 1.0, 3.7, 20.0, 111.5))
        dim = draw.choice((16, 32, 48, 64, 96, 128, 192, 256, 512))
        table = Table(name=f"t{i}", rows=draw.randint(100, 10**7), dim=dim, features=features, optimizer=Sgd())
        made.append(Workload(table=table, access=Access(pooling=pooling)))
    return made


def theirs(
    workloads: list[Workload], topology: Topology, local: int, columns: int
) -> dict[tuple[str, str, int], float]:
    """Milliseconds of each shard by table, layout and columns."""
    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.planner import Topology as Devices
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs, constraints = [], {}
    for table, access in ((w.table, w.access) for w in workloads):
        names = list(table.feature_names)
        configs.append(
            EmbeddingBagConfig(name=table.name, num_embeddings=table.rows, embedding_dim=table.dim, feature_names=names)
        )
        constraints[table.name] = ParameterConstraints(
            pooling_factors=[access.pooling / len(names)] * len(names),
            min_partition=table.dim // columns,
            sharding_types=list(THEIRS),
        )
    devices = Devices(world_size=topology.world, local_world_size=topology.devices, compute_device="cuda")
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    estimator = EmbeddingPerfEstimator(topology=devices, constraints=constraints)
    enumerator = EmbeddingEnumerator(devices, local, constraints, estimator=estimator)
    found = {}
    for option in enumerator.enumerate(bags, [EmbeddingBagCollectionSharder()]):
        kernel = "dense" if option.sharding_type == "data_parallel" else "fused"
        if option.compute_kernel == kernel and option.sharding_type in THEIRS:
            for shard in option.shards:
                at = (option.name, THEIRS[option.sharding_type], shard.size[1])
                assert found.setdefault(at, shard.perf.total) == shard.perf.total
    return found


@pytest.mark.slow
@TORCHREC
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("hosts", "local"), [(1, 64), (2, 512), (4, 33)])
def test_estimates_are_torchrecs(hosts, local):
    topology = Topology(hosts=hosts, devices=8)
    workloads = made_up(hosts)
    hardware = structs.replace(hardware_named("a100-like"), device_bytes=1 << 60)
    batch = local * topology.world
    question = request_of(workloads, hardware, topology, batch=batch, model=TorchRecModel(topology))
    problem = make_problem(question)
    expected = {}
    for columns in (1, *SPLITS):
        expected |= theirs(workloads, topology, local, columns)
    seen = set()
    for option, item in enumerate(problem.item_of_O):
        kind, table = problem.kind_of(option), question.workloads[problem.members[item][0]].table
        if table.dim % (4 * kind.parts) or kind.parts not in (1, *SPLITS):
            continue
        for piece in problem.pieces_of(option):
            at = (table.name, kind.layout.name, table.dim // kind.parts)
            if at not in expected:
                continue
            assert problem.pieces.load_NK[piece, 0] == pytest.approx(expected[at] / 1000, rel=1e-9), at
            assert problem.pieces.link_N[piece] == 0
            seen.add((kind.layout.name, kind.parts))
    layouts = {layout for layout, _ in seen}
    assert layouts >= {"table_wise", "column_wise", "row_wise", "replicated"}
    assert ("table_row_wise" in layouts) == ("grid" in layouts) == (hosts > 1)
    assert np.isfinite(problem.pieces.load_NK).all()
