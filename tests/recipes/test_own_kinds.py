"""A kind of model of the user's own, with a loss and an evaluator: it trains, is measured, predicts and is served."""

import numpy as np
import pytest
from pyarrow import parquet as pq
from small import trained

from rowwise.base.errors import SpecError
from rowwise.recipes.export import export
from rowwise.recipes.served import open_version
from rowwise.recipes.trained import evaluate
from rowwise.serve.forward import arrays_of

KIND = """
import torch
from torch import nn
from rowwise.train.evaluate import Scores
from rowwise.train.objective import Outcome


class Brier(nn.Module):
    "Learns probabilities by their squared error, and is measured by it."

    metrics = ("skill",)

    def __init__(self, embeddings, dense_features, tasks):
        super().__init__()
        self.embeddings = embeddings
        self.out = nn.Linear(dense_features + 3 * 8, tasks)

    def forward(self, batch):
        return self.out(torch.cat([batch.dense_BF, self.embeddings(batch.sparse).values()], 1))

    def make_objective(self, train, comm):
        def loss(batch, step):
            logits_BK = self(batch)
            return Outcome((logits_BK.sigmoid() - batch.labels_BK).square().mean(), logits_BK)

        return loss

    def make_evaluator(self, batches, tasks, comm):
        return Skill(self, batches, tasks)


class Skill:
    metrics = ("skill", "count")

    def __init__(self, model, batches, tasks):
        self.model, self.batches, self.tasks = model, batches, tasks

    def __call__(self):
        self.model.eval()
        with torch.inference_mode():
            pairs = [(self.model(batch).sigmoid(), batch.labels_BK) for batch in self.batches()]
        self.model.train()
        p, y = (torch.cat(parts) for parts in zip(*pairs))
        skill = 1 - (p - y).square().mean() / (y.mean() - y).square().mean()
        return Scores({self.tasks[0]: {"skill": float(skill), "count": len(y)}})
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "brier.py").write_text(KIND)
    return {"model": f"{tmp_path / 'brier.py'}:Brier", "train": {"batch": 128, "epochs": 2, "threads": 1}}


def test_a_kind_of_ones_own_trains_is_measured_predicts_and_is_served(own, tmp_path, command):
    run, result = trained(tmp_path, **own, evaluate={"metric": "skill", "patience": 2})
    assert result.best.metric == "skill"
    assert 0 < result.test["label"]["skill"] < 1
    path = run.folder.path
    assert ",skill," in (path / "metrics.csv").read_text()
    assert evaluate(path).tasks["label"]["skill"] == pytest.approx(result.test["label"]["skill"])
    rows = tmp_path / "rows.parquet"
    code, _, err = command("predict", str(path), "--data", f"parquet:{rows}", "--out", "p.parquet")
    assert code == 0, err
    export(path, tmp_path / "served")
    version = open_version(tmp_path / "served")
    table = pq.read_table(rows).select(version.schema.names)
    logits = version.forward(arrays_of(table), len(table), 256).flatten().numpy()
    np.testing.assert_array_equal(logits, pq.read_table(tmp_path / "p.parquet")["label_logit"].to_numpy())


def test_a_metric_that_a_kind_does_not_have_is_refused(own, tmp_path):
    with pytest.raises(SpecError, match=r"evaluate\.metric='hits'.*skill"):
        trained(tmp_path, **own, evaluate={"metric": "hits"})
