"""`Embeddings`: the module that holds a model's tables on one device.

`forward` looks a batch up, the backward stages gradients, `update` applies them: rows have no torch optimizer. Tables
are parameters under their names that do not require gradients, so `state_dict` has one entry per table. Under
torch.compile the lookup is a graph break; the operators themselves compile.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NoReturn, Self, TypeVar, final

import torch
from msgspec import structs
from torch import Tensor, nn

from rowwise.base.errors import BatchError, RowwiseError, SpecError, StateError
from rowwise.tables.batch import Jagged, KeyedJagged
from rowwise.tables.ops import rowtype
from rowwise.tables.ops.arena import Arena
from rowwise.tables.ops.in_backward import BackwardEnd
from rowwise.tables.ops.in_ddp import running_ddp
from rowwise.tables.ops.layout import TablePiece
from rowwise.tables.ops.lookup import StagedGradients
from rowwise.tables.ops.tiles import Tiles
from rowwise.tables.row_optimizers import Sgd
from rowwise.tables.spec import Table, check_tables
from rowwise.tables.store.row_store import TooManyRowsError

Module = TypeVar("Module", bound=nn.Module)
LookedUp = tuple[Tensor, Mapping[str, Tensor]]  # pooled features side by side, and the rows of sequences by feature


@final
class Vectors:
    """The output of a lookup: pooled features side by side, and the rows of sequences.

    `vectors[name]` is [B, D] for a pooled feature and [N, D] for a sequence; `keys`, `values` and `to_dict`
    are those of TorchRec's KeyedTensor and cover the pooled features. Vectors of sharded tables may be in flight
    from other ranks: the first access blocks, so a model should first compute what does not need them.
    """

    __slots__ = ("_receive", "_result", "columns")

    def __init__(self, columns: Mapping[str, slice], receive: Callable[[], LookedUp]) -> None:
        """`receive` is called once, at the first access; `columns`: of the pooled features."""
        self.columns, self._receive = columns, receive
        self._result: LookedUp | None = None

    @classmethod
    def of(cls, matrix_BS: Tensor, columns: Mapping[str, slice], sequences: Mapping[str, Tensor]) -> Self:
        """The vectors of a finished lookup."""
        vectors = cls(columns, _receive_nothing)
        vectors._result = matrix_BS, sequences
        return vectors

    def wait(self) -> LookedUp:
        """Block until the vectors have arrived."""
        if self._result is None:
            receive, self._receive = self._receive, _receive_nothing  # frees the send buffers
            self._result = receive()
        return self._result

    @property
    def matrix_BS(self) -> Tensor:
        return self.wait()[0]

    @property
    def sequences(self) -> Mapping[str, Tensor]:
        return self.wait()[1]

    def __getitem__(self, feature: str) -> Tensor:
        if feature in self.sequences:
            return self.sequences[feature]
        if feature not in self.columns:
            raise BatchError(f"no feature {feature!r}; there are {', '.join([*self.columns, *self.sequences])}")
        return self.matrix_BS[:, self.columns[feature]]

    def keys(self) -> list[str]:
        """Names of the pooled features."""
        return list(self.columns)

    def values(self) -> Tensor:
        """All pooled features as one matrix [B, S]."""
        return self.matrix_BS

    def to_dict(self) -> dict[str, Tensor]:
        """The pooled features by name."""
        return {name: self[name] for name in self.columns}


def _receive_nothing() -> LookedUp:
    raise StateError("vectors of a lookup that failed", hint="look up again")


Forward = Callable[[Module, Jagged | KeyedJagged], Vectors]


def break_graph(look_up: Forward[Module]) -> Forward[Module]:
    """Wrap a lookup as a `forward` with a graph break: a compiled graph could neither stage gradients nor wait."""

    def receive(module: Module, sparse: Jagged | KeyedJagged) -> Vectors:
        vectors = look_up(module, sparse)
        vectors.wait()
        return vectors

    @wraps(look_up)
    def forward(self: Module, sparse: Jagged | KeyedJagged) -> Vectors:
        if torch.compiler.is_compiling():
            # Not as a decorator, which would import the compiler (seconds) even where nothing is compiled.
            return torch.compiler.disable(receive)(self, sparse)
        return look_up(self, sparse)

    return forward


def point_parameters(module: nn.Module, rows: Mapping[str, Tensor]) -> None:
    """Create parameters, or point them to memory that has moved: views of an arena, which owns the memory."""
    for name, view in rows.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            # Not register_parameter, which rejects names of methods, as tables may have.
            module._parameters[name] = nn.Parameter(view, requires_grad=False)
        else:
            parameter.data = view  # keep the Parameter object, as Module.to does


def apply_to_empty(fn: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What `fn` of `Module._apply` makes of vectors: the type and device that it converts to."""
    empty = fn(torch.empty(0, dtype=dtype, device=device))
    if empty.is_cpu and empty.is_shared():
        raise SpecError(
            "share_memory() of tables, of which each process would still train rows of its own",
            hint="train on several ranks: shard(model, plan, comm)",
        )
    return empty


def convert(vectors: LookedUp, dtype: torch.dtype) -> LookedUp:
    """The vectors of a lookup as another type of floats."""
    if dtype is torch.float32:
        return vectors
    return vectors[0].to(dtype), {feature: rows.to(dtype) for feature, rows in vectors[1].items()}


def check_not_in_backward(module: Any) -> None:
    """Raise for a module whose gradients nobody can clip or defer, as each backward applies them."""
    if module.update_in_backward:
        raise SpecError(
            f"table {module.tables[0].name!r}: its gradients are applied in the backward, which leaves none to check, "
            "clip or defer",
            "update_in_backward=False",
        )


class Embeddings(nn.Module):
    """Embedding tables on one device.

    Args:
        tables: the tables; pooled features are side by side in the output, in this order.
        seed: seed of the initial rows, which depend on nothing else (not on devices, threads or the plan).
        device: device of the rows; "meta" allocates none, for tables that are too large until they are sharded.
        merge_shared: sum the gradients of shared bags before they are merged ([Note: Merged bags]): less work, but
            another order of summation.
        update_in_backward: each backward ends with an update, so `update` is not called. For a plain loop: trainers of
            rowwise refuse it. See [Note: Updates in the backward] in `ops/in_backward.py`.
        rows_of_ids: batches have row numbers in place of ids of managed tables, as `ManagedEmbeddings` passes them.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        merge_shared: bool = False,
        update_in_backward: bool = False,
        rows_of_ids: bool = False,
    ) -> None:
        """Allocate and initialise the tables."""
        super().__init__()
        check_tables(tables)
        mapped = [table.name for table in tables if table.id_map is not None]
        if mapped:
            raise SpecError(
                f"table {mapped[0]!r} has an id_map, which Embeddings does not apply",
                "MappedEmbeddings, or rowwise.make_embeddings, which chooses the class",
            )
        managed = [table.name for table in tables if table.managed is not None]
        if managed and not rows_of_ids:
            raise SpecError(
                f"table {managed[0]!r} is managed, and Embeddings does not give its ids rows",
                "ManagedEmbeddings, or rowwise.make_embeddings, which chooses the class",
            )
        self.seed, self.update_in_backward = seed, update_in_backward
        self._end = BackwardEnd()
        self._tiles = Tiles(tables, torch.device(device), merge_shared=merge_shared)
        self._host_tiles: Tiles | None = None  # looks up batches that find no slots, see `serve_on`
        self.arena.fill(seed)
        self._columns = self._tiles.pooled.column_slices
        self.vector_type = torch.float32  # of outputs; `double()` and the like change it, for the layers above
        self.register_load_state_dict_pre_hook(_adapt_state_dict)
        self._make_parameters()

    @property
    def arena(self) -> Arena:
        """The memory of rows and optimizer state."""
        return self._tiles.arena

    @property
    def device(self) -> torch.device:
        return self.arena.rows.device

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """All arenas; `ShardedEmbeddings` has several."""
        return (self.arena,)

    @property
    def unknown_ids(self) -> dict[str, int]:
        """Number of ids outside their table, which were mapped to its last row, by feature."""
        return self._tiles.unknown_ids

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.arena.tables

    def reserve(self, spare_rows: Callable[[Table], int]) -> None:
        """Reserve spare rows after each table for later versions (meta device only); see `ops/newer.py`."""
        assert self.arena.rows.is_meta
        pieces = [piece._replace(spare_rows=spare_rows(piece.table)) for piece in self.arena.pieces]
        self._tiles = Tiles(pieces, self.device, merge_shared=self._tiles.merge_shared)
        self.arena.fill(self.seed)

    @torch.no_grad()
    def cache_on(self, device: torch.device | str, cache_rows: Mapping[str, int], samples: int = 0) -> Self:
        """Move to a GPU, but leave the tables of `cache_rows` in host memory and cache that many rows of each.

        The GPU reads missed rows from host memory and writes changed ones back, with their optimizer state. Results
        have the same bits as without a cache. Parameters of cached tables are views of host memory: `table`, `weights`,
        `optimizer_state` and checkpoints bring them up to date.

        `samples`: batch size; a table gets at least one overflow slot per sample and feature. A batch with more rows
        of a table than the cache has slots is an error.
        """
        return self._cache_pieces(torch.device(device), self.arena.pieces, cache_rows, samples)

    @torch.no_grad()
    def serve_on(
        self, device: torch.device | str, cache_rows: Mapping[str, int], samples: int, newer: Mapping[str, int]
    ) -> Self:
        """Like `cache_on`, for rows in memory that `Arena.attach` was given, which are only looked up.

        `newer`: number of spare rows of each table that hold rows of later versions. A batch whose rows find no slots
        is looked up in host memory.
        """
        host_tiles = self._tiles
        pieces = [
            piece._replace(
                table=structs.replace(piece.table, optimizer=Sgd()), spare_rows=newer.get(piece.table.name, 0)
            )
            for piece in self.arena.pieces
        ]
        for table in self.tables:
            del self._parameters[table.name]  # still on the meta device
        self._cache_pieces(torch.device(device), pieces, cache_rows, samples)
        self._host_tiles = host_tiles if cache_rows else None
        return self

    def _cache_pieces(
        self, device: torch.device, uncached_pieces: Sequence[TablePiece], cache_rows: Mapping[str, int], samples: int
    ) -> Self:
        managed = {table.name for table in self.tables if table.managed is not None}
        for name in cache_rows:
            self._index(name)
            if name in managed:
                raise SpecError(
                    f"table {name!r} is managed, so its rows stay together", "the table on the device, uncached"
                )
        self.arena.check_in_host_memory()
        pieces = [
            piece.cached(cache_rows[name], samples) if (name := piece.table.name) in cache_rows else piece
            for piece in uncached_pieces
        ]
        self._tiles = self._tiles.cached_on(device, pieces)
        self._make_parameters()
        return self

    def table(self, name: str) -> Tensor:
        """The rows of a table as they are stored: a view [R, D], or the bytes of int8 rows [R, row_bytes]."""
        return self.arena.table(self._index(name))

    def weights(self, name: str) -> Tensor:
        """The rows of a table as float32 [R, D]: a view if they are stored as float32, else a copy."""
        return self.arena.weights(self._index(name))

    @break_graph
    def forward(self, sparse: Jagged | KeyedJagged) -> Vectors:
        """Look a batch up. With gradients enabled, each backward stages what `update` will apply."""
        if torch.is_grad_enabled():
            self._check_ddp()
            self._end.begin_forward(self.discard)
        jagged = Jagged.from_keyed(sparse).contiguous()
        try:
            lookup = self._tiles.look_up(jagged)
        except TooManyRowsError:
            if self._host_tiles is None:
                raise
            lookup = self._host_tiles.look_up(jagged.to("cpu")).to(self.device)
        if self.update_in_backward:
            steps = self._check_in_backward, self.update
            self._end.watch((lookup.matrix_BS, lookup.flat), steps, self.discard)
        matrix_BS, sequences = convert((lookup.matrix_BS, self._tiles.split(lookup)), self.vector_type)
        return Vectors.of(matrix_BS, self._columns, sequences)

    def abort_forward(self, error: RowwiseError) -> NoReturn:
        """Called instead of `forward` if the batch could not be built; `ShardedEmbeddings` raises on all ranks."""
        raise error

    def update(self) -> None:
        """Apply the gradients staged since the last update: each touched row changes once."""
        self._tiles.update()

    def check_staged(self) -> float:
        """Raise if a staged gradient is not finite, before any row changes (`update` changes all but the bad rows).

        Finite gradients whose sum overflows are left to `update`. Returns an upper bound of the sums' absolute values.
        """
        return self._tiles.check_staged()

    def _check_in_backward(self) -> None:
        if self.device.type == "cpu":  # kernels of a GPU check too; the host learns of it later
            self.check_staged()

    def _check_ddp(self) -> None:
        ddp = running_ddp()
        if ddp is not None and ddp.process_group.size() > 1:
            raise SpecError(
                f"table {self.tables[0].name!r} in DistributedDataParallel on {ddp.process_group.size()} ranks: each "
                "would train rows of its own",
                hint="call shard(model, plan, comm) before DistributedDataParallel",
            )

    def discard(self) -> None:
        """Drop the staged gradients, for example after a loss that is not finite."""
        self._tiles.discard()

    @property
    def staged(self) -> Sequence[StagedGradients]:
        """The gradients that the next update applies."""
        return tuple(self._tiles.staged)

    def take_staged(self) -> list[StagedGradients]:
        """Remove and return the staged gradients, for a deferred update."""
        check_not_in_backward(self)
        return self._tiles.take_staged()

    def put_staged(self, staged: list[StagedGradients]) -> None:
        """Stage gradients that `take_staged` returned, ahead of those staged since."""
        self._tiles.staged = staged + self._tiles.staged

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer state as views of the arena: {table: {name: tensor}}."""
        return {table.name: self.arena.table_state(index) for index, table in enumerate(self.tables)}

    @torch.no_grad()
    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy state into the arena, from a mapping such as `optimizer_state` returns."""
        self.arena.mark_all()
        for table, views in self.optimizer_state().items():
            for name, view in views.items():
                tensor = state.get(table, {}).get(name)
                if tensor is None or tensor.shape != view.shape:
                    got = "nothing" if tensor is None else tuple(tensor.shape)
                    raise StateError(f"optimizer state {name!r} of table {table!r}: got {got}", tuple(view.shape))
                # Copied, as kernels address state by its offset in the arena.
                view.copy_(tensor)

    def _index(self, name: str) -> int:
        for index, table in enumerate(self.tables):
            if table.name == name:
                return index
        raise SpecError(f"no table {name!r}; the tables are {', '.join(t.name for t in self.tables)}")

    def _make_parameters(self) -> None:
        point_parameters(self, {table.name: self.arena.table(index) for index, table in enumerate(self.tables)})

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Called by `to`: the arena moves as a whole. Rows keep their type, a property of the table; vectors do not."""
        moved = apply_to_empty(fn, self.vector_type, self.arena.rows.device)
        self.arena.to(moved.device)
        self.vector_type = moved.dtype
        self._make_parameters()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:
        """Raise: rows have no gradients that autograd knows of."""
        raise SpecError(
            f"requires_grad_({requires_grad}) of table {self.tables[0].name!r}, whose rows are trained by update()",
            hint="look rows up under torch.no_grad() to freeze them",
        )

    def __getstate__(self) -> dict[str, Any]:
        # Without the parameters, which __setstate__ makes again: torch.save rejects views of a storage as two dtypes.
        names = {table.name for table in self.tables}
        remaining = {name: parameter for name, parameter in self._parameters.items() if name not in names}
        return {**self.__dict__, "_parameters": remaining}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_parameters()

    def extra_repr(self) -> str:
        return "\n".join(
            f"{t.name}: {t.rows} x {t.dim} {t.row_type}, {t.pooling}, {type(t.optimizer).__name__}" for t in self.tables
        )


def _adapt_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """Rename entries of nn.EmbeddingBag and TorchRec, check shapes, and copy even with assign=True."""
    assert isinstance(module, Embeddings)
    module.arena.mark_all()
    for table in module.tables:
        name = table.name
        # In a ModuleDict of EmbeddingBags, in TorchRec's pooled and sequence collections, in a single EmbeddingBag.
        aliases = [f"{name}.weight", f"embedding_bags.{name}.weight", f"embeddings.{name}.weight"]
        if len(module.tables) == 1:
            aliases.append("weight")
        for alias in aliases:
            if prefix + alias in state_dict:
                state_dict[prefix + name] = state_dict.pop(prefix + alias)
        weights = state_dict.get(prefix + name)
        if weights is None:
            continue
        stored = module.table(name)
        is_float = weights.is_floating_point()
        if stored.dtype == torch.uint8 and is_float and tuple(weights.shape) == (table.rows, table.dim):
            state_dict[prefix + name] = rowtype.pack(weights, table.row_type, table.column_group)
        elif weights.shape != stored.shape or not (
            weights.dtype == stored.dtype or (is_float and stored.is_floating_point())
        ):
            raise StateError(
                f"table {name!r}: got {tuple(weights.shape)} of {weights.dtype}",
                f"{tuple(stored.shape)} of {stored.dtype}",
            )
    # With assign=True torch would replace the parameters, and the arena would keep the old rows.
    local_metadata["assign_to_params_buffers"] = False
