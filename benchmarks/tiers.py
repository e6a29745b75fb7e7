"""How fast do tables on disk train, beside tables in memory, the disk's own limit, memory-mapped files and RocksDB?

    python benchmarks/tiers.py [--quick | --smoke] [--gigabytes N] [--folder DIR] [--save]

- step: a DLRM with eight tables of dim 64 and row-wise Adagrad, batch 4,096, one Zipf(1.05) id a feature. Rows and
  state take 20 GB on the disk, of which 4 GB are cached (--quick: 2 GB and .4 GB). All rows were written, and the cache
  begins full of the most frequent ones. Rows that the next batch misses are read while a batch is computed. The same
  model with smaller tables, all of them in memory, takes turns with it in the same process. A time is the least mean of
  20 steps in a row, so the log's large writes count. The disk's limit is the time of a step's missed rows at the random
  reads of 4 KiB that 32 threads do in the same run. Reads and writes are direct.
- peers: the same ids, lookup and update of rows without dense layers, and without reading ahead. nn.EmbeddingBag on
  memory-mapped files with sparse gradients, and RocksDB with MultiGet and a write batch, have the same memory
  (`parts/tiers_peers.py`). Sides are checked to have the same rows.
- policy: hit rates of the cache, LRU and LFU, beside the simulator's on the same accesses.

Each side has a process of its own. The last printed line is one JSON object.

Takes: 10 minutes, 25 GB of disk; --quick 1 minute, 5 GB
Needs: the extra `peers` for RocksDB
"""

import argparse
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from parts.report import at_least, at_most, exactly, finish, options, parsed, show
from parts.tiers_policy import measure_policy
from parts.tiers_sides import OURS, PEERS, ROCKS, THREADS, Steps, run_side
from parts.tiers_work import Size, best_mean

SECTIONS = ("step", "peers", "policy")
CACHED = 0.2  # of rows and state, of which the memory has as much
OF_MEMORY, OF_LIMIT, PEER, NEAR = 0.5, 0.8, 5.0, 0.01
ALIKE = 1e-4  # relative difference of sums of rows
RUN = 20  # steps in a row
FULL = Steps(rows=100, peers=20, settle=20, train=200)
QUICK = Steps(rows=40, peers=8, settle=10, train=60)
SMOKE = Steps(rows=4, peers=2, settle=1, train=2)
GIGABYTES = {"full": 20.0, "quick": 2.0, "smoke": 0.05}


def measure_sides(size: Size, steps: Steps, folder: Path, *, peers: bool) -> list[dict]:
    ours = run_side(OURS, size, steps, folder)
    rows = [row_of_step(ours, size)]
    show(rows[0])
    if not peers:
        return rows
    rows.append({"section": "peers", "side": OURS, "rows_ms": best_mean(ours["rows_s"], RUN) * 1e3, "end_ms": 0.0})
    rows[-1] |= {name: ours[name] for name in ("sum", "squares")}
    for side in PEERS:
        if side == ROCKS and find_spec("rocksdict") is None:
            print("left out: rocksdict is not installed (`make bench` installs it)", flush=True)
            continue
        found = run_side(side, size, steps, folder)
        # The first step of a peer meets caches of its own that are cold.
        times = {f"{name}_ms": best_mean(found[f"{name}_s"][1:], RUN) * 1e3 for name in ("rows", "end")}
        rows.append({"section": "peers", "side": side, **times})
        rows[-1] |= {name: found[name] for name in ("sum", "squares", "fill_s", "cache_bytes")}
    base = rows[1]["rows_ms"]
    for row in rows[1:]:
        row["times"] = (row["rows_ms"] + row["end_ms"]) / base
        show(row)
    return rows


def row_of_step(found: dict, size: Size) -> dict:
    memory_s, disk_s = best_mean(found["memory_train_s"], RUN), best_mean(found["train_s"], RUN)
    row = {name: found[name] for name in ("hits", "misses", "reads", "evictions", "writes", "reads_s", "fill_s")}
    row |= {name: found[name] for name in ("disk_bytes", "direct", "peak_bytes")}
    limit_s = found["misses"] / found["reads_s"]
    rows_ms = {"rows_ms": best_mean(found["rows_s"], RUN) * 1e3}
    rows_ms |= {"memory_rows_ms": best_mean(found["memory_rows_s"], RUN) * 1e3}
    speeds = {"samples_s": size.batch / disk_s, "memory_samples_s": size.batch / memory_s}
    about = {"section": "step", "threads": THREADS, **size._asdict(), **speeds, "limit_samples_s": size.batch / limit_s}
    hit_rate = found["hits"] / (found["hits"] + found["misses"])
    return about | {"ms": disk_s * 1e3, "memory_ms": memory_s * 1e3, "hit_rate": hit_rate, **rows_ms, **row}


def floors_of(rows: list[dict]) -> list[dict]:
    floors: list[dict] = []
    for row in rows:
        match row["section"]:
            case "step":
                least = min(OF_MEMORY * row["memory_samples_s"], OF_LIMIT * row["limit_samples_s"])
                floors.append(at_least("samples/s on disk", row["samples_s"], least))
                floors.append(at_least("of the speed in memory", row["samples_s"] / row["memory_samples_s"], None))
                floors.append(at_least("of the disk's limit", row["samples_s"] / row["limit_samples_s"], None))
                floors.append(exactly("direct reads and writes", int(row["direct"]), 1))
            case "peers" if row["side"] != OURS:
                floors.append(at_least(f"times as fast as {row['side']}", row["times"], PEER))
                if row["end_ms"]:
                    alone = row["times"] * row["rows_ms"] / (row["rows_ms"] + row["end_ms"])
                    floors.append(at_least(f"times as fast as {row['side']} that writes nothing", alone, None))
            case "policy":
                what = "{policy}, batch {batch}".format(**row)
                off = max(
                    abs(row["live"] - row["simulated"]), abs(row["live"] - row["measured"]) * (row["batch"] < 100)
                )
                floors.append(at_most(f"hit rate off the simulator's and others', {what}", off, NEAR))
    return floors + same_rows(rows)


def same_rows(rows: list[dict]) -> list[dict]:
    """Whether peers have our rows after the same steps."""
    sides = [row for row in rows if row["section"] == "peers"]
    alike = [all(abs(row[n] / sides[0][n] - 1) < ALIKE for n in ("sum", "squares")) for row in sides]
    return [exactly("sides with the same rows", sum(alike), len(sides))] if sides else []


def smoke_floors(rows: list[dict]) -> list[dict]:
    """No times."""
    floors = same_rows(rows)
    step = [row for row in rows if row["section"] == "step"]
    policy = [row for row in rows if row["section"] == "policy"]
    same = sum(row["live"] == row["simulated"] for row in policy)
    floors += [exactly("runs with direct reads, of which rows were read", sum(r["reads"] > 0 for r in step), len(step))]
    return [*floors, exactly("hit rates equal to the simulator's", same, len(policy))]


def measure(args: argparse.Namespace, folder: Path) -> list[dict]:
    run = "smoke" if args.smoke else "quick" if args.quick else "full"
    gigabytes = args.gigabytes or GIGABYTES[run]
    size = Size.of(gigabytes, gigabytes * CACHED, batch=256 if args.smoke else 4096)
    steps = SMOKE if args.smoke else QUICK if args.quick else FULL
    rows: list[dict] = []
    if "step" in args.only or "peers" in args.only:
        rows += measure_sides(size, steps, folder, peers="peers" in args.only)
    if "policy" in args.only:
        rows += measure_policy(folder, 20_000 if args.smoke else 150_000)
    return rows


def main() -> None:
    parser = options("tiers", __doc__, only=SECTIONS)
    parser.add_argument("--gigabytes", type=float, help="of rows and state on disk; a fifth of it is cached")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: that of temporary files)")
    args = parsed(parser)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(args, Path(folder))
    floors = smoke_floors(rows) if args.smoke else floors_of(rows)
    finish("tiers", rows, floors, args)


if __name__ == "__main__":
    main()
