"""What do lookups take whose tables are ten times the memory: from the cache, from Redis, and from files?

    python benchmarks/serve_rows.py [--quick | --smoke] [--save]

Tables of a DLRM behind a cache of a tenth of their bytes, as a worker of `rowwise serve` has them, in one thread. Ids
follow Zipf's law with exponent 1.05. Each lookup is compared with that of tables in memory, bit for bit. A hit rate is
compared with that of the simulator for the same ids. Redis is a server on the loopback address; while it is killed,
emptied and cut off, answers of `rowwise serve` are compared with those of `rowwise predict`. Latencies of a worker are
compared with the forecast of `rowwise fleet`. Accuracy is that of a small model on its test rows, with a share of its
rows replaced, at random and behind the most popular ones.

Takes: 5 minutes; --quick 1 minute
Needs: the extras `serve` and `redis`, and redis-server
"""

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from parts.batches import bags_of
from parts.command import rowwise
from parts.redis_server import RedisServer
from parts.report import at_least, at_most, exactly, finish, options, parsed, show
from parts.serve_work import TABLES, changing, make_requests, measure, serving, write_versions
from torch import Tensor

from rowwise import Embeddings, Jagged
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.tables import table_modules
from rowwise.recipes.compose import build_model, make_evaluator
from rowwise.recipes.export import export
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.served import read_model
from rowwise.recipes.text import decode
from rowwise.recipes.trained import load_trained
from rowwise.serve.cached_rows import CachedRows, RowCounts
from rowwise.serve.default_rows import read_mean_rows
from rowwise.serve.hot_rows import read_hot_rows
from rowwise.serve.package import version_folder
from rowwise.serve.redis_rows import parse_addresses
from rowwise.serve.row_memory import tables_of
from rowwise.serve.row_tiers import RowTiers, make_tiers
from rowwise.serve.shared_rows import SharedRows, map_rows, reserve_rows, use_newer
from rowwise.serve.worker import SWITCH_s
from rowwise.tables.store.simulate import Trace, simulate
from rowwise.train.snapshot import restore_model

SKEW, PART = 1.05, 10  # tables are so many times the cache
SIZES = {  # as of `write_versions`; samples of a batch, batches; rows and test rows to train; faults
    "smoke": ((1000, 64, (64,), 0, 2), 8, 12, (4000, 2000), 3),
    "quick": ((20_000, 64, (64,), 0, 2), 32, 800, (40_000, 10_000), 10),
    "full": ((40_000, 64, (64,), 0, 2), 32, 6000, (200_000, 30_000), 50),
}
SHARES = (0.0, 0.01, 0.1, 0.5, 1.0)  # of rows that are replaced
HIT_RATES = (1.0, 0.99, 0.9, 0.7, 0.5, 0.0)  # of lookups, by the rows that are asked for most often


class Opened(NamedTuple):
    """Tables of a version, as a worker has them."""

    embeddings: Embeddings
    tiers: RowTiers
    cached: tuple[CachedRows, ...]


def open_tables(models: Path, tiers: RowTiers) -> Opened:
    path = version_folder(models, 1).path
    served, version = read_model(path), Checkpoint.open(path)
    model = build_model(served.parts, on_meta=True)
    places, memory, file = reserve_rows(model), tiers.divide(version.manifest, path), os.memfd_create("rows")
    shared = SharedRows.of(file, 1, version.manifest, places, memory.cached)
    map_rows(model, file, path, fresh=True, cached=memory.cached)
    restore_model(version, model, without=memory.cached)
    use_newer(model, version, shared.newer)
    cached = tiers.attach(model, served.name, version, shared, shared.newer, memory)
    (embeddings,) = (module for _, module in table_modules(model))
    assert isinstance(embeddings, Embeddings)
    return Opened(embeddings, tiers, cached)


def make_ids(rows: int, batches: int, batch: int) -> np.ndarray:
    """Ids [batches, tables, samples]; popular ones differ between tables."""
    draw = np.random.default_rng(0)
    weights_R = 1 / np.arange(1, rows + 1) ** SKEW
    total_R = np.cumsum(weights_R / weights_R.sum())
    ranks = np.minimum(np.searchsorted(total_R, draw.random((batches, TABLES, batch))), rows - 1)
    orders = np.stack([draw.permutation(rows) for _ in range(TABLES)])
    return orders[np.arange(TABLES)[None, :, None], ranks]


def batch_of(ids_TB: np.ndarray) -> Jagged:
    return bags_of([f"c{k}" for k in range(TABLES)], torch.from_numpy(ids_TB.reshape(-1)))


class Measured(NamedTuple):
    """Lookups of batches."""

    wrong: int  # vectors with other bits than those of tables in memory
    seconds: list[float]
    counts: RowCounts
    misses: list[int]  # rows that the cache lacked, by batch


def run(opened: Opened, ids: np.ndarray, wanted: Callable[[int], Tensor], before: Callable[[], None]) -> Measured:
    counts, seconds, misses, wrong = RowCounts(), [], [], 0
    with torch.inference_mode():
        for number, ids_TB in enumerate(ids):
            batch = batch_of(ids_TB)
            before()
            begin_s = time.perf_counter()
            found = opened.embeddings(batch).matrix_BS
            seconds.append(time.perf_counter() - begin_s)
            wrong += int((found != wanted(number)).any(1).sum())
            for one in opened.cached:
                new = one.take_counts()
                counts.add(new)
                misses.append(new.redis + new.files + new.defaults)
    return Measured(wrong, seconds, counts, misses)


def describe(name: str, measured: Measured, rows: int) -> dict:
    taken = np.array(measured.seconds)
    quantiles = {f"p{q}_ms": 1e3 * float(np.quantile(taken, q / 100)) for q in (50, 99)}
    row = {"case": name, "rows_s": rows / float(np.median(taken)), **quantiles, "wrong": measured.wrong}
    row |= {origin: getattr(measured.counts, origin) for origin in ("cache", "redis", "files", "defaults")}
    show(row)
    return row


def measure_tiers(folder: Path, size: tuple, batch: int, batches: int) -> tuple[list[dict], list[dict]]:
    models, _ = write_versions(folder, size)
    rows, dim = size[:2]
    ids = make_ids(rows, batches, batch)
    resident = open_tables(models, RowTiers())

    def wanted(number: int) -> Tensor:
        return resident.embeddings(batch_of(ids[number])).matrix_BS

    manifest = Checkpoint.open(version_folder(models, 1).path).manifest
    memory = rows * TABLES * dim * 4 // PART
    half, per_batch, found = batches // 2, TABLES * batch, []
    plain = open_tables(models, make_tiers(manifest, memory, (), None))

    def empty(opened: Opened) -> None:
        assert opened.tiers.caches is not None
        opened.tiers.caches.bytes[:] = 0

    found.append(describe("in memory", run(resident, ids[half:], lambda n: wanted(half + n), _nothing), per_batch))
    cold = run(plain, ids[:half], wanted, _nothing)
    found.append(describe("cache that fills, files", cold, per_batch))
    warm = run(plain, ids[half:], lambda n: wanted(half + n), _nothing)
    found.append(describe("warm cache, files", warm, per_batch))
    again = ids[-1:].repeat(min(200, batches), 0)
    hot = run(plain, again, lambda n: wanted(batches - 1), _nothing)
    found.append(describe("one batch again, all cached", hot, per_batch))
    assert plain.tiers.layout is not None
    (cache,) = plain.tiers.layout.caches
    keys = ids + np.arange(TABLES)[None, :, None] * (rows + rows // 4 + 1024)
    trace = Trace.of(keys.reshape(-1), per_batch, skip=half * per_batch)
    simulated = simulate(trace, cache.shape.slots, cache.shape.policy).hit_rate
    hit_rate = 1 - sum(warm.misses) / (per_batch * (batches - half))
    rates = {"case": "hit rate", "found": hit_rate, "simulated": simulated}
    show(rates)
    with closing(RedisServer(folder / "redis")) as redis:
        tiers = make_tiers(manifest, memory, parse_addresses(redis.address), None)
        shared = open_tables(models, tiers)
        few = again[:100]
        run(shared, few[:1], lambda n: wanted(batches - 1), _nothing)
        time.sleep(1)  # the rows are written meanwhile
        from_redis = run(shared, few, lambda n: wanted(batches - 1), lambda: empty(shared))
        found.append(describe("one batch again, all from Redis", from_redis, per_batch))
        from_files = run(plain, few, lambda n: wanted(batches - 1), lambda: empty(plain))
        found.append(describe("one batch again, all from files", from_files, per_batch))
        empty(shared)
        both = run(shared, ids[half:], lambda n: wanted(half + n), _nothing)
        found.append(describe("cache that fills, Redis and files", both, per_batch))
    rule = open_tables(models, make_tiers(manifest, memory, (), 0.5))
    ruled = run(rule, ids[:half], wanted, _nothing)
    found.append(describe("cache that fills, hit rate 50 %", ruled, per_batch))
    exact = [cold, warm, hot, from_redis, from_files, both]
    times = [float(np.median(one.seconds)) for one in (hot, from_redis)]
    floors = [
        exactly("vectors with other bits", sum(one.wrong for one in exact), 0),
        at_most("distance of the hit rate from the simulator's", abs(hit_rate - simulated), 0.01),
        exactly("rows that Redis had, of those of a batch", from_redis.counts.files, 0),
        at_least("time of rows from Redis over time of cached rows", times[1] / times[0], 5.0),
    ]
    return [*found, rates], floors


def _nothing() -> None:
    pass


def measure_faults(folder: Path, faults: int) -> tuple[list[dict], list[dict]]:
    """Requests to a server while its Redis is killed, emptied, and cut off for a while; each logit is compared."""
    models, data = folder / "models", folder / "new.parquet"
    requests, draw, ending = make_requests(models, data, folder), random.Random(0), threading.Event()
    total = sum(table.size_bytes for table in tables_of(Checkpoint.open(version_folder(models, 1).path).manifest))
    made: list[str] = []
    with closing(RedisServer(folder / "fault")) as redis:

        def harm() -> None:
            while len(made) < faults:
                made.append(draw.choice(("kill", "flush", "stop")))
                getattr(redis, made[-1])()
                time.sleep(draw.uniform(0.05, 0.4))
                if made[-1] == "kill":
                    redis.start()
                redis.go_on()
                time.sleep(draw.uniform(0.05, 0.4))
            ending.set()

        options = ("--memory", f"{total // PART}B", "--redis", redis.address)
        with serving(models, requests, *options) as server, changing(models, 0.5) as versions:
            thread, answers, wrong = threading.Thread(target=harm), 0, 0
            thread.start()
            while not ending.is_set():
                one = measure(server, "one row", 500, 8)
                answers, wrong = answers + one["requests"], wrong + one["wrong_logits"]
            thread.join()
    counts = {fault: made.count(fault) for fault in ("kill", "flush", "stop")}
    row = {"case": "faults", "answers": answers, "wrong": wrong, "versions": len(versions), **counts}
    show(row)
    return [row], [exactly("wrong logits while Redis has faults", wrong, 0)]


def measure_fleet(folder: Path) -> tuple[list[dict], list[dict]]:
    """The forecast of `rowwise fleet` beside latencies of requests at random times, of one worker."""
    found = []
    for rows in (1, 100):
        words = ("--qps", "1000", "--p99", "1000", "--rows", str(rows), "--json")
        for check in json.loads(rowwise("fleet", str(folder / "models"), *words))["checks"]:
            found.append({"case": "fleet", "rows": rows, **check})
            show(found[-1])
    worst = max(abs(one["p99_over_forecast"] - 1) for one in found)
    return found, [at_most("p99 of requests at random times over its forecast, less 1", worst, 0.25)]


def measure_accuracy(folder: Path, rows: int, test_rows: int) -> list[dict]:
    """AUC where a share of the rows is replaced by zeros, or by the mean row of their table."""
    recipe = {
        "name": "accuracy",
        "data": {"dataset": "synthetic", "rows": rows, "test_rows": test_rows},
        "tables": {"all": {"dim": 16}},
        "model": {"kind": "dlrm", "bottom": [32, 16], "top": [32]},
        "train": {"batch": 256},
    }
    run = TrainingRun.start(decode(recipe, "accuracy.yaml"), folder / "runs")
    run.go(test=False)
    found = measure_defaults(run.folder.path, folder / "defaults")
    for share in SHARES:
        row = {"case": "accuracy", "share": share}
        for kind in ("zeros", "mean row"):
            tables, score = open_run(run.folder.path)
            draw = torch.Generator().manual_seed(0)
            for weights_RD in tables.values():
                replaced = torch.rand(len(weights_RD), generator=draw) < share
                weights_RD[replaced] = 0.0 if kind == "zeros" else weights_RD.mean(0)
            row[kind] = score()["auc"]
        show(row)
        found.append(row)
    return found


def open_run(run: Path) -> tuple[dict[str, Tensor], Callable[[], dict[str, float]]]:
    """The rows of a run's tables, and the metrics of its test rows as these are then."""
    resolved, model = load_trained(run, "best")
    ((_, embeddings),) = table_modules(model)
    assert resolved.rows.test is not None
    evaluate = make_evaluator(resolved, model, resolved.rows.test)
    return {table.name: embeddings.table(table.name) for table in embeddings.tables}, lambda: evaluate().tasks["label"]


def measure_defaults(run: Path, models: Path) -> list[dict]:
    """What answers cost where a server has the most popular rows alone, and does not wait for the others."""
    version = export(run, models).folder.path
    hot, means, found = read_hot_rows(version), read_mean_rows(version), []
    for hit_rate in HIT_RATES:
        row = {"case": "default rows", "hit_rate": hit_rate}
        for kind in ("zero", "plain mean", "mean"):
            tables, score = open_run(run)
            for table, weights_RD in tables.items():
                name = f"model/embeddings.{table}"
                rows_M, counts_M = hot[name]
                hits_M = np.cumsum(counts_M) / max(1, counts_M.sum())
                kept = rows_M[: int(np.searchsorted(hits_M, hit_rate))]
                missing_R = torch.full((len(weights_RD),), hit_rate < 1)
                missing_R[torch.from_numpy(kept.copy())] = False
                default_D = {"zero": 0.0, "plain mean": weights_RD.mean(0), "mean": means[name]}[kind]
                weights_RD[missing_R] = default_D
            values = score()
            row |= {f"{kind} auc": values["auc"], f"{kind} ne": values["ne"]}
        show(row)
        found.append(row)
    return found


def main() -> None:
    args = parsed(options("serve_rows", __doc__))
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_s)
    size, batch, batches, accuracy, faults = SIZES["smoke" if args.smoke else "quick" if args.quick else "full"]
    with tempfile.TemporaryDirectory() as name:
        rows, floors = measure_tiers(Path(name), size, batch, batches)
        for part in (measure_faults(Path(name), faults), *(() if args.smoke else (measure_fleet(Path(name)),))):
            rows, floors = rows + part[0], floors + part[1]
        rows += measure_accuracy(Path(name), *accuracy)
    if args.smoke:
        floors = [floor for floor in floors if floor["floor"] == 0]
    finish("serve_rows", rows, floors, args)


if __name__ == "__main__":
    main()
