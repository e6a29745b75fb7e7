"""What do batches whose samples share bags save (RecD, arXiv 2211.05239), beside the same batches expanded?

    python benchmarks/recd.py [--quick | --smoke] [--save]

About ten samples a session: most features are the user's and alike in all of them, some are the item's. Both forms of
the same batches go through the same tables in turns (A B A B): on one device, and on two processes with tables whole
on one rank each. How often samples repeat is measured: the ids of the user's features, over those that are held once. A
time is the 20 % quantile over steps, of the slower rank; how much faster a form is, the median over batches. What is
looked up and what updates leave is checked to be equal, to the bit; a third turn merges gradients of shared bags first,
which is equal to rounding. A step is of the tables alone; its limit on one device is in `parts/limits.py`, for the rows
of the expanded form. The last printed line is one JSON object.

Takes: 10 minutes; --quick 1 minute
Needs: nothing else
"""

import os
import time
from collections import Counter
from dataclasses import dataclass, replace

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from parts.limits import Rows, limit_of, rows_s, share_floor
from parts.report import at_least, exactly, finish, options, parsed, show
from torch.profiler import ProfilerActivity, profile

from rowwise import Embeddings, Plan, RowWiseAdagrad, Table
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.spawn import run_processes
from rowwise.parallel.plan import Tile
from rowwise.parallel.shard.apply import copy_tables
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.tables.batch import Jagged
from rowwise.tables.ops.jagged import share

WORLD, SEED = 2, 3
LEAST = 0.95  # of the repeats, in lookups and in bytes
ALONE = "one device"
EXPANDED, SHARED, MERGED = FORMS = "expanded", "shared", "merged"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Batches of sessions."""

    batch: int
    pooling: int
    users: int = 16  # features
    items: int = 4
    item_ids: int = 20  # of each, on average
    rows: int = 100_000
    dim: int = 64
    session: int = 10  # samples on average
    steps: int = 12

    def tables(self) -> list[Table]:
        names = [f"user{k}" for k in range(self.users)] + [f"item{k}" for k in range(self.items)]
        return [Table(name=name, rows=self.rows, dim=self.dim, optimizer=RowWiseAdagrad(lr=0.01)) for name in names]

    @property
    def common(self) -> tuple[str, ...]:
        return tuple(f"user{k}" for k in range(self.users))

    def draw(self, seed: int) -> Jagged:
        """A batch as it is expanded; lists are as long as `pooling` on average."""
        g = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 2 * self.session, (self.batch,), generator=g)
        inverse_B = torch.arange(self.batch).repeat_interleave(sizes)[: self.batch]
        distinct = int(inverse_B[-1]) + 1
        lengths_FU = torch.randint(1, 2 * self.pooling, (self.users, distinct), generator=g)
        once = Jagged(
            features=self.common,
            values_N=self._ids(int(lengths_FU.sum()), g),
            lengths_FB=lengths_FU.flatten(),
        ).of_samples(inverse_B)
        lengths_FB = torch.randint(1, 2 * self.item_ids, (self.items * self.batch,), generator=g)
        return Jagged(
            features=tuple(table.name for table in self.tables()),
            values_N=torch.cat([once.values_N, self._ids(int(lengths_FB.sum()), g)]),
            lengths_FB=torch.cat([once.lengths_FB, lengths_FB]),
        )

    def _ids(self, count: int, g: torch.Generator) -> torch.Tensor:
        """Few of them often."""
        return (self.rows * torch.rand(count, generator=g, dtype=torch.float64) ** 4).long()


def rows_looked_up(module: torch.nn.Module, batch: Jagged) -> int:
    """Ids that the pooling kernel gets, which are its third argument."""
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        module(batch)
    return sum(event.input_shapes[2][0] for event in recorded.events() if event.name == "rowwise::pool")


def repeats(batch: Jagged) -> dict[str, float]:
    """How often ids, and samples, repeat."""
    shared = batch.shared
    bags = shared.expanded()
    ids = len(bags.values_N) / len(shared.jagged.values_N)
    return {"ids": ids, "samples": batch.batch_size / shared.jagged.batch_size}


def step(module: torch.nn.Module, batch: Jagged, up_BS: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """One step; what was looked up, and what its parts take in ms."""
    begin = time.perf_counter()
    out_BS = module(batch).matrix_BS
    middle = time.perf_counter()
    out_BS.backward(up_BS)
    module.update()
    end = time.perf_counter()
    return out_BS.detach(), {"ms": (end - begin) * 1e3, "forward_ms": (middle - begin) * 1e3}


def take_turns(modules: dict[str, torch.nn.Module], load: Load, comm: Comm | None = None) -> dict:
    """Both forms of the same batches, in turns."""
    rank = 0 if comm is None else comm.rank
    times: dict[str, list[dict[str, float]]] = {name: [] for name in modules}
    sent: dict[str, Counter] = {name: Counter() for name in modules}
    rows: Counter = Counter()
    equal, factors = True, []
    up_BS = torch.randn(load.batch, load.dim * (load.users + load.items)) / load.batch
    for number in range(load.steps):
        plain = load.draw(100 * number + rank)
        forms = {EXPANDED: plain, SHARED: share(plain, load.common)}
        forms[MERGED] = forms[SHARED]
        factors.append(repeats(forms[SHARED]))
        outs = {}
        for name, module in modules.items():
            if comm is not None:
                comm.all_gather(torch.zeros(1), (1,) * WORLD, "start").wait()
            before = Counter() if comm is None else Counter(comm.sent.counts)
            outs[name], took = step(module, forms[name], up_BS)
            times[name].append(took)
            if comm is not None:
                for (what, *_), n in (Counter(comm.sent.counts) - before).items():
                    sent[name][what] += n
        equal = equal and torch.equal(outs[EXPANDED], outs[SHARED])
        for name, module in modules.items():
            rows[name] += rows_looked_up(module, forms[name])
    pairs = list(zip(modules[EXPANDED].arenas, modules[SHARED].arenas, strict=True))
    equal = equal and all(torch.equal(a.rows, b.rows) and torch.equal(a.state, b.state) for a, b in pairs)
    return {
        "equal": equal,
        "repeats": {what: sum(f[what] for f in factors) / len(factors) for what in ("ids", "samples")},
        "times": times,
        "sent": {name: dict(counts) for name, counts in sent.items()},
        "rows": dict(rows),
    }


def on_ranks(comm: Comm, load: Load) -> dict:
    """Whole tables on each of two ranks."""
    torch.set_num_threads(1)
    tables = load.tables()
    tiles = tuple(
        Tile(table=table.name, rank=k % WORLD, rows=(0, table.rows), cols=(0, table.dim))
        for k, table in enumerate(tables)
    )
    modules = {name: ShardedEmbeddings(tables, Plan(world=WORLD, tiles=tiles), comm) for name in FORMS}
    modules[MERGED].merge_shared = True
    whole = Embeddings(tables, seed=SEED)
    for module in modules.values():
        copy_tables(whole, module)
    return take_turns(modules, load, comm)


def alone(load: Load) -> dict:
    """One device, of two threads."""
    torch.set_num_threads(WORLD)
    modules = {name: Embeddings(load.tables(), seed=SEED, merge_shared=name == MERGED) for name in FORMS}
    found = take_turns(modules, load)
    rows = [Rows(modules[EXPANDED], load.draw(100 * number)) for number in range(min(load.steps, 4))]
    return found | {"limit": limit_of(0, 1.0, rows_s(rows, 3))}


def row_of(where: str, load: Load, found: list[dict]) -> dict:
    """What was measured, of all ranks together."""
    row = {"where": where, **{name: getattr(load, name) for name in ("batch", "pooling", "users", "items", "item_ids")}}
    row["equal"] = all(one["equal"] for one in found)
    row |= found[0].get("limit", {})
    for what in ("ids", "samples"):
        row[f"repeats_of_{what}"] = sum(one["repeats"][what] for one in found) / len(found)
    for part in ("ms", "forward_ms"):
        slower: dict[str, list[float]] = {}
        for name in FORMS:
            each = zip(*([t[part] for t in one["times"][name]] for one in found), strict=True)
            slower[name] = [max(took) for took in each]
            row[f"{part}_{name}"] = sorted(slower[name])[len(slower[name]) // 5]
        for name in (SHARED, MERGED):  # of the same batch, one after the other: whatever else runs slows both down
            faster = [a / b for a, b in zip(slower[EXPANDED], slower[name], strict=True)]
            row[f"faster_{part}_{name}"] = sorted(faster)[len(faster) // 2]
    for name in FORMS:
        row[f"rows_{name}"] = sum(one["rows"][name] for one in found)
        for what in ("ids", "pooled", "gradients"):
            row[f"{what}_bytes_{name}"] = sum(one["sent"][name].get(what, 0) for one in found) / load.steps
    return row


def floors_of(rows: list[dict]) -> list[dict]:
    floors = []
    for row in rows:
        where = f"{row['where']}, {row['pooling']} ids, {row['items']} own features of {row['item_ids']}"
        floors.append(exactly(f"{where}: results equal to the bit", int(row["equal"]), 1))
        if not row["items"]:
            kinds = [("rows", "rows looked up", "ids")]
            if row["ids_bytes_expanded"]:
                kinds += [("ids_bytes", "bytes of ids", "ids"), ("pooled_bytes", "bytes of vectors", "samples")]
            for key, what, repeated in kinds:
                value = row[f"{key}_expanded"] / row[f"{key}_shared"] / row[f"repeats_of_{repeated}"]
                name = f"{where}: {what} fall, of how often {repeated} repeat"
                floors.append(at_least(name, value, LEAST))
        # No floors: on one device both forms do nearly the same work, so whatever else runs decides which is faster.
        timed = (("step", "ms", SHARED), ("forward", "forward_ms", SHARED), ("step, gradients merged", "ms", MERGED))
        for what, part, form in timed:
            floors.append(at_least(f"{where}: times faster, {what}", row[f"faster_{part}_{form}"], None))
        if "limit_ms" in row:
            share = row["limit_ms"] / row["ms_expanded"]
            floors.append(share_floor(f"step of the expanded form, {where}", share))
    return floors


def result_floors(rows: list[dict]) -> list[dict]:
    """What does not depend on the machine."""
    kept = ("equal to the bit", "of how often")
    counted = exactly("loads, on one device and on two ranks", len(rows), 4)
    return [counted, *(f for f in floors_of(rows) if any(what in f["name"] for what in kept))]


def main() -> None:
    args = parsed(options("recd", __doc__))
    load = Load(batch=4096, pooling=20, steps=20)
    if args.quick:
        load = Load(batch=1024, pooling=10, item_ids=10, rows=20_000, steps=8)
    if args.smoke:
        load = Load(batch=512, pooling=10, item_ids=10, users=4, items=2, rows=2_000, dim=16, steps=2)
    loads = [replace(load, items=0), load]
    if not args.quick:
        loads += [replace(load, item_ids=1), replace(load, pooling=1, item_ids=1)]
    rows = []
    for one in loads:
        rows.append(row_of(ALONE, one, [alone(one)]))
        rows.append(row_of("two ranks", one, run_processes(WORLD, on_ranks, one, shared_memory=True)))
        for row in rows[-2:]:
            show(row)
    floors = result_floors(rows) if args.smoke else floors_of(rows)
    finish("recd", rows, floors, args)


if __name__ == "__main__":
    main()
