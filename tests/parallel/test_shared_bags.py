"""Bags that neighbours share: held once, looked up once, and nothing else changes, to the bit."""

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import OPTIMIZERS, ROW_TYPES, Keyed, make_problem, problems
from repeated_rows import adjacent
from shared_batches import draw_copies, make_shared

from rowwise import Batch, BatchError, Embeddings, IdError, Jagged, Pooling, Table, UnknownIdWarning
from rowwise.base.errors import DataError
from rowwise.ingest.block import RaggedColumn
from rowwise.models.histories import single_ids
from rowwise.tables.batch import SharedBags
from rowwise.tables.ops.jagged import bucketize, concatenate, permute, row_bounds, share, split
from rowwise.train.evaluate import ids_or_none
from rowwise.train.ranks import empty_batch_like
from rowwise.train.traffic import TableTraffic


def bags_of(jagged):
    """Of each feature and sample: the ids, and their weights."""
    plain = jagged.expanded()
    sizes = plain.lengths_FB.tolist()
    ids = [part.tolist() for part in plain.values_N.split(sizes)]
    weights = [[]] * len(ids) if plain.weights_N is None else [part.tolist() for part in plain.weights_N.split(sizes)]
    both = list(zip(ids, weights, strict=True))
    batch = plain.batch_size
    return {name: both[k * batch : (k + 1) * batch] for k, name in enumerate(plain.features)}


def draw_tables(draws, poolings=tuple(Pooling)):
    tables = []
    for index in range(4):
        row_type, group = draws.choice(ROW_TYPES)
        names = tuple(f"f{index}.{k}" for k in range(draws.randint(1, 3)))
        tables.append(
            Table(
                name=f"t{index}",
                rows=draws.choice((1, 7, 300)),
                dim=draws.choice((1, 4, 12, 64)),
                features=names,
                pooling=draws.choice(poolings),
                optimizer=draws.choice(OPTIMIZERS),
                row_type=row_type,
                column_group=group,
            )
        )
    return tuple(tables)


def draw_batch(draws, tables, seed):
    features = [f for t in tables for f in t.feature_names] + ["not used"]
    common = draws.sample(features, draws.randint(1, len(features)))
    samples = draws.choice((0, 1, 2, 40, 300))
    copies = draw_copies(draws, samples, draws.choice((1, 12, 400)))  # U = B and U = 1 among them
    ids, lengths = (draws.choice((torch.int32, torch.int64)) for _ in range(2))
    return make_shared(tables, common, copies, seed, ids=ids, lengths=lengths)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_shared_is_expanded_on_one_device(seed):
    draws = random.Random(seed)
    tables = draw_tables(draws)
    batches = [draw_batch(draws, tables, seed + k) for k in range(3)]
    modules = [Embeddings(tables, seed=1) for _ in range(2)]
    for kept in (False, True):  # an update for each batch, and one for two
        for batch in batches:
            found = [modules[0](batch), modules[1](batch.expanded())]
            assert torch.equal(found[0].matrix_BS, found[1].matrix_BS)
            assert found[0].sequences.keys() == found[1].sequences.keys()
            assert all(torch.equal(found[0][name], found[1][name]) for name in found[0].sequences)
            for module, out in zip(modules, found, strict=True):
                loss = ((out.matrix_BS - 0.3) ** 2).sum() + sum(((x - 0.1) ** 2).sum() for x in out.sequences.values())
                loss.backward()
                if not kept or batch is batches[-1]:
                    module.update()
    assert torch.equal(modules[0].arena.rows, modules[1].arena.rows)
    assert torch.equal(modules[0].arena.state, modules[1].arena.state)


def test_distinct_bags_are_looked_up_once(monkeypatch):
    table = Table(name="t", rows=50, dim=4)
    batch = make_shared([table], ["t"], [10] * 7, 0)
    asked, pool = [], torch.ops.rowwise.pool
    monkeypatch.setattr(torch.ops.rowwise, "pool", lambda *args: asked.append(len(args[2])) or pool(*args))
    Embeddings([table])(batch)
    Embeddings([table])(batch.expanded())
    once = len(batch.shared.jagged.values_N)
    assert asked == [once, 10 * once + len(batch.values_N)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(problem=problems(), data=st.data())
def test_share_finds_what_expanding_loses(problem, data):
    """Neighbours with equal bags of all features become one; nothing else does, and expanding gives it all back."""
    jagged, features = problem.jagged, problem.jagged.features
    draws = random.Random(problem.seed)
    copies = torch.tensor([draws.randint(1, 4) for _ in range(jagged.batch_size)])
    jagged = jagged.of_samples(torch.arange(jagged.batch_size).repeat_interleave(copies))
    chosen = data.draw(st.lists(st.sampled_from(features), min_size=1, unique=True))
    shared = share(jagged, chosen)
    assert shared.shared.jagged.features == tuple(chosen)
    assert set(shared.features) == set(features) - set(chosen)
    wanted = bags_of(jagged)
    assert bags_of(shared) == wanted
    alike = [all(wanted[f][b] == wanted[f][b - 1] for f in chosen) for b in range(1, jagged.batch_size)]
    assert shared.shared.inverse_B.diff().tolist() == [int(not same) for same in alike]
    assert bags_of(share(shared, features)) == wanted


def test_weights_that_learn_are_not_shared():
    jagged = replace(Jagged.from_lists({"a": [[1], [1]]}), weights_N=torch.ones(2, requires_grad=True))
    with pytest.raises(BatchError, match="require gradients"):
        share(jagged, ["a"])
    with pytest.raises(BatchError, match="no features"):
        share(jagged, [])


def test_gradients_of_shared_weights_are_those_of_all_samples():
    table = Table(name="t", rows=50, dim=4, pooling=Pooling.WEIGHTED)
    grads = []
    for expand in (False, True):
        batch = make_shared([table], ["t"], [3, 1, 4], 0)
        weights = batch.shared.jagged.weights_N.requires_grad_()
        out = Embeddings([table])(batch.expanded() if expand else batch).matrix_BS
        (out**2).sum().backward()
        grads.append(weights.grad)
    assert torch.equal(*grads)
    assert grads[0].abs().sum() > 0


@pytest.mark.slow
@given(seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_rearranged_batches_are_those_of_the_expanded(seed):
    draws = random.Random(seed)
    batch = draw_batch(draws, draw_tables(draws), seed)
    plain, size = batch.expanded(), batch.batch_size
    first = draws.randint(0, size)
    sizes = [first, 0, size - first]
    for part, want in zip(split(batch, sizes), split(plain, sizes), strict=True):
        assert part.shared is not None
        part.shared.check()
        assert bags_of(part) == bags_of(want)
    assert bags_of(concatenate([batch, plain])) == bags_of(concatenate([plain, plain]))
    assert bags_of(concatenate([plain, batch])) == bags_of(concatenate([plain, plain]))
    names = draws.sample(plain.features, len(plain.features))
    assert bags_of(permute(batch, names)) == bags_of(permute(plain, names))
    assert permute(batch, names).features == tuple(names)
    bounds = row_bounds(plain.features, {f: (0, 2, 300) for f in plain.features})
    mine, want = bucketize(batch, bounds), bucketize(plain, bounds)
    assert torch.equal(mine.values_N, want.values_N)
    assert torch.equal(mine.lengths_WFB, want.lengths_WFB)
    for feature in plain.features:
        assert torch.equal(batch.lengths_of(feature).long(), plain.lengths_of(feature).long())
    assert bags_of(pickle.loads(pickle.dumps(batch)).to("cpu").contiguous()) == bags_of(plain)
    assert batch.without_samples().batch_size == 0
    assert set(batch.without_samples().all_features) == set(plain.features)


def test_who_knows_nothing_of_sharing_is_told():
    batch = make_shared([Table(name="t", rows=50, dim=4)], ["t"], [3, 1], 0)
    for read in ("keys", "values", "lengths", "weights_or_none", "offsets"):
        with pytest.raises(BatchError, match=r"t are shared .*"):
            getattr(batch, read)()
    assert batch.stride() == 4
    assert batch.to_keyed(Keyed).keys() == ["not used", "t"]
    with pytest.raises(BatchError, match="no feature 'x'"):
        batch.lengths_of("x")


def one_feature(name, ids, **more):
    return replace(Jagged.from_lists({name: [[one] for one in ids]}), **more)


@pytest.mark.parametrize(
    ("inverse", "distinct"), [([0, 2], 3), ([1, 1], 2), ([0, 0], 2), ([], 1), ([0, 1, 0], 2), ([0, -1], 1), ([0, 5], 2)]
)
def test_numbers_that_do_not_ascend_one_by_one_are_refused(inverse, distinct):
    shared = SharedBags(jagged=one_feature("t", [1] * distinct), inverse_B=torch.tensor(inverse, dtype=torch.int64))
    batch = one_feature("u", [1] * len(inverse), shared=shared) if inverse else None
    with pytest.raises(BatchError, match=f"ascend from 0 to {distinct - 1} in steps of 0 or 1"):
        shared.expanded()
    if batch is not None:
        with pytest.raises(BatchError, match="0 or 1"):
            Embeddings([Table(name="t", rows=9, dim=4), Table(name="u", rows=9, dim=4)])(batch)


def test_parts_that_do_not_fit_are_refused():
    shared = SharedBags(jagged=one_feature("t", [1, 2]), inverse_B=torch.tensor([0, 0, 1]))
    one_feature("u", [1, 2, 3], shared=shared)
    with pytest.raises(BatchError, match="2 lengths for 1"):
        one_feature("u", [1, 2], shared=shared)
    with pytest.raises(BatchError, match="named twice: t, t"):
        one_feature("t", [1, 2, 3], shared=shared)
    with pytest.raises(BatchError, match="features of a batch"):
        one_feature("u", [1, 2, 3], shared=shared, weights_N=torch.ones(3))
    with pytest.raises(BatchError, match="int32 or int64"):
        SharedBags(jagged=one_feature("t", [1]), inverse_B=torch.ones(1))
    with pytest.raises(BatchError, match="shared again"):
        SharedBags(jagged=one_feature("u", [1, 2, 3], shared=shared), inverse_B=torch.tensor([0]))


def test_bad_ids_are_told_of_samples_as_ever():
    tables = [Table(name="t", rows=9, dim=4), Table(name="u", rows=9, dim=4, unknown="last_row")]
    for t, u in ((99, 1), (1, 99)):
        inner = Jagged.from_lists({"t": [[1], [t]], "u": [[1], [u]]})
        shared = SharedBags(jagged=inner, inverse_B=torch.tensor([0, 0, 0, 1, 1]))
        batch = one_feature("v", [0] * 5, shared=shared)
        modules = [Embeddings(tables, seed=1) for _ in range(2)]
        if t == 99:
            said = []
            for module, form in zip(modules, (batch, batch.expanded()), strict=True):
                with pytest.raises(IdError, match="sample 3") as raised:
                    module(form)
                said.append(str(raised.value))
            assert said[0] == said[1]
            continue
        with pytest.warns(UnknownIdWarning):
            outs = [module(form).matrix_BS for module, form in zip(modules, (batch, batch.expanded()), strict=True)]
        assert torch.equal(*outs)
        assert modules[0].unknown_ids == modules[1].unknown_ids == {"u": 2}
    with pytest.raises(BatchError, match="lacks t"):
        Embeddings(tables)(permute(batch, ["u", "v"]))
    with pytest.raises(BatchError, match="lacks t"):
        Embeddings(tables)(share(permute(batch, ["u", "v"]), ["u"]))


def test_who_looks_at_ids_sees_those_of_all_samples():
    tables = [Table(name="t", rows=50, dim=4), Table(name="u", rows=50, dim=4)]
    module = Embeddings(tables)
    inner = Jagged(features=("t",), values_N=torch.tensor([4, 7, 8]), lengths_FB=torch.tensor([1, 2]))
    sparse = one_feature("u", [5, 6, 7], shared=SharedBags(jagged=inner, inverse_B=torch.tensor([0, 0, 1])))
    batch = Batch(dense_BF=torch.zeros(3, 0), sparse=sparse, labels_BK=torch.zeros(3, 1))
    plain = Batch(dense_BF=torch.zeros(3, 0), sparse=sparse.expanded(), labels_BK=torch.zeros(3, 1))
    traffic = [TableTraffic(), TableTraffic()]
    for counter, one in zip(traffic, (batch, plain), strict=True):
        counter.add([module], one)
    assert traffic[0].rows([module]) == traffic[1].rows([module])
    assert traffic[0].pooling("t") == 4 / 3
    assert ids_or_none(batch, "t").tolist() == ids_or_none(plain, "t").tolist()
    assert single_ids(batch.sparse, "u").tolist() == [5, 6, 7]
    with pytest.raises(BatchError, match="2 ids in sample"):
        single_ids(batch.sparse, "t")
    empty = empty_batch_like(batch).to("cpu")
    assert (empty.sparse.batch_size, empty.sparse.all_features) == (0, ("u", "t"))


lists = st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=30)


@given(rows=lists, singles=st.lists(st.integers(0, 1), min_size=30, max_size=30), skipped=st.integers(0, 3))
def test_rows_of_a_split_that_repeat_are_found(rows, singles, skipped):
    ids = np.array([9] * skipped + [i for row in rows for i in row], np.int64)
    offsets = np.cumsum([skipped, *map(len, rows)]).astype(np.int64)
    single = np.array(singles[: len(rows)], np.int64)
    bags = [RaggedColumn(values_N=ids, offsets_R1=offsets), RaggedColumn(values_N=single, offsets_R1=None)]
    for some, whole in ((bags[:1], rows), (bags, list(zip(rows, singles, strict=False)))):
        found = adjacent(some)
        assert found.dtype == np.int64
        wanted = [sum(whole[k] != whole[k - 1] for k in range(1, n + 1)) for n in range(len(whole))]
        assert found.tolist() == wanted


def test_rows_that_do_not_match_are_refused():
    bags = [RaggedColumn(values_N=np.arange(n), offsets_R1=None) for n in (2, 3)]
    with pytest.raises(DataError, match="features of 2, 3"):
        adjacent(bags)
    with pytest.raises(DataError, match="no features"):
        adjacent([])


def test_a_feature_more_than_the_tables_need_may_be_shared():
    table = Table(name="t", rows=50, dim=4)
    own = make_problem([table], 5, 3, 0).jagged
    batch = share(own, ["not used"])
    assert torch.equal(Embeddings([table])(batch).matrix_BS, Embeddings([table])(own).matrix_BS)


def test_merged_gradients_agree_to_rounding():
    tables = [Table(name=p.value, rows=30, dim=8, pooling=p) for p in Pooling]
    modules = [Embeddings(tables, seed=1, merge_shared=merges) for merges in (False, True)]
    for seed in range(3):
        batch = make_shared(tables, [t.name for t in tables[seed:]], [10, 1, 7, 40], seed)
        for module in modules:
            out = module(batch)
            ((out.matrix_BS**2).sum() + (out[Pooling.SEQUENCE.value] ** 2).sum()).backward()
        pooled = [t.name for t in tables if t.pooling is not Pooling.SEQUENCE]
        counts = [
            sum(len(permute(s.call.jagged, pooled).values_N) for s in module.staged if not s.call.per_id)
            for module in modules
        ]
        assert counts[1] < counts[0]
        for module in modules:
            module.check_staged()
            module.update()
    rows = [module.arena.rows.view(torch.float32) for module in modules]
    assert 0 < float((rows[0] - rows[1]).abs().max()) < 1e-4
