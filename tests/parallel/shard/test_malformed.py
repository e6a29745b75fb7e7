"""A malformed batch on one rank raises on all of them, wherever it is noticed, and the next batch works everywhere."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from parallel.shard.equal import SEED, make_sharded, place
from problems import Keyed
from tables.ids.maps import make_maps
from torch import nn

from rowwise import Jagged, Pooling, Sgd, Table, Topology
from rowwise.base.errors import PeerError, RowwiseError
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.apply import shard
from rowwise.tables.batch import SharedBags
from rowwise.tables.ids.embeddings import MappedEmbeddings
from rowwise.tables.ops.jagged import permute

WORLD = Topology(devices=2)
SAMPLES = 256  # whole blocks: ids that a sequence repeats are sent once
POOLED = (Table(name="a", rows=40, dim=8, features=("a.0", "a.1"), optimizer=Sgd()), Table(name="b", rows=9, dim=8))
SEQUENCES = (
    Table(name="s", rows=30, dim=8, pooling=Pooling.SEQUENCE),
    Table(name="t", rows=9, dim=8, pooling="sequence"),
)
KINDS = {"pooled": POOLED, "sequences": SEQUENCES, "both": POOLED + SEQUENCES}
LAYOUTS = ("table-wise", "row-wise", "column-wise", "replicated", "all on the last rank", "pinwheel")


def lengths_with(batch, at, change):
    lengths_FB = batch.lengths_FB.clone()
    lengths_FB[at] += change
    return replace(batch, lengths_FB=lengths_FB)


def ids_with(batch, number):
    return replace(
        batch, values_N=batch.values_N.clone().index_fill_(0, torch.tensor([len(batch.values_N) // 2]), number)
    )


def negative_and_even(batch):
    """The sum is right."""
    lengths_FB = batch.lengths_FB.clone()
    lengths_FB[0] += lengths_FB[1] + 1
    lengths_FB[1] = -1
    return replace(batch, lengths_FB=lengths_FB)


def without_the_first(batch):
    return permute(batch, batch.features[1:])


FAULTS = {
    "a feature is missing": without_the_first,
    "the first length is too large": lambda b: lengths_with(b, 0, 1),
    "the last length is too large": lambda b: lengths_with(b, -1, 1),
    "ids are left over": lambda b: lengths_with(b, -1, -int(b.lengths_FB[-1])) if b.lengths_FB[-1] else ids_with(b, -1),
    "a length is far too large": lambda b: lengths_with(b, 0, 1 << 40),
    "a length is negative": lambda b: lengths_with(b, 0, -(1 << 40)),
    "a length is negative, the sum is right": negative_and_even,
    "an id has no row": lambda b: ids_with(b, 1 << 35),
    "an id is negative": lambda b: ids_with(b, -1),
    "no batch at all": lambda _: None,
    "lengths of another class are short": lambda b: Keyed(b.features, b.values_N, lengths=b.lengths_FB[1:]),
    "ids of another class are floats": lambda b: Keyed(b.features, b.values_N.float(), lengths=b.lengths_FB),
    "ids of another class are lists": lambda b: Keyed(b.features, b.values_N.tolist(), lengths=b.lengths_FB),
    "features of another class are the same": lambda b: Keyed(
        (b.features[0],) * len(b.features), b.values_N, lengths=b.lengths_FB
    ),
}


def batch_for(tables, seed):
    """Of these features and no other, whose last bag holds ids."""
    names = tuple(f for t in tables for f in t.feature_names)
    bags = {f: [[0] * 3 for _ in range(SAMPLES)] for f in names}
    rows = {f: t.rows for t in tables for f in t.feature_names}
    whole = Jagged.from_lists(bags)
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randint(0, rows[f], (3 * SAMPLES,), generator=generator) for f in names]
    return replace(whole, values_N=torch.cat(draws))


def refused_everywhere(make, tables, faults, change=lambda batch: batch):
    """Each fault on each rank; a right batch in between gives what it gave."""

    def rank(comm):
        module = make(comm)
        batch = change(batch_for(tables, comm.rank))
        wanted = module(batch)
        for fault, guilty in product(faults, range(WORLD.world)):
            spoiled = faults[fault](batch)
            with pytest.raises(RowwiseError) as raised:
                module(spoiled if comm.rank == guilty else batch)
            told = isinstance(raised.value, PeerError)
            assert told == (comm.rank != guilty), (fault, raised.value)
            assert not told or f"rank {guilty} (ids of a batch): " in str(raised.value)
        again = module(batch)
        assert torch.equal(again.matrix_BS, wanted.matrix_BS)
        assert all(torch.equal(again.sequences[f], x) for f, x in wanted.sequences.items())

    run_threads(WORLD, rank, timeout_s=20)


def sharded(tables, layout):
    return lambda comm: make_sharded(tables, place(tables, layout, WORLD), comm)


def slow_but(*fast, of):
    """The combinations, of which only these are fast tests."""
    return [pytest.param(*values, marks=() if values in fast else pytest.mark.slow) for values in product(*of)]


@pytest.mark.parametrize(("layout", "kind"), slow_but(("pinwheel", "both"), of=(LAYOUTS, KINDS)))
def test_on_one_rank_of_tables(layout, kind):
    refused_everywhere(sharded(KINDS[kind], layout), KINDS[kind], FAULTS)


def sharing(batch, common):
    """The same, of which each two neighbours share the bags of some features."""
    inverse_B = torch.arange(SAMPLES // 2).repeat_interleave(2)
    own = tuple(f for f in batch.features if f not in common)
    plain = batch.of_samples(torch.arange(SAMPLES), own) if own else batch.without_samples()
    once = batch.of_samples(torch.arange(0, SAMPLES, 2), common)
    return replace(plain, features=own, shared=SharedBags(jagged=once, inverse_B=inverse_B))


SHARED_FAULTS = {
    "a shared length is too large": lambda s: replace(s, jagged=lengths_with(s.jagged, 0, 1)),
    "shared ids are left over": lambda s: replace(s, jagged=lengths_with(s.jagged, -1, -1)),
    "a shared length is negative": lambda s: replace(s, jagged=negative_and_even(s.jagged)),
    "a shared id has no row": lambda s: replace(s, jagged=ids_with(s.jagged, 1 << 35)),
    "samples are of none": lambda s: replace(s, inverse_B=s.inverse_B + 1),
    "samples go back": lambda s: replace(s, inverse_B=s.inverse_B.flip(0)),
    "samples are far out": lambda s: replace(s, inverse_B=s.inverse_B * (1 << 40)),
}


def shared_fault(name):
    """In what samples share."""
    return lambda batch: replace(batch, shared=SHARED_FAULTS[name](batch.shared))


def mapped(kind, tables, layout):
    """Tables whose ids share rows by a kind of map, of which one part is on each rank."""

    def make(comm):
        maps = {table.name: make_maps(table.rows)[kind] for table in tables}
        module = nn.ModuleDict({"tables": MappedEmbeddings(tables, maps, seed=SEED)})
        stored = module["tables"].stored.tables
        return shard(module, place(stored, layout, WORLD), comm)["tables"]

    return make


SOME, ALL = ("a.0", "b"), ("a.0", "a.1", "b")


@pytest.mark.parametrize(("layout", "common"), slow_but(("row-wise", SOME), of=(LAYOUTS, (SOME, ALL))))
def test_on_one_rank_whose_samples_share_bags(layout, common):
    faults = {name: shared_fault(name) for name in SHARED_FAULTS}
    refused_everywhere(sharded(POOLED, layout), POOLED, faults, lambda batch: sharing(batch, common))


MAPS = ("hash", "double_hash", "product", "mixed, rare ids nowhere")


@pytest.mark.parametrize(("kind", "layout"), slow_but(("product", "table-wise"), of=(MAPS, ("table-wise",))))
def test_on_one_rank_of_tables_whose_ids_share_rows(kind, layout):
    tables = KINDS["both"]
    refused_everywhere(mapped(kind, tables, layout), tables, FAULTS)
    faults = {name: shared_fault(name) for name in SHARED_FAULTS}
    refused_everywhere(mapped(kind, tables, layout), tables, faults, lambda batch: sharing(batch, ("a.0", "s", "t")))
