"""Made-up clicks that models have to learn, and how well they do."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise import Batch, Embeddings, Jagged, Pooling, RowWiseAdagrad, Table
from rowwise.models.wide import Wide

DENSE = 3


def make_tables(dim: int = 8) -> list[Table]:
    """Two tables of one id a sample, and one with two features of bags."""
    adagrad = RowWiseAdagrad(lr=0.1)
    return [
        Table(name="user", rows=20, dim=dim, optimizer=adagrad),
        Table(name="item", rows=30, dim=dim, optimizer=adagrad),
        Table(name="word", rows=10, dim=dim, features=("said", "read"), pooling=Pooling.MEAN, optimizer=adagrad),
    ]


def make_clicks(size: int, *, seed: int = 0, tasks: int = 1) -> Batch:
    """What is clicked depends on each part alone and on user and item together; other tasks on nothing."""
    truth = torch.Generator().manual_seed(100)  # the same for all samples
    user_R, item_R = torch.randn(20, generator=truth), torch.randn(30, generator=truth)
    user_RD, item_RD = torch.randn(20, 2, generator=truth), torch.randn(30, 2, generator=truth)
    generator = torch.Generator().manual_seed(seed)
    user_B, item_B = (torch.randint(rows, (size,), generator=generator) for rows in (20, 30))
    lengths_2B = torch.randint(3, (2 * size,), generator=generator)
    words_N = torch.randint(10, (int(lengths_2B.sum()),), generator=generator)
    dense_BF = torch.randn(size, DENSE, generator=generator)
    logits_B = user_R[user_B] + item_R[item_B] + 2 * (user_RD[user_B] * item_RD[item_B]).sum(1) + dense_BF[:, 0]
    labels_BK = torch.full((size, tasks), 0.5)
    labels_BK[:, 0] = logits_B.sigmoid()
    sparse = Jagged(
        features=("user", "item", "said", "read"),
        values_N=torch.cat((user_B, item_B, words_N)),
        lengths_FB=torch.cat((torch.ones(2 * size, dtype=torch.int64), lengths_2B)),
    )
    return Batch(dense_BF=dense_BF, sparse=sparse, labels_BK=torch.bernoulli(labels_BK, generator=generator))


def randomize(wide: Wide) -> None:
    """A linear part that begins with zeros, as if it had learned."""
    wide.embeddings.load_state_dict({k: torch.randn_like(v) for k, v in wide.embeddings.state_dict().items()})
    nn.init.normal_(wide.weight)
    nn.init.normal_(wide.bias)


def step(model: nn.Module, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step of everything that learns."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for module in model.modules():
        if isinstance(module, Embeddings):
            module.update()


def learned_auc(model: nn.Module, *, batches: int = 200, size: int = 256) -> float:
    """AUC on held-out clicks after one pass over fresh ones: .77 for who knows no pairs, .92 for who knows all."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for seed in range(1, batches + 1):
        batch = make_clicks(size, seed=seed)
        step(model, F.binary_cross_entropy_with_logits(model(batch), batch.labels_BK), optimizer)
    held_out = make_clicks(4000)
    with torch.no_grad():
        return auc(model(held_out)[:, 0], held_out.labels_BK[:, 0])


def auc(logits_B: Tensor, labels_B: Tensor) -> float:
    """How often a clicked sample is ranked above one that was not clicked."""
    clicked_B = labels_B[logits_B.argsort()].double()
    return float((clicked_B * (1 - clicked_B).cumsum(0)).sum() / (clicked_B.sum() * (1 - clicked_B).sum()))
