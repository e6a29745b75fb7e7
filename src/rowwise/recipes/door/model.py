"""`DistributedModelParallel` in TorchRec's shape: TorchRec's own, with sharders that put our tables into the model.

TorchRec walks the module, wraps dense parameters in DistributedDataParallel, and names parameters and state. One rank
needs no wrapper and no process group.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec.distributed import model_parallel
from torchrec.distributed.model_parallel import get_default_sharders as get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from rowwise.base.errors import SpecError
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.launch import default_group, join_default_group
from rowwise.parallel.shard.embeddings import AnyEmbeddings, ShardedEmbeddings
from rowwise.recipes.door.collection import RowwiseCollection
from rowwise.recipes.door.dense import use_our_kernels
from rowwise.recipes.door.pieces import find_pieces
from rowwise.recipes.door.plans import check_paths, make_plan, tiles_of
from rowwise.recipes.door.sources import CollectionSource, find_collections, parameter_of
from rowwise.tables.embedding import Embeddings
from rowwise.tables.spec import Codecs, Topology, Wire, WireType

COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)


class DistributedModelParallel(model_parallel.DistributedModelParallel):
    """A module whose collections of tables are ours; arguments as TorchRec's.

    Args:
        module: the model, which is changed in place.
        env: of the default process group, or of one rank.
        device: of dense parameters and rows.
        plan: TorchRec's plan of all collections; by default `simple_plan` makes one.
        sharders: their `fused_params` are the hyperparameters of tables without an optimizer of their own, and their
            `qcomm_codecs_registry` the types in which vectors travel.
        init_data_parallel: wrap dense parameters now, not by a later `init_data_parallel()`.
        init_parameters: allocate dense parameters on the meta device.
        data_parallel_wrapper: wraps dense parameters; by default DistributedDataParallel does, for several ranks.
    """

    def __init__(  # noqa: PLR0913 - TorchRec's
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: Any = None,
        model_tracker_configs: Any = None,
    ) -> None:
        if model_tracker_configs is not None:
            raise SpecError("model_tracker_configs: touched rows are not tracked here", "None")
        wire = read_wire(sharders)
        device = device or torch.device("cpu")
        group = default_group()
        env = env or (ShardingEnv.from_local(1, 0) if group is None else ShardingEnv.from_process_group(group))
        sources = find_collections(module, sharders)
        comm = comm_of(env.process_group) if env.world_size > 1 else None
        topology = Topology() if comm is None else comm.topology
        plan = plan or make_plan(sources, topology, device.type)
        check_paths(plan, sources)
        tiles = {source.path: tiles_of(source, plan.plan[source.path], env.world_size) for source in sources}
        by_path = {source.path: (source, tiles[source.path]) for source in sources}
        our_sharders = [RowwiseSharder(kind, by_path, comm, wire) for kind in COLLECTIONS]
        self._wraps = env.world_size > 1 or data_parallel_wrapper is not None
        super().__init__(
            module, env, device, plan, our_sharders, init_data_parallel, init_parameters, data_parallel_wrapper
        )
        for path, child in self.module.named_modules():
            if type(child) in COLLECTIONS:
                raise SpecError(f"collection {path!r} has two names in one module", "one name")
        use_our_kernels(self.module)
        self._collections = [child for child in self.module.modules() if isinstance(child, RowwiseCollection)]

    def init_data_parallel(self) -> None:
        """Wrap dense parameters, if there are several ranks."""
        if self._wraps:
            super().init_data_parallel()
        elif not self._ddp_wrapped:
            if self.init_parameters:
                self._init_parameters(self._dmp_wrapped_module)
            self._dmp_wrapped_module.to(self.device)
            self._ddp_wrapped = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for collection in self._collections:
            collection.lookups = 0
        try:
            return super().forward(*args, **kwargs)
        finally:
            for collection in self._collections:
                collection.lookups = None


class RowwiseSharder(ModuleSharder[nn.Module]):
    """Replaces collections of one class by ours."""

    def __init__(self, kind: type[nn.Module], by_path: Any, comm: Comm | None, wire: Wire) -> None:
        super().__init__()
        self._kind, self._by_path, self._comm, self._wire = kind, by_path, comm, wire

    @property
    def module_type(self) -> type[nn.Module]:
        return self._kind

    def shard(
        self, module: nn.Module, params: Any, env: Any, device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> RowwiseCollection:  # fmt: skip
        """The collection of this rank, with the rows of `module`, or initial rows if it is on the meta device."""
        source, plan = self._by_path[module_fqn or ""]
        tables = [entry.table for entry in source.tables]
        embeddings: AnyEmbeddings
        if self._comm is None:
            embeddings = Embeddings(tables, device=device or "cpu")
        else:
            embeddings = ShardedEmbeddings(tables, plan, self._comm, wire=self._wire, device=device or "cpu")
            embeddings.fill(0)  # sets the keys of random rounding
        fill_rows(source, module, embeddings, env, self._comm)
        return RowwiseCollection(source, embeddings, env)


@torch.no_grad()
def fill_rows(
    source: CollectionSource, module: nn.Module, embeddings: AnyEmbeddings, env: Any, comm: Comm | None
) -> None:
    """Copy a module's rows, or draw those of one on the meta device; rank 0's for tables that each rank holds."""
    for entry, pieces in zip(source.tables, find_pieces(embeddings, env), strict=True):
        rows = parameter_of(module, entry.table.name).detach()
        for piece in pieces.local:
            if rows.is_meta:
                entry.init_rows(piece.rows)
            else:
                piece.rows.copy_(rows[slice(*piece.tile.rows), slice(*piece.tile.cols)])
        if comm is not None and not pieces.tiles:
            copies = pieces.local[0].rows
            sent = copies.float() if comm.rank == 0 else torch.zeros(copies.shape)
            copies.copy_(comm.all_reduce(sent.flatten(), "start").wait().view(copies.shape))


@lru_cache(maxsize=1)
def comm_of(group: Any) -> Comm:
    """The communicator of the ranks of a process group, one for all models."""
    if group is not default_group():
        raise SpecError("the env is of some ranks", "the default process group, or one rank")
    return join_default_group()


def read_wire(sharders: Sequence[Any] | None) -> Wire:
    """The types in which vectors and gradients travel, from the sharders' `qcomm_codecs_registry`."""
    wires: set[Codecs] = set()
    for sharder in sharders or ():
        for codecs in (getattr(sharder, "qcomm_codecs_registry", None) or {}).values():
            forward, backward = (getattr(codec, "_comm_precision", None) for codec in (codecs.forward, codecs.backward))
            names = [SparseType.FP32.value if kind is None else kind.value for kind in (forward, backward)]
            unknown = [name for name in names if name not in tuple(WireType)]
            if unknown:
                raise SpecError(f"sharder {type(sharder).__name__}: vectors in {unknown[0]}", ", ".join(WireType))
            wires.add(Codecs(*map(WireType, names)))
    if len(wires) > 1:
        raise SpecError(f"sharders with {len(wires)} different qcomm_codecs_registry", "one for all collections")
    codecs = wires.pop() if wires else Codecs()
    return Wire(host=codecs, network=codecs)
