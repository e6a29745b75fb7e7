"""A linear model over ids: each id has one weight for each task, in tables of its own.

    logits = W dense + b + the pooled weights of all ids

It is the wide part of `WideDeep` and the first order of `DeepFM`. Its tables sit in a second `Embeddings`, which looks
the same features up again; so the weights have their own optimizer, and the first tables are unaffected.
"""

from collections.abc import Sequence

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.models.inputs import Ids, check_dims, input_columns
from rowwise.models.mlp import PackedModule
from rowwise.tables.idmaps import AnyIdMap, StoredIds
from rowwise.tables.ids.make import make_embeddings
from rowwise.tables.ops.linear import LinearLayer
from rowwise.tables.row_optimizers import RowOptimizer
from rowwise.tables.spec import Constant, RowType, Table

ENDING = "_wide"  # suffix of the names of these tables


def wide_tables(tables: Sequence[Table], tasks: int = 1, optimizer: RowOptimizer | None = None) -> list[Table]:
    """For each table a "<name>_wide" of dim `tasks`, with the same rows, features and pooling, initialised to 0.

    Its optimizer is the table's own if none is given. Its rows are float32: narrower ones would save little, as the
    scale of an int8 row alone takes eight bytes.
    """
    return [
        structs.replace(
            table,
            name=table.name + ENDING,
            dim=tasks,
            features=table.feature_names,
            optimizer=optimizer or table.optimizer,
            init=Constant(),
            row_type=RowType.FP32,
            column_group=None,
            id_map=same_map(table),
        )
        for table in tables
    ]


def same_map(table: Table) -> AnyIdMap | None:
    """The id map of a table, for a table of another name."""
    id_map = table.id_map
    return structs.replace(id_map, table=id_map.table or table.name) if isinstance(id_map, StoredIds) else id_map


class Wide(PackedModule):
    """logits = W dense + b + the pooled weights of all ids; all initialised to 0.

    Args:
        tables: of dim `tasks` each; `wide_tables` makes them.
        dense_features: dense numbers per sample.
        tasks: logits per sample.
        device: where the tables are, as of other `Embeddings`.
    """

    def __init__(
        self, tables: Sequence[Table], dense_features: int, tasks: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.columns = input_columns(tables, 0)
        check_dims(tables, tasks, "one weight for each task")
        self.embeddings = make_embeddings(tables, device=device)
        # Not a Linear, which draws initial weights and warns if it has none.
        self.weight = nn.Parameter(torch.zeros(tasks, dense_features))
        self.bias = nn.Parameter(torch.zeros(tasks))

    def chain(self) -> Sequence[LinearLayer]:
        return [LinearLayer(self.weight, self.bias, False)]

    def forward(self, dense_BF: Tensor, ids: Ids) -> Tensor:
        tasks = len(self.bias)
        vectors = self.embeddings(ids)
        dense_BK = F.linear(dense_BF, self.weight, self.bias) if self.packed is None else self.packed(dense_BF)
        return dense_BK + vectors.values().view(dense_BF.shape[0], self.columns // tasks, tasks).sum(1)
