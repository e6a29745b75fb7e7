"""How fast are lookup, backward and update of 26 tables beside FBGEMM, torch and the memory's limit?

    python benchmarks/ops.py [--quick | --smoke] [--save]
    python benchmarks/ops.py --fbgemm-1.5-python PATH    # an environment with fbgemm-gpu-cpu 1.5.0

Every pair runs interleaved on the same ids (A B A B); results are first checked to be equal; a time is the
20 % quantile of the repeats. The last printed line is one JSON object.

Takes: 45 minutes; --quick 3 minutes
Needs: the extra `peers`
"""

import argparse
import gc
import json
import os
import subprocess
import time
from collections import Counter

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from parts import BENCHMARKS
from parts.batches import OPTIMIZERS, bags_of, names_of, tables_of
from parts.limits import Rows
from parts.ops_work import FbgemmPeer, Work, ids_for, rows_for
from parts.report import at_least, environment, exactly, finish, geomean, has_peer, options, parsed, save, show

from rowwise import Embeddings, Jagged, RowType


class Ours:
    """rowwise as a user has it: input checks on, outputs allocated by the library."""

    def __init__(self, rows: list[int], dim: int, optimizer: str, row_type: str = "fp32"):
        tables = tables_of(rows, dim, optimizer=OPTIMIZERS[optimizer], row_type=RowType(row_type))
        self.module, self.features = Embeddings(tables), names_of(len(rows))

    def batch(self, ids: torch.Tensor, work: Work) -> Jagged:
        return bags_of(self.features, ids, work.pooling)

    def step(self, jagged: Jagged, grad: torch.Tensor) -> tuple[float, float]:
        begin = time.perf_counter()
        out = self.module(jagged).matrix_BS
        middle = time.perf_counter()
        out.backward(grad)
        self.module.update()
        return middle - begin, time.perf_counter() - middle


class FbgemmElsewhere:
    """FBGEMM in another environment: a child process that makes the same ids and answers with its times."""

    def __init__(self, python: str, rows: list[int], dim: int, optimizer: str):
        command = [python, str(BENCHMARKS / "parts" / "ops_work.py"), json.dumps([rows, dim, optimizer])]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
        self.version = self._read()

    def prepare(self, work: Work) -> None:
        self._ask(list(work))

    def step(self, index: int) -> tuple[float, float]:
        forward, rest = self._ask(index)
        return forward, rest

    def close(self) -> None:
        self.child.stdin.close()
        self.child.wait()

    def _ask(self, question: object) -> list[float]:
        self.child.stdin.write(json.dumps(question) + "\n")
        self.child.stdin.flush()
        return self._read()

    def _read(self) -> list[float]:
        return json.loads(self.child.stdout.readline())


def quantile(seconds: list) -> np.ndarray:
    return np.quantile(np.array(seconds), 0.2, axis=0)


SMOKE_BATCH = 32
SPARSE = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam, "lamb": torch.optim.SparseAdam}


def repeats(work: Work, tables: int, quick: bool) -> int:
    if work.batch == SMOKE_BATCH:
        return 2
    floats = work.batch * tables * (work.pooling + 4) * work.dim
    return int(np.clip((0.5e9 if quick else 1e9) / floats, 5, 40))


def assert_equal(
    ours: Ours, peer: FbgemmPeer, jagged: Jagged, ids: torch.Tensor, work: Work, grad: torch.Tensor
) -> None:
    """Two steps from the same rows give the same rows; those of 16 bits within the steps that noise may take."""
    tolerance = {"fp32": 1e-5, "fp16": 4 * 2.0**-11}[work.row_type]
    for i, rows in enumerate(peer.tables()):
        rows.copy_(ours.module.table(f"t{i}"))
    peer.copy_state(ours.module.optimizer_state())
    for _ in range(2):
        ours.step(jagged, grad)
        peer.step(ids, peer.offsets(work), grad)
    for i, rows in enumerate(peer.tables()):
        touched = ids[i * work.batch * work.pooling : (i + 1) * work.batch * work.pooling].unique()
        a, b = ours.module.table(f"t{i}")[touched].float(), rows[touched].float()
        # Not all of them: of a merged gradient that nearly cancels, Adagrad's first steps keep the sign alone.
        worst = torch.quantile((a - b).abs().flatten()[: 1 << 22], 0.999)
        error = float(worst / b.abs().max())
        if error > tolerance:
            raise AssertionError(f"table {i}: relative error {error}")


def measure_fbgemm(works: list[Work], rows: list[int], quick: bool) -> list[dict]:
    out: list[dict] = []
    for kind in dict.fromkeys((w.dim, w.optimizer, w.row_type) for w in works):
        ours, peer = Ours(rows, *kind), FbgemmPeer(rows, *kind)
        for work in (w for w in works if (w.dim, w.optimizer, w.row_type) == kind):
            torch.set_num_threads(work.threads)
            batches = [ids_for(rows, work, seed) for seed in range(3)]
            jagged = [ours.batch(ids, work) for ids in batches]
            rows_read = [Rows(ours.module, one) for one in jagged]
            offsets, grad = peer.offsets(work), work.grad(len(rows))
            assert_equal(ours, peer, jagged[0], batches[0], work, grad)
            times: dict[str, list] = {"limit": [], "rewrite": [], "ours": [], "peer": []}
            for repeat in range(repeats(work, len(rows), quick)):
                k = repeat % 3
                # Rows of another batch: those of this one would be in the caches when ours has its turn.
                times["limit"].append(rows_read[k - 1].gather_s())
                times["rewrite"].append(rows_read[k - 1].rewrite_s())
                times["ours"].append(ours.step(jagged[k], grad))
                times["peer"].append(peer.step(batches[k], offsets, grad))
            out.append(row_of(work, "fbgemm-gpu-cpu " + peer.version, times))
            show(out[-1])
        del ours, peer
        gc.collect()
        torch.ops.rowwise.drop_kept()
    return out


def measure_elsewhere(works: list[Work], rows: list[int], quick: bool, python: str) -> list[dict]:
    out: list[dict] = []
    for dim, optimizer in dict.fromkeys((w.dim, w.optimizer) for w in works):
        ours, peer = Ours(rows, dim, optimizer), FbgemmElsewhere(python, rows, dim, optimizer)
        for work in (w for w in works if (w.dim, w.optimizer) == (dim, optimizer)):
            torch.set_num_threads(work.threads)
            jagged = [ours.batch(ids_for(rows, work, seed), work) for seed in range(3)]
            grad = work.grad(len(rows))
            peer.prepare(work)
            times: dict[str, list] = {"ours": [], "peer": []}
            for repeat in range(repeats(work, len(rows), quick)):
                times["ours"].append(ours.step(jagged[repeat % 3], grad))
                times["peer"].append(peer.step(repeat % 3))
            out.append(row_of(work, f"fbgemm-gpu-cpu {peer.version}", times))
            show(out[-1])
        peer.close()
        del ours, peer
        gc.collect()
    return out


def measure_row_types(works: list[Work], rows: list[int], quick: bool) -> list[dict]:
    """Rows of bf16 and int8 beside our own of fp16: what a narrower or a wider type costs."""
    out: list[dict] = []
    types = ("fp16", "bf16", "int8")
    for dim, optimizer in dict.fromkeys((w.dim, w.optimizer) for w in works):
        sides = [Ours(rows, dim, optimizer, row_type) for row_type in types]
        for work in (w for w in works if (w.dim, w.optimizer) == (dim, optimizer)):
            torch.set_num_threads(work.threads)
            jagged = [sides[0].batch(ids_for(rows, work, seed), work) for seed in range(3)]
            grad = work.grad(len(rows))
            times: list[list] = [[] for _ in types]
            for repeat in range(2 * repeats(work, len(rows), quick)):
                for side, mine in zip(sides, times, strict=True):
                    mine.append(side.step(jagged[repeat % 3], grad))
            for row_type, mine in zip(types[1:], times[1:], strict=True):
                found = row_of(work._replace(row_type=row_type), "rowwise fp16", {"ours": mine, "peer": times[0]})
                out.append(found)
                show(found)
        del sides
        gc.collect()
    return out


def measure_torch(works: list[Work], rows: list[int], quick: bool) -> list[dict]:
    """nn.EmbeddingBag(sparse=True), one a table, with torch's sparse optimizers."""
    out: list[dict] = []
    for dim, name in dict.fromkeys((w.dim, w.optimizer) for w in works):
        ours = Ours(rows, dim, name)
        bags = [torch.nn.EmbeddingBag(n, dim, mode="sum", sparse=True) for n in rows]
        optimizer = SPARSE[name]([b.weight for b in bags], lr=0.01)
        for work in (w for w in works if (w.dim, w.optimizer) == (dim, name)):
            torch.set_num_threads(work.threads)
            ids = ids_for(rows, work, 0)
            jagged, grad = ours.batch(ids, work), work.grad(len(rows))
            bag_ids = ids.view(len(rows), work.batch, work.pooling)
            times: dict[str, list] = {"ours": [], "peer": []}
            for _ in range(3 if quick else 7):
                times["ours"].append(ours.step(jagged, grad))
                begin = time.perf_counter()
                pooled = torch.cat([bag(x) for bag, x in zip(bags, bag_ids, strict=True)], 1)
                middle = time.perf_counter()
                optimizer.zero_grad()
                pooled.backward(grad)
                optimizer.step()
                times["peer"].append((middle - begin, time.perf_counter() - middle))
            out.append(row_of(work, f"torch EmbeddingBag + {SPARSE[name].__name__}", times))
            show(out[-1])
        del ours, bags, optimizer
        gc.collect()
    return out


def row_of(work: Work, peer: str, times: dict[str, list]) -> dict:
    ours, theirs = quantile(times["ours"]), quantile(times["peer"])
    row = {
        **work._asdict(),
        "peer": peer,
        "ours_forward_ms": ours[0] * 1e3,
        "ours_rest_ms": ours[1] * 1e3,
        "peer_forward_ms": theirs[0] * 1e3,
        "peer_rest_ms": theirs[1] * 1e3,
        "ratio": float(theirs.sum() / ours.sum()),
        "noise": float(np.quantile([sum(t) for t in times["ours"]], 0.5) / ours.sum() - 1),
    }
    if "limit" in times:
        row["limit_ms"] = float(quantile(times["limit"])) * 1e3
        row["rewrite_ms"] = float(quantile(times["rewrite"])) * 1e3
        row["gather_share"] = row["limit_ms"] / row["ours_forward_ms"]
        row["limit_share"] = (row["limit_ms"] + row["rewrite_ms"]) / (row["ours_forward_ms"] + row["ours_rest_ms"])
    return row


def floors_of(rows: list[dict]) -> list[dict]:
    def ratios(peer: str, **want: object) -> list[float]:
        return [r["ratio"] for r in rows if r["peer"].endswith(peer) and all(r[k] == v for k, v in want.items())]

    def fbgemm(optimizer: str, row_type: str = "fp32", **want: object) -> list[float]:
        return ratios(" 1.8.0", optimizer=optimizer, row_type=row_type, **{"section": row_type, **want})

    limited = (r for r in rows if "gather_share" in r and r["row_type"] == "fp32")
    shares = [r["gather_share"] for r in limited if r["pooling"] == 20 and r["dim"] >= 64]
    mean, of = ", geometric mean", "against FBGEMM 1.8.0"
    named = [
        (f"row-wise Adagrad {of}, 1 thread{mean}", fbgemm("rowwise_adagrad", threads=1), geomean, 1.5),
        (f"row-wise Adagrad {of}, 2 threads{mean}", fbgemm("rowwise_adagrad", threads=2), geomean, 2.4),
        (f"SGD {of}{mean}", fbgemm("sgd"), geomean, 2.5),
        (f"worst cell {of}", ratios(" 1.8.0"), min, 1.0),
        (
            f"other shapes, fp32, 1 thread {of}{mean}",
            fbgemm("rowwise_adagrad", threads=1, section="shapes"),
            geomean,
            1.4,
        ),
        (
            f"other shapes, fp32, 1 thread {of}, worst cell",
            fbgemm("rowwise_adagrad", threads=1, section="shapes"),
            min,
            1.1,
        ),
        (f"fp16 rows, Adagrad {of}, 1 thread{mean}", fbgemm("adagrad", "fp16", threads=1), geomean, 4),
        (f"fp16 rows, row-wise Adagrad {of}, 1 thread{mean}", fbgemm("rowwise_adagrad", "fp16", threads=1), geomean, 4),
        ("row-wise Adagrad against FBGEMM 1.5.0, 2 threads" + mean, ratios(" 1.5.0"), geomean, 1.5),
        ("forward, share of the gather limit (pooling 20, dim >= 64)" + mean, shares, geomean, 0.92),
        ("forward, share of the gather limit, worst cell", shares, min, 0.92),
        ("bf16 rows against fp16 rows" + mean, ratios("rowwise fp16", row_type="bf16"), geomean, 1 / 1.2),
        ("int8 rows against fp16 rows" + mean, ratios("rowwise fp16", row_type="int8"), geomean, 1 / 1.2),
        ("int8 rows against fp16 rows, worst cell", ratios("rowwise fp16", row_type="int8"), min, 1 / 1.2),
        ("Adagrad against nn.EmbeddingBag(sparse) + Adagrad" + mean, ratios("Bag + Adagrad"), geomean, 10),
        ("Adam against nn.EmbeddingBag(sparse) + SparseAdam" + mean, ratios("Adam", optimizer="adam"), geomean, 8),
        ("LAMB against nn.EmbeddingBag(sparse) + SparseAdam" + mean, ratios("Adam", optimizer="lamb"), geomean, 8),
    ]
    return [at_least(name, how(values), floor) for name, values, how, floor in named if values]


def grid(optimizers: tuple[str, ...], row_type: str, args: argparse.Namespace, threads: list[int]) -> list[Work]:
    dims, batches = ((64,), (2048,)) if args.quick else ((16, 64, 128), (2048, 16384))
    batches = (SMOKE_BATCH,) if args.smoke else batches
    return [
        Work(dim, batch, pooling, ids, n, optimizer, row_type)
        for optimizer in optimizers
        for dim in dims
        for batch in batches
        for pooling in (1, 20)
        for ids in ("zipf", "uniform")
        for n in threads
    ]


# Widths that are whole vectors and that are not, bags of one id and of many, small batches and large.
SHAPES = (  # dim, batch, pooling, ids
    (8, 65536, 1, "zipf"),
    (8, 2048, 20, "uniform"),
    (12, 16384, 1, "uniform"),
    (20, 2048, 50, "zipf"),
    (24, 512, 100, "zipf"),
    (40, 16384, 5, "uniform"),
    (48, 2048, 20, "zipf"),
    (64, 65536, 1, "zipf"),
    (64, 2048, 20, "uniform"),
    (100, 2048, 1, "uniform"),
    (100, 2048, 20, "zipf"),
    (128, 512, 1, "zipf"),
    (160, 4096, 10, "uniform"),
    (200, 8192, 2, "zipf"),
    (256, 4096, 1, "uniform"),
    (256, 512, 50, "zipf"),
)


def shapes(args: argparse.Namespace) -> list[Work]:
    return [
        Work(dim, SMOKE_BATCH if args.smoke else batch, pooling, ids, n, "rowwise_adagrad", row_type)
        for row_type in ("fp32", "fp16")
        for dim, batch, pooling, ids in SHAPES
        for n in args.threads[: 1 if args.smoke else None]
    ]


SECTIONS = ("fp32", "fp16", "shapes", "fbgemm-1.5", "row types", "torch")


def measure(section: str, args: argparse.Namespace) -> list[dict]:
    tables, most = (4, 2_000) if args.smoke else (26, 400_000 if args.quick else 4_000_000)
    rows, fewer = rows_for(tables, 1_000, most), rows_for(tables, 1_000, min(most, 1_000_000))  # several copies fit
    works = grid(("rowwise_adagrad", "sgd"), "fp32", args, args.threads)
    halves = grid(("rowwise_adagrad", "adagrad"), "fp16", args, args.threads[:1])
    if section == "fp32":
        return measure_fbgemm(works, rows, args.quick)
    if section == "fp16":
        return measure_fbgemm(halves, rows, args.quick)
    if section == "shapes":
        return measure_fbgemm(shapes(args), rows if args.smoke else rows_for(15, 1_000, 1_000_000), args.quick)
    if section == "fbgemm-1.5":
        old = [w for w in works if w.threads == 2 and w.optimizer == "rowwise_adagrad"]
        return measure_elsewhere(old, rows, args.quick, args.old_python) if args.old_python else []
    if section == "row types":
        return measure_row_types([w for w in halves if w.batch == halves[0].batch], fewer, args.quick)
    small = [w for w in works if w.dim == 64 and w.optimizer == "rowwise_adagrad" and w.batch == works[0].batch]
    small = [w for w in small if not args.quick or w.threads == 1]
    found: list[dict] = []
    for name in SPARSE:  # Adam keeps two floats for each weight, on both sides
        sizes = rows if name == "adagrad" else fewer
        found += measure_torch([w._replace(optimizer=name) for w in small], sizes, args.quick)
    return found


SMOKE_ROWS = {"fp32": 16, "fp16": 8, "shapes": 32, "fbgemm-1.5": 0, "row types": 16, "torch": 12}


def smoke_floors(rows: list[dict], sections: list[str]) -> list[dict]:
    """FBGEMM's tables were compared with ours before they were timed."""
    counts = Counter(row["section"] for row in rows)
    return [exactly(f"cells of {section}", counts[section], SMOKE_ROWS[section]) for section in sections]


def main() -> None:
    parser = options("ops", __doc__, only=SECTIONS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--fbgemm-1.5-python", dest="old_python", help="python of an environment with fbgemm-gpu-cpu 1.5.0"
    )
    args = parsed(parser)
    with_peer = has_peer("fbgemm-gpu-cpu", args)
    only = [section for section in args.only if with_peer or section not in ("fp32", "fp16", "shapes")]
    made = environment()
    measured: list[dict] = []
    if args.save and args.save.exists():
        measured = [r for r in json.loads(args.save.read_text())["rows"] if r["section"] not in only]
    for section in only:
        found = measure(section, args)
        measured += [{"section": section, "commit": made["commit"], **row} for row in found]
        result = {"benchmark": "ops", "environment": made, "rows": measured}
        result["floors"] = smoke_floors(measured, only) if args.smoke else floors_of(measured)
        save(result, args.save)  # after each section: the next may fail
    finish("ops", measured, result["floors"], args, environment=made)


if __name__ == "__main__":
    main()
