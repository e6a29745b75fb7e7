"""MMoE and PLE: several tasks that share experts, each with gates of its own.

"Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts" (Ma et al. 2018, KDD):

    x        = [dense, pooled rows of all features]
    f_t      = sum over experts e of softmax(G_t x)_e E_e(x)              E: MLPs
    logit_t  = tower_t(f_t)

"Progressive Layered Extraction (PLE)" (Tang et al. 2020, RecSys) has experts of each task beside the shared ones, and
levels of them. A task's gate sees its own experts and the shared ones; the shared part of a level, which only the next
level reads, is gated over all experts:

    f^l_t = sum over own and shared e of softmax(G^l_t f^(l-1)_t)_e E^l_e(f^(l-1) of the expert's task)      f^0 = x
    f^l_s = sum over all e of softmax(G^l_s f^(l-1)_s)_e E^l_e(...)

"Entire Space Multi-Task Model" (ESMM, Ma et al. 2018, arXiv 1804.07931), for labels of consecutive events, such as a
click and a sale, learns the rate of a sale from all impressions, as the product of two rates:

    P(sale) = P(click) P(sale | click)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.base.errors import SpecError
from rowwise.models.inputs import Ids, input_columns, unpack
from rowwise.models.mlp import Linear, Mlp
from rowwise.tables.batch import Batch
from rowwise.tables.ids.make import AnyTables

MIN_NEGATIVE_LOG = 1e-7  # of a rate, as a rate of 1 has no logit


class ExpertLevel(nn.Module):
    """Experts of each task and shared ones, mixed by a gate for each task.

    Args:
        inputs: numbers that an expert reads.
        sizes: of an expert's layers.
        tasks: number of tasks.
        own: experts per task.
        shared: experts shared by all tasks.
        last: whether this is the last level, which has no shared mixture.
    """

    def __init__(self, inputs: int, sizes: Sequence[int], tasks: int, *, own: int, shared: int, last: bool) -> None:
        super().__init__()
        if own < 0 or shared < 0 or not own + shared or not sizes:
            raise SpecError(
                f"{own} experts of each task, {shared} shared ones of sizes {tuple(sizes)}",
                "at least one expert and one layer size",
            )
        if not own and not last:
            raise SpecError("several levels of shared experts only", "task experts, or a single level")
        self.own = nn.ModuleList(_expert(inputs, sizes) for _ in range(tasks * own))  # task by task
        self.count = own
        self.shared = nn.ModuleList(_expert(inputs, sizes) for _ in range(shared))
        self.gates = nn.ModuleList(Linear(inputs, own + shared, bias=False) for _ in range(tasks))
        self.shared_gate = None if last else Linear(inputs, own * tasks + shared, bias=False)

    def forward(self, tasks: Sequence[Tensor], shared_BS: Tensor) -> tuple[list[Tensor], Tensor]:
        """Mixtures of each task and of all tasks, from the inputs of each task's and of the shared experts."""
        out = [expert(tasks[k // self.count]) for k, expert in enumerate(self.own)]
        own = [out[t * self.count : (t + 1) * self.count] for t in range(len(tasks))]
        shared = [expert(shared_BS) for expert in self.shared]
        mixed = [_mix(gate(x), [*outputs, *shared]) for gate, x, outputs in zip(self.gates, tasks, own, strict=True)]
        if self.shared_gate is None:
            return mixed, shared_BS
        return mixed, _mix(self.shared_gate(shared_BS), [*out, *shared])


def _expert(inputs: int, sizes: Sequence[int]) -> Mlp:
    return Mlp((inputs, *sizes), relu_last=True)


def _mix(gates_BE: Tensor, experts: Sequence[Tensor]) -> Tensor:
    return torch.einsum("be,ebs->bs", gates_BE.softmax(1), torch.stack(list(experts)))


def chain_rates(logits_BK: Tensor) -> Tensor:
    """Logits of products of rates: of task 0, of tasks 0 and 1, and so on."""
    wide_BK = logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32))
    logs_BK = F.logsigmoid(wide_BK).cumsum(1).clamp(max=-MIN_NEGATIVE_LOG)
    return logs_BK - (-torch.expm1(logs_BK)).log()


class PLE(nn.Module):
    """PLE (Tang et al. 2020): levels of experts of each task and of shared ones, each task with gates of its own.

    Args:
        embeddings: pooled tables of any dims.
        dense_features: dense numbers per sample.
        tasks: number of logits.
        expert_sizes: of an expert's layers.
        task_experts: experts per task.
        shared_experts: experts shared by all tasks.
        levels: levels of experts.
        tower: sizes of the hidden layers between a task's mixture and its logit.
        dropout: rate on a tower's hidden layers.
        chain: whether each task happens only after the one before it, as in ESMM.
    """

    def __init__(  # noqa: PLR0913 - a model's hyperparameters
        self,
        embeddings: AnyTables,
        dense_features: int,
        tasks: int,
        *,
        expert_sizes: Sequence[int] = (128, 64),
        task_experts: int = 1,
        shared_experts: int = 2,
        levels: int = 1,
        tower: Sequence[int] = (32,),
        dropout: float = 0.0,
        chain: bool = False,
    ) -> None:
        """Shares `embeddings` with the caller; creates experts, gates and towers."""
        super().__init__()
        if levels < 1 or tasks < 1 or not expert_sizes:
            raise SpecError(
                f"levels={levels}, tasks={tasks}, expert_sizes={tuple(expert_sizes)}", "at least one of each"
            )
        self.embeddings, self.dense_features, self.chain = embeddings, dense_features, chain
        inputs = [input_columns(embeddings.tables, dense_features), *[expert_sizes[-1]] * (levels - 1)]
        counts = {"own": task_experts, "shared": shared_experts}
        self.levels = nn.ModuleList(
            ExpertLevel(inputs[k], expert_sizes, tasks, **counts, last=k + 1 == levels) for k in range(levels)
        )
        self.towers = nn.ModuleList(Mlp((expert_sizes[-1], *tower, 1), dropout=dropout) for _ in range(tasks))

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Logits [B, tasks] of a batch, or of dense numbers [B, dense_features] and sparse ids."""
        dense_BF, ids = unpack(batch, sparse, self.dense_features)
        shared_BS = torch.cat((dense_BF, self.embeddings(ids).values()), 1)
        mixed = [shared_BS] * len(self.towers)
        for level in self.levels:
            mixed, shared_BS = level(mixed, shared_BS)
        logits_BK = torch.cat([tower(x_BS) for tower, x_BS in zip(self.towers, mixed, strict=True)], 1)
        return chain_rates(logits_BK) if self.chain else logits_BK


class MMoE(PLE):
    """MMoE (Ma et al. 2018): experts that all tasks share, each task with a gate of its own.

    Args:
        embeddings: pooled tables of any dims.
        dense_features: dense numbers per sample.
        tasks: number of logits.
        experts: number of experts.
        expert_sizes: of an expert's layers.
        tower: sizes of the hidden layers between a task's mixture and its logit.
        dropout: rate on a tower's hidden layers.
        chain: whether each task happens only after the one before it, as in ESMM.
    """

    def __init__(  # noqa: PLR0913 - a model's hyperparameters
        self,
        embeddings: AnyTables,
        dense_features: int,
        tasks: int,
        *,
        experts: int = 4,
        expert_sizes: Sequence[int] = (128, 64),
        tower: Sequence[int] = (32,),
        dropout: float = 0.0,
        chain: bool = False,
    ) -> None:
        settings: dict[str, Any] = {"expert_sizes": expert_sizes, "tower": tower, "dropout": dropout, "chain": chain}
        super().__init__(embeddings, dense_features, tasks, task_experts=0, shared_experts=experts, **settings)
