"""What a user of FuxiCTR writes to train on a log: PYTHON first_hour_fuxictr.py WORK, a JSON object.

The package has layers and a training loop, but neither DeepFM nor DCN, whose examples are in its repository: so the
model is put together here. Run by a Python that has FuxiCTR and not rowwise, so nothing else of `parts` is imported
but the watch.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from first_hour_watch import Watch
from fuxictr.features import FeatureMap
from fuxictr.preprocess import FeatureProcessor, build_dataset
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.layers import CrossNetV2, FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything

LABEL = "label"


class Model(BaseModel):
    """DeepFM or stacked DCN-v2."""

    def __init__(self, features: FeatureMap, work: dict, **settings: object) -> None:
        super().__init__(features, **settings)
        width = features.sum_emb_out_dim()
        deep = {"hidden_units": work["deep"], "dropout_rates": work["dropout"], "output_dim": 1}
        self.rows = FeatureEmbedding(features, work["dim"])
        self.pairs = FactorizationMachine(features) if work["model"] == "deepfm" else None
        self.crosses = CrossNetV2(width, work["crosses"]) if work["model"] == "dcn" else None
        self.deep = MLP_Block(width, **deep)
        self.validates = work["validates"]
        self.compile("adam", "binary_crossentropy", work["lr"])
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: dict) -> dict:
        columns = self.get_inputs(inputs)
        rows_BFD = self.rows(columns)
        flat_BS = rows_BFD.flatten(1)
        logits_B1 = self.deep(flat_BS if self.crosses is None else self.crosses(flat_BS))
        if self.pairs is not None:
            logits_B1 = logits_B1 + self.pairs(columns, rows_BFD)
        return {"y_pred": self.output_activation(logits_B1)}

    def eval_step(self) -> None:
        """As it is, but for runs whose speed is measured."""
        if self.validates:
            super().eval_step()
        else:
            self.save_weights(self.checkpoint)


def columns_of(work: dict) -> list[dict]:
    ids = [{"name": name, "type": "categorical", "dtype": "str"} for name in work["ids"]]
    mean = {"splitter": "|", "feature_encoder": "layers.MaskedAveragePooling()"}
    lists = [{"name": name, "type": "sequence", "dtype": "str", **mean} for name in work["lists"]]
    scaled = {"type": "numeric", "dtype": "float", "normalizer": "StandardScaler"}
    return [{"active": True, **column} for column in [*ids, *lists, *({"name": n, **scaled} for n in work["numbers"])]]


def as_npz(path: str) -> str:
    """The rows of a Parquet file for the loader without Ray: lists as rows of a matrix."""
    rows = pd.read_parquet(path)
    columns = {name: rows[name].to_numpy() for name in rows.columns}
    made = {name: np.stack(column) if column.dtype == object else column for name, column in columns.items()}
    np.savez(path.replace(".parquet", ".npz"), **made)
    return path.replace(".parquet", ".npz")


def main() -> None:
    work = json.loads(sys.argv[1])
    rows, out = Path(work["rows"]), Path(work["out"])
    seed_everything(work["seed"])
    torch.set_num_threads(work["threads"])
    files = {f"{part}_data": str(rows / f"{part}.csv") for part in ("train", "valid", "test")}
    label = {"name": LABEL, "dtype": "float"}
    processor = FeatureProcessor(columns_of(work), label, dataset_id="rows", data_root=str(out))
    train, valid, test = build_dataset(processor, **files, data_format="csv")
    if work["loader"] == "npz":
        train, valid, test = as_npz(train), as_npz(valid), as_npz(test)
    features = FeatureMap("rows", processor.data_dir)
    features.load(processor.json_file, {"embedding_dim": work["dim"]})
    settings = {"verbose": 0, "model_root": str(out), "metrics": ["AUC", "logloss"], "monitor": {"logloss": -1}}
    os.makedirs(out / "rows", exist_ok=True)
    model = Model(features, work, **settings, early_stop_patience=work["patience"])
    data = {"batch_size": work["batch"], "shuffle": True, "data_format": work["loader"]}
    train_rows, valid_rows = RankDataLoader(features, "train", train_data=train, valid_data=valid, **data)
    watch = Watch(model.optimizer, len(train_rows))
    model.fit(train_rows, epochs=work["epochs"], validation_data=valid_rows)
    test_rows = RankDataLoader(features, "test", test_data=test, **data)
    labels = torch.cat([batch[LABEL] for batch in test_rows])
    found = watch.found(labels, model.predict(test_rows))
    found |= watch.version("fuxictr")
    if work["alone"]:
        found |= watch.alone(model.train().train_step, list(train_rows))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
