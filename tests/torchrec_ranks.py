"""What each rank does under TorchRec: takes a plan of ours, says where its tables lie, and looks up."""

import warnings

import torch
from torch import distributed, nn

BATCH = 16


def join(comm) -> None:
    """Make torch's default group, which is what TorchRec talks through."""
    world = len(comm.ranks)
    mine = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    ports_W = comm.all_gather(torch.tensor([mine.port if mine else 0]), [1] * world, "port").wait().tolist()
    store = mine or distributed.TCPStore("127.0.0.1", ports_W[0])
    distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=world)


class Model(nn.Module):
    """The collection is somewhere inside."""

    def __init__(self, tables) -> None:
        super().__init__()
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        configs = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=list(table.feature_names),
                pooling=PoolingType(str(table.pooling).upper()),
            )
            for table in tables
        ]
        self.inner = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=configs)})

    def forward(self, batch):
        return self.inner["bags"](batch)


def batch_of(tables, rank: int):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    g = torch.Generator().manual_seed(rank)
    names = [(table, feature) for table in tables for feature in table.feature_names]
    lengths = torch.randint(0, 5, (len(names), BATCH), generator=g)
    ids = [torch.randint(0, t.rows, (int(n.sum()),), generator=g) for (t, _), n in zip(names, lengths, strict=True)]
    return KeyedJaggedTensor(keys=[f for _, f in names], values=torch.cat(ids), lengths=lengths.flatten())


def lies_and_finds(comm, text: str, tables) -> tuple[dict, float]:
    """Of each table: this rank's pieces (rows, columns, first of each); the largest difference from one device."""
    warnings.simplefilter("ignore")
    join(comm)
    from torchrec.distributed import DistributedModelParallel

    from rowwise.recipes.torchrec import sharding_plan

    torch.manual_seed(7)
    whole = Model(tables)
    weights = {name.split(".")[-2]: value.detach().clone() for name, value in whole.named_parameters()}
    model = Model(tables)
    plan = sharding_plan(text, model)
    assert list(plan.plan) == ["inner.bags"]
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)
    held = {}
    for name, value in model.state_dict().items():
        table = name.split(".")[-2]
        if not hasattr(value, "local_shards"):
            value.copy_(weights[table])
            held[table] = [((0, 0), tuple(value.shape))]
            continue
        held[table] = []
        for shard in value.local_shards():
            (row, col), (rows, cols) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            assert shard.tensor.shape == (rows, cols)
            shard.tensor.detach().copy_(weights[table][row : row + rows, col : col + cols])
            held[table].append(((row, col), (rows, cols)))
    batch = batch_of(tables, comm.rank)
    mine, one = model(batch).to_dict(), whole(batch).to_dict()
    assert list(sorted(mine)) == list(sorted(one))
    apart = max(float((mine[name] - one[name]).abs().max()) for name in one)
    moved = max(float(one[name].abs().max()) for name in one)
    distributed.barrier()
    distributed.destroy_process_group()
    return held, apart / moved
