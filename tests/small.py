"""Small runs: made-up clicks as Parquet, a recipe that learns from them in a second, and what a run has saved."""

import torch
from pyarrow import parquet as pq
from safetensors.torch import load_file

from rowwise.ingest.datasets.synthetic import SyntheticColumns
from rowwise.parallel.comm.thread import run_threads
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode
from rowwise.train.saved import CheckpointFolder

WORLD = SyntheticColumns(dense=2, ids=(("user", 50), ("item", 30)), bags=(("seen", 20),))
RECIPE = {
    "name": "small",
    "data": {"dataset": "parquet:rows.parquet", "valid_share": 0.2, "test_share": 0.2},
    "columns": {
        "labels": ["label"],
        "sparse": [{"column": name, "ids": "direct"} for name in ("user", "item", "seen")],
        "dense": [{"column": "d0"}, {"column": "d1"}],
        "key": "row",
    },
    "tables": {
        "list": [
            {
                "name": name,
                "rows": rows,
                "dim": 8,
                "pooling": "mean",
                "optimizer": {"kind": "rowwise_adagrad", "lr": 0.1},
            }
            for name, rows in WORLD.ids + WORLD.bags
        ]
    },
    "model": {"kind": "dlrm", "bottom": [8], "top": [8]},
    "train": {"batch": 128, "epochs": 2, "threads": 1, "ahead": 0, "optimizer": {"kind": "adam", "lr": 0.01}},
    "log": {"every": 4},
}


def write_rows(path, rows=2000, *, first=0, group=500, **more):
    """Rows of the small world, with more columns or others."""
    table = WORLD.rows(first, rows).drop_columns(["logit"])
    for name, values in more.items():
        made = values(table) if callable(values) else values
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, made if hasattr(made, "type") else [made])
    pq.write_table(table, path, row_group_size=group)
    return path


def sections(folder, base=RECIPE, **changes):
    """What the YAML of the small recipe would be read as; sections are merged, those of another kind replaced."""
    made = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
    made["data"]["dataset"] = f"parquet:{folder / 'rows.parquet'}"
    for key, value in changes.items():
        made[key] = {**made.get(key, {}), **value} if isinstance(value, dict) and "kind" not in value else value
    return made


def recipe(folder, **changes):
    """The small recipe; its rows are written if they are not there."""
    if not (folder / "rows.parquet").exists():
        write_rows(folder / "rows.parquet")
    return decode(sections(folder, **changes), "small.yaml")


def trained(folder, **changes):
    """A run that was trained to its end, and its result."""
    run = TrainingRun.start(recipe(folder, **changes), folder / "runs")
    return run, run.go()


def check_resumed(folder, steps, train, *, before_resuming=lambda: None, **changes):
    """A run that ended after some steps, and then went on, leaves the bits of one that did not end."""
    whole, _ = trained(folder, train=train, **changes)
    cut, _ = trained(folder, train=train | {"steps": steps}, **changes)
    before_resuming()
    TrainingRun.resume(cut.folder.path, ["train.steps=null"]).go()
    assert same(saved(whole.folder.path), saved(cut.folder.path))


def train_on_ranks(world, made, root):
    """A run to its end, on ranks that are threads: the result and the folder of each."""

    def on_a_rank(comm):
        run = TrainingRun.start(made, root, comm=comm)
        return run.go(), run.folder.path

    return run_threads(world, on_a_rank, timeout_s=120)


def tensors(run, *, state=True):
    """The newest checkpoint as one device has it, without what ranks have of their own; `state`: of optimizers, too."""
    found = CheckpointFolder(run / "ckpt").open()
    parts = ("model/", "rows/", "optimizer/") if state else ("model/", "rows/")
    return {name: found.load(name) for name in found.names() if name.startswith(parts)}


def saved(run, which=None):
    """All tensors of a checkpoint by name; without a name, of the newest."""
    found = sorted((run / "ckpt").glob("step-*[0-9]"))
    folder = found[-1] if which is None else run / "ckpt" / which
    return {key: x for file in sorted(folder.glob("*.safetensors")) for key, x in load_file(file).items()}


def same(a, b):
    """The same names and bits."""
    return a.keys() == b.keys() and all(torch.equal(_bits(a[k]), _bits(b[k])) for k in a)


def lines(run, name="metrics.csv"):
    """Of a CSV file, without the times."""
    rows = [line.split(",") for line in (run / name).read_text().splitlines()]
    at = rows[0].index("time_s")
    return [row[:at] + row[at + 1 :] for row in rows]


def _bits(x):
    return x.contiguous().view(-1).view(torch.uint8)
