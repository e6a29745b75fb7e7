"""Train a small DLRM on made-up clicks: the demo, about half a minute on two cores.

    python examples/dlrm_synthetic.py [--samples 3000000] [--batch 2048] [--seed 0] [--threads 2]

The clicks come from a teacher whose tables and weights are drawn at random, so the best possible AUC is known:
the teacher's own. The model sees only ids, dense numbers and clicks, and has to get close. Data is made as it
goes, so every sample is seen once, and the AUC while training is that of samples not trained on yet.
"""

import argparse
import os
import time
from collections import deque

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: idle threads leave the cores alone

import torch
from msgspec import structs
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F

from rowwise import DLRM, Batch, Embeddings, Jagged, Normal, Pooling, RowType, RowWiseAdagrad, Table

DENSE, DIM = 13, 16
ROWS = {"user": 20_000, "item": 10_000, "shop": 2_000, "city": 1_000, "brand": 500, "kind": 100}  # one id a sample
BAGS = {"seen": 10_000, "words": 2_000}  # 0 to 6 ids a sample
TABLES = ROWS | BAGS


def make_tables(dim: int, init: Normal, row_type: RowType = RowType.FP32) -> list[Table]:
    """One table a feature; a bag's vector is the mean of its rows."""
    how = Table(name="any", rows=1, dim=dim, pooling=Pooling.MEAN, optimizer=RowWiseAdagrad(lr=0.1), init=init)
    return [structs.replace(how, name=name, rows=rows, row_type=row_type) for name, rows in TABLES.items()]


def make_model(seed: int) -> DLRM:
    """Dense numbers through an MLP, ids through tables, dot products of all pairs, and an MLP on top."""
    embeddings = Embeddings(make_tables(DIM, Normal(std=0.05)), seed=seed)
    return DLRM(embeddings, DENSE, bottom=(64, DIM), top=(64, 1))


class World:
    """Makes samples: ids by a power law, and clicks drawn from the logit of a teacher that the model never sees."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.teacher = Embeddings(make_tables(4, Normal()), seed=seed + 1)
        self.dense_F = torch.randn(DENSE, generator=self.generator) / DENSE**0.5

    @torch.no_grad()
    def sample(self, size: int) -> tuple[Batch, Tensor]:
        """A batch, and the teacher's logit of each of its samples."""
        dense_BF = torch.randn(size, DENSE, generator=self.generator)
        sparse = self._ids(size)
        vectors_BTD = self.teacher(sparse).values().view(size, len(TABLES), 4)
        alone_B = vectors_BTD[:, :, 0].sum(1)
        # The dots of all pairs add up to half of what the square of the sum has beside the squares.
        together_B = (vectors_BTD.sum(1).square().sum(1) - vectors_BTD.square().sum((1, 2))) / 2
        logits_B = -1 + dense_BF @ self.dense_F + 0.4 * alone_B + 0.05 * together_B
        clicks_B = torch.bernoulli(torch.sigmoid(logits_B), generator=self.generator)
        return Batch(dense_BF=dense_BF, sparse=sparse, labels_BK=clicks_B.unsqueeze(1)), logits_B

    def _ids(self, size: int) -> Jagged:
        lengths: list[Tensor] = []
        values: list[Tensor] = []
        for name, rows in TABLES.items():
            least, most = (0, 6) if name in BAGS else (1, 1)
            lengths.append(torch.randint(least, most + 1, (size,), generator=self.generator))
            u_N = torch.rand(int(lengths[-1].sum()), generator=self.generator)
            values.append(((rows + 1) ** u_N - 1).long().clamp(max=rows - 1))  # id k comes about 1 / (k + 1) as often
        return Jagged(features=tuple(TABLES), values_N=torch.cat(values), lengths_FB=torch.cat(lengths))


class Meter:
    """Loss and AUC of the last batches, shown as a live line, or as a line every few seconds in a log."""

    def __init__(self, bar: Progress, samples: int) -> None:
        self.bar, self.samples = bar, samples
        self.task = bar.add_task("starting", total=samples)
        self.begin = self.shown = time.perf_counter()
        self.done = 0
        self.recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=16)

    def add(self, logits_B: Tensor, clicks_B: Tensor) -> None:
        """Another batch is trained."""
        self.done += len(clicks_B)
        self.recent.append((logits_B.detach(), clicks_B))
        live = self.bar.console.is_terminal
        if self.done >= self.samples or time.perf_counter() - self.shown > (0.2 if live else 5.0):
            self.shown = time.perf_counter()
            line = f"{self.samples_s:,.0f} samples/s, {score(*map(torch.cat, zip(*self.recent, strict=True)))}"
            self.bar.update(self.task, completed=self.done, description=line)
            if not live:
                self.bar.console.print(f"{self.done:,} samples, {line}")

    @property
    def samples_s(self) -> float:
        """Samples a second since the beginning."""
        return self.done / (time.perf_counter() - self.begin)


def score(logits_B: Tensor, clicks_B: Tensor) -> str:
    """Loss and AUC, for people."""
    return f"loss {F.binary_cross_entropy_with_logits(logits_B, clicks_B):.6f}, AUC {auc(logits_B, clicks_B):.4f}"


def auc(logits_B: Tensor, clicks_B: Tensor) -> float:
    """How often a clicked sample is ranked above one that was not clicked."""
    clicked_B = clicks_B[logits_B.argsort()].double()
    clicks, others = clicked_B.sum(), (1 - clicked_B).sum()
    return float((clicked_B * (1 - clicked_B).cumsum(0)).sum() / (clicks * others))


def train(model: DLRM, world: World, meter: Meter, batch_size: int) -> None:
    """One pass over fresh samples."""
    dense_optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    while meter.done < meter.samples:
        batch, _ = world.sample(min(batch_size, meter.samples - meter.done))
        clicks_B = batch.labels_BK.squeeze(1)
        logits_B = model(batch).squeeze(1)
        dense_optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(logits_B, clicks_B).backward()
        dense_optimizer.step()
        model.embeddings.update()  # rows have no torch optimizer: each touched row changes once, in place
        meter.add(logits_B, clicks_B)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3_000_000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    world = World(options.seed)
    held_out, teacher_B = world.sample(50_000)
    model = make_model(options.seed)
    console = Console()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        meter = Meter(bar, options.samples)
        train(model, world, meter, options.batch)
    samples_s = meter.samples_s
    with torch.no_grad():
        logits_B = model(held_out).squeeze(1)
    clicks_B = held_out.labels_BK.squeeze(1)
    print(f"held-out samples: {score(logits_B, clicks_B)}")
    print(f"the teacher's:    {score(teacher_B, clicks_B)}")
    print(f"speed: {samples_s:,.0f} samples/s on {options.threads} threads")


if __name__ == "__main__":
    main()
