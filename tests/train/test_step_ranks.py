"""A step of several ranks is the step of one: same sums, loss and end if a number is bad; if elastic, the same bits."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from clicks import make_clicks, make_tables
from counting import Counting
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trainings import join, work_of

from rowwise import DLRM, BatchError, Embeddings, GradientError, IdError, Jagged, Plan, RowWiseAdagrad, SpecError, Table
from rowwise.base.errors import AgreedError, PeerError, RowwiseError, UpdateError
from rowwise.parallel.comm.group import TransportComm
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard import shard
from rowwise.planning.planner import column_wise, replicated, table_wise
from rowwise.tables.batch import Batch
from rowwise.tables.ops.jagged import permute
from rowwise.tables.spec import Codecs, RowType, Wire
from rowwise.train.breakdown import Breakdown
from rowwise.train.objective import Clicks, Outcome
from rowwise.train.settings import DenseAdam, DenseParallel, DenseSgd, Training
from rowwise.train.step import EXACT, StepContext, step
from rowwise.train.virtual import BLOCK, VirtualShards, cut, split

TIMEOUT_S = 20


def make_mlp(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))


def dense_only(model):
    clicks = Clicks(nn.Identity())
    clicks._model = lambda batch: model(batch.dense_BF)
    return clicks


def machinery(comm, model, training, wire=EXACT):
    return StepContext.create(model, dense_only(model), training, Breakdown(), comm, wire)


def bits(model):
    return {name: x.clone() for name, x in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def trained(comm, model, training, cuts, wire=EXACT):
    """What is told of each step, and the parameters; cuts[s][k] are the sizes by rank of the k-th batch of step s."""
    model = copy.deepcopy(model)
    work, told = machinery(comm, model, training, wire), []
    for number, parts in enumerate(cuts, 1):
        batches = [
            split(make_clicks(sum(sizes), seed=97 * number + k), sizes)[comm.rank] for k, sizes in enumerate(parts)
        ]
        stepped = step(work, batches, number)
        told.append((stepped.loss, stepped.samples, stepped.rate, stepped.gradient_norm))
    return told, bits(model)


def cuts_of(world, steps, accumulate, seed=0):
    """Sizes that add up to the same batches for every world; a third of the ranks have nothing."""
    generator = torch.Generator().manual_seed(seed + world)
    made = []
    for number in range(steps):
        parts = []
        for k in range(accumulate):
            total = 24 + 8 * (number % 3) + k
            ends = sorted(torch.randint(0, total + 1, (world - 1,), generator=generator).tolist())
            ends = [0 if torch.rand((), generator=generator) < 0.3 else end for end in ends]
            bounds = [0, *sorted(ends), total]
            parts.append([bounds[w + 1] - bounds[w] for w in range(world)])
        made.append(parts)
    return made


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", [DenseSgd(lr=0.1, momentum=0.9), DenseAdam(lr=0.01)])
def test_ranks_with_uneven_and_empty_batches_train_as_one(optimizer, accumulate):
    model, training = make_mlp(), Training(optimizer=optimizer, clip=0.5)
    found = {}
    for world in (1, 2, 4):
        cuts = cuts_of(world, 20, accumulate)
        assert world == 1 or any(0 in sizes for parts in cuts for sizes in parts)
        ranks = run_threads(world, partial(trained, model=model, training=training, cuts=cuts), TIMEOUT_S)
        assert all(told == ranks[0][0] and same(after, ranks[0][1]) for told, after in ranks), "ranks differ"
        found[world] = ranks[0]
    told, after = found[1]
    for other, there in (found[2], found[4]):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(told), rtol=1e-5, atol=1e-6)
        for name, x in after.items():
            torch.testing.assert_close(there[name], x, rtol=1e-6, atol=1e-6)


def test_one_rank_is_no_rank():
    model, training = make_mlp(), Training()
    cuts = cuts_of(1, 5, 2)
    ((told, after),) = run_threads(1, partial(trained, model=model, training=training, cuts=cuts))
    work = machinery(None, alone := copy.deepcopy(model), training)
    for number, parts in enumerate(cuts, 1):
        stepped = step(work, [make_clicks(n, seed=97 * number + k) for k, (n,) in enumerate(parts)], number)
        assert (stepped.loss, stepped.samples, stepped.rate, stepped.gradient_norm) == told[number - 1]
    assert same(bits(alone), after)


@pytest.mark.parametrize("kind", [RowType.BF16, RowType.INT8])
def test_a_lossy_wire_learns_and_ranks_stay_the_same(kind):
    wire = Wire(dense=kind, error_feedback=True)
    training = Training(optimizer=DenseAdam(lr=0.01))
    cuts = [[[200, 56]]] * 30
    ranks = run_threads(2, partial(trained, model=make_mlp(), training=training, cuts=cuts, wire=wire), TIMEOUT_S)
    ((told, after),) = run_threads(1, partial(trained, model=make_mlp(), training=training, cuts=[[[256]]] * 30))
    assert same(ranks[0][1], ranks[1][1])
    assert not same(ranks[0][1], after)
    assert ranks[0][0][-1][0] == pytest.approx(told[-1][0], rel=0.01)


@pytest.mark.parametrize(
    ("wire", "want"),
    [
        (Wire(far="fp32"), r"wire\.far=fp32 with train\.dense_parallel\.kind=full: expected null, or kind=replicate"),
        (
            Wire(dense="bf16"),
            r"wire\.dense=bf16 with train\.dense_parallel\.kind=full: expected fp32, or kind=replicate",
        ),
    ],
)
def test_sharded_parameters_have_no_coded_sums(wire, want):
    training = Training(dense_parallel=DenseParallel(kind="full"))

    def rank(comm):
        with pytest.raises(SpecError, match=want):
            machinery(comm, make_mlp(), training, wire)

    run_threads(2, rank, TIMEOUT_S)


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_batch_without_samples_changes_nothing(empty):
    """Also where models look rows up, and metrics are made of logits."""
    found = []
    for with_empty in (False, True):
        torch.manual_seed(0)
        model = DLRM(Embeddings(make_tables(), seed=0), 3, (8, 8), (8, 1))
        work = work_of(model)
        batches = [make_clicks(32, seed=1), make_clicks(16, seed=2)]
        if with_empty:
            batches.insert(empty, split(make_clicks(8), [0, 8])[0])
        stepped = step(work, batches, 1)
        found.append((stepped.loss, stepped.samples, stepped.gradient_norm, bits(model)))
    assert found[0][:3] == found[1][:3]
    assert same(found[0][3], found[1][3])


def test_no_samples_at_all():
    def rank(comm):
        with pytest.raises(BatchError, match=r"\d+ has no samples"):
            trained(comm, make_mlp(), Training(), [[[0, 0]]])

    run_threads(2, rank, TIMEOUT_S)


class Breaks(nn.Module):
    """Has a bad number where dense column 0 is 99."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how, self.embeddings, self.top = how, Embeddings(make_tables(4), seed=0), nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch):
        good_B1 = (batch.dense_BF[:, :1] != 99).float()
        vectors_B1 = self.embeddings(batch.sparse)["user"].sum(1, keepdim=True)
        match self.how:
            case "loss":  # and with it all gradients, on all ranks
                return (self.top(batch.dense_BF / 100) + vectors_B1) / good_B1
            case "dense":  # the root has no slope at 0
                vectors_B1 = vectors_B1 + (self.scale * good_B1).abs().sqrt()
            case "rows":
                vectors_B1 = vectors_B1 + (vectors_B1 * good_B1).abs().sqrt()
        return self.top(batch.dense_BF / 100) + vectors_B1


def sharded(model, comm):
    """With every table on another rank than the last."""
    tables = model.embeddings.tables
    tiles = tuple(tile for k, table in enumerate(tables) for tile in table_wise(table, k % len(comm.ranks)))
    return shard(model, Plan(world=len(comm.ranks), tiles=tiles), comm)


TOLD = {
    "loss": ("the loss is nan|the loss is inf", r"rank 1 \(step 2\): GradientError: the loss is (nan|inf)$"),
    "rows": (
        "nan in the gradient of table 'user', feature 'user', sample 5 of rank 1, column 0",
        r"rank 1 \(step 2\): GradientError: nan in .* of table 'user', feature 'user', sample 5 of rank 1",
    ),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ["loss", "dense", "rows"])
def test_a_bad_number_on_one_rank_stops_all_before_anything_changes(how, world):
    """The rank that has it raises its own error, the others one that names it; a gradient that was summed is all's."""
    model = Breaks(how)

    def rank(comm):
        mine = sharded(copy.deepcopy(model), comm)
        work = work_of(mine, comm)
        good = make_clicks(8, seed=comm.rank)
        step(work, [good], 1)
        before, moments = bits(mine), copy.deepcopy(work.optimizer.state_dict())
        dense_BF = good.dense_BF.clone()
        dense_BF[5, 0] = 99 if comm.rank == 1 else 0
        kind = GradientError if comm.rank == 1 or how == "dense" else PeerError
        own, others = TOLD.get(how, ("the gradient of the dense parameters is nan",) * 2)
        with pytest.raises(kind, match=own if kind is GradientError else others):
            step(work, [good, replace(good, dense_BF=dense_BF)], 2)
        assert same(bits(mine), before)
        assert not mine.embeddings.staged
        for parameter, state in work.optimizer.state_dict()["state"].items():
            assert all(torch.equal(x, moments["state"][parameter][k]) for k, x in state.items())
        again = step(work, [good], 2)
        return again.loss, {k: x for k, x in bits(mine).items() if not k.startswith("embeddings")}

    found = run_threads(world, rank, TIMEOUT_S)
    assert all(loss == found[0][0] and same(after, found[0][1]) for loss, after in found)


def test_an_error_in_one_forward_reaches_the_others():
    def rank(comm):
        model = sharded(Breaks(""), comm)
        work = work_of(model, comm)
        batch = make_clicks(8)
        if comm.rank == 1:
            batch = replace(batch, sparse=replace(batch.sparse, values_N=batch.sparse.values_N + 1000))
        if comm.rank == 0:
            with pytest.raises(PeerError, match=r"batch\): IdError: table 'user'"):
                step(work, [batch], 1)
        else:
            step(work, [batch], 1)

    with pytest.raises(ValueError, match="table 'user'"):
        run_threads(2, rank, TIMEOUT_S)


@pytest.mark.parametrize(
    ("number", "batches", "want"),
    [
        ((3, 4), (1, 1), "number of the step differs: rank 0 has 3 and rank 1 has 4"),
        ((1, 1), (1, 2), "number of batches differs: rank 0"),
    ],
)
def test_ranks_that_are_not_at_the_same_step(number, batches, want):
    def rank(comm):
        work = machinery(comm, make_mlp(), Training())
        with pytest.raises(PeerError, match=f"the {want}"):
            step(work, [make_clicks(4)] * batches[comm.rank], number[comm.rank])

    run_threads(2, rank, TIMEOUT_S)


MALFORMED = {
    "dense": lambda b: replace(b, dense_BF=b.dense_BF[:, :-1]),
    "no matrix": lambda b: replace(b, dense_BF=b.dense_BF[:, 0]),
    "labels": lambda b: replace(b, labels_BK=b.labels_BK.repeat(1, 2)),
    "a feature": lambda b: replace(b, sparse=permute(b.sparse, b.sparse.features[1:])),
    "a length": lambda b: replace(b, sparse=replace(b.sparse, lengths_FB=b.sparse.lengths_FB + 1)),
}


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_batch_of_one_rank_ends_the_step_on_all_and_the_next_works(fault, guilty):
    """Also where it is one of several batches, and before any rank has looked anything up."""

    def rank(comm):
        model = sharded(Breaks(""), comm)
        work = work_of(model, comm)
        batch = make_clicks(8)
        for batches in ([MALFORMED[fault](batch)], [batch, MALFORMED[fault](batch)]):
            with pytest.raises(RowwiseError):
                step(work, batches if comm.rank == guilty else [batch] * len(batches), 1)
        return step(work, [batch], 1).loss

    assert len(set(run_threads(2, rank, TIMEOUT_S))) == 1


def elastic_cuts(totals, shards, world):
    """Each rank has the samples of its shards."""
    each = shards // world
    return [[[sum(cut(n, shards)[w * each : (w + 1) * each]) for w in range(world)]] for n in totals]


@pytest.mark.few(1)
@pytest.mark.parametrize(("shards", "worlds"), [(8, (1, 2, 4, 8)), (6, (1, 2, 3, 6))])
def test_elastic_steps_have_the_same_bits_for_any_world(shards, worlds):
    """Also where the last batch is short, so that its shards are uneven and some have nothing."""
    training = Training(determinism="elastic", virtual_shards=shards, clip=0.3)
    totals = (shards * BLOCK, shards * BLOCK, 700, 1)
    found = []
    for world in worlds:
        cuts = elastic_cuts(totals, shards, world)
        ranks = run_threads(world, partial(trained, model=make_mlp(), training=training, cuts=cuts), TIMEOUT_S)
        assert [samples for _, samples, *_ in ranks[0][0]] == list(totals)
        found += ranks
    assert all(told == found[0][0] for told, _ in found)
    assert all(same(after, found[0][1]) for _, after in found)
    # It is the same training as ever, but for rounding.
    plain = Training(clip=0.3)
    ((told, after),) = run_threads(1, partial(trained, model=make_mlp(), training=plain, cuts=[[[n]] for n in totals]))
    torch.testing.assert_close(torch.tensor(told), torch.tensor(found[0][0]), rtol=1e-5, atol=1e-6)
    assert all(torch.allclose(after[name], x, rtol=1e-5, atol=1e-6) for name, x in found[0][1].items())


def test_elastic_with_tables_and_any_number_of_threads(threads):
    """Rows get what they would get from the shards as accumulated batches; one outcome a batch is told."""

    def once(determinism, batches, before):
        threads(before)
        torch.manual_seed(0)
        model = DLRM(Embeddings(make_tables(), seed=0), 3, (64, 8), (64, 1))
        seen = []
        model.top.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
        work = work_of(model, determinism=determinism, virtual_shards=4)
        stepped = step(work, batches, 1)
        assert torch.get_num_threads() == before
        return stepped, bits(model), set(seen)

    batch = make_clicks(4 * BLOCK)
    one, after, seen = once("elastic", [batch], 1)
    two, with_two, seen_too = once("elastic", [batch], 2)
    assert seen == seen_too == {1}
    assert same(after, with_two)
    assert (one.loss, one.gradient_norm) == (two.loss, two.gradient_norm)
    plain, accumulated, _ = once("run", split(batch, [BLOCK] * 4), 1)
    assert all(torch.equal(after[name], x) for name, x in accumulated.items() if name.startswith("embeddings."))
    (outcome,) = one.outcomes
    assert torch.equal(outcome.logits_BK, torch.cat([o.logits_BK for o in plain.outcomes]))
    assert float(outcome.loss) == pytest.approx(one.loss)


def test_a_step_that_stopped_halfway_leaves_nothing_to_the_next():
    found, batch = [], make_clicks(2 * BLOCK)
    bad_N = batch.sparse.values_N.clone()
    bad_N[2 * BLOCK - 1] = 1000  # the user of the last sample
    bad = replace(batch, sparse=replace(batch.sparse, values_N=bad_N))
    for stopped in (False, True):
        model = Breaks("")
        model.load_state_dict(found[0][1] if stopped else model.state_dict())
        first = bits(model)
        work = work_of(model, determinism="elastic", virtual_shards=2)
        if stopped:
            with pytest.raises(IdError, match="table 'user'"):
                step(work, [bad], 1)
        step(work, [batch], 1)
        found.append((bits(model), first))
    assert same(found[0][0], found[1][0])


def test_what_is_drawn_follows_from_the_shard():
    """Not from who computes it, nor from what was drawn before; and it leaves no trace."""
    drawn = {}
    for world in (1, 2, 4, 8):
        for rank in range(world):
            shards = VirtualShards(count=8, rank=rank, world=world, seed=5)
            torch.manual_seed(world * 10 + rank)
            torch.rand(rank)
            before = torch.get_rng_state()
            for place in range(8 // world):
                with shards.seeded_draws(3, place):
                    found = torch.rand(4)
                assert torch.equal(drawn.setdefault(rank * (8 // world) + place, found), found)
            assert torch.equal(torch.get_rng_state(), before)
    with VirtualShards(count=8, rank=0, world=1, seed=6).seeded_draws(3, 0):
        drawn["another seed"] = torch.rand(4)
    with VirtualShards(count=8, rank=0, world=1, seed=5).seeded_draws(4, 0):
        drawn["another step"] = torch.rand(4)
    assert len({tuple(x.tolist()) for x in drawn.values()}) == 10


def test_dropout_follows_from_what_torch_was_seeded_with():
    def once(seed, more):
        model = make_mlp(dropout=0.5)
        torch.manual_seed(seed)
        work = machinery(None, model, Training(determinism="elastic", virtual_shards=2))
        torch.rand(more)
        return step(work, [make_clicks(512)], 1).loss

    assert once(1, 0) == once(1, 7) != once(2, 0)


@given(st.integers(0, 20000), st.integers(1, 40))
def test_a_batch_is_cut_in_whole_blocks(samples, shards):
    sizes = cut(samples, shards)
    assert len(sizes) == shards
    assert sum(sizes) == samples
    filled = [size for size in sizes if size]
    assert all(size % BLOCK == 0 for size in filled[:-1])
    blocks = [-(-size // BLOCK) for size in sizes]
    assert max(blocks) - min(blocks) <= 1
    if samples % (shards * BLOCK) == 0:
        assert len(set(sizes)) == 1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.booleans())
def test_a_batch_that_was_split_is_joined_again(sizes, known):
    batch = make_clicks(sum(sizes))
    if known:
        keys_B = torch.arange(sum(sizes))
        batch = replace(batch, weights_B=torch.rand(sum(sizes)), keys_B=keys_B, times_B=keys_B + 7)
    parts = split(batch, sizes)
    assert [len(part.labels_BK) for part in parts] == sizes
    again = join(parts)
    assert torch.equal(again.dense_BF, batch.dense_BF)
    assert torch.equal(again.sparse.values_N, batch.sparse.values_N)
    assert torch.equal(again.sparse.lengths_FB, batch.sparse.lengths_FB)
    for name in ("weights_B", "keys_B", "times_B"):
        whole, pieces = getattr(batch, name), [getattr(part, name) for part in parts]
        assert all(p is None for p in pieces) if whole is None else torch.equal(torch.cat(pieces), whole)


def test_what_elastic_refuses():
    elastic = Training(determinism="elastic", virtual_shards=8)

    def rank(comm):
        with pytest.raises(SpecError, match="size of 1, 2"):
            machinery(comm, make_mlp(), elastic)

    run_threads(3, rank, TIMEOUT_S)
    for wire in (Wire(dense=RowType.BF16), Wire(network=Codecs(backward=RowType.INT8))):
        with pytest.raises(SpecError, match="'fp32' for every type"):
            machinery(None, make_mlp(), elastic, wire)
    with pytest.raises(SpecError, match=r"train\.accumulate=2"):
        Training(determinism="elastic", accumulate=2)
    with pytest.raises(SpecError, match="least 1"):
        Training(virtual_shards=0)

    def uneven(comm):
        want = r"8 virtual shards: got \[1000, 1048\] samples on 2 ranks: expected one batch per rank, of \[1024"
        with pytest.raises(BatchError, match=want):
            trained(comm, make_mlp(), elastic, [[[1000, 1048]]])
        with pytest.raises(BatchError, match=r"rank.*a multiple of 2048"):
            trained(comm, make_mlp(), elastic, [[[1024, 1024], [1024, 1024]]])

    run_threads(2, uneven, TIMEOUT_S)


def test_elastic_ranks_with_other_seeds():
    def rank(comm):
        work = machinery(comm, make_mlp(), Training(determinism="elastic", virtual_shards=2))
        shards = VirtualShards(count=2, rank=comm.rank, world=2, seed=comm.rank)
        object.__setattr__(work, "shards", shards)
        with pytest.raises(PeerError, match="rank 0 has 0"):
            step(work, [make_clicks(BLOCK)], 1)

    run_threads(2, rank, TIMEOUT_S)


def test_an_objective_without_logits():
    model = make_mlp()

    def loss(batch, _step):
        return Outcome((model(batch.dense_BF) ** 2).mean())

    work = StepContext.create(model, loss, Training(determinism="elastic", virtual_shards=2), Breakdown())
    (outcome,) = step(work, [make_clicks(300)], 1).outcomes
    assert outcome.logits_BK is None


def test_a_step_tells_its_status_in_two_gathers():
    """One before anything is looked up; one before anything is changed, on its way while gradients are."""

    def rank(comm):
        calls = []
        comm = TransportComm(Counting(comm.transport, calls), comm.topology, comm.rank)
        model = sharded(Breaks(""), comm)
        work = work_of(model, comm)
        calls.clear()
        step(work, [make_clicks(8)], 1)
        return calls

    forward = ["all_to_all of counts", "all_to_all of ids", "all_to_all of pooled"]
    backward = ["all_to_all of gradients", "all_gather of step", "all_reduce of dense", "all_reduce of dense"]
    steps = run_threads(2, rank, TIMEOUT_S)
    assert steps == [["all_gather of step", *forward, *backward]] * 2


@pytest.mark.parametrize(
    ("tables", "guilty"),
    [
        (lambda table, world: table_wise(table, 1), {1}),
        (lambda table, world: column_wise(table, range(world - 1)), {0, 1}),  # the sum over columns is exchanged
        (lambda table, world: replicated(table, range(world)), {0, 1, 2}),
    ],
    ids=["one rank", "columns", "copies"],
)
def test_gradients_that_overflow_in_an_update_end_the_step_on_all(tables, guilty):
    """Each is finite, so only the rank that adds them up can know; the others are told in the same step."""
    spec = Table(name="user", rows=8, dim=8, optimizer=RowWiseAdagrad(lr=0.1))

    def rank(comm):
        torch.manual_seed(0)
        model = nn.ModuleDict({"tables": Embeddings([spec]), "top": nn.Linear(1, 1)})
        shard(model, Plan(world=3, tiles=tuple(tables(spec, 3))), comm)
        scale = [1.0]

        def loss(batch, _step):
            vectors = model["tables"](batch.sparse)["user"]
            return Outcome(((vectors - vectors.detach()) * scale[0]).sum() + model["top"].weight.sum())

        work = StepContext.create(model, loss, Training(), Breakdown(), comm)
        sparse = Jagged.from_lists({"user": [[5], [5], [comm.rank]]})
        batch = Batch(dense_BF=torch.zeros(3, 0), sparse=sparse, labels_BK=torch.zeros(3, 1))
        step(work, [batch], 1)
        weight, scale[0] = model["top"].weight.clone(), 3e38
        with pytest.raises(UpdateError if comm.rank in guilty else AgreedError) as raised:
            step(work, [batch], 2)
        assert torch.equal(model["top"].weight, weight)
        scale[0] = 1.0
        step(work, [batch], 2)
        return str(raised.value)

    for number, text in enumerate(run_threads(3, rank, TIMEOUT_S)):
        assert "step 2: table 'user', row 5: " in text
        assert number in guilty or text.startswith(f"rank {min(guilty)} (update of rows): UpdateError: ")
