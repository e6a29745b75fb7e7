"""How fast are lookups, updates and training on a GPU, beside the copy speed of its memory, torch and FBGEMM?

    python benchmarks/gpu.py [--quick | --smoke] [--save] [--only SECTION ...]

Bits of 20 runs are compared with the CPU's first. Times of lookups and updates are events of the GPU, the 20 % quantile
of the repeats; a share is bytes that the work needs / time / copy speed. Times of training are wall time. What a
section has found is saved before the next one begins, and a section that fails says so in its row. With --smoke and
no GPU the kernels run in Triton's interpreter on tiny tables, a rehearsal that measures nothing. The last printed line
is one JSON object.

Takes: 3 minutes; --quick 2 minutes
Needs: a GPU (--smoke: none), Triton
"""

import importlib
import os
import sys

import torch

if "--smoke" in sys.argv and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from parts.batches import bags_of, names_of, tables_of
from parts.gpu_work import Tables, WorkBatch, host_milliseconds, kernel_times, limits, milliseconds
from parts.ops_work import Work, ids_for, rows_for
from parts.report import at_least, at_most, environment, exactly, finish, options, parsed, save, saved, show
from torch import Tensor, nn
from torch.optim import Optimizer

from rowwise import Adagrad, Adam, Batch, Embeddings, Jagged, RowWiseAdagrad, Sgd
from rowwise.ingest.ahead import read_ahead
from rowwise.models.dlrm import DLRM
from rowwise.tables.ops.faults import check_faults
from rowwise.tables.ops.host_rows import host_rows
from rowwise.train.breakdown import Breakdown
from rowwise.train.groups import check_and_pin
from rowwise.train.objective import Clicks
from rowwise.train.settings import DenseSgd, Training
from rowwise.train.step import StepContext, StepResult, step

OPTIMIZERS = {"rowwise_adagrad": RowWiseAdagrad(lr=0.01), "sgd": Sgd(lr=0.01), "adam": Adam(lr=0.01)}
SHARES = {  # of copy speed, by operator and dim: floors of rows in fp32
    ("lookup", 128): 0.80,
    ("lookup", 64): 0.60,
    ("update", 128): 0.45,
    ("update", 64): 0.45,
}
EQUAL_RUNS = 20
CACHED_SHARES, CACHED_BATCHES = (1.0, 0.5, 0.1, 0.02), 24  # of rows; alternating, so that few repeat at once
LOSSES = 20  # steps whose losses a CPU and a GPU both have


class Sizes:
    """Sizes of a run: tables large enough that caches hold little of them."""

    def __init__(self, smoke: bool, quick: bool) -> None:
        self.rows = [40, 9] if smoke else rows_for(26, 100_000, 1_000_000 if quick else 4_000_000)
        self.rows_of_training = [40, 9] if smoke else rows_for(26, 100_000, 1_000_000)
        self.rows_of_bits = [40, 9] if smoke else [3000, 200_000]
        self.batches = (4,) if smoke else (2048, 65_536) if quick else (2048, 16_384, 65_536)
        self.pooling, self.megabytes = (3, 1) if smoke else (20, 2048)
        self.dims = (16,) if smoke else (64, 128)
        self.steps, self.repeats = (2, 1) if smoke else (60, 20)

    def works(self, dim: int, ids: str) -> list[Work]:
        """One id a bag at the largest batch, many at the smallest."""
        shapes = ((self.batches[-1], 1), (self.batches[0], self.pooling))
        return [Work(dim, batch, pooling, ids, 1, "rowwise_adagrad") for batch, pooling in shapes]


def machine(sizes: Sizes, device: torch.device) -> list[dict]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    return [{"device": name, **limits(device, sizes.megabytes)}]


def bits(sizes: Sizes, device: torch.device) -> list[dict]:
    """Lookups and updates, 20 of each, against the CPU's kernels."""
    cpu = {name: getattr(torch.ops.rowwise, name) for name in ("pool", "update")}
    rows = []
    for optimizer in OPTIMIZERS:
        for row_type in ("fp32", "fp16", "bf16", "int8"):
            work = Work(sizes.dims[0], sizes.batches[0], 2, "zipf", 1, optimizer, row_type)
            there = Tables.make(sizes.rows_of_bits, work, OPTIMIZERS[optimizer], torch.device("cpu"))
            kept = there.copied_to(device)
            pooled = there.lookup(cpu).to(device)
            there.update(cpu)
            expected, runs = there.copied_to(device).arena, EQUAL_RUNS if device.type == "cuda" else 1
            found = {"optimizer": optimizer, "row_type": row_type, "runs": runs, "lookups_differ": 0, "differ": 0}
            for _ in range(runs):
                again = kept.copied_to(device)
                found["lookups_differ"] += not same_bits(again.lookup(), pooled)
                again.update()
                same_rows = same_bits(again.arena.rows, expected.rows)
                found["differ"] += not (same_rows and same_bits(again.arena.state, expected.state))
            rows.append(found)
    return rows


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also of zeros, which have two signs."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def grid(sizes: Sizes, device: torch.device) -> list[dict]:
    """Times of lookups and updates, as shares of the copy speed, beside FBGEMM."""
    copy_Bps = limits(device, sizes.megabytes)["copy_Bps"]
    rows = []
    for dim in sizes.dims:
        works = [work for ids in ("uniform", "zipf") for work in sizes.works(dim, ids)]
        tables = Tables.make(sizes.rows, works[0], OPTIMIZERS[works[0].optimizer], device)
        found = [_timed(sizes, tables.with_work(work), device, copy_Bps) for work in works]
        del tables  # its memory is the peers' now
        for mode in ("", "unchecked_"):
            for row, times in zip(found, _times_of_fbgemm(sizes, works, device, checks=not mode), strict=False):
                row |= {f"fbgemm_{mode}{name}": value for name, value in times.items()}
        rows += found
    return rows


def _timed(sizes: Sizes, tables: Tables, device: torch.device, copy_Bps: float) -> dict:
    lookup_ms = milliseconds(tables.lookup, device, sizes.repeats)
    update_ms = milliseconds(tables.update, device, sizes.repeats)
    check_faults(device)
    return {
        **tables.work._asdict(),
        "lookup_ms": lookup_ms,
        "update_ms": update_ms,
        "lookup_host_ms": host_milliseconds(tables.lookup, device, sizes.repeats),
        "update_host_ms": host_milliseconds(tables.update, device, sizes.repeats),
        "lookup_share": tables.lookup_bytes() / (lookup_ms / 1e3) / copy_Bps,
        "update_share": tables.update_bytes() / (update_ms / 1e3) / copy_Bps,
        "kernels_ms": kernel_times(tables.update) if device.type == "cuda" else {},
    }


def _times_of_fbgemm(sizes: Sizes, works: list[Work], device: torch.device, *, checks: bool) -> Iterator[dict]:
    """Nothing where FBGEMM is not installed for GPUs; `checks`: of ids, as TorchRec has them."""
    if device.type != "cuda" or find_spec("fbgemm_gpu") is None:
        return
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    specs = [(n, works[0].dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for n in sizes.rows]
    module = SplitTableBatchedEmbeddingBagsCodegen(
        specs,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        device=device,
        bounds_check_mode=BoundsCheckMode.WARNING if checks else BoundsCheckMode.NONE,
    )
    for work in works:
        batch = WorkBatch.make(sizes.rows, work, device)

        def run(batch: WorkBatch = batch) -> None:
            module(batch.values, batch.offsets).backward(batch.grad)

        lookup_ms = milliseconds(lambda batch=batch: module(batch.values, batch.offsets), device, sizes.repeats)
        yield {"ms": milliseconds(run, device, sizes.repeats), "lookup_ms": lookup_ms, "kernels_ms": kernel_times(run)}


def torch_peers(sizes: Sizes, device: torch.device) -> list[dict]:
    """EmbeddingBag of each table with sparse gradients, and an optimizer of torch, beside ours of the same rule."""
    rows, dim, found = sizes.rows_of_training, sizes.dims[-1], []
    for name, ours, theirs in (
        ("sgd", Sgd(lr=0.01), torch.optim.SGD),
        ("adagrad", Adagrad(lr=0.01), torch.optim.Adagrad),
    ):
        one, many = (work._replace(optimizer=name) for work in sizes.works(dim, "uniform"))
        made = Tables.make(rows, one, ours, device)
        times = {
            work: tuple(milliseconds(f, device, sizes.repeats) for f in (t.lookup, t.update))
            for work in (one, many)
            for t in [made.with_work(work)]
        }
        del made
        bags = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum", sparse=True, device=device) for n in rows)
        optimizer = theirs(bags.parameters(), lr=0.01)
        for work in (one, many):
            batch = WorkBatch.make(rows, work, device)
            ids = batch.values.view(len(rows), work.batch, work.pooling)

            def run(
                ids: Tensor = ids,
                grad: Tensor = batch.grad,
                optimizer: Optimizer = optimizer,
                bags: nn.ModuleList = bags,
            ) -> None:
                optimizer.zero_grad()
                torch.cat([bag(one) for bag, one in zip(bags, ids, strict=True)], 1).backward(grad)
                optimizer.step()

            torch_ms = milliseconds(run, device, max(1, sizes.repeats // 4))
            lookup_ms, update_ms = times[work]
            found.append({**work._asdict(), "lookup_ms": lookup_ms, "update_ms": update_ms, "torch_ms": torch_ms})
    return found


def train(sizes: Sizes, device: torch.device) -> list[dict]:
    """A DLRM: samples a second, what the GPU does meanwhile, peak memory, and the losses of a CPU beside a device's."""
    dim, batch = sizes.dims[-1], sizes.batches[-1]
    small = [made_batch(sizes.rows_of_training, min(batch, 2048), number) for number in range(LOSSES)]
    losses = {str(where): _losses(sizes.rows_of_training, dim, where, small) for where in (torch.device("cpu"), device)}
    large = [made_batch(sizes.rows_of_training, batch, number) for number in range(3)]
    rows = []
    for precision in ("fp32", "bf16"):
        context = None  # its memory is the next one's
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        context = _context(sizes.rows_of_training, dim, device, precision)
        _run(context, large, 0, 16)  # until torch has all the pinned memory that it will use
        begin_s = time.perf_counter()
        _run(context, large, 4, sizes.steps)
        spent_s = time.perf_counter() - begin_s
        resident = [one.to(device) for one in large]
        _run(context, resident, 0, 2, copies=False)
        begin_s = time.perf_counter()
        _run(context, resident, 4, sizes.steps, copies=False)
        resident_s = time.perf_counter() - begin_s
        found = {"dim": dim, "batch": batch, "precision": precision, "samples_s": batch * sizes.steps / spent_s}
        if device.type == "cuda":
            pinned = [check_and_pin(context, one) for one in large]
            kernels = kernel_times(lambda context=context: _run(context, large, 50, 1))
            found |= {
                "step_ms": spent_s / sizes.steps * 1e3,
                "resident_ms": resident_s / sizes.steps * 1e3,
                "host_ms": host_milliseconds(
                    lambda context=context, pinned=pinned: _start(context, pinned, 60), device
                ),
                "kernels_ms": kernels,
                "peak_bytes": torch.cuda.max_memory_allocated(device),
            }
        rows.append(found | {"losses": losses})
    return rows


def _context(rows: list[int], dim: int, device: torch.device, precision: str = "fp32") -> StepContext:
    torch.manual_seed(0)
    model = dlrm(rows, dim).to(device)
    settings = Training(device=str(device), precision=precision, optimizer=DenseSgd(lr=0.1))
    return StepContext.create(model, Clicks(model), settings, Breakdown())


def _losses(rows: list[int], dim: int, device: torch.device, batches: list[Batch]) -> list[float]:
    context = _context(rows, dim, device)
    steps = (step(context, [context.copies.start(one)], number + 1) for number, one in enumerate(batches))
    return [stepped.loss for stepped in steps]


def _start(context: StepContext, batches: list[Batch], number: int) -> StepResult:
    return step(context, [context.copies.start(batches[number % len(batches)])], number + 1)


def _run(context: StepContext, batches: list[Batch], first: int, steps: int, *, copies: bool = True) -> None:
    """As the trainer does: a batch is copied during the step before it, a loss is read during the step after it."""
    chosen = (batches[number % len(batches)] for number in range(first, first + steps))
    pinned = read_ahead((check_and_pin(context, batch) for batch in chosen), 2) if copies else chosen
    moved = map(context.copies.start, pinned) if copies else pinned
    copied, before = next(moved), None
    for number in range(first, first + steps):
        following = next(moved, copied)
        stepped = step(context, [copied], number + 1)
        if before is not None:
            float(before.loss)
        copied, before = following, stepped
    float(stepped.loss)
    check_faults(context.device)


def dlrm(rows: list[int], dim: int) -> DLRM:
    tables = tables_of(rows, dim, optimizer=RowWiseAdagrad(lr=0.01))
    return DLRM(Embeddings(tables), dense_features=13, bottom=(512, 256, dim), top=(1024, 512, 1))


def made_batch(rows: list[int], samples: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(0, n, (samples,), generator=g) for n in rows])
    sparse = bags_of(names_of(len(rows)), ids)
    dense = torch.rand(samples, 13, generator=g)
    return Batch(dense_BF=dense, sparse=sparse, labels_BK=(dense.mean(1, keepdim=True) > 0.5).float())


def cached(sizes: Sizes, device: torch.device) -> list[dict]:
    """Lookups and updates of tables in host memory, by the share of their rows that the device caches."""
    bus_Bps = limits(device, sizes.megabytes)["from_host_Bps"]
    rows_T, dim, found = sizes.rows_of_training, sizes.dims[-1], []
    for ids in ("uniform", "zipf"):
        work = Work(dim, sizes.batches[-1], 1, ids, 1, "rowwise_adagrad")
        batches = [bags_of(names_of(len(rows_T)), ids_for(rows_T, work, k)).to(device) for k in range(CACHED_BATCHES)]
        expected: Embeddings | None = None
        for share in CACHED_SHARES:
            module = Embeddings(tables_of(rows_T, dim, optimizer=RowWiseAdagrad(lr=0.01)))
            if share < 1:
                module.cache_on(device, {f"t{i}": int(n * share) for i, n in enumerate(rows_T)}, work.batch)
            else:
                module.to(device)
            _train_tables(module, batches)
            before = _cache_counts(module)
            begin_s = time.perf_counter()
            _train_tables(module, batches)
            step_s = (time.perf_counter() - begin_s) / len(batches)
            hits, misses, writes = (now - then for now, then in zip(_cache_counts(module), before, strict=True))
            moved = (misses + writes) * (dim + 1) * 4 / len(batches)
            expected = expected or module
            found.append(
                {
                    "ids": ids,
                    "dim": dim,
                    "batch": work.batch,
                    "rows": sum(rows_T),
                    "cached": share,
                    "step_ms": step_s * 1e3,
                    "hit_rate": hits / max(1, hits + misses),
                    "moved_bytes": moved,
                    "bus_share": moved / step_s / bus_Bps,
                    "differ": sum(not same_bits(module.table(f"t{i}").cpu(), expected.table(f"t{i}").cpu())
                                  for i in range(len(rows_T))),
                }
            )  # fmt: skip
            show(found[-1])
    return found


def _train_tables(module: Embeddings, batches: list[Jagged]) -> None:
    for batch in batches:
        module(batch).matrix_BS.sum().backward()
        module.update()
    check_faults(module.device)


def _cache_counts(module: Embeddings) -> tuple[int, int, int]:
    """Ids that hit, ids that missed, rows written back; of all tables."""
    cache = host_rows(module.arena)
    counters = [] if cache is None else [cache.counters(number) for number in range(len(cache.tables))]
    hits, misses, writes = (sum(getattr(one, name) for one in counters) for name in ("hits", "misses", "writes"))
    return hits, misses, writes


SECTIONS: dict[str, Callable[[Sizes, torch.device], list[dict]]] = {
    "machine": machine,
    "bits": bits,
    "grid": grid,
    "torch": torch_peers,
    "train": train,
    "cached": cached,
}


def floors_of(rows: list[dict], *, smoke: bool) -> list[dict]:
    floors = [exactly("sections that failed", sum("failed" in row for row in rows), 0)]
    found = [row for row in rows if "failed" not in row]
    for row in found:
        if row["section"] == "bits":
            what = f"{row['optimizer']}, {row['row_type']}"
            floors.append(exactly(f"{what}: results other than the CPU's", row["differ"] + row["lookups_differ"], 0))
        elif row["section"] == "cached":
            what = f"{row['cached']:.0%} of rows cached, {row['ids']} ids: tables other than without a cache"
            floors.append(exactly(what, row["differ"], 0))
        elif not smoke and row["section"] == "grid":
            floors += _floors_of_grid(row)
        elif not smoke and row["section"] == "torch":
            what = f"dim {row['dim']}, batch {row['batch']}, {row['pooling']} ids"
            ratio = row["torch_ms"] / (row["lookup_ms"] + row["update_ms"])
            floors.append(at_least(f"{what}: as fast as torch's EmbeddingBag and its {row['optimizer']}", ratio, 10))
        elif not smoke and row["section"] == "train":
            floors += _floors_of_training(row)
    return floors if smoke else floors + _floors_of_zipf([row for row in found if row["section"] == "grid"])


def _floors_of_zipf(rows: list[dict]) -> list[dict]:
    floors = []
    for uniform in (row for row in rows if row["ids"] == "uniform"):
        zipf = next(
            row
            for row in rows
            if row["ids"] == "zipf" and (row["dim"], row["pooling"]) == (uniform["dim"], uniform["pooling"])
        )
        what = f"dim {uniform['dim']}, {uniform['pooling']} ids: share of updates with uniform ids over Zipf's"
        floors.append(at_most(what, uniform["update_share"] / zipf["update_share"], 1.3))
    return floors


def _floors_of_grid(row: dict) -> list[dict]:
    what, floors = f"dim {row['dim']}, batch {row['batch']}, {row['pooling']} ids, {row['ids']}", []
    for operator in ("lookup", "update"):
        floor = SHARES.get((operator, row["dim"])) if row["ids"] == "uniform" else None
        floors.append(at_least(f"{what}: {operator}, share of copy speed", row[f"{operator}_share"], floor))
    ours_ms = row["lookup_ms"] + row["update_ms"]
    if "fbgemm_ms" in row:
        floors.append(at_least(f"{what}: as fast as FBGEMM", row["fbgemm_ms"] / ours_ms, 0.95))
        ratio = row["fbgemm_unchecked_ms"] / ours_ms
        floors.append(at_least(f"{what}: as fast as FBGEMM without its checks of ids", ratio, None))
    return floors


def _floors_of_training(row: dict) -> list[dict]:
    cpu, gpu = row["losses"].values()
    apart = max(abs(a - b) / a for a, b in zip(cpu, gpu, strict=True))
    what = f"DLRM in {row['precision']}"
    waits = 1 - row["resident_ms"] / row["step_ms"]
    floors = [at_most(f"{what}, batch {row['batch']}: share of a step that its batch is waited for", waits, 0.02)]
    if row["precision"] == "fp32":
        floors.append(at_most(f"{what}: losses of {LOSSES} steps apart from the CPU's, in millionths", apart * 1e6, 10))
    return floors


def with_gpu(path: Path, name: str) -> Path:
    """A path among the results of a GPU: those of `NVIDIA H100 80GB HBM3` are nvidia-h100's."""
    return path.parents[1] / "-".join(name.lower().split()[:2]) / path.name


def main() -> None:
    parser = options("gpu", __doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="run these sections alone")
    args = parsed(parser)
    if not torch.cuda.is_available() and not args.smoke:
        sys.exit("torch finds no GPU: nothing to measure; `--smoke` rehearses in Triton's interpreter")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.save and args.save.parent == saved("gpu").parent and device.type == "cuda":
        args.save = with_gpu(args.save, torch.cuda.get_device_name(device))
    sizes, rows = Sizes(args.smoke, args.quick), []
    result = {"benchmark": "gpu", "environment": environment(), "rows": rows}
    if device.type == "cuda" and find_spec("fbgemm_gpu") is not None:
        result["environment"]["versions"]["fbgemm-gpu"] = importlib.import_module("fbgemm_gpu").__version__
    for name, section in SECTIONS.items():
        if args.only and name not in args.only:
            continue
        begin_s = time.perf_counter()
        try:
            found = section(sizes, device)
        except Exception as error:  # the sections after it are still worth their time
            found = [{"failed": f"{type(error).__name__}: {error}"}]
        rows += [{"section": name, **row} for row in found]
        print(f"{name}: {time.perf_counter() - begin_s:.1f} s", flush=True)
        save(result, args.save)
    finish("gpu", rows, floors_of(rows, smoke=args.smoke), args, environment=result["environment"])


if __name__ == "__main__":
    main()
