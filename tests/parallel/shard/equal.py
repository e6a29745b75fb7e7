"""One device against several ranks: the same tables, batches and gradients, and what of both has to be equal.

What is compared, and how closely: rows, optimizer state and sequences to the bit, always. Pooled vectors to the bit
too, but for tables whose rows are cut, where results need not be elastic: those are sums in another order, and the
largest number times 1e-6 apart at most. (Replicated tables that are all-reduced are another matter: test_replicated.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from parallel.shard.layout_cases import CASES
from problems import make_problem

from rowwise import Embeddings, Jagged, Plan, Pooling, Table
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.apply import copy_tables
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.tables.ops import rowtype
from rowwise.tables.ops.jagged import split

CLOSE = 1e-6  # of the largest number of a matrix
SEED = 3
Tensors = dict[str, torch.Tensor]  # by sequence; of the pooled features as ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A batch, of which each rank has some samples, and what a loss multiplies the vectors by or wants them to be."""

    batch: Jagged
    ups: Tensors
    sizes_W: tuple[int, ...]

    def of(self, rank):
        """A rank's part."""
        return Step(batch=split(self.batch, self.sizes_W)[rank], ups=self.cut(self.ups, rank), sizes_W=self.sizes_W)

    def cut(self, tensors, rank):
        """A rank's part of vectors of the whole batch."""
        first, last = list(pairwise(accumulate(self.sizes_W, initial=0)))[rank]
        found = {"": tensors[""][first:last]}
        for name in tensors.keys() - {""}:
            lengths_B = self.batch.lengths_of(name)
            found[name] = tensors[name][int(lengths_B[:first].sum()) : int(lengths_B[:last].sum())]
        return found


def make_steps(tables, sizes_SW, seed=0, **kinds):
    """Steps of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for number, sizes_W in enumerate(sizes_SW):
        batch = make_problem(tables, sum(sizes_W), 4, seed + 100 * number, **kinds).jagged
        pooled = [t.dim * len(t.feature_names) for t in tables if t.pooling is not Pooling.SEQUENCE]
        shapes = {"": (sum(sizes_W), sum(pooled))}
        shapes |= {
            f: (len(batch.ids_of(f)), t.dim) for t in tables if t.pooling is Pooling.SEQUENCE for f in t.feature_names
        }
        ups = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        steps.append(Step(batch=batch, ups=ups, sizes_W=tuple(sizes_W)))
    return steps


def outputs(module, batch):
    vectors = module(batch)
    return {"": vectors.matrix_BS} | dict(vectors.sequences)


def look_up(module, step):
    return outputs(module, step.batch)


def given(outs, step):
    """A loss whose gradients do not depend on what was looked up."""
    return sum((outs[name] * step.ups[name]).sum() for name in outs)


def squares(outs, step):
    """One whose gradients do."""
    return sum(((outs[name] - step.ups[name]) ** 2).sum() for name in outs) / 16


def train(module, steps, loss=given):
    """One update for each batch."""
    for number, step in enumerate(steps):
        outs = look_up(module, step)
        yield number, outs
        loss(outs, step).backward()
        module.update()


def train_in_pieces(module, steps, pieces, size=None):
    """One update for each batch, in as many forwards and backwards; all pieces but the last are of a size."""
    module.forwards_per_batch = pieces
    for step in steps:
        total = len(step.ups[""])
        each = total // pieces if size is None else size
        sizes = [each] * (pieces - 1) + [total - each * (pieces - 1)]
        whole = Step(batch=step.batch, ups=step.ups, sizes_W=tuple(sizes))
        for part in (whole.of(k) for k in range(pieces)):
            given(look_up(module, part), part).backward()
        module.update()


def place(tables, layouts, topology):
    """A plan: a layout for each table, or one for all."""
    placed = zip(tables, [layouts] * len(tables) if isinstance(layouts, str) else layouts, strict=True)
    return Plan(world=topology.world, tiles=tuple(x for t, layout in placed for x in CASES[layout](t, topology)))


def make_sharded(tables, plan, comm, **settings):
    """The rows that `Embeddings(tables, seed=SEED)` has."""
    sharded = ShardedEmbeddings(tables, plan, comm, **settings)
    copy_tables(Embeddings(tables, seed=SEED), sharded)
    return sharded


def assert_alike(whole, layouts, topology, script, limit=0.0, **settings):
    """Holds the rows of one device against those of ranks, each of which runs `script(module, rank)`."""
    tables = whole.tables
    plan = place(tables, layouts, topology)

    def rank(comm):
        sharded = make_sharded(tables, plan, comm, **settings)
        script(sharded, comm.rank)
        return list(rows_apart(sharded, whole, limit))

    assert not [text for texts in run_threads(topology, rank, timeout_s=60) for text in texts]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is done, on how many ranks, and how."""

    tables: tuple[Table, ...]
    plan: Plan
    steps: list[Step]
    elastic: bool = False
    disk: Path | None = None  # the folder of rows on disk
    hot_rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    script: Callable = train  # of a module and steps; yields the numbers of steps, and what it looked up for them

    def whole(self):
        """What one device makes of it."""
        module = Embeddings(self.tables, seed=SEED)
        outs = [(k, {name: x.detach() for name, x in found.items()}) for k, found in self.script(module, self.steps)]
        return Whole(job=self, module=module, outs=outs)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A job, and what one device has made of it."""

    job: Job
    module: Embeddings
    outs: list[tuple[int, Tensors]]

    def differences(self, comm):
        """Does this rank's part of the job; what came out differently, in words."""
        job = self.job
        settings = {"elastic": job.elastic, "disk": job.disk, "hot_rows": job.hot_rows}
        sharded = make_sharded(job.tables, job.plan, comm, **settings)
        found = []
        script = job.script(sharded, [step.of(comm.rank) for step in job.steps])
        for (number, outs), (_, wanted) in zip(script, self.outs, strict=True):
            wanted = job.steps[number].cut(wanted, comm.rank)
            found += [f"step {number}, {text}" for text in self._outputs(sharded.routes, outs, wanted)]
        return [f"rank {comm.rank}, {text}" for text in [*found, *rows_apart(sharded, self.module)]]

    def _outputs(self, routes, outs, wanted):
        assert outs.keys() == wanted.keys()
        limit = CLOSE * max((float(out[""].abs().max()) for _, out in self.outs if out[""].numel()), default=0.0)
        for name in outs.keys() - {""}:
            yield from apart(f"sequence {name}", outs[name], wanted[name])
        for feature, columns in routes.columns.items():
            exact = self.job.elastic or len(routes.cuts[feature]) == 2
            yield from apart(feature, outs[""][:, columns], wanted[""][:, columns], 0.0 if exact else limit)


def rows_apart(sharded, whole, limit=0.0):
    """Of rows and optimizer state, what differs from those of one device; `limit` is of the largest number, or of 1."""
    tables, states = {table.name: table for table in whole.tables}, whole.optimizer_state()
    for held in sharded.local_tiles():
        table, rows, columns = tables[held.tile.table], slice(*held.tile.rows), slice(*held.tile.cols)
        mine = rowtype.unpack(in_memory(held.rows), columns.stop - columns.start, table.row_type, table.column_group)
        want = whole.weights(table.name)[rows, columns]
        yield from apart(str(held.tile), mine, want, limit * max(1.0, float(want.abs().max())))
        assert held.state.keys() == states[table.name].keys()
        for name, state in held.state.items():
            full = states[table.name][name]
            want = full if not full.dim() else full[rows] if full.dim() == 1 else full[rows, columns]
            yield from apart(f"{held.tile} {name}", in_memory(state), want, limit * max(1.0, float(want.abs().max())))


def in_memory(rows):
    """Rows or optimizer state of a tile: a view, or a copy of what is on disk."""
    return rows if isinstance(rows, torch.Tensor) else rows.read(0, rows.shape[0])


def apart(what, mine, want, limit=0.0):
    assert mine.shape == want.shape, what
    if torch.equal(mine, want):
        return
    largest = float((mine.detach().double() - want.double()).abs().max())
    if not limit or not largest <= limit:  # NaN is not close to anything
        yield f"{what}: {largest:.1e} apart, {limit:.1e} allowed"
