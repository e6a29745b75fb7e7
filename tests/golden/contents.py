"""What golden files hold, as plain values: `exact` ones, and numbers that a processor may round otherwise (`near`)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import to_builtins
from pyarrow import parquet as pq

from rowwise import Plan, Table
from rowwise.checkpoint.read import Checkpoint
from rowwise.ingest import ParquetReader
from rowwise.planning.perf.exchange import Amounts
from rowwise.planning.perf.hardware import read_hardware
from rowwise.planning.perf.learned import model_of
from rowwise.recipes.trained import evaluate, predict_rows
from rowwise.tables.ids import file as id_map_file
from rowwise.tables.ids.rows import look_up_rows
from rowwise.tables.spec import Topology
from rowwise.train.saved import CheckpointFolder

MAPPED = Table(name="user", rows=50, dim=8)


def exact(folder: Path) -> dict[str, Any]:
    """Of a copy of the golden files."""
    found = {
        "plan": plan(folder),
        "id map": id_map(folder),
        "warehouse": warehouse(folder),
        "checkpoints": {path.name: checkpoint(path) for path in sorted((folder / "run" / "ckpt").glob("step-*"))},
        "steps": CheckpointFolder(folder / "run" / "ckpt").steps(),
    }
    return json.loads(json.dumps(found))


def near(folder: Path) -> dict[str, list[float]]:
    """Of a copy of the golden files."""
    return profile(folder) | run(folder)


def plan(folder: Path) -> Any:
    """Every tile, and what was expected."""
    made = Plan.from_json((folder / "plan.json").read_text())
    forecast = made.forecast
    assert forecast is not None
    tiles = [to_builtins(tile) | {"str": str(tile)} for tile in made.tiles]
    return {"world": made.world, "tiles": tiles, "step_s": forecast.step_s, "bound_s": forecast.bound_s}


def id_map(folder: Path) -> Any:
    """The rows of every id, by the map and by those of its folds."""
    made = id_map_file.load(folder / "user.idmap", MAPPED)
    assert made.folding is not None
    return {
        "digest": made.digest,
        "rows": look_up_rows(made, np.arange(MAPPED.rows)).tolist(),
        "folding": to_builtins(made.folding),
        "folds": [digest(words) for words in made.fold_words],
    }


def warehouse(folder: Path) -> Any:
    """Rows by column, in the order in which they are read, with the column that its folders make."""
    reader = ParquetReader(str(folder / "warehouse"), verify=True)
    names = ["day", "row", "label", "d0", "d1", "user", "item", "seen"]
    tables = [reader.read(split, names) for split in reader.splits()]
    values = {name: [value for table in tables for value in table[name].to_pylist()] for name in names}
    return {name: hashlib.sha256(json.dumps(column).encode()).hexdigest() for name, column in values.items()}


def checkpoint(folder: Path) -> Any:
    """The bits of every tensor, and where training stood."""
    made = Checkpoint.open(folder)
    made.verify()
    progress = made.manifest.data["progress"]
    tensors = {name: made.load(name) for name in made.names()}
    bits = {name: f"{x.dtype} {tuple(x.shape)} {digest(x.contiguous().numpy())}" for name, x in tensors.items()}
    return {"step": progress["step"], "samples": progress["samples"], "tensors": bits}


def digest(words: np.ndarray) -> str:
    """Of the bytes of an array."""
    return hashlib.sha256(np.ascontiguousarray(words).tobytes()).hexdigest()[:16]


def profile(folder: Path) -> dict[str, list[float]]:
    """Rates of a machine, and what its networks say of some loads and exchanges."""
    made = read_hardware((folder / "hardware.json").read_text())
    assert made.exchanges is not None
    phi = model_of(made, Topology(devices=4)).phi
    loads_NK = np.random.default_rng(0).integers(1, 1000, (5, phi.width)) / 1e6
    amounts = Amounts(
        dim_W=np.array([64.0, 128.0, 32.0, 0.0]),
        ids_W=np.array([1e4, 2e4, 5e3, 0.0]),
        batch=4096,
        skew_W=np.array([0.0, 1e-3, 5e-4, 0.0]),
    )
    rates = [made.device_Bps, made.cache_Bps, made.device_bytes, made.launch_s, made.host.all_to_all_Bps]
    return {
        "rates": [float(rate) for rate in rates],
        "kernels": phi(loads_NK).tolist(),
        "exchange": made.exchanges.forward(amounts).tolist(),
    }


def run(folder: Path) -> dict[str, list[float]]:
    """What a run measures of its test rows, and predicts for them."""
    torch.set_num_threads(1)
    values = evaluate(folder / "run").tasks["label"]
    predict_rows(folder / "run", folder / "predicted.parquet")
    predicted = pq.read_table(folder / "predicted.parquet")
    return {
        "metrics": [values[name] for name in ("count", "loss", "ne", "auc")],
        "rows": [float(row) for row in predicted["row"].to_pylist()],
        "logits": predicted["label_logit"].to_pylist(),
    }
