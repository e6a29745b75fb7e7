"""A training loop of one's own: rowwise's tables, batches and metrics, and everything else in plain PyTorch.

    python examples/own_loop.py [--rows 200000]

For those who have a trainer already. `rowwise train dlrm-synthetic` does the same and more: checkpoints, reports, exact
resume. The clicks are made up by a teacher with known answers, whose AUC no model can beat on average.
"""

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: idle threads leave the cores alone

import torch
from torch.nn import functional as F

from rowwise import DLRM, Embeddings
from rowwise.ingest import Batcher, Batching
from rowwise.ingest.datasets.synthetic import synthetic
from rowwise.train.metrics import Metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)

    data = synthetic(options.rows, test_rows=50_000)
    embeddings = Embeddings(data.tables, update_in_backward=True)  # tables carry their own optimizers
    model = DLRM(embeddings, len(data.columns.dense), bottom=(64, 16), top=(64, 1))
    dense_optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)

    batches = Batcher(data.train, data.columns, data.tables, Batching(size=2048, ahead=2))
    for epoch in range(options.epochs):
        for batch in batches:
            dense_optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels_BK)
            loss.backward()  # each touched row changes once, in place
            dense_optimizer.step()
        print(f"epoch {epoch}: last loss {loss.item()}")

    metrics = Metrics(data.columns.labels)
    with torch.no_grad():
        for batch in Batcher(data.test, data.columns, data.tables, Batching(size=8192, shuffle=False)):
            metrics.update(model(batch), batch.labels_BK)
    found = metrics.value()["label"]
    print(f"test: NE {found.fit.ne:.4f}, AUC {found.area.auc:.4f}")


if __name__ == "__main__":
    main()
