"""TorchRec's own planner on our tasks, rated as it rates itself: the side of `planner.py` that needs torchrec."""

import time

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from rowwise.planning.planner.problem import PlanRequest

TYPES = {
    "table_wise": "table_wise", "column_wise": "column_wise", "row_wise": "row_wise", "replicated": "data_parallel",
}  # fmt: skip
ROOM_bytes = 1 << 42  # memory is no limit here: TorchRec counts other things than we do


def torchrec_rating(question: PlanRequest, sort: str) -> tuple[float, float]:
    """Seconds of its best plan by its own estimates, and seconds to find it."""
    world = question.machine.topology.world
    layouts = question.constraints.layouts["*"]
    types = [TYPES[layout] for layout in layouts]
    tables, constraints = [], {}
    for w in question.workloads:
        t = w.table
        tables.append(
            EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
        )
        # A sharding type that a table is too narrow or short for is left out by its enumerator.
        constraints[t.name] = ParameterConstraints(
            sharding_types=types, compute_kernels=["fused", "dense"], pooling_factors=[w.access.pooling],
            min_partition=32 if t.dim >= 64 else t.dim,
        )  # fmt: skip
    topology = Topology(world_size=world, compute_device="cuda", hbm_cap=ROOM_bytes, ddr_cap=ROOM_bytes)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=question.batch // world,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        partitioner=GreedyPerfPartitioner(sort_by=SortBy.PERF if sort == "perf" else SortBy.STORAGE),
        stats=[],
    )
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    begin_s = time.perf_counter()
    planner.plan(module, [EmbeddingBagCollectionSharder()])
    took_s = time.perf_counter() - begin_s
    rating = NoopPerfModel(topology=topology).rate(plan=planner._best_plan)  # milliseconds
    return rating / 1000, took_s
