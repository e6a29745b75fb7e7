"""Jagged batches rearranged: kernel == reference, what is taken apart goes together again, bad input is named."""

import re
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rowwise import BatchError, Embeddings, IdError, Jagged, SpecError, Table
from rowwise.tables.ops import check, reference
from rowwise.tables.ops.jagged import bucketize, concatenate, deduplicate, lengths, permute, row_bounds, split
from rowwise.tables.ops.operators import OPERATORS

ops = torch.ops.rowwise
INTEGERS = st.sampled_from([torch.int32, torch.int64])
ROWS = (1, 2, 17, 300, 5000)


def same(found, wanted) -> bool:
    """Equal in every bit, and in type and shape; of tensors, or of whatever holds some."""
    if isinstance(found, torch.Tensor):
        return found.dtype == wanted.dtype and found.shape == wanted.shape and bool((found == wanted).all())
    if isinstance(found, Jagged):
        parts = ((j.features, j.values_N, j.lengths_FB, j.weights_N) for j in (found, wanted))
        return all(same(a, b) for a, b in zip(*parts, strict=True))
    if isinstance(found, tuple | list):
        return len(found) == len(wanted) and all(same(a, b) for a, b in zip(found, wanted, strict=True))
    return found == wanted


def make_jagged(features: int, batch: int, most: int, seed: int, weighted=True, ids=torch.int64, bags=None) -> Jagged:
    """Ids of feature k are below ROWS[k]."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most + 1, (features * batch,), generator=g)
    counts[torch.rand(features * batch, generator=g) < 0.3] = 0
    sizes = counts.view(features, batch).sum(1).tolist()
    values = [torch.randint(0, ROWS[k % len(ROWS)], (n,), generator=g) for k, n in enumerate(sizes)]
    return Jagged(
        features=tuple(f"f{k}" for k in range(features)),
        values_N=torch.cat(values).to(ids),
        lengths_FB=counts.to(bags or ids),
        weights_N=torch.rand(sum(sizes), generator=g) if weighted else None,
    )


batches = st.builds(
    make_jagged,
    features=st.integers(1, 5),
    batch=st.sampled_from((0, 1, 2, 7, 40, 300)),
    most=st.sampled_from((0, 1, 3, 20)),
    seed=st.integers(0, 1000),
    weighted=st.booleans(),
    ids=INTEGERS,
    bags=INTEGERS,
)


@st.composite
def bounds_for(draw, jagged: Jagged) -> torch.Tensor:
    """Even ranges, or any, empty ones among them."""
    buckets = draw(st.sampled_from((1, 2, 3, 8, 16, 17, 18, 100, 1024)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    found = []
    for k in range(len(jagged.features)):
        rows = ROWS[k % len(ROWS)]
        if draw(st.booleans()):
            size = -(-rows // buckets)
            found.append([min(w * size, rows) for w in range(buckets + 1)])
        else:
            inner = torch.randint(0, rows + 1, (buckets - 1,), generator=g).sort().values.tolist()
            found.append([0, *inner, rows])
    return torch.tensor(found)


batches_and_bounds = batches.flatmap(lambda jagged: st.tuples(st.just(jagged), bounds_for(jagged)))


# Kernels and reference


@given(st.lists(batches, min_size=1, max_size=3), st.data())
def test_take(jaggeds, data):
    weighted = all(j.weights_N is not None for j in jaggeds)
    bags = [len(j.lengths_FB) for j in jaggeds]
    segments = []
    for _ in range(data.draw(st.integers(0, 8))):
        source = data.draw(st.integers(0, len(jaggeds) - 1))
        first = data.draw(st.integers(0, bags[source]))
        segments.append((source, first, data.draw(st.integers(0, bags[source] - first))))
    args = (
        [j.values_N for j in jaggeds],
        [j.lengths_FB for j in jaggeds],
        [j.weights_N for j in jaggeds] if weighted else [],
        torch.tensor(segments, dtype=torch.int64).view(-1, 3),
    )
    assert same(ops.take(*args), reference.take(*args))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_take_past_the_caches(dtype):
    """Outputs of megabytes are written in whole cache lines; segments begin and end anywhere."""
    n = 1_200_000
    ids, weights = torch.arange(n, dtype=dtype), torch.rand(n)
    bags = torch.full((n // 3,), 3, dtype=dtype)
    segments = torch.tensor([[0, 5, 1], [0, 7, 399_000], [0, 0, 3], [0, 399_001, 900]])
    args = [ids], [bags], [weights], segments
    assert same(ops.take(*args), reference.take(*args))


@st.composite
def expansions(draw):
    """Features of several batches, for samples that name any of theirs."""
    jaggeds = draw(st.lists(batches.filter(lambda j: j.batch_size), min_size=1, max_size=3))
    count = draw(st.sampled_from((0, 1, 5, 600, 1100)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    samples = []
    for jagged in jaggeds:
        numbers = torch.randint(0, jagged.batch_size, (count,), generator=g)
        kind = draw(st.sampled_from(("any", "ascending", "in a row")))
        if kind == "ascending":
            numbers = numbers.sort().values
        if kind == "in a row":
            numbers = torch.arange(count) % jagged.batch_size
        samples.append(numbers.to(draw(INTEGERS)))
    all_places = [(k, f * j.batch_size) for k, j in enumerate(jaggeds) for f in range(len(j.features))]
    places = draw(st.lists(st.sampled_from(all_places), max_size=6))
    weighted = all(j.weights_N is not None for j in jaggeds)
    return (
        [j.values_N for j in jaggeds],
        [j.lengths_FB for j in jaggeds],
        [j.weights_N for j in jaggeds] if weighted else [],
        samples,
        torch.tensor(places, dtype=torch.int64).view(-1, 2),
        draw(st.booleans()),
    )


@given(expansions())
def test_expand(args):
    assert same(ops.expand(*args), reference.expand(*args))


def test_bags_that_are_not_there_are_not_expanded():
    ids, bags, places = torch.arange(4), torch.tensor([1, 3]), torch.tensor([[0, 0]])
    for samples in ([0, 2], [-1]):
        for expand in (ops.expand, reference.expand):
            with pytest.raises(RuntimeError, match="outside the distinct ones"):
                expand([ids], [bags], [], [torch.tensor(samples)], places, False)
    one = torch.tensor([0])
    for lengths_, message in (([1, 2], "add up to 4 values"), ([5, -1], "add up to 4 values")):
        with pytest.raises(RuntimeError, match=message):
            ops.expand([ids], [torch.tensor(lengths_)], [], [one], places, False)
    for place in ([1, 0], [-1, 0], [0, 3], [0, -1]):
        with pytest.raises(RuntimeError, match="no bags"):
            ops.expand([ids], [bags], [], [one], torch.tensor([place]), False)
    with pytest.raises(RuntimeError, match="0 samples"):
        ops.expand([ids, ids], [bags, bags], [], [one, one[:0]], places, False)
    with pytest.raises(RuntimeError, match="3 weights for 4"):
        ops.expand([ids], [bags], [torch.rand(3)], [one], places, False)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("batch", "width"), [(0, 3), (1, 0), (700, 5), (1100, 1024)])
@pytest.mark.parametrize("all_of_them", [True, False])
def test_spread(batch, width, all_of_them):
    """Some columns are written, and no others; large outputs in whole cache lines, wherever they begin."""
    g = torch.Generator().manual_seed(batch)
    distinct = batch if all_of_them else 90
    vectors = torch.rand(distinct, width, generator=g)
    samples = None if all_of_them else torch.randint(0, distinct, (batch,), generator=g).sort().values.int()
    half = width // 2
    segments = torch.tensor([[0, 3, half], [half, half + 9, width - half]])
    found, wanted = (torch.full((batch, width + 11), 7.0) for _ in range(2))
    ops.spread(found, vectors, samples, segments)
    reference.spread(wanted, vectors, samples, segments)
    assert same(found, wanted)


def test_vectors_that_are_not_there_are_not_spread():
    vectors, one = torch.rand(2, 4), torch.tensor([[0, 0, 4]])
    for samples in ([0, 2, 1], [0, 0, -1]):
        with pytest.raises(RuntimeError, match="outside the distinct ones"):
            ops.spread(torch.empty(3, 4), vectors, torch.tensor(samples), one)
    for samples in (None, torch.tensor([0])):
        with pytest.raises(RuntimeError, match="samples for 3"):
            ops.spread(torch.empty(3, 4), vectors, samples, one)
    for segment in ([1, 0, 4], [0, 1, 4], [-1, 0, 1], [0, -1, 1], [0, 0, -1]):
        with pytest.raises(RuntimeError, match="segment 0 reaches past"):
            ops.spread(torch.empty(2, 4), vectors, None, torch.tensor([segment]))


@pytest.mark.usefixtures("isa")
@settings(max_examples=25)  # for each instruction set
@given(batches_and_bounds)
def test_bucketize(problem):
    jagged, bounds = problem
    args = (jagged.values_N, jagged.lengths_FB, jagged.weights_N, bounds)
    assert same(ops.bucketize(*args), reference.bucketize(*args))


WIDEST = (1 << 63) - 1


def make_ids(n: int, least: int, span: int, seed: int) -> torch.Tensor:
    """Few ids often and many seldom, in the span from the least."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, span, (n,), generator=g)
    hot = torch.rand(n, generator=g) < 0.5
    ids[hot] = ids[hot] % min(span, 20) * (span // 20 or 1) % span
    return ids + least


@st.composite
def segments(draw):
    parts = [
        make_ids(
            n=draw(st.sampled_from((0, 1, 2, 30, 500, 3000, 20_000))),
            least=draw(st.sampled_from((0, 5, -7, -(1 << 63), (1 << 62) - 1))),
            span=draw(st.sampled_from((1, 2, 50, 5000, 1 << 20, 1 << 40, (1 << 62) + 3))),
            seed=draw(st.integers(0, 1000)),
        )
        for _ in range(draw(st.integers(0, 4)))
    ]
    if draw(st.booleans()):
        parts = [(x % (1 << 31)).int() for x in parts]
    values = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    return values, torch.tensor([0, *accumulate(len(p) for p in parts)])


@pytest.mark.usefixtures("isa")
@settings(max_examples=25)  # for each instruction set
@given(segments())
@example((torch.tensor([WIDEST, -WIDEST - 1, WIDEST, 0, -1]), torch.tensor([0, 5])))
def test_deduplicate(problem):
    values, bounds = problem
    assert same(ops.deduplicate(values, bounds), reference.deduplicate(values, bounds))


def agreeing_ids() -> torch.Tensor:
    """Ids of 64 bits of which many agree in all but the lowest: what sorting by the highest cannot tell apart."""
    g = torch.Generator().manual_seed(0)
    return (torch.randint(-2, 2, (100_000,), generator=g) << 61) + torch.randint(0, 30_000, (100_000,), generator=g)


MANY = {
    "near": make_ids(150_000, 3, 300_000, 0),
    "far": make_ids(150_000, -5, 1 << 36, 0),
    "any": make_ids(150_000, -(1 << 63), (1 << 62) + 3, 0) * 3,
    "agreeing": agreeing_ids(),
    "one": torch.full((100_000,), 7),
    "two": torch.tensor([-WIDEST - 1, WIDEST]).repeat(50_000),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MANY)
def test_many_ids_are_shared_by_threads(kind, threads):
    """One segment large enough for all threads, between two small ones."""
    values = torch.cat([MANY[kind][:100], MANY[kind], MANY[kind][-50:]])
    bounds = torch.tensor([0, 100, len(values) - 50, len(values)])
    wanted = reference.deduplicate(values, bounds)
    for count in (1, 2, 5):
        threads(count)
        assert same(ops.deduplicate(values, bounds), wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize("buckets", [1, 7, 300])
def test_threads_change_no_bit(buckets, threads):
    jagged = make_jagged(3, batch=3000, most=30, seed=1)
    bounds = torch.tensor([[min(w * -(-ROWS[k] // buckets), ROWS[k]) for w in range(buckets + 1)] for k in range(3)])
    threads(1)
    routed, chosen = bucketize(jagged, bounds), permute(jagged, ("f2", "f0"))
    for count in (2, 5):
        threads(count)
        again = bucketize(jagged, bounds)
        assert all(same(getattr(again, name), getattr(routed, name)) for name in routed.__slots__)
        assert same(permute(jagged, ("f2", "f0")), chosen)


@given(st.lists(st.integers(0, 1 << 24), max_size=50), INTEGERS)
def test_lengths_are_what_offsets_were_made_from(counts, dtype):
    counts = torch.tensor(counts, dtype=torch.int64)
    offsets = ops.offsets(counts).to(dtype)
    assert same(lengths(offsets), counts)
    assert same(reference.lengths(offsets), counts)


@settings(max_examples=40)
@given(batches, st.data())
def test_ids_in_range(jagged, data):
    """Also of features that are looked up twice, or not at all, and where one id alone is outside."""
    chosen = data.draw(st.lists(st.integers(0, len(jagged.features) - 1), max_size=4))
    offsets = jagged.offsets().tolist()
    parts = [jagged.values_N[offsets[f * jagged.batch_size] : offsets[(f + 1) * jagged.batch_size]] for f in chosen]
    limits = [[f, int(ids.max()) + 1 if len(ids) else 1] for f, ids in zip(chosen, parts, strict=True)]
    args = jagged.values_N, jagged.lengths_FB
    assert ops.in_range(*args, torch.tensor(limits, dtype=torch.int64).view(-1, 2), jagged.batch_size)
    assert reference.in_range(*args, torch.tensor(limits, dtype=torch.int64).view(-1, 2), jagged.batch_size)
    assert not check.find_out_of_range(jagged, [tuple(one) for one in limits])
    for index, ids in enumerate(parts):
        if not len(ids):
            continue
        smaller = [list(one) for one in limits]
        smaller[index][1] -= 1
        assert not ops.in_range(*args, torch.tensor(smaller), jagged.batch_size)
        assert not reference.in_range(*args, torch.tensor(smaller), jagged.batch_size)
        ((found, positions),) = check.find_out_of_range(jagged, [tuple(one) for one in smaller])
        assert found == index
        assert jagged.values_N[positions].tolist() == [limits[index][1] - 1] * len(positions)


def test_a_range_of_wrong_lengths_names_the_features():
    wrong = Jagged(features=("a", "b"), values_N=torch.arange(3), lengths_FB=torch.tensor([1, 1, 3, 1]))
    with pytest.raises(BatchError, match=r"3.*a: 2, b: 4"):
        check.find_out_of_range(wrong, [(0, 10)])
    with pytest.raises(RuntimeError, match="no feature 2"):
        ops.in_range(torch.arange(3), torch.tensor([1, 2]), torch.tensor([[2, 9]]), 1)


def test_operators_of_devices_without_kernels():
    for name in ("take", "bucketize", "deduplicate", "lengths", "in_range", "expand", "spread"):
        assert OPERATORS[name].reference is getattr(reference, name)


@pytest.mark.parametrize("name", ["take", "bucketize", "deduplicate", "lengths", "expand", "spread"])
def test_shapes_for_the_compiler(name):
    a = arguments()
    torch.library.opcheck(getattr(ops, name).default, args_of(name, a), test_utils=("test_schema", "test_faketensor"))


# Properties


@settings(max_examples=20)
@given(batches, st.data())
def test_permuting_back_gives_the_batch(jagged, data):
    order = data.draw(st.permutations(jagged.features))
    assert same(permute(permute(jagged, order), jagged.features), jagged)


@settings(max_examples=20)
@given(batches, st.data())
def test_permuting_chooses(jagged, data):
    order = data.draw(st.permutations(jagged.features))
    chosen = order[: data.draw(st.integers(1, len(order)))]
    found = permute(jagged, chosen)
    assert found.features == tuple(chosen)
    assert found.batch_size == jagged.batch_size
    offsets = jagged.offsets().tolist()
    bags = [jagged.features.index(name) * jagged.batch_size + b for name in chosen for b in range(jagged.batch_size)]
    assert found.values_N.tolist() == [i for k in bags for i in jagged.values_N[offsets[k] : offsets[k + 1]].tolist()]


@settings(max_examples=20)
@given(batches, st.data())
def test_what_is_split_concatenates_to_the_batch(jagged, data):
    inner = data.draw(st.lists(st.integers(0, jagged.batch_size), max_size=4))
    sizes = [b - a for a, b in pairwise([0, *sorted(inner), jagged.batch_size])]
    parts = split(jagged, sizes)
    assert [p.batch_size for p in parts] == sizes
    assert same(concatenate(parts), jagged)


def test_concatenating_finds_features_by_name():
    a = Jagged.from_lists({"x": [[1], [2, 3]], "y": [[4], []], "z": [[], [5]]})
    b = Jagged.from_lists({"y": [[6, 7]], "x": [[]]})
    found = concatenate([a, b], ["x", "y"])
    assert same(found, Jagged.from_lists({"x": [[1], [2, 3], []], "y": [[4], [], [6, 7]]}))
    assert same(concatenate([b, a]), Jagged.from_lists({"y": [[6, 7], [4], []], "x": [[], [1], [2, 3]]}))


def test_concatenating_batches_of_several_types():
    narrow = make_jagged(2, batch=3, most=3, seed=0, ids=torch.int32)
    wide = make_jagged(2, batch=3, most=3, seed=1, weighted=False)
    both, one = concatenate([narrow, wide]), concatenate([narrow, narrow])
    assert both.values_N.dtype == both.lengths_FB.dtype == torch.int64
    assert both.weights_N is None
    assert one.values_N.dtype == one.lengths_FB.dtype == torch.int32
    assert one.weights_N is not None


@settings(max_examples=20)
@given(batches_and_bounds)
def test_bucketizing_loses_nothing(problem):
    jagged, bounds = problem
    found = bucketize(jagged, bounds)
    assert found.positions_N.sort().values.tolist() == list(range(len(jagged.values_N)))
    back = torch.empty_like(jagged.values_N)
    starts = found.starts_W1.tolist()
    at = 0
    for w in range(found.num_buckets):
        bucket = found.bucket(w)
        assert bucket.features == jagged.features
        assert bucket.batch_size == jagged.batch_size
        assert int(bucket.lengths_FB.sum()) == len(bucket.values_N) == starts[w + 1] - starts[w]
        # Each feature's part of the bucket, its rows counted from the table's first again.
        for k, n in enumerate(bucket.lengths_FB.view(len(jagged.features), -1).sum(1).tolist()):
            ids = found.values_N[at : at + n] + bounds[k, w].to(jagged.values_N.dtype)
            back[found.positions_N[at : at + n]] = ids
            assert bool((ids < bounds[k, w + 1]).all())
            at += n
    assert torch.equal(back, jagged.values_N)
    bags = found.lengths_WFB.view(found.num_buckets, -1).sum(0, dtype=jagged.lengths_FB.dtype)
    assert torch.equal(bags, jagged.lengths_FB)
    if jagged.weights_N is not None:
        assert torch.equal(found.weights_N, jagged.weights_N[found.positions_N])


def test_one_bucket_is_the_batch():
    jagged = make_jagged(3, batch=40, most=5, seed=2)
    found = bucketize(jagged, torch.tensor([[0, ROWS[k]] for k in range(3)]))
    assert same(found.bucket(0), jagged)
    assert found.positions_N.tolist() == list(range(len(jagged.values_N)))


def test_lookups_in_buckets_add_up():
    """Row-wise sharding on one device: each bucket looks up in its rows of the tables, and the sums are summed."""
    tables = [Table(name=f"t{k}", rows=ROWS[k], dim=4, features=(f"f{k}",)) for k in range(4)]
    whole = Embeddings(tables)
    jagged = make_jagged(4, batch=50, most=6, seed=3)
    cuts = {f"f{k}": [0, ROWS[k] // 3, ROWS[k] // 3, ROWS[k]] for k in range(4)}
    found = bucketize(jagged, row_bounds(jagged.features, cuts))
    total = torch.zeros(50, 16)
    for w in range(3):
        bucket = found.bucket(w)
        for k, name in enumerate(jagged.features):
            begin, end = cuts[name][w : w + 2]
            one = permute(bucket, [name])
            rows = whole.table(f"t{k}")[begin:end]
            total[:, k * 4 : k * 4 + 4] += torch.nn.functional.embedding_bag(
                one.values_N, torch.cat([rows, rows.new_zeros(1, 4)]), ops.offsets(one.lengths_FB)[:-1], mode="sum"
            )
    torch.testing.assert_close(total, whole(jagged).values())


@settings(max_examples=20)
@given(segments())
def test_distinct_ids_give_the_ids_back(problem):
    values, bounds = problem
    found = deduplicate(values, bounds)
    assert torch.equal(found.values_U[found.inverse_N], values)
    assert int(found.counts_U.sum()) == len(values)
    for begin, end in pairwise(found.bounds_S1.tolist()):
        distinct = found.values_U[begin:end]
        assert bool((distinct[:-1] < distinct[1:]).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_of_other_types_move_too(dtype):
    jagged = make_jagged(2, batch=8, most=4, seed=4)
    half = Jagged(
        features=jagged.features,
        values_N=jagged.values_N,
        lengths_FB=jagged.lengths_FB,
        weights_N=jagged.weights_N.to(dtype),
    )
    bounds = torch.tensor([[0, 1, 1], [0, 1, 2]])
    for move in (
        lambda j: permute(j, ("f1",)).weights_N,
        lambda j: concatenate([j, j]).weights_N,
        lambda j: split(j, [3, 5])[1].weights_N,
        lambda j: bucketize(j, bounds).weights_N,
    ):
        assert same(move(half), move(jagged).to(dtype))


def test_weights_carry_gradients():
    jagged = make_jagged(2, batch=8, most=4, seed=5)
    weights = jagged.weights_N.clone().requires_grad_()
    learned = Jagged(
        features=jagged.features, values_N=jagged.values_N, lengths_FB=jagged.lengths_FB, weights_N=weights
    )
    factors = torch.arange(1.0, len(weights) + 1)
    for moved in (
        bucketize(learned, torch.tensor([[0, 1, 1], [0, 1, 2]])).weights_N,
        permute(learned, ("f1", "f0")).weights_N,
        torch.cat([part.weights_N for part in split(learned, [1, 7])]),
    ):
        (grad,) = torch.autograd.grad((moved * factors).sum(), weights)
        with torch.no_grad():
            assert float((grad * weights).sum()) == pytest.approx(float((moved * factors).sum()), rel=1e-5)
        assert grad.sort().values.tolist() == factors.tolist()


def test_strided_batches():
    ids = torch.arange(12).view(6, 2) % 2
    jagged = Jagged(features=("f0",), values_N=ids[:, 1], lengths_FB=torch.tensor([[2, 9], [4, 9]])[:, 0])
    assert permute(jagged, ("f0",)).values_N.tolist() == [1] * 6
    assert bucketize(jagged, torch.tensor([[0, 1, 2]])).starts_W1.tolist() == [0, 0, 6]
    assert deduplicate(jagged.values_N, torch.tensor([0, 6])).counts_U.tolist() == [6]


# Bad input


def test_features_that_are_not_there():
    jagged = Jagged.from_lists({"a": [[1]], "b": [[2]]})
    with pytest.raises(BatchError, match="'c' in the batch"):
        permute(jagged, ("a", "c"))
    with pytest.raises(BatchError, match="'b' in the batch"):
        concatenate([jagged, permute(jagged, ("a",))])
    with pytest.raises(BatchError, match="feature is named twice"):
        permute(jagged, ("a", "a"))
    with pytest.raises(BatchError, match="no batches to concatenate"):
        concatenate([])


@pytest.mark.parametrize("sizes", [[], [1], [3], [3, -1], [1, 1, 1]])
def test_sizes_that_do_not_cut_the_batch(sizes):
    with pytest.raises(BatchError, match=re.escape(f"sizes {sizes} do not cut 2 samples")):
        split(Jagged.from_lists({"a": [[1], [2]]}), sizes)


@pytest.mark.parametrize("wrong", [-1, 2, 1 << 40, -(1 << 63)])
@pytest.mark.parametrize("buckets", [1, 2, 20])
@pytest.mark.usefixtures("isa")
def test_ids_outside_their_table_are_named(wrong, buckets):
    jagged = Jagged.from_lists({"a": [[1, 0], [], [1]], "b": [[0], [1, 0, wrong], [wrong]]})
    bounds = torch.tensor([[0] + [2] * buckets] * 2)
    message = f"feature 'b', sample 1, position 2: id {wrong} is not in 0..1 (2 such ids in the batch)"
    with pytest.raises(IdError, match=re.escape(message)):
        bucketize(jagged, bounds)


def test_lengths_that_do_not_fit_are_named():
    ids = torch.tensor([1, 0, 1])
    short = Jagged(features=("a", "b"), values_N=ids, lengths_FB=torch.tensor([1, 1]))
    negative = Jagged(features=("a", "b"), values_N=ids, lengths_FB=torch.tensor([4, -1]))
    for move in (
        lambda j: permute(j, ("b",)),
        lambda j: split(j, [1]),
        lambda j: concatenate([j, j]),
        lambda j: bucketize(j, torch.tensor([[0, 2]] * 2)),
    ):
        with pytest.raises(BatchError, match=r"\(a: 1, b: 1\)"):
            move(short)
        with pytest.raises(BatchError, match="feature 'b', sample 0"):
            move(negative)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"a": [0, 2]}, "no row bounds for feature 'b'; there are some for a"),
        ({"a": [0, 2], "b": [0]}, r"feature 'b': row bounds \[0\] do not ascend from 0 to the rows"),
        ({"a": [0, 2], "b": [1, 2]}, r"feature 'b': row bounds \[1, 2\] do not ascend"),
        ({"a": [0, 3, 2], "b": [0, 1, 2]}, r"feature 'a': row bounds \[0, 3, 2\] do not ascend"),
        ({"a": [0, 2], "b": [0, 1, 2]}, "feature 'b': 2 row ranges: expected 1, as feature 'a' has"),
    ],
)
def test_row_bounds_that_are_none(bounds, message):
    with pytest.raises(SpecError, match=message):
        row_bounds(("a", "b"), bounds)


def test_row_bounds_of_other_features():
    with pytest.raises(SpecError, match=r"bounds: got \(1, 2\)"):
        bucketize(Jagged.from_lists({"a": [[1]], "b": [[2]]}), torch.tensor([[0, 9]]))


@pytest.mark.parametrize("index", [-1, 2])
def test_buckets_that_are_not_there(index):
    found = bucketize(Jagged.from_lists({"a": [[1]]}), torch.tensor([[0, 1, 2]]))
    with pytest.raises(IndexError, match=re.escape(f"bucket {index}; expected one of 0..1")):
        found.bucket(index)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([], r"offsets begin \[\]: expected offsets from 0"),
        ([1, 2], r"offsets begin \[1, 2\]: expected offsets from 0"),
        ([0, 3, 2], "offsets descend from 3 to 2 at position 2"),
    ],
)
def test_offsets_that_are_none(offsets, message):
    with pytest.raises(BatchError, match=message):
        lengths(torch.tensor(offsets, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="rowwise: offset"):
        ops.lengths(torch.tensor(offsets, dtype=torch.int64))


@pytest.mark.parametrize("bounds", [[], [0], [0, 3], [0, 1], [1, 2], [0, 2, 1, 2]])
def test_segments_that_are_none(bounds):
    message = re.escape(f"bounds of segments begin {bounds}: expected bounds that ascend from 0 to 2")
    with pytest.raises(BatchError, match=message):
        deduplicate(torch.tensor([5, 5]), torch.tensor(bounds, dtype=torch.int64))


def arguments() -> dict[str, torch.Tensor]:
    return {
        "values": torch.tensor([1, 2, 3, 0, 3, 2, 1, 0]),
        "lengths": torch.tensor([1, 1, 2, 0, 2, 2]),
        "weights": torch.ones(8),
        "segments": torch.tensor([[0, 2, 4], [0, 0, 1]]),
        "bounds": torch.tensor([[0, 1, 4], [0, 2, 4], [0, 4, 4]]),
        "segment_bounds": torch.tensor([0, 3, 3, 8]),
        "offsets": torch.tensor([0, 3, 3, 8]),
    }


def args_of(op: str, a: dict):
    match op:
        case "take":
            return [a["values"]], [a["lengths"]], [a["weights"]], a["segments"]
        case "bucketize":
            return a["values"], a["lengths"], a["weights"], a["bounds"]
        case "deduplicate":
            return a["values"], a["segment_bounds"]
        case "lengths":
            return (a["offsets"],)
        case "expand":
            places = torch.tensor([[0, 0], [0, 3]])
            return [a["values"]], [a["lengths"]], [a["weights"]], [torch.tensor([0, 0, 1])], places, True
        case "spread":
            return torch.zeros(3, 5), torch.rand(2, 4), torch.tensor([0, 1, 1]), torch.tensor([[0, 2, 3]])
    raise AssertionError(op)


def call(op: str, a: dict):
    return getattr(ops, op)(*args_of(op, a))


USED = [
    *[("take", name) for name in ("values", "lengths", "weights", "segments")],
    *[("bucketize", name) for name in ("values", "lengths", "weights", "bounds")],
    *[("deduplicate", name) for name in ("values", "segment_bounds")],
    ("lengths", "offsets"),
]


def test_the_arguments_are_good_before_they_are_changed():
    for op in dict(USED):
        call(op, arguments())


@pytest.mark.parametrize(("op", "name"), USED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int16, torch.bool, torch.int32])
def test_tensors_of_another_type(op, name, dtype):
    a = arguments()
    if name in ("values", "lengths", "offsets") and dtype == torch.int32:
        dtype = torch.float32  # they may be of 32 bits
    a[name] = a[name].to(dtype)
    with pytest.raises(RuntimeError, match=r"rowwise: .* must"):
        call(op, a)


@pytest.mark.parametrize(("op", "name"), USED)
def test_tensors_that_are_strided(op, name):
    a = arguments()
    a[name] = torch.stack([a[name], a[name]], dim=-1)[..., 0]
    with pytest.raises(RuntimeError, match=r"rowwise: .* must"):
        call(op, a)


@pytest.mark.parametrize(
    ("op", "name", "wrong", "message"),
    [
        ("take", "segments", [[1, 0, 1]], "no batch 1"),
        ("take", "segments", [[-1, 0, 1]], "no batch -1"),
        ("take", "segments", [[0, 0, 7]], "segment 0 reaches past the 6 bags"),
        ("take", "segments", [[0, 7, 0]], "segment 0 reaches past"),
        ("take", "segments", [[0, -1, 1]], "segment 0 reaches past"),
        ("take", "segments", [[0, 2, -1]], "segment 0 reaches past"),
        ("take", "segments", [[0, 3, (1 << 63) - 1]], "segment 0 reaches past"),
        ("take", "segments", [[0, 0, 1, 1]], r"segments must be \[n, 3\]"),
        ("take", "segments", [0, 0, 1], r"segments must be \[n, 3\]"),
        ("take", "lengths", [1, 1, 2, 0, 2, 1], "lengths do not add up to 8 values"),
        ("take", "lengths", [1, 1, 2, 0, 2, 3], "lengths do not add up to 8 values"),
        ("take", "lengths", [1, 1, 2, 0, 5, -1], "lengths do not add up to 8 values"),
        ("take", "lengths", [1 << 62, 1 << 62, 1 << 62, 1 << 62, 4, 4], "lengths do not add up to 8 values"),
        ("take", "weights", [1.0] * 7, "7 weights for 8 values"),
        ("bucketize", "lengths", [1, 1, 2, 0, 2], "lengths do not add up to 8 values|do not divide"),
        ("bucketize", "lengths", [1, 1, 2, 0, 9, -5], "lengths do not add up to 8 values"),
        ("bucketize", "lengths", [8], "1 bags do not divide among 3 features"),
        ("bucketize", "weights", [1.0] * 9, "9 weights for 8 values"),
        ("bucketize", "bounds", [[0, 1, 4], [0, 5, 4], [0, 4, 4]], "bounds of feature 1 do not ascend from 0"),
        ("bucketize", "bounds", [[0, 1, 4], [1, 2, 4], [0, 4, 4]], "bounds of feature 1 do not ascend from 0"),
        ("bucketize", "bounds", [[0, -1, 4], [0, 2, 4], [0, 4, 4]], "bounds of feature 0 do not ascend from 0"),
        ("bucketize", "bounds", [[0], [0], [0]], "bounds must be"),
        ("bucketize", "bounds", [0, 4], "bounds must be"),
        ("bucketize", "bounds", [[0, 0, 0]] * 3, "id 1 at position 0 is outside its table"),
        ("bucketize", "bounds", [[0, 4, 4], [0, 4, 4], [0, 1, 2]], "id 3 at position 4 is outside its table"),
        ("deduplicate", "segment_bounds", [], "bounds of segments do not ascend from 0 to 8"),
        ("deduplicate", "segment_bounds", [0], "bounds of segments do not ascend from 0 to 8"),
        ("deduplicate", "segment_bounds", [0, 9], "bounds of segments do not ascend from 0 to 8"),
        ("deduplicate", "segment_bounds", [1, 8], "bounds of segments do not ascend from 0 to 8"),
        ("deduplicate", "segment_bounds", [0, 9, 8], "bounds of segments do not ascend from 0 to 8"),
        ("deduplicate", "segment_bounds", [0, -1, 8], "bounds of segments do not ascend from 0 to 8"),
    ],
)
def test_arguments_that_reach_out(op, name, wrong, message):
    a = arguments()
    a[name] = torch.tensor(wrong, dtype=a[name].dtype)
    with pytest.raises(RuntimeError, match=f"rowwise: .*({message})"):
        call(op, a)


def test_lists_that_do_not_match():
    v, bags, w, segments = (arguments()[name] for name in ("values", "lengths", "weights", "segments"))
    for args in (([], [], []), ([v], [bags, bags], []), ([v, v], [bags, bags], [w]), ([v], [], [w])):
        with pytest.raises(
            RuntimeError, match=r"rowwise: \d tensors of values, \d of lengths and \d of weights|no tensor"
        ):
            ops.take(*args, segments)


def test_outputs_larger_than_any_memory():
    # Memory that is mapped and never touched: ids that many segments could take more often than there are addresses.
    ids, bags = ops.zeros(1 << 32).view(torch.int32), torch.tensor([1 << 32])
    with pytest.raises((RuntimeError, MemoryError)):
        ops.take([ids], [bags], [], torch.tensor([[0, 0, 1]]).repeat(1 << 17, 1))


nasty = st.sampled_from([-(1 << 63), -1, 0, 1, 2, 3, 4, 5, 8, 9, 1 << 31, 1 << 61, 1 << 62, (1 << 63) - 1])
cells = st.lists(
    st.tuples(
        st.sampled_from(["values", "lengths", "segments", "bounds", "segment_bounds", "offsets"]),
        st.integers(0, 9),
        nasty,
    ),
    min_size=1,
    max_size=3,
)


@given(op=st.sampled_from(sorted(dict(USED))), cells=cells)
@settings(max_examples=80)
def test_any_numbers_are_refused_or_harmless(op, cells):
    """Outputs hold nothing but what the arguments held; what is written outside them the sanitizers see."""
    a = arguments()
    for name, at, value in cells:
        a[name].view(-1)[at % a[name].numel()] = value
    try:
        found = call(op, a)
    except RuntimeError as error:
        assert "rowwise: " in str(error)  # noqa: PT017 - either outcome is right
        return
    if op == "deduplicate":
        assert torch.equal(found[0][found[2]], a["values"])
    if op == "bucketize":
        assert int(found[1].sum()) == len(a["values"])
