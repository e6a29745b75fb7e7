"""`Embeddings`: the tables of a model on one device, as models use them.

A plain module: `forward` looks a batch up, autograd stages gradients, `update` applies them (there is no
torch optimizer for the rows). Tables appear as parameters under their names, without requiring a gradient, so
`state_dict` has one entry per table. Under torch.compile the lookup is a graph break; the operators
themselves compile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from rowwise.batch import Jagged, KeyedJagged
from rowwise.errors import BatchError, RowwiseError, SpecError, StateError
from rowwise.ops import rowtype
from rowwise.ops.arena import Arena
from rowwise.ops.lookup import StagedGradients
from rowwise.ops.tiles import Tiles
from rowwise.spec import Table, check_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """The result of a lookup: pooled features side by side, and the rows of sequences.

    `vectors[name]` is [B, D] for a pooled feature and [N, D] for a sequence; `keys`, `values` and `to_dict`
    are those of TorchRec's KeyedTensor and cover the pooled features.
    """

    matrix_BS: Tensor
    columns: Mapping[str, slice]
    sequences: Mapping[str, Tensor]

    def __getitem__(self, feature: str) -> Tensor:
        """The vectors of one feature."""
        if feature in self.sequences:
            return self.sequences[feature]
        if feature not in self.columns:
            raise BatchError(f"no feature {feature!r}; there are {', '.join([*self.columns, *self.sequences])}")
        return self.matrix_BS[:, self.columns[feature]]

    def keys(self) -> list[str]:
        """Names of the pooled features."""
        return list(self.columns)

    def values(self) -> Tensor:
        """The pooled features as one matrix."""
        return self.matrix_BS

    def to_dict(self) -> dict[str, Tensor]:
        """The pooled features by name."""
        return {name: self[name] for name in self.columns}


class Embeddings(nn.Module):
    """Embedding tables on one device.

    Args:
        tables: what to hold; features of pooled tables stand side by side in this order in the output.
        seed: of the initial rows, which depend on nothing else (not on devices, threads or cuts).
        device: where the rows live; "meta": nowhere, for tables that are too large until they are sharded.
        merge_shared: add up the gradients of bags that samples share before they are merged, see [Note: Merged bags]:
            less work, and sums in another order.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        merge_shared: bool = False,
    ) -> None:
        """Allocate and fill the tables."""
        super().__init__()
        check_tables(tables)
        mapped = [table.name for table in tables if table.id_map is not None]
        if mapped:
            want = "want MappedEmbeddings, or rowwise.make_embeddings, which makes what tables need"
            raise SpecError(f"table {mapped[0]!r} has an id_map, and Embeddings looks ids up as they are: {want}")
        self.seed = seed
        self._tiles = Tiles(tables, torch.device(device), merge_shared=merge_shared)
        self.arena.fill(seed)
        self._columns = self._tiles.pooled.column_slices
        self.register_load_state_dict_pre_hook(_before_load)
        self._show_tables()

    @property
    def arena(self) -> Arena:
        """The memory of rows and optimizer state."""
        return self._tiles.arena

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.arena.rows.device

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The same, as there may be several once it is sharded."""
        return (self.arena,)

    @property
    def unknown_ids(self) -> dict[str, int]:
        """How many ids outside their table were mapped to its last row, by feature."""
        return self._tiles.unknown_ids

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables, in order."""
        return self.arena.tables

    def table(self, name: str) -> Tensor:
        """The rows of a table as they are stored: a view [R, D], or the bytes of int8 rows [R, row_bytes]."""
        return self.arena.table(self._index(name))

    def weights(self, name: str) -> Tensor:
        """The rows of a table as float32 [R, D]: the view itself if they are stored so, else a copy."""
        return self.arena.weights(self._index(name))

    def forward(self, sparse: Jagged | KeyedJagged) -> Vectors:
        """Look a batch up. With gradients enabled, each backward stages what `update` will apply."""
        if torch.compiler.is_compiling():
            # Staging appends to a list, which a compiled graph cannot; so the graph breaks here, once. Not as a
            # decorator: that would load the compiler, seconds of it, for everybody.
            return torch.compiler.disable(self._forward)(sparse)
        return self._forward(sparse)

    def abort_forward(self, error: RowwiseError) -> NoReturn:
        """Instead of `forward`, where there is no batch because of an error; sharded tables raise on all ranks."""
        raise error

    def _forward(self, sparse: Jagged | KeyedJagged) -> Vectors:
        looked = self._tiles.look_up(Jagged.from_keyed(sparse).contiguous())
        return Vectors(matrix_BS=looked.matrix_BS, columns=self._columns, sequences=self._tiles.split(looked))

    def update(self) -> None:
        """Apply what the backwards since the last update staged: each touched row changes once."""
        self._tiles.update()

    def check_staged(self) -> float:
        """Raise if a staged gradient is not finite, while no row has changed; `update` keeps only bad rows as they are.

        Gradients that are finite one by one and not together are left to `update`. Returns a bound for their sums.
        """
        return self._tiles.check_staged()

    def discard(self) -> None:
        """Forget what was staged, for instance after a loss that is not finite."""
        self._tiles.discard()

    @property
    def staged(self) -> Sequence[StagedGradients]:
        """What the next update would apply."""
        return tuple(self._tiles.staged)

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Views of the optimizer state: {table: {name: tensor}}."""
        return {table.name: self.arena.table_state(index) for index, table in enumerate(self.tables)}

    @torch.no_grad()
    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy in what `optimizer_state` gave."""
        self.arena.mark_all()
        for table, views in self.optimizer_state().items():
            for name, view in views.items():
                found = state.get(table, {}).get(name)
                if found is None or found.shape != view.shape:
                    got = "nothing" if found is None else tuple(found.shape)
                    raise StateError(
                        f"optimizer state {name!r} of table {table!r}: got {got}, want {tuple(view.shape)}"
                    )
                # Into the arena: the kernels know the state by its place.
                view.copy_(found)

    def _index(self, name: str) -> int:
        for index, table in enumerate(self.tables):
            if table.name == name:
                return index
        raise SpecError(f"no table {name!r}; the tables are {', '.join(t.name for t in self.tables)}")

    def _show_tables(self) -> None:
        """(Re)make the parameters: views of the arena, as rows are stored, which alone owns the memory."""
        for index, table in enumerate(self.tables):
            view = self.arena.table(index)
            parameter = self._parameters.get(table.name)
            if parameter is None:
                # Not register_parameter: it refuses the names of methods, which tables may have.
                self._parameters[table.name] = nn.Parameter(view, requires_grad=False)
            else:
                parameter.data = view  # the same object, as a move keeps other parameters the same objects

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Moves: the arena goes as a whole. Rows keep their type: it belongs to the table, not to the caller."""
        # fn is applied to an empty float tensor to learn the device it moves to; a change of type is ignored.
        self.arena.to(fn(torch.empty(0, device=self.arena.rows.device)).device)
        self._show_tables()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds."""
        # Not the views of tables, which the arena gives again: torch.save refuses views of a storage as another type.
        names = {table.name for table in self.tables}
        others = {name: parameter for name, parameter in self._parameters.items() if name not in names}
        return {**self.__dict__, "_parameters": others}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a copy or an unpickling the parameters are views again."""
        # A copied parameter owns a copy of its rows; the arena's copy is the one that counts.
        super().__setstate__(state)
        self._show_tables()

    def extra_repr(self) -> str:
        """One line a table."""
        return "\n".join(
            f"{t.name}: {t.rows} x {t.dim} {t.row_type}, {t.pooling}, {type(t.optimizer).__name__}" for t in self.tables
        )


def _before_load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """Take nn.EmbeddingBag and TorchRec names too, check shapes, and copy always, as parameters are views."""
    assert isinstance(module, Embeddings)
    module.arena.mark_all()
    for table in module.tables:
        name = table.name
        # A ModuleDict of bags, TorchRec's pooled and sequence collections, and a single bag.
        aliases = [f"{name}.weight", f"embedding_bags.{name}.weight", f"embeddings.{name}.weight"]
        if len(module.tables) == 1:
            aliases.append("weight")
        for alias in aliases:
            if prefix + alias in state_dict:
                state_dict[prefix + name] = state_dict.pop(prefix + alias)
        found = state_dict.get(prefix + name)
        if found is None:
            continue
        stored = module.table(name)
        floats = found.is_floating_point()  # of any width
        if stored.dtype == torch.uint8 and floats and tuple(found.shape) == (table.rows, table.dim):
            state_dict[prefix + name] = rowtype.pack(found, table.row_type, table.column_group)
        elif found.shape != stored.shape or not (
            found.dtype == stored.dtype or (floats and stored.is_floating_point())
        ):
            want = f"{tuple(stored.shape)} of {stored.dtype}"
            raise StateError(f"table {name!r}: got {tuple(found.shape)} of {found.dtype}, want {want}")
    # With assign=True torch would replace the parameters, and the arena would keep the old rows.
    local_metadata["assign_to_params_buffers"] = False
