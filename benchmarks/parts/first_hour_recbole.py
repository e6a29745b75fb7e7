"""What a user of RecBole writes to train on a log: PYTHON first_hour_recbole.py WORK, a JSON object.

The log becomes files of RecBole's own format. Run by a Python that has RecBole and not rowwise, so nothing else of
`parts` is imported but the watch.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from first_hour_watch import Watch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.utils import get_model, get_trainer, init_logger, init_seed

LABEL = "label"
MODELS = {"deepfm": "DeepFM", "dcn": "DCNV2"}
# Its checkpoints hold objects, which torch no longer reads unless it is told to.
torch.load = functools.partial(torch.load, weights_only=False)


def write_files(work: dict) -> None:
    """Atomic files: tabs, a type in each name, lists by spaces."""
    folder = Path(work["out"]) / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    types = dict.fromkeys(work["ids"], "token") | dict.fromkeys(work["lists"], "token_seq")
    types |= dict.fromkeys([LABEL, *work["numbers"]], "float")
    read = {name: float if kind == "float" else str for name, kind in types.items()}
    for part in ("train", "valid", "test"):
        rows = pd.read_csv(Path(work["rows"]) / f"{part}.csv", usecols=list(types), dtype=read)
        for name in work["lists"]:
            rows[name] = rows[name].str.replace("|", " ")
        rows.columns = [f"{name}:{types[name]}" for name in rows.columns]
        rows.to_csv(folder / f"rows.{part}.inter", sep="\t", index=False)


def settings_of(work: dict) -> dict:
    names = [*work["ids"], *work["lists"], *work["numbers"]]
    evaluation = {"split": {"RS": [0.8, 0.1, 0.1]}, "group_by": None, "order": "RO", "mode": "labeled"}
    return {
        "data_path": work["out"],
        "checkpoint_dir": work["out"],
        "benchmark_filename": ["train", "valid", "test"],
        "load_col": {"inter": [LABEL, *names]},
        "LABEL_FIELD": LABEL,
        "USER_ID_FIELD": names[0],
        "ITEM_ID_FIELD": names[1],
        "numerical_features": work["numbers"],
        "normalize_field": work["numbers"] or None,
        "eval_args": evaluation,
        "metrics": ["AUC", "LogLoss"],
        "valid_metric": "LogLoss",
        "valid_metric_bigger": False,
        "stopping_step": work["patience"],
        "epochs": work["epochs"],
        "train_batch_size": work["batch"],
        "embedding_size": work["dim"],
        "mlp_hidden_size": work["deep"],
        "dropout_prob": work["dropout"],
        "cross_layer_num": work["crosses"],
        "learning_rate": work["lr"],
        "seed": work["seed"],
        "use_gpu": False,
        "show_progress": False,
        "state": "ERROR",
    }


def main() -> None:
    work = json.loads(sys.argv.pop(1))
    torch.set_num_threads(work["threads"])
    write_files(work)
    config = Config(MODELS[work["model"]], "rows", config_dict=settings_of(work))
    init_seed(config["seed"], config["reproducibility"])
    init_logger(config)
    dataset = create_dataset(config)
    train, valid, test = data_preparation(config, dataset)
    model = get_model(config["model"])(config, train.dataset)
    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    watch = Watch(trainer.optimizer, len(train))
    trainer.fit(train, valid if work["validates"] else None, verbose=False)
    state = torch.load(trainer.saved_model_file)["state_dict"]
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        parts = [(batch[0][LABEL].numpy(), model.predict(batch[0]).numpy()) for batch in test]
    found = watch.found(*(np.concatenate(several) for several in zip(*parts, strict=True)))
    found |= watch.version("recbole")
    if work["alone"]:
        found |= watch.alone(step_of(model, trainer.optimizer), list(train))
    print(json.dumps(found))


# The rest is for the watch.
def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[object], None]:
    """A step of the trainer, which has only epochs."""
    model.train()

    def step(batch: object) -> None:
        optimizer.zero_grad()
        model.calculate_loss(batch).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
