"""Writes the golden files of a version: `python tests/golden/make.py FOLDER`, with `tests` on PYTHONPATH.

`files` was written by the first version that was kept, and stays: a later version has to read it. Where a format
changes on purpose and older files are refused, a message says so, and the files of both are kept.
"""

import gzip
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
from golden import contents
from golden.elastic_bits import JOBS, WORLDS, digest
from golden.losses import CLOSE, RECIPES, losses_of
from msgspec import structs
from planning.perf.networks import profile
from small import write_rows

from rowwise import Plan, Table, Topology
from rowwise.cli.main import make_app
from rowwise.parallel.plan import Forecast, Tile
from rowwise.planning.perf.exchange import ExchangeNetwork, Exchanges
from rowwise.planning.planner import column_wise, grid, replicated, row_wise
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import read
from rowwise.tables.ids.arrays import entry_map, make_folds
from rowwise.tables.ids.file import save

FILES = Path(__file__).parent / "files"
HOME = "/golden"  # stands for the folder that the files are in
ROWS, DAY = 1400, 700


def command(*args: str) -> None:
    """Of rowwise, which ends the process when it is done."""
    try:
        make_app()(args)
    except SystemExit as ended:
        if ended.code:
            raise


def write_warehouse(folder: Path) -> None:
    """Two days of made-up rows."""
    days = pa.array([row // DAY for row in range(ROWS)], pa.int32())
    write_rows(folder / "rows.parquet", ROWS, day=days)
    layout = ("--partition-by", "day", "--cluster-by", "user")
    command("data", "convert", str(folder / "rows.parquet"), str(folder / "warehouse"), *layout)
    (folder / "rows.parquet").unlink()


def write_id_map(folder: Path) -> None:
    """As learned ones are: with a map for each fold of the samples."""
    generator = np.random.default_rng(0)
    one, *others = (entry_map(50, generator.integers(0, 12, 50), 12) for _ in range(4))
    save(folder / "user.idmap", "user", make_folds(one, others, ("user", "item", "seen"), 5))


def write_plan(folder: Path) -> None:
    """Every layout, and a tile in a lower tier."""
    tables = [Table(name=f"t{k}", rows=1000 * (k + 1), dim=32) for k in range(4)]
    tiles = (
        *row_wise(tables[0], range(4)),
        *column_wise(tables[1], [1, 3]),
        *grid(tables[2], Topology(hosts=2, devices=2), [0, 1]),
        *replicated(tables[3], range(4)),
        Tile(table="below", rank=2, rows=(0, 10**9), cols=(0, 64), tier="host", cache_rows=10**6),
    )
    forecast = Forecast(model="roofline", batch=4096, step_s=0.00125, bound_s=0.001, bound="relaxed")
    (folder / "plan.json").write_text(Plan(world=4, tiles=tiles, forecast=forecast).to_json())


def write_profile(folder: Path) -> None:
    """A machine whose networks nobody trained."""
    rng = np.random.default_rng(1)

    def network() -> ExchangeNetwork:
        inner = tuple(tuple(row) for row in rng.normal(size=(10, 3)).tolist())
        three, ten = rng.normal(size=(2, 3)).tolist(), rng.uniform(1, 2, (2, 10)).tolist()
        return ExchangeNetwork(
            start_s=1e-5, byte_s=1e-9, id_s=2e-9, mean=tuple(ten[0]), scale=tuple(ten[1]),
            inner=inner, inner_offset=tuple(three[0]), outer=tuple(three[1]), outer_offset=0.1,
        )  # fmt: skip

    exchanges = Exchanges(route=network(), forward=network(), backward=network(), error=0.1, samples=10)
    (folder / "hardware.json").write_text(structs.replace(profile(0), exchanges=exchanges).to_json())


def write_run(folder: Path) -> None:
    """A run with full checkpoints and increments; without its report, which nothing reads."""
    os.chdir(folder)  # the recipe names its map beside it
    made = read(RECIPES / "run.yaml", [f"data.dataset=parquet:{folder / 'warehouse'}"])
    run = TrainingRun.start(made, folder / "runs")
    run.go()
    shutil.move(run.folder.path, folder / "run")
    (folder / "runs" / "run").rmdir()
    (folder / "runs").rmdir()
    (folder / "run" / "report.html").unlink()


def forget_places(folder: Path) -> None:
    """No path of this machine is kept."""
    environment = folder / "run" / "env.json"
    said = json.loads(environment.read_text())
    environment.write_text(json.dumps(said | {"library": f"{HOME}/librowwise_ops.so", "os": "Linux"}, indent=2))
    for path in (path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".yaml", ".txt")):
        path.write_text(path.read_text().replace(str(folder), HOME))
    shutil.rmtree(folder / "warehouse" / "_rowwise" / "popularity")
    for tensors in folder.rglob("*.safetensors"):  # histograms and tables that are mostly zeros
        Path(f"{tensors}.gz").write_bytes(gzip.compress(tensors.read_bytes(), mtime=0))
        tensors.unlink()
    for lock in folder.rglob("*lock"):
        lock.unlink()


def main(folder: Path) -> None:
    """Everything, and what is in it."""
    folder.mkdir(parents=True)
    for write in (write_warehouse, write_id_map, write_plan, write_profile, write_run):
        write(folder)
    losses = {name: losses_of(name, folder) for name in CLOSE}
    bits = {name: digest(tables, *WORLDS["one rank"]) for name, tables in JOBS.items()}
    shutil.rmtree(folder / "losses")
    said = {"exact": contents.exact(folder), "near": contents.near(folder), "losses": losses, "elastic bits": bits}
    (folder / "predicted.parquet").unlink()
    forget_places(folder)
    (folder / "contents.json").write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
