"""Bad ids, lengths, gradients and arguments: an error that names the place, and no row touched that should not be.

The raw operators check metadata themselves: whatever they are handed, they raise, and never read or write
outside their tensors.
"""

import re
import subprocess
import sys
import warnings

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rowwise import (
    Adagrad,
    BatchError,
    Embeddings,
    GradientError,
    IdError,
    Jagged,
    Pooling,
    RowWiseAdagrad,
    Sgd,
    Table,
    UnknownIdWarning,
)

ops = torch.ops.rowwise
TABLES = (
    Table(name="users", rows=40, dim=8, features=("u1", "u2")),
    Table(name="items", rows=30, dim=4, features=("i",), pooling=Pooling.MEAN),
    Table(name="words", rows=50, dim=12, features=("w",), pooling=Pooling.WEIGHTED),
    Table(name="clicks", rows=20, dim=4, features=("c1", "c2"), pooling=Pooling.SEQUENCE),
)
TABLE_OF = {f: t for t in TABLES for f in t.feature_names}
FEATURES = ("c2", "i", "other", "u2", "u1", "w", "c1")  # the order in the batch
SIZE = 9


def make_batch(seed=0, dtype=torch.int64, size=SIZE) -> Jagged:
    """At least one id in every bag."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5, (len(FEATURES) * size,), generator=g)
    values = []
    for name, count in zip(FEATURES, lengths.view(-1, size).sum(1).tolist(), strict=True):
        rows = TABLE_OF[name].rows if name in TABLE_OF else 1 << 30
        values.append(torch.randint(0, rows, (count,), generator=g))
    v = torch.cat(values).to(dtype)
    return Jagged(features=FEATURES, values_N=v, lengths_FB=lengths, weights_N=torch.rand(len(v), generator=g) + 0.5)


def bag(jagged: Jagged, feature: str, sample: int) -> slice:
    at = jagged.features.index(feature) * jagged.batch_size + sample
    begin, end = jagged.offsets().tolist()[at : at + 2]
    return slice(begin, end)


def everything(embeddings: Embeddings) -> dict[str, torch.Tensor]:
    kept = {name: rows.clone() for name, rows in embeddings.state_dict().items()}
    for table, state in embeddings.optimizer_state().items():
        kept |= {f"{table}.{name}": view.clone() for name, view in state.items()}
    return kept


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in found:
        assert torch.equal(found[name], wanted[name]), name


def outputs(embeddings: Embeddings, jagged: Jagged) -> list[torch.Tensor]:
    found = embeddings(jagged)
    return [found.values(), *found.sequences.values()]


def train(embeddings: Embeddings, jagged: Jagged) -> None:
    outs = outputs(embeddings, jagged)
    torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
    embeddings.update()


# Ids

places = st.tuples(st.sampled_from(sorted(TABLE_OF)), st.integers(0, SIZE - 1), st.integers(0, 3))


def wrong_ids(feature: str, dtype: torch.dtype) -> list[int]:
    limits = torch.iinfo(dtype)
    return [TABLE_OF[feature].rows, TABLE_OF[feature].rows + 1, limits.max, -1, limits.min]


def id_message(jagged: Jagged, feature: str, sample: int, position: int, wrong: int, count: int = 1) -> str:
    table = TABLE_OF[feature]
    place = f"table {table.name!r}: feature {feature!r}, sample {sample}, position {position}: id {wrong}"
    return re.escape(f"{place} is not in 0..{table.rows - 1} ({count} such ids in the batch)")


@given(place=places, which=st.integers(0, 4), dtype=st.sampled_from([torch.int32, torch.int64]), grad=st.booleans())
@settings(max_examples=25)
def test_an_id_outside_its_table_is_named(place, which, dtype, grad):
    feature, sample, position = place
    jagged = make_batch(dtype=dtype)
    where = bag(jagged, feature, sample)
    position %= where.stop - where.start
    wrong = wrong_ids(feature, dtype)[which]
    jagged.values_N[where.start + position] = wrong
    embeddings = Embeddings(TABLES)
    before = everything(embeddings)
    with torch.set_grad_enabled(grad):
        with pytest.raises(IdError, match=id_message(jagged, feature, sample, position, wrong)):
            embeddings(jagged)
        with pytest.raises(
            ValueError, match="Hash or map the ids, give the table more rows, or set unknown='last_row'"
        ):
            embeddings(jagged)
    embeddings.update()
    same(everything(embeddings), before)
    train(embeddings, make_batch())  # and the module still works


def test_the_first_of_many_bad_ids_is_named_and_all_are_counted():
    jagged = make_batch()
    where = bag(jagged, "u2", 3)
    jagged.values_N[where] = 99
    jagged.values_N[bag(jagged, "u2", 5)] = -7
    count = sum(bag(jagged, "u2", s).stop - bag(jagged, "u2", s).start for s in (3, 5))
    with pytest.raises(IdError, match=id_message(jagged, "u2", 3, 0, 99, count)):
        Embeddings(TABLES)(jagged)


def test_the_last_ids_of_a_table_are_inside_it():
    rows = Jagged.from_lists({"t": [[0, 6], [6]]})
    assert Embeddings([Table(name="t", rows=7, dim=4)])(rows).values().shape == (2, 4)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("feature", sorted(TABLE_OF))
def test_ids_that_turn_bad_after_the_forward(feature, count, threads):
    """What is staged refers to the caller's ids; when they are overwritten, the update sees it."""
    threads(count)
    embeddings = Embeddings(TABLES)
    before = everything(embeddings)
    jagged = make_batch()
    outs = outputs(embeddings, jagged)
    where = bag(jagged, feature, 4)
    torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
    for wrong in wrong_ids(feature, torch.int64)[-1:]:
        jagged.values_N[where.start] = wrong
        with pytest.raises(IdError, match=id_message(jagged, feature, 4, 0, wrong)):
            embeddings.update()
    after = everything(embeddings)
    for name in [n for n in after if n.split(".")[0] == TABLE_OF[feature].name]:
        assert torch.equal(after[name], before[name])
    assert all(x.isfinite().all() for x in after.values())
    assert not embeddings.staged
    train(embeddings, make_batch())


@pytest.mark.parametrize("many", [1, 70_000])
def test_all_ids_turn_bad_after_the_forward(many, threads):
    threads(4)
    embeddings = Embeddings([Table(name="t", rows=1000, dim=4)])
    before = everything(embeddings)
    ids = torch.arange(many) % 1000
    jagged = Jagged(features=("t",), values_N=ids, lengths_FB=torch.ones(many, dtype=torch.int64))
    embeddings(jagged).values().sum().backward()
    ids.fill_(1 << 40)
    with pytest.raises(IdError, match=f"table 't': feature 't', sample 0, position 0: .*{many} such ids"):
        embeddings.update()
    same(everything(embeddings), before)


def test_ids_that_turn_bad_before_the_backward_of_weights():
    embeddings = Embeddings(TABLES)
    jagged = make_batch()
    weights = jagged.weights_N.requires_grad_()
    outs = outputs(embeddings, jagged)
    jagged.values_N[bag(jagged, "w", 2)] = 50
    with pytest.raises(RuntimeError, match=r"id 50 .*is outside its table"):
        outs[0].sum().backward()
    assert weights.grad is None


def test_accumulated_ids_that_turned_bad_are_named():
    embeddings = Embeddings(TABLES)
    before = everything(embeddings)
    jaggeds = [make_batch(seed) for seed in range(3)]
    for jagged in jaggeds:
        outs = outputs(embeddings, jagged)
        torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
    jaggeds[1].values_N[bag(jaggeds[1], "i", 2)] = -1
    with pytest.raises(IdError, match="table 'items': feature 'i', sample 11, position 0: id -1"):
        embeddings.update()
    assert torch.equal(embeddings.table("items"), before["items"])


# Ids that a table takes as unknown

KNOWING = tuple(msgspec.structs.replace(t, unknown="last_row") for t in TABLES)


def clamped(jagged: Jagged) -> Jagged:
    """The same batch with every id outside its table replaced by the last row."""
    values = jagged.values_N.clone()
    for name in set(FEATURES) & set(TABLE_OF):
        mine = slice(bag(jagged, name, 0).start, bag(jagged, name, jagged.batch_size - 1).stop)
        rows = TABLE_OF[name].rows
        values[mine] = torch.where((values[mine] < 0) | (values[mine] >= rows), rows - 1, values[mine])
    return Jagged(features=FEATURES, values_N=values, lengths_FB=jagged.lengths_FB, weights_N=jagged.weights_N)


@given(st.lists(st.tuples(places, st.integers(0, 4)), max_size=6), st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=20)
def test_unknown_ids_read_and_train_the_last_row(wrong, dtype):
    jagged = make_batch(dtype=dtype)
    for (feature, sample, position), which in wrong:
        where = bag(jagged, feature, sample)
        jagged.values_N[where.start + position % (where.stop - where.start)] = wrong_ids(feature, dtype)[which]
    given_ids = jagged.values_N.clone()
    known = clamped(jagged)
    counts = {}
    for name in TABLE_OF:
        mine = slice(bag(jagged, name, 0).start, bag(jagged, name, SIZE - 1).stop)
        bad = int((jagged.values_N[mine] != known.values_N[mine]).sum())
        counts |= {name: bad} if bad else {}

    one, two = Embeddings(KNOWING), Embeddings(TABLES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = outputs(one, jagged)
        torch.autograd.backward(mine, [x.detach() for x in mine])
        one.update()
    theirs = outputs(two, known)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    torch.autograd.backward(theirs, [x.detach() for x in theirs])
    two.update()
    same(everything(one), everything(two))
    assert one.unknown_ids == counts
    assert len(caught) == len(counts)
    assert torch.equal(jagged.values_N, given_ids)  # the caller's ids stay as they were


def test_unknown_ids_are_warned_of_at_each_power_of_ten():
    embeddings = Embeddings([Table(name="t", rows=7, dim=4, features=("f",), unknown="last_row")])
    warned = []
    for seen in range(1, 121):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            embeddings(Jagged.from_lists({"f": [[-seen]]}))
        warned += [seen] * len(caught)
        assert all(w.category is UnknownIdWarning for w in caught)
    assert warned == [1, 10, 100]
    assert embeddings.unknown_ids == {"f": 120}
    with pytest.warns(UnknownIdWarning, match=re.escape("table 't': 1120 ids of feature 'f' so far were outside 0..6")):
        embeddings(Jagged.from_lists({"f": [[9] * 1000]}))


@pytest.mark.parametrize("strict", [t.name for t in TABLES])
def test_a_strict_table_beside_others_still_raises(strict):
    embeddings = Embeddings([t if t.name == strict else k for t, k in zip(TABLES, KNOWING, strict=True)])
    jagged = make_batch()
    for name in TABLE_OF:
        jagged.values_N[bag(jagged, name, 1)] = 77
    before = everything(embeddings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownIdWarning)
        with pytest.raises(IdError, match=f"table '{strict}': feature .*, sample 1, position 0: id 77 is not in"):
            embeddings(jagged)
    same(everything(embeddings), before)


# What else a batch can lack


@pytest.mark.parametrize("more", [-1, 1, 5, -3, 1 << 40])
def test_lengths_that_do_not_add_up(more):
    jagged = make_batch()
    jagged.lengths_FB[-1] += more - min(0, int(jagged.lengths_FB[-1]) + more)  # never negative
    total, ids = int(jagged.lengths_FB.sum()), jagged.values_N.numel()
    message = rf"lengths add up to {total} and there are {ids} ids \(c2: \d+, i: \d+, other: \d+, u2: "
    with pytest.raises(BatchError, match=message):
        Embeddings(TABLES)(jagged)


@pytest.mark.parametrize("unknown", ["raise", "last_row"])
def test_lengths_are_blamed_before_the_ids_that_they_shift(unknown):
    """Wrong lengths give a feature the ids of its neighbour, which may well be outside its table."""
    tables = [Table(name="large", rows=1000, dim=4), Table(name="small", rows=10, dim=4, unknown=unknown)]
    embeddings = Embeddings(tables)
    ids, lengths = torch.tensor([500, 600, 3]), torch.tensor([1, 1])  # should be 2, 1
    with pytest.raises(BatchError, match=r"lengths add up to 2 and there are 3 ids \(large: 1, small: 1\)"):
        embeddings(Jagged(features=("large", "small"), values_N=ids, lengths_FB=lengths))
    assert embeddings.unknown_ids == {}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [-1, -(1 << 31)])
def test_negative_lengths(dtype, wrong):
    jagged = make_batch()
    lengths = jagged.lengths_FB.to(dtype)
    lengths[3 * SIZE + 2] = wrong
    bad = Jagged(features=FEATURES, values_N=jagged.values_N, lengths_FB=lengths, weights_N=jagged.weights_N)
    with pytest.raises(BatchError, match=f"feature 'u2', sample 2: length {wrong}; want 0 or more"):
        Embeddings(TABLES)(bad)


def test_negative_lengths_that_add_up():
    bad = Jagged(features=("t",), values_N=torch.tensor([1, 2]), lengths_FB=torch.tensor([3, -1]))
    with pytest.raises(BatchError, match="feature 't', sample 1: length -1; want 0 or more"):
        Embeddings([Table(name="t", rows=7, dim=4)])(bad)


def test_lengths_that_overflow():
    lengths = torch.full((3,), 1 << 62)
    with pytest.raises(BatchError, match=r"lengths add up to .* and there are 3 ids"):
        Embeddings([Table(name="t", rows=7, dim=4)])(
            Jagged(features=("t",), values_N=torch.tensor([1, 2, 3]), lengths_FB=lengths)
        )


def test_missing_features_are_listed():
    with pytest.raises(BatchError, match="the batch lacks c1, c2, i, u2, w; it holds x, u1"):
        Embeddings(TABLES)(Jagged.from_lists({"x": [[1]], "u1": [[1]]}))


def test_missing_weights_name_the_tables():
    kinds = {"a": Pooling.SUM, "b": Pooling.WEIGHTED, "c": Pooling.WEIGHTED}
    tables = [Table(name=name, rows=7, dim=4, pooling=pooling) for name, pooling in kinds.items()]
    with pytest.raises(BatchError, match=r"the batch has no weights, which tables b, c \(pooling 'weighted'\) need"):
        Embeddings(tables)(Jagged.from_lists({t.name: [[1]] for t in tables}))


# Gradients that are not finite

BAD = [float("nan"), float("inf"), -float("inf")]
CASES = [
    (float("nan"), Sgd(lr=0.1)),
    (float("inf"), Sgd(lr=0.1, weight_decay=0.1)),
    (-float("inf"), Adagrad(lr=0.1)),
    (float("nan"), RowWiseAdagrad(lr=0.1)),
]


def trained_with(tables, jagged: Jagged, grads: list[torch.Tensor], error: str | None) -> Embeddings:
    embeddings = Embeddings(tables, seed=2)
    outs = outputs(embeddings, jagged)
    torch.autograd.backward(outs, [g.clone() for g in grads])
    if error is None:
        embeddings.update()
    else:
        with pytest.raises(GradientError, match=error):
            embeddings.update()
    return embeddings


def random_gradients(embeddings: Embeddings, jagged: Jagged) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(x.shape, generator=g) for x in outputs(embeddings, jagged)]


def check_split(tables, jagged: Jagged, grads: list, bad_grads: list, table: str, ids: set[int], error: str) -> None:
    """Rows that a bad gradient reaches stay, with their state; every other row is as if all had been finite."""
    start = everything(Embeddings(tables, seed=2))
    good = everything(trained_with(tables, jagged, grads, None))
    embeddings = trained_with(tables, jagged, bad_grads, error)
    found = everything(embeddings)
    for name in found:
        wanted = good[name].clone()
        if name.split(".")[0] == table:
            left = sorted(ids)
            wanted[left] = start[name][left]
        assert torch.equal(found[name], wanted), name
    assert not embeddings.staged
    train(embeddings, jagged)
    assert all(x.isfinite().all() for x in everything(embeddings).values())


@pytest.mark.parametrize(("value", "optimizer"), CASES, ids=str)
@pytest.mark.parametrize("feature", ["u1", "u2", "i", "w"])
def test_bad_gradient_of_pooled_rows(feature, optimizer, value):
    tables = tuple(msgspec.structs.replace(t, optimizer=optimizer) for t in TABLES)
    jagged = make_batch()
    probe = Embeddings(tables)
    grads = random_gradients(probe, jagged)
    bad = [g.clone() for g in grads]
    column = probe(jagged).columns[feature].start + 2
    bad[0][5, column] = value
    ids = jagged.values_N[bag(jagged, feature, 5)].tolist()
    table = TABLE_OF[feature].name
    place = f"{value} in the gradient of table '{table}', feature '{feature}', sample 5, column 2, ids {ids}. "
    error = re.escape(place + "Rows it would have reached were left as they were; all others are updated")
    check_split(tables, jagged, grads, bad, table, set(ids), error)


@pytest.mark.parametrize(("value", "optimizer"), CASES, ids=str)
@pytest.mark.parametrize(("feature", "output"), [("c1", 1), ("c2", 2)])
def test_bad_gradient_of_sequences(feature, output, optimizer, value):
    tables = tuple(msgspec.structs.replace(t, optimizer=optimizer) for t in TABLES)
    jagged = make_batch()
    grads = random_gradients(Embeddings(tables), jagged)
    bad = [g.clone() for g in grads]
    at = bag(jagged, feature, 6).start
    bad[output][at - bag(jagged, feature, 0).start, 1] = value
    row = int(jagged.values_N[at])
    place = f"{value} in the gradient of table 'clicks', feature '{feature}', sample 6, position 0, id {row}. "
    error = re.escape(place + "Rows it would have reached were left as they were; all others are updated")
    check_split(tables, jagged, grads, bad, "clicks", {row}, error)


@pytest.mark.parametrize("count", [1, 4])
def test_bad_gradient_in_a_table_that_threads_share(count, threads):
    threads(count)
    many = 70_000
    ids = torch.arange(many) % 500
    jagged = Jagged(features=("t",), values_N=ids, lengths_FB=torch.ones(many, dtype=torch.int64))
    tables = (Table(name="t", rows=1000, dim=4, optimizer=RowWiseAdagrad()),)
    grads = [torch.ones(many, 4)]
    bad = [torch.ones(many, 4)]
    bad[0][[1007, 40_300], 3] = float("nan")
    error = "nan in the gradient of table 't', feature 't', sample 1007, column 3, ids .7.. "
    check_split(tables, jagged, grads, bad, "t", {7, 300}, error)


def test_bad_gradients_of_pooled_rows_and_sequences_at_once():
    jagged = make_batch()
    grads = random_gradients(Embeddings(TABLES), jagged)
    bad = [torch.full_like(g, float("nan")) for g in grads]
    start = everything(Embeddings(TABLES, seed=2))
    embeddings = trained_with(TABLES, jagged, bad, "nan in the gradient of table 'users', feature 'u1', sample 0")
    same(everything(embeddings), start)
    assert not embeddings.staged


def test_a_bad_gradient_of_an_empty_bag_reaches_no_row():
    tables = (Table(name="a", rows=9, dim=4), Table(name="b", rows=9, dim=4))
    jagged = Jagged.from_lists({"a": [[], [1]], "b": [[2], [3]]})
    bad = torch.zeros(2, 8)
    bad[0, :4] = float("nan")
    trained_with(tables, jagged, [bad], None)
    bad[0] = float("nan")  # now a row is reached, and it is that one's place which is named
    trained_with(tables, jagged, [bad], re.escape("table 'b', feature 'b', sample 0, column 0, ids [2]"))


def test_gradients_that_overflow_when_merged():
    """Each is finite, and their sum is not."""
    tables = (Table(name="t", rows=9, dim=4, optimizer=Sgd()),)
    jagged = Jagged.from_lists({"t": [[1], [1], [2]]})
    error = "the gradients of a row add up past the range of float32; lower the learning rate"
    check_split(
        tables, jagged, [torch.ones(3, 4)], [torch.tensor([[3e38] * 4, [3e38] * 4, [1.0] * 4])], "t", {1}, error
    )


@pytest.mark.parametrize("value", BAD)
def test_a_weight_that_is_not_finite_is_named(value):
    jagged = make_batch()
    grads = random_gradients(Embeddings(TABLES), jagged)
    where = bag(jagged, "w", 3)
    jagged.weights_N[where.start] = value
    embeddings = trained_with(TABLES, jagged, grads, "table 'words', feature 'w', sample 3")
    row = int(jagged.values_N[where.start])
    assert torch.equal(embeddings.table("words")[row], Embeddings(TABLES, seed=2).table("words")[row])
    assert all(x.isfinite().all() for x in everything(embeddings).values())


def test_an_error_of_ours_is_also_the_builtin_one():
    assert issubclass(GradientError, ArithmeticError)
    assert issubclass(IdError, ValueError)
    assert issubclass(BatchError, ValueError)


# The raw operators


class Guarded:
    """Memory for tables in the middle of a larger block, so that writes outside it show."""

    def __init__(self, floats: int):
        self.block = torch.full((floats + 2048,), 7.0)
        self.inner = self.block[1024 : 1024 + floats]

    def intact(self) -> bool:
        return bool((self.block[:1024] == 7).all() and (self.block[-1024:] == 7).all())


def arguments() -> dict[str, torch.Tensor]:
    """Two tables of 8 x 4 and three features, as the operators want them."""
    return {
        "arena": torch.zeros(64),
        "state": torch.zeros(16),
        "tables": torch.tensor([[0, 8, 4, 0, 1, 2, 0, 2], [32, 8, 4, 8, 1, 2, 2, 1]]),
        "hyper": torch.tensor([[0.1, 1e-8, 0, 0]] * 2),
        "features": torch.tensor([[0, 0, 0, 8, 4, 0, 2], [1, 0, 0, 8, 4, 4, 2], [2, 1, 32, 8, 4, 8, 0]]),
        "values": torch.tensor([1, 2, 3, 4, 5, 6, 7, 0]),
        "offsets": torch.tensor([0, 1, 2, 4, 4, 6, 8]),
        "weights": torch.ones(8),
        "grad": torch.ones(2, 12),
        "flat": torch.ones(32),
        "lengths": torch.tensor([1, 1, 2]),
        "out": torch.zeros(10),
    }


def call(op: str, a: dict, batch=2, columns=12):
    rows = (a["arena"], a["features"], a["values"], a["offsets"])
    how = (a["arena"], a["state"], a["tables"], a["hyper"], a["features"], a["values"], a["offsets"], a["weights"])
    match op:
        case "pool":
            return ops.pool(*rows, a["weights"], batch, columns)
        case "gather":
            return ops.gather(*rows, batch)
        case "pool_weight_grad":
            return ops.pool_weight_grad(*rows, a["weights"], a["grad"], batch)
        case "update":
            return ops.update(*how, a["grad"], batch, False)
        case "update per id":
            return ops.update(*how, a["flat"], batch, True)
        case "touch":
            return ops.touch(*rows, batch)
        case "offsets":
            return ops.offsets(a["lengths"])
        case "fill_uniform":
            return ops.fill_uniform(a["out"], 1, 0, 0.0, 1.0)
    raise AssertionError(op)


POOLED = ("pool", "pool_weight_grad", "update")
LOOKUPS = ("pool", "gather", "pool_weight_grad", "touch", "update", "update per id")
UPDATES = ("update", "update per id")


def test_the_arguments_below_are_good_before_they_are_changed():
    for op in (*LOOKUPS, "offsets", "fill_uniform"):
        a = arguments()
        if op in ("gather", "touch", "update per id"):
            a["features"][:, 6] = 0
        call(op, a)


def changed(name: str, change) -> dict:
    a = arguments()
    a[name] = change(a[name])
    return a


TENSORS = {
    "arena": LOOKUPS,
    "features": LOOKUPS,
    "values": LOOKUPS,
    "offsets": LOOKUPS,
    "weights": POOLED,
    "grad": ("pool_weight_grad", "update"),
    "flat": ("update per id",),
    "state": UPDATES,
    "tables": UPDATES,
    "hyper": UPDATES,
    "lengths": ("offsets",),
    "out": ("fill_uniform",),
}


@pytest.mark.parametrize(("name", "op"), [(name, op) for name, used in TENSORS.items() for op in used])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int16, torch.int32, torch.bool, torch.complex64])
def test_tensors_of_another_type(name, op, dtype):
    if name in ("values", "lengths") and dtype == torch.int32:
        dtype = torch.float32  # both take 32-bit integers
    with pytest.raises(RuntimeError, match=r"rowwise: .* must be"):
        call(op, changed(name, lambda x: x.to(dtype)))


@pytest.mark.parametrize(("name", "op"), [(name, op) for name, used in TENSORS.items() for op in used])
def test_tensors_that_are_strided(name, op):
    with pytest.raises(RuntimeError, match=r"rowwise: .* must be a contiguous CPU tensor"):
        call(op, changed(name, lambda x: torch.stack([x, x], dim=-1)[..., 0]))


OUTSIDE = [-1, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63)]


@pytest.mark.parametrize("op", LOOKUPS)
@pytest.mark.parametrize("value", OUTSIDE)
@pytest.mark.parametrize(
    ("field", "near", "message"),
    [
        (0, 3, "no feature"),
        (2, 33, "reaches past the arena"),
        (3, 9, "reaches past the arena"),
        (4, 5, "reaches past the arena"),
    ],
    ids=["source", "base", "rows", "dim"],
)
def test_features_reaching_out(op, field, near, message, value):
    for wrong in (value, near):
        a = arguments()
        if op in ("gather", "touch", "update per id"):
            a["features"][:, 6] = 0
        a["features"][2, field] = wrong
        with pytest.raises(RuntimeError, match=message):
            call(op, a)


@pytest.mark.parametrize("op", POOLED)
@pytest.mark.parametrize("value", [9, *OUTSIDE])
def test_features_reaching_past_the_output(op, value):
    a = arguments()
    a["features"][2, 5] = value
    with pytest.raises(RuntimeError, match="feature 2 reaches past the output"):
        call(op, a)


@pytest.mark.parametrize("op", LOOKUPS)
@pytest.mark.parametrize("value", [3, *OUTSIDE])
def test_unknown_poolings(op, value):
    a = arguments()
    a["features"][0, 6] = value
    with pytest.raises(RuntimeError, match="rowwise: feature 0 is weighted and the batch carries no weights"):
        call(op, a)


@pytest.mark.parametrize("op", LOOKUPS)
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([], "bags do not divide"),
        ([0], "do not add up to 8 values"),
        ([0, 1, 2, 4, 4, 6, 7], "do not add up to 8 values"),
        ([0, 1, 2, 4, 4, 6, 9], "do not add up to 8 values"),
        ([1, 1, 2, 4, 4, 6, 8], "do not add up to 8 values"),
        ([0, 2, 1, 4, 4, 6, 8], "do not add up to 8 values"),
        ([0, 1, -5, 4, 4, 6, 8], "do not add up to 8 values"),
        ([0, 1, 1 << 62, 4, 4, 6, 8], "do not add up to 8 values"),
        ([0, 1, 2, 4, 4, 8], "bags do not divide into a batch of 2"),
        ([0, 1, 2, 4, 8], "no feature 2 in the batch"),
    ],
)
def test_offsets_that_are_none(op, offsets, message):
    a = changed("offsets", lambda _: torch.tensor(offsets, dtype=torch.int64))
    if op in ("gather", "touch", "update per id"):
        a["features"][:, 6] = 0
    with pytest.raises(RuntimeError, match=message):
        call(op, a)


@pytest.mark.parametrize("op", LOOKUPS)
@pytest.mark.parametrize("batch", [0, 1, 3, 4, -1, -2, 1 << 40, (1 << 63) - 1, -(1 << 63)])
def test_another_batch_size(op, batch):
    a = arguments()
    if op in ("gather", "touch", "update per id"):
        a["features"][:, 6] = 0
    if batch == 1 and op in ("pool", "gather", "touch"):
        call(op, a, batch=batch)  # the first three bags, as three features of one sample
        return
    message = "bags do not divide|grad must be|wrong shape of grad|no feature"
    with pytest.raises(RuntimeError, match=message):
        call(op, a, batch=batch)


@pytest.mark.parametrize("op", LOOKUPS)
@pytest.mark.parametrize("wrong", [8, 9, -1, (1 << 63) - 1, -(1 << 63)])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_ids_outside_their_table(op, wrong, position):
    a = arguments()
    if op in ("gather", "touch", "update per id"):
        a["features"][:, 6] = 0
    if op == "pool_weight_grad":
        a["features"][:, 6] = 2
    a["values"][position] = wrong
    arena = a["arena"].clone()
    if op == "touch":
        call(op, a)  # a measurement: it skips them
    else:
        with pytest.raises(RuntimeError, match=f"rowwise: id {wrong} at position {position} is outside its table"):
            call(op, a)
    if position < 4:  # the first table is the bad one
        assert torch.equal(a["arena"][:32], arena[:32])


@pytest.mark.parametrize(
    ("name", "shape", "ops_"),
    [
        ("features", (3, 6), LOOKUPS),
        ("features", (3, 8), LOOKUPS),
        ("features", (21,), LOOKUPS),
        ("tables", (2, 7), UPDATES),
        ("tables", (16,), UPDATES),
        ("hyper", (2, 3), UPDATES),
        ("hyper", (3, 4), UPDATES),
        ("hyper", (8,), UPDATES),
        ("weights", (7,), POOLED),
        ("weights", (9,), POOLED),
        ("weights", (0,), POOLED),
        ("grad", (1, 12), ("pool_weight_grad", "update")),
        ("grad", (3, 12), ("pool_weight_grad", "update")),
        ("grad", (2, 11), ("pool_weight_grad", "update")),
        ("grad", (24,), ("pool_weight_grad", "update")),
        ("flat", (31,), ("update per id",)),
        ("flat", (33,), ("update per id",)),
        ("flat", (8, 4), ("update per id",)),
        ("flat", (0,), ("update per id",)),
        ("state", (15,), UPDATES),
        ("state", (0,), UPDATES),
        ("arena", (63,), LOOKUPS),
        ("arena", (0,), LOOKUPS),
    ],
)
def test_tensors_of_another_shape(name, shape, ops_):
    for op in ops_:
        a = changed(name, lambda x: torch.ones(shape, dtype=x.dtype))
        with pytest.raises(RuntimeError, match="rowwise: "):
            call(op, a)


@pytest.mark.parametrize("op", UPDATES)
@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        (0, [1, 31, *OUTSIDE], "does not match its table"),
        (1, [7, 9, *OUTSIDE], "does not match its table|past the arena"),
        (2, [3, 5, *OUTSIDE], "does not match its table|past the arena"),
        (3, [9, *OUTSIDE], "state of table 1 reaches past the arena"),
        (4, [0, 2, *OUTSIDE], "state of table 1 reaches past the arena"),
        (5, [3, *OUTSIDE], "unknown optimizer"),
        (6, [0, 1, 3, *OUTSIDE], "features are not in table order"),
        (7, [0, 2, *OUTSIDE], "features are not in table order"),
    ],
    ids=["base", "rows", "dim", "state_base", "state_width", "rule", "first_feature", "num_features"],
)
def test_tables_that_are_none(op, field, values, message):
    for value in values:
        a = arguments()
        if op == "update per id":
            a["features"][:, 6] = 0
        a["tables"][1, field] = value
        with pytest.raises(RuntimeError, match=message):
            call(op, a)


def test_adagrad_needs_a_float_of_state_for_each_column():
    a = arguments()
    a["tables"][:, 5] = 1
    with pytest.raises(RuntimeError, match="state of table 0 reaches past the arena"):
        call("update", a)


@pytest.mark.parametrize("op", UPDATES)
def test_features_and_tables_that_do_not_match(op):
    a = arguments()
    a["tables"] = a["tables"][:1]
    a["hyper"] = a["hyper"][:1]
    with pytest.raises(RuntimeError, match="features without a table"):
        call(op, a)
    a = arguments()
    a["features"][1, 6] = 0  # another pooling than the table's first feature
    with pytest.raises(RuntimeError, match="feature 1 does not match its table"):
        call(op, a)


nasty = st.sampled_from(
    [-(1 << 63), -1, 0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 63, 64, 1 << 31, 1 << 61, 1 << 62, (1 << 63) - 1]
)
cells = st.lists(
    st.tuples(st.sampled_from(["features", "tables", "values", "offsets"]), st.integers(0, 23), nasty), max_size=3
)


@given(
    op=st.sampled_from(LOOKUPS),
    cells=cells,
    batch=st.sampled_from([0, 1, 2, 3, 6]),
    columns=st.sampled_from([0, 1, 12, 16]),
)
@example(op="update", cells=[], batch=2, columns=12)
@settings(max_examples=300)
def test_any_metadata_is_refused_or_harmless(op, cells, batch, columns):
    """Nothing outside the rows and the state is written, whatever the numbers say."""
    a = arguments()
    arena, state = Guarded(64), Guarded(16)
    a["arena"], a["state"] = arena.inner, state.inner
    if op in ("gather", "touch", "update per id"):
        a["features"][:, 6] = 0
    for name, at, value in cells:
        a[name].view(-1)[at % a[name].numel()] = value
    try:
        call(op, a, batch=batch, columns=columns)
    except RuntimeError as error:
        assert "rowwise: " in str(error)  # noqa: PT017 - either outcome is right
    assert arena.intact()
    assert state.intact()


def test_sizes_past_any_memory_are_an_error_and_not_a_crash():
    """In another process, as the failure would be its end."""
    code = """
import torch
import rowwise.ops
ops = torch.ops.rowwise
def features(*rows): return torch.tensor(rows, dtype=torch.int64).view(-1, 7)
none, one, bounds = torch.empty(0, dtype=torch.int64), torch.tensor([1]), torch.tensor([0, 1])
arena, wrap = torch.zeros(64), (1 << 62) + (1 << 16)
calls = {
    "no memory": lambda: ops.zeros((1 << 60) - 1),
    "negative": lambda: ops.zeros(-1),
    "gather": lambda: ops.gather(ops.zeros(1 << 20), features(*[(0, 0, 0, 1, 1 << 20, 0, 0)] * 64),
                                 torch.zeros(1 << 20, dtype=torch.int64), torch.tensor([0, 1 << 20]), 1),
    "large output": lambda: ops.pool(arena, features(), none, torch.tensor([0]), None, 1 << 30, 1 << 30),
    "negative columns": lambda: ops.pool(arena, features((0, 0, 0, 8, 8, 1 << 45, 0)), one, bounds, None, 1, -1),
    "columns that wrap": lambda: ops.pool(arena, features((0, 0, 0, 8, 8, 1 << 45, 0)), one, bounds, None, 1, wrap),
    "less that wrap": lambda: ops.pool(arena, features((0, 0, 0, 8, 8, 0, 0)), one, bounds, None, 1, wrap - (1 << 63)),
    "rows that wrap": lambda: ops.gather(ops.zeros(1 << 30), features(*[(0, 0, 0, 1, 1 << 30, 0, 0)] * (1 << 14)),
                                         torch.zeros(1 << 20, dtype=torch.int64), torch.tensor([0, 1 << 20]), 1),
    "batch that wraps": lambda: ops.pool(arena, features(), none, torch.tensor([0]), None, wrap, 1),
}
for name, call in calls.items():
    try:
        call()
    except (RuntimeError, MemoryError):
        print(name, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"after {done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"
    assert done.stdout.count("\n") == 9
