"""`RowwiseFusedOptimizer`: the optimizer of a collection as TorchRec shows it, by the names of its parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizer

from rowwise.parallel.shard.embeddings import AnyEmbeddings
from rowwise.recipes.door.pieces import TablePieces


class RowwiseFusedOptimizer(FusedOptimizer):
    """Its state is that of the tables. `step` applies nothing, as the backward did, but takes over learning rates.

    Each table has a parameter group, whose `lr` a scheduler may change.
    """

    def __init__(self, tables: Mapping[str, tuple[nn.Parameter, TablePieces]], embeddings: AnyEmbeddings) -> None:
        self._embeddings = embeddings
        held = {key: (parameter, pieces) for key, (parameter, pieces) in tables.items() if pieces.local}
        self._names = {parameter: pieces.table.name for parameter, pieces in held.values()}
        groups = [{"params": [parameter], "lr": pieces.table.optimizer.lr} for parameter, pieces in held.values()]
        state = {parameter: pieces.save_state() for parameter, pieces in held.values()}
        super().__init__({key: parameter for key, (parameter, _) in held.items()}, state, groups)

    def step(self, closure: Any = None) -> None:
        self._set_learning_rates()

    def zero_grad(self, set_to_none: bool = False) -> None:
        self._set_learning_rates()

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of updates so far, as TorchRec's fused optimizer does."""
        for arena in self._embeddings.arenas:
            arena.steps_T.fill_(step)

    def _set_learning_rates(self) -> None:
        rates = {self._names[parameter]: float(g["lr"]) for g in self.param_groups for parameter in g["params"]}
        for arena in self._embeddings.arenas:
            own = [rates[piece.full_table.name] for piece in arena.pieces]
            if arena.learning_rates_T is not None or own != [piece.table.optimizer.lr for piece in arena.pieces]:
                arena.learning_rates_T = torch.tensor(own)
