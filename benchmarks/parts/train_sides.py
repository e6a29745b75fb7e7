"""The sides of `train_step.py`: one DLRM as rowwise, TorchRec and plain torch users write it.

Apart, because the comparison should not know how a side works. Every side starts from the same weights, sees the same
batches, and gives its dense parameters to the same torch optimizer.

TorchRec's tables are its `FusedEmbeddingBagCollection`: FBGEMM's table-batched operator with row-wise Adagrad inside
its backward, in one process and without communication.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as log_loss

from parts.batches import bags_of, names_of, tables_of
from parts.dlrm import BOTTOM, DENSE, DIM, FEATURES, TOP, WIDTH, TorchInteraction, linears, torch_mlp
from parts.ops_work import Work, ids_for, rows_for
from rowwise import DLRM, Batch, Embeddings, RowWiseAdagrad
from rowwise.train.recorder import peak_memory_bytes

NAMES = list(names_of(FEATURES))


class Size(NamedTuple):
    """Samples of a batch, and rows of each table."""

    batch: int
    rows: list[int]


FULL = Size(2048, rows_for(FEATURES, 1_000, 1_000_000))
SMOKE = Size(32, rows_for(FEATURES, 100, 1_000))
LR, EPS = 0.01, 1e-8  # of the rows
BATCHES = 4  # that the steps go through

# Fused, which is the fastest torch has on a CPU; of the dense parameters, on every side.
DENSE_OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3, fused=True),
}


class Side(Protocol):
    """A model with its optimizers; `halves`: whether it computes under autocast to bfloat16."""

    def dense(self) -> list[nn.Linear]:
        """Its linear layers, from the bottom up."""
        ...

    def tables(self) -> list[Tensor]:
        """Its rows, to start from."""
        ...

    def prepare(self, parts: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Dense numbers, ids feature by feature, and labels, as this side takes them."""
        ...

    def step(self, batch: Any) -> Tensor:
        """One training step; the loss before it."""
        ...


def parts_of(seed: int, size: Size = FULL) -> tuple[Tensor, Tensor, Tensor]:
    """One batch: one Zipf-like id a feature, and labels that the dense numbers say something about."""
    generator = torch.Generator().manual_seed(seed)
    dense_BF = torch.randn(size.batch, DENSE, generator=generator)
    labels_BK = (dense_BF[:, :1] + torch.randn(size.batch, 1, generator=generator) > 0).float()
    return dense_BF, ids_for(size.rows, Work(DIM, size.batch, 1, "zipf", 1, ""), seed), labels_BK


def same_start(sides: Sequence[Side]) -> None:
    """The first side's weights into all others."""
    first, *others = sides
    with torch.no_grad():
        for other in others:
            for mine, theirs in zip(first.dense(), other.dense(), strict=True):
                theirs.weight.copy_(mine.weight)
                theirs.bias.copy_(mine.bias)
            for mine, theirs in zip(first.tables(), other.tables(), strict=True):
                theirs.copy_(mine)
            if isinstance(other, TorchRec):
                sort_pairs(other.dense())


class Ours:
    """rowwise as its examples have it."""

    def __init__(self, optimizer: str, size: Size = FULL, *, halves: bool) -> None:
        tables = tables_of(size.rows, DIM, optimizer=RowWiseAdagrad(lr=LR, eps=EPS))
        self.model, self.halves = DLRM(Embeddings(tables), DENSE, BOTTOM, TOP), halves
        self.optimizer = DENSE_OPTIMIZERS[optimizer]([p for p in self.model.parameters() if p.requires_grad])

    def dense(self) -> list[nn.Linear]:
        return linears(self.model)

    def tables(self) -> list[Tensor]:
        return [self.model.embeddings.table(name) for name in NAMES]

    def prepare(self, parts: tuple[Tensor, Tensor, Tensor]) -> Batch:
        dense_BF, ids, labels_BK = parts
        return Batch(dense_BF=dense_BF, sparse=bags_of(NAMES, ids), labels_BK=labels_BK)

    def step(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.halves):
            logits_BK = self.model(batch)
        loss = log_loss(logits_BK.float(), batch.labels_BK)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.model.embeddings.update()
        return loss.detach()


class TorchRec:
    """TorchRec's DLRM over FBGEMM."""

    def __init__(self, optimizer: str, size: Size = FULL, *, halves: bool) -> None:
        quiet()
        from torchrec.models.dlrm import DLRM as TheirDlrm
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.optim import RowWiseAdagrad as TheirAdagrad

        tables = [
            EmbeddingBagConfig(name=n, embedding_dim=DIM, num_embeddings=r, feature_names=[n])
            for n, r in zip(NAMES, size.rows, strict=True)
        ]
        numbers = {"lr": LR, "eps": EPS}
        bags = FusedEmbeddingBagCollection(tables, TheirAdagrad, numbers, device=torch.device("cpu"))
        self.model: nn.Module = TheirDlrm(bags, DENSE, list(BOTTOM), list(TOP))
        self.halves = halves
        parameters = [p for name, p in self.model.named_parameters() if "sparse_arch" not in name]
        self.optimizer = DENSE_OPTIMIZERS[optimizer](parameters)

    def dense(self) -> list[nn.Linear]:
        return linears(self.model)

    def tables(self) -> list[Tensor]:
        found = {name.split(".")[-2]: rows for name, rows in self.model.state_dict().items() if "sparse_arch" in name}
        return [found[name] for name in NAMES]

    def prepare(self, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dense_BF, ids, labels_BK = parts
        return dense_BF, ids, torch.ones(len(ids), dtype=torch.int32), labels_BK

    def step(self, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        dense_BF, ids, lengths_FB, labels_BK = batch
        sparse = KeyedJaggedTensor(keys=NAMES, values=ids, lengths=lengths_FB)  # a new one, as of a new batch
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.halves):
            logits_BK = self.model(dense_BF, sparse)
        loss = log_loss(logits_BK.float(), labels_BK)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def sort_pairs(layers: Sequence[nn.Linear]) -> None:
    """TorchRec's dots of pairs come in another order: its first layer over them sorts its columns to match."""
    place = {(int(i), int(j)): k for k, (i, j) in enumerate(torch.tril_indices(27, 27, offset=-1).t())}
    order = [place[int(j), int(i)] for i, j in torch.triu_indices(27, 27, offset=1).t()]
    weight = next(m.weight for m in layers if m.in_features == WIDTH)
    weight[:, DIM:] = weight[:, DIM:][:, order]


def quiet() -> None:
    """Without what importing TorchRec prints."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


class Plain:
    """One nn.EmbeddingBag a table, Adagrad for the rows; its state is a number a weight, not a row."""

    def __init__(self, optimizer: str, size: Size = FULL, *, halves: bool) -> None:
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for rows in size.rows)
        self.bottom, self.top = torch_mlp((DENSE, *BOTTOM), True), torch_mlp((WIDTH, *TOP), False)
        self.interaction, self.halves = TorchInteraction(FEATURES + 1), halves
        parameters = [*self.bottom.parameters(), *self.top.parameters()]
        rows = torch.optim.Adagrad(self.bags.parameters(), lr=LR, eps=EPS)
        self.optimizers = [DENSE_OPTIMIZERS[optimizer](parameters), rows]

    def dense(self) -> list[nn.Linear]:
        return [*linears(self.bottom), *linears(self.top)]

    def tables(self) -> list[Tensor]:
        return [bag.weight.detach() for bag in self.bags]

    def prepare(self, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        dense_BF, ids, labels_BK = parts
        return dense_BF, ids.view(FEATURES, len(dense_BF), 1), labels_BK

    def step(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        dense_BF, ids_FB1, labels_BK = batch
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.halves):
            pooled_BS = torch.cat([bag(ids) for bag, ids in zip(self.bags, ids_FB1, strict=True)], 1)
            logits_BK = self.top(self.interaction(self.bottom(dense_BF), pooled_BS))
        loss = log_loss(logits_BK.float(), labels_BK)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()


SIDES: dict[str, Callable[[str, Size], Side]] = {
    f"{name} {kind}": partial(side, halves=kind == "bf16")
    for name, side in (("rowwise", Ours), ("TorchRec", TorchRec), ("torch", Plain))
    for kind in ("fp32", "bf16")
}


def main() -> None:
    """Print the bytes that a process with one side has held at most, after some steps: SIDE [--smoke]."""
    size = SMOKE if "--smoke" in sys.argv else FULL
    side = SIDES[sys.argv[1]]("adam", size)
    batches = [side.prepare(parts_of(seed, size)) for seed in range(BATCHES)]
    for batch in batches * 2:
        side.step(batch)
    print(peak_memory_bytes())


if __name__ == "__main__":
    main()
