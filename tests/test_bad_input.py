"""Bad ids, lengths, gradients and arguments: an error that names the place, and no row touched that should not be.

The raw operators check metadata themselves: whatever they are handed, they raise, and never read or write
outside their tensors.
"""

import re
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import cycle

import msgspec
import pytest
import table_state
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import OPTIMIZERS
from table_state import outputs, same, with_optimizer, without_steps

from rowwise import (
    BatchError,
    Embeddings,
    GradientError,
    IdError,
    Jagged,
    Pooling,
    RowType,
    RowWiseAdagrad,
    Sgd,
    Table,
    UnknownIdWarning,
)
from rowwise.tables.ops.layout import RowFormat

ops = torch.ops.rowwise
TABLES = (
    Table(name="users", rows=40, dim=8, features=("u1", "u2")),
    Table(name="items", rows=30, dim=4, features=("i",), pooling=Pooling.MEAN, row_type=RowType.INT8),
    Table(name="words", rows=50, dim=12, features=("w",), pooling=Pooling.WEIGHTED, row_type=RowType.FP16),
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
    """Rows and what belongs to them; the number of updates is not among it."""
    return without_steps(table_state.everything(embeddings))


def all_finite(embeddings: Embeddings) -> bool:
    rows = [embeddings.weights(t.name) for t in embeddings.tables]
    state = [x for name, x in everything(embeddings).items() if "." in name]
    return all(bool(x.isfinite().all()) for x in rows + state)


def backward(embeddings: Embeddings, jagged: Jagged) -> None:
    outs = outputs(embeddings, jagged)
    torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])


def train(embeddings: Embeddings, jagged: Jagged) -> None:
    backward(embeddings, jagged)
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
        with pytest.raises(ValueError, match="Hash or map"):
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
    backward(embeddings, jagged)
    where = bag(jagged, feature, 4)
    for wrong in wrong_ids(feature, torch.int64)[-1:]:
        jagged.values_N[where.start] = wrong
        with pytest.raises(IdError, match=id_message(jagged, feature, 4, 0, wrong)):
            embeddings.update()
    after = everything(embeddings)
    for name in [n for n in after if n.split(".")[0] == TABLE_OF[feature].name]:
        assert torch.equal(after[name], before[name])
    assert all_finite(embeddings)
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
    with pytest.raises(RuntimeError, match=r"id 50 .*is outside"):
        outs[0].sum().backward()
    assert weights.grad is None


def test_accumulated_ids_that_turned_bad_are_named():
    embeddings = Embeddings(TABLES)
    before = everything(embeddings)
    jaggeds = [make_batch(seed) for seed in range(3)]
    for jagged in jaggeds:
        backward(embeddings, jagged)
    jaggeds[1].values_N[bag(jaggeds[1], "i", 2)] = -1
    with pytest.raises(IdError, match="table 'items': feature 'i'"):
        embeddings.update()
    assert torch.equal(embeddings.table("items"), before["items"])


# Ids that a table takes as unknown

KNOWING = tuple(msgspec.structs.replace(t, unknown="last_row") for t in TABLES)


def clamped(jagged: Jagged) -> Jagged:
    """The same batch with every id outside its table replaced by the last row."""
    clamped_ids = jagged.map_tensors(torch.clone)
    for name, table in TABLE_OF.items():
        ids = clamped_ids.ids_of(name)
        ids[(ids < 0) | (ids >= table.rows)] = table.rows - 1
    return clamped_ids


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
        bad = int((jagged.ids_of(name) != known.ids_of(name)).sum())
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
    message = rf"lengths add up to {total}: expected {ids}, the number of ids \(c2: \d+, i: \d+, other: \d+, u2: "
    with pytest.raises(BatchError, match=message):
        Embeddings(TABLES)(jagged)


@pytest.mark.parametrize("unknown", ["raise", "last_row"])
def test_lengths_are_blamed_before_the_ids_that_they_shift(unknown):
    """Wrong lengths give a feature the ids of its neighbour, which may well be outside its table."""
    tables = [Table(name="large", rows=1000, dim=4), Table(name="small", rows=10, dim=4, unknown=unknown)]
    embeddings = Embeddings(tables)
    ids, lengths = torch.tensor([500, 600, 3]), torch.tensor([1, 1])  # should be 2, 1
    with pytest.raises(BatchError, match=r"\(large: 1, small: 1\)"):
        embeddings(Jagged(features=("large", "small"), values_N=ids, lengths_FB=lengths))
    assert embeddings.unknown_ids == {}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [-1, -(1 << 31)])
def test_negative_lengths(dtype, wrong):
    jagged = make_batch()
    lengths = jagged.lengths_FB.to(dtype)
    lengths[3 * SIZE + 2] = wrong
    bad = replace(jagged, lengths_FB=lengths)
    with pytest.raises(BatchError, match=f"feature 'u2', sample 2: length {wrong}: expected 0 or more"):
        Embeddings(TABLES)(bad)


def test_negative_lengths_that_add_up():
    bad = Jagged(features=("t",), values_N=torch.tensor([1, 2]), lengths_FB=torch.tensor([3, -1]))
    with pytest.raises(BatchError, match="feature 't', sample 1"):
        Embeddings([Table(name="t", rows=7, dim=4)])(bad)


def test_lengths_that_overflow():
    lengths = torch.full((3,), 1 << 62)
    with pytest.raises(BatchError, match=r"add up to .*"):
        Embeddings([Table(name="t", rows=7, dim=4)])(
            Jagged(features=("t",), values_N=torch.tensor([1, 2, 3]), lengths_FB=lengths)
        )


def test_missing_features_are_listed():
    with pytest.raises(BatchError, match="c1, c2, i, u2"):
        Embeddings(TABLES)(Jagged.from_lists({"x": [[1]], "u1": [[1]]}))


def test_missing_weights_name_the_tables():
    kinds = {"a": Pooling.SUM, "b": Pooling.WEIGHTED, "c": Pooling.WEIGHTED}
    tables = [Table(name=name, rows=7, dim=4, pooling=pooling) for name, pooling in kinds.items()]
    with pytest.raises(BatchError, match=r"b, c \(pooling 'weighted'\)"):
        Embeddings(tables)(Jagged.from_lists({t.name: [[1]] for t in tables}))


# Gradients that are not finite

BAD = [float("nan"), float("inf"), -float("inf")]
CASES = list(zip(cycle(BAD), OPTIMIZERS, strict=False))
LEFT = "Rows that it would have reached are unchanged; all others are updated"


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
    assert all_finite(embeddings)


@pytest.mark.parametrize(("value", "optimizer"), CASES, ids=str)
@pytest.mark.parametrize("feature", ["u1", "u2", "i", "w"])
def test_bad_gradient_of_pooled_rows(feature, optimizer, value):
    tables = with_optimizer(optimizer, TABLES)
    jagged = make_batch()
    probe = Embeddings(tables)
    grads = random_gradients(probe, jagged)
    bad = [g.clone() for g in grads]
    column = probe(jagged).columns[feature].start + 2
    bad[0][5, column] = value
    ids = jagged.values_N[bag(jagged, feature, 5)].tolist()
    table = TABLE_OF[feature].name
    place = f"{value} in the gradient of table '{table}', feature '{feature}', sample 5, column 2, ids {ids}. "
    check_split(tables, jagged, grads, bad, table, set(ids), re.escape(place + LEFT))


@pytest.mark.parametrize(("value", "optimizer"), CASES, ids=str)
@pytest.mark.parametrize(("feature", "output"), [("c1", 1), ("c2", 2)])
def test_bad_gradient_of_sequences(feature, output, optimizer, value):
    tables = with_optimizer(optimizer, TABLES)
    jagged = make_batch()
    grads = random_gradients(Embeddings(tables), jagged)
    bad = [g.clone() for g in grads]
    at = bag(jagged, feature, 6).start
    bad[output][at - bag(jagged, feature, 0).start, 1] = value
    row = int(jagged.values_N[at])
    place = f"{value} in the gradient of table 'clicks', feature '{feature}', sample 6, position 0, id {row}. "
    check_split(tables, jagged, grads, bad, "clicks", {row}, re.escape(place + LEFT))


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
    error = "table 't', row 1: the sum of its gradients overflows float32; lower the learning rate"
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
    assert all_finite(embeddings)


def test_an_error_of_ours_is_also_the_builtin_one():
    assert issubclass(GradientError, ArithmeticError)
    assert issubclass(IdError, ValueError)
    assert issubclass(BatchError, ValueError)


# The raw operators


class Guarded:
    """Memory in the middle of a larger block, so that writes outside it show."""

    def __init__(self, inner: torch.Tensor):
        size = inner.numel() * inner.element_size()
        self.block = torch.full((size + 8192,), 7, dtype=torch.uint8)
        self.inner = self.block[4096 : 4096 + size].view(inner.dtype)
        self.inner.copy_(inner)

    def intact(self) -> bool:
        return bool((self.block[:4096] == 7).all() and (self.block[-4096:] == 7).all())


# How rows are stored; rows of four columns take 16, 8, 8 and 12 bytes, those of twenty in groups 36.
FORMATS = (
    RowFormat(RowType.FP32, 4, 0),
    RowFormat(RowType.FP16, 4, 0),
    RowFormat(RowType.BF16, 4, 0),
    RowFormat(RowType.INT8, 4, 0),
    RowFormat(RowType.INT8, 20, 16),
)
FP32 = FORMATS[0]
TYPES = tuple(RowType)
# Columns of the features: source, table, base, rows, dim, column, mode, type, group.
MODE = 6
# And of the tables: base, rows, dim, state_base, state_width, rule, first_feature, num_features, type, group.
RULE = 5


def arguments(form: RowFormat = FP32) -> dict[str, torch.Tensor]:
    """Two tables of 8 rows and three features, as the operators want them."""
    dim, stored, end = form.dim, (TYPES.index(form.type), form.scale_group), 8 * form.bytes
    tables = [[0, 8, dim, 0, 1, 2, 0, 2, *stored, 0, 0, -1], [end, 8, dim, 8, 1, 2, 2, 1, *stored, 0, 0, -1]]
    return {
        "arena": torch.zeros(2 * end, dtype=torch.uint8),
        "state": torch.zeros(16),
        "tables": torch.tensor(tables),
        "hyper": torch.tensor([[0.1, 1e-8, 0, 0, 0, 0, 0, 0]] * 2),
        "keys": torch.tensor([1, -(1 << 63)]),
        "features": torch.tensor(
            [
                [0, 0, 0, 8, dim, 0, 2, *stored],
                [1, 0, 0, 8, dim, dim, 2, *stored],
                [2, 1, end, 8, dim, 2 * dim, 0, *stored],
            ]
        ),
        "values": torch.tensor([1, 2, 3, 4, 5, 6, 7, 0]),
        "offsets": torch.tensor([0, 1, 2, 4, 4, 6, 8]),
        "weights": torch.ones(8),
        "grad": torch.ones(2, 3 * dim),
        "flat": torch.ones(8 * dim),
        "lengths": torch.tensor([1, 1, 2]),
        "out": torch.zeros(10),
        "rows": torch.ones(3, 20),
        "packed": torch.zeros(3, 36, dtype=torch.uint8),
    }


def call(op: str, a: dict, batch=2, columns=12):
    rows = (a["arena"], a["features"], a["values"], a["offsets"])
    how = (a["arena"], a["state"], a["tables"], a["hyper"], a["keys"], *rows[1:], a["weights"])
    calls = {
        "pool": lambda: ops.pool(*rows, a["weights"], batch, columns),
        "gather": lambda: ops.gather(*rows, batch),
        "pool_weight_grad": lambda: ops.pool_weight_grad(*rows, a["weights"], a["grad"], batch),
        "update": lambda: ops.update(*how, a["grad"], batch, False),
        "update per id": lambda: ops.update(*how, a["flat"], batch, True),
        "touch": lambda: ops.touch(*rows, batch),
        "offsets": lambda: ops.offsets(a["lengths"]),
        "fill_uniform": lambda: ops.fill_uniform(a["out"], 1, 0, 0.0, 1.0),
        "fill_uniform_rows": lambda: ops.fill_uniform_rows(a["out"].view(1, -1), a["keys"][:1], 1, 0.0, 1.0),
        "pack": lambda: ops.pack(a["rows"], 16),
        "unpack": lambda: ops.unpack(a["packed"], 20, 16),
    }
    return calls[op]()


POOLED = ("pool", "pool_weight_grad", "update")
LOOKUPS = ("pool", "gather", "pool_weight_grad", "touch", "update", "update per id")
UPDATES = ("update", "update per id")


def arguments_for(op: str, form: RowFormat = FP32) -> dict[str, torch.Tensor]:
    """Without weights where the operator takes none."""
    a = arguments(form)
    if op in ("gather", "touch", "update per id"):
        a["features"][:, MODE] = 0
    return a


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_arguments_below_are_good_before_they_are_changed(form):
    for op in (*LOOKUPS, "offsets", "fill_uniform", "fill_uniform_rows", "pack", "unpack"):
        call(op, arguments_for(op, form), columns=3 * form.dim)


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
    "keys": UPDATES,
    "lengths": ("offsets",),
    "out": ("fill_uniform", "fill_uniform_rows"),
    "rows": ("pack",),
    "packed": ("unpack",),
}


@pytest.mark.few(80)
@pytest.mark.parametrize(("name", "op"), [(name, op) for name, used in TENSORS.items() for op in used])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.int16, torch.int32, torch.int8, torch.bool, torch.complex64, "the other"],
)
def test_tensors_of_another_type(name, op, dtype):
    if name in ("values", "lengths") and dtype == torch.int32:
        dtype = torch.float32  # both take 32-bit integers
    if dtype == "the other":  # as the operators once took it: rows as floats
        dtype = torch.float32 if name in ("arena", "packed", "keys") else torch.uint8
    with pytest.raises(RuntimeError, match=r"rowwise: .* must be"):
        call(op, changed(name, lambda x: x.to(dtype)))


@pytest.mark.parametrize(("name", "op"), [(name, op) for name, used in TENSORS.items() for op in used])
def test_tensors_that_are_strided(name, op):
    with pytest.raises(RuntimeError, match=r"rowwise: .* must"):
        call(op, changed(name, lambda x: torch.stack([x, x], dim=-1)[..., 0]))


OUTSIDE = [-1, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63)]


@pytest.mark.few(60)
@pytest.mark.parametrize("op", LOOKUPS)
@pytest.mark.parametrize("value", OUTSIDE)
@pytest.mark.parametrize(
    ("field", "near", "message"),
    [
        (0, 3, "no feature"),
        (2, 132, "reaches past the arena"),
        (2, 130, "reaches past the arena"),  # not on a whole float
        (3, 9, "reaches past the arena"),
        (4, 5, "reaches past the arena"),
        (7, len(TYPES), "unknown row type"),
        (8, 8, "expected a multiple of 16, or 0 for all"),
    ],
    ids=["source", "base", "odd base", "rows", "dim", "type", "group"],
)
def test_features_reaching_out(op, field, near, message, value):
    if field == 4:
        message += "|rows of .* columns"  # more than any kernel counts
    for wrong in (value, near):
        if field == 8 and value > 0:
            wrong |= 1  # large multiples of 16 are one group
        a = arguments_for(op)
        a["features"][2, field] = wrong
        with pytest.raises(RuntimeError, match=message):
            call(op, a)


@pytest.mark.parametrize("op", POOLED)
@pytest.mark.parametrize("value", [9, *OUTSIDE])
def test_features_reaching_past_the_output(op, value):
    a = arguments()
    a["features"][2, 5] = value
    with pytest.raises(RuntimeError, match="feature 2 reaches past"):
        call(op, a)


@pytest.mark.parametrize("op", LOOKUPS)
@pytest.mark.parametrize("value", [3, *OUTSIDE])
def test_unknown_poolings(op, value):
    a = arguments()
    a["features"][0, MODE] = value
    with pytest.raises(RuntimeError, match="feature 0 is weighted"):
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
    a = arguments_for(op) | {"offsets": torch.tensor(offsets, dtype=torch.int64)}
    with pytest.raises(RuntimeError, match=message):
        call(op, a)


@pytest.mark.parametrize("op", LOOKUPS)
@pytest.mark.parametrize("batch", [0, 1, 3, 4, -1, -2, 1 << 40, (1 << 63) - 1, -(1 << 63)])
def test_another_batch_size(op, batch):
    a = arguments_for(op)
    if batch == 1 and op in ("pool", "gather", "touch"):
        call(op, a, batch=batch)  # the first three bags, as three features of one sample
        return
    message = "bags do not divide|grad must be|wrong shape of grad|no feature"
    with pytest.raises(RuntimeError, match=message):
        call(op, a, batch=batch)


@pytest.mark.few(30)
@pytest.mark.parametrize("op", LOOKUPS)
@pytest.mark.parametrize("wrong", [8, 9, -1, (1 << 63) - 1, -(1 << 63)])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_ids_outside_their_table(op, wrong, position):
    a = arguments_for(op)
    if op == "pool_weight_grad":
        a["features"][:, MODE] = 2
    a["values"][position] = wrong
    arena = a["arena"].clone()
    if op == "touch":
        call(op, a)  # a measurement: it skips them
    else:
        with pytest.raises(RuntimeError, match=f"rowwise: id {wrong} at position {position} is outside its table"):
            call(op, a)
    if position < 4:  # the first table is the bad one
        assert torch.equal(a["arena"][:128], arena[:128])


OTHER_SHAPES = {
    "features": [(3, 7), (3, 8), (3, 10), (27,)],
    "tables": [(2, 8), (2, 9), (2, 12), (20,)],
    "hyper": [(2, 4), (2, 7), (2, 9), (1, 8), (3, 8), (16,)],
    "keys": [(1,), (3,), (0,), (2, 1), (1, 2)],
    "rows": [(60,), (3, 0), (3, 4, 5)],
    "packed": [(108,), (3, 35), (3, 37), (3, 28), (3, 6, 6)],
    "weights": [(7,), (9,), (0,)],
    "grad": [(1, 12), (3, 12), (2, 11), (24,)],
    "flat": [(31,), (33,), (8, 4), (0,)],
    "state": [(15,), (0,)],
    "arena": [(252,), (255,), (64,), (0,)],
}


@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name, shapes in OTHER_SHAPES.items() for shape in shapes]
)
def test_tensors_of_another_shape(name, shape):
    for op in TENSORS[name]:
        a = arguments_for(op)
        a[name] = torch.ones(shape, dtype=a[name].dtype)
        with pytest.raises(RuntimeError, match="rowwise: "):
            call(op, a)


@pytest.mark.parametrize("op", UPDATES)
@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        (0, [1, 124, *OUTSIDE], "does not match its table"),
        (1, [7, 9, *OUTSIDE], "does not match its table|past the arena"),
        (2, [3, 5, *OUTSIDE], "does not match its table|past the arena"),
        (3, [9, *OUTSIDE], "state of table 1 reaches past the arena"),
        (4, [0, 2, *OUTSIDE], "state of table 1 reaches past the arena"),
        (5, [7, *OUTSIDE], "unknown optimizer"),
        (6, [0, 1, 3, *OUTSIDE], "features are not in table order"),
        (7, [0, 2, *OUTSIDE], "features are not in table order"),
        (8, [1, 2, 3, 4, *OUTSIDE], "does not match its table"),
        (9, [1, 16, 1 << 40, *OUTSIDE], "does not match its table"),
        (12, [0, 1, 1 << 62], "slots of table 1 reach past those that are listed"),
    ],
    ids=[
        "base",
        "rows",
        "dim",
        "state_base",
        "state_width",
        "rule",
        "first_feature",
        "num_features",
        "type",
        "group",
        "slot",
    ],
)
def test_tables_that_are_none(op, field, values, message):
    for value in values:
        a = arguments_for(op)
        a["tables"][1, field] = value
        with pytest.raises(RuntimeError, match=message):
            call(op, a)


@pytest.mark.parametrize(("rule", "floats"), [(0, 0), (1, 4), (2, 1), (3, 8), (4, 5), (5, 8), (6, 8)])
@pytest.mark.parametrize("op", UPDATES)
def test_an_optimizer_needs_its_state(op, rule, floats):
    """As many floats in each row are enough, and one fewer is refused."""
    a = arguments_for(op)
    a["state"] = torch.zeros(2 * 8 * floats)
    a["tables"][:, RULE] = rule
    a["tables"][:, 4] = torch.tensor([floats, floats])
    a["tables"][:, 3] = torch.tensor([0, 8 * floats])
    call(op, a)
    for index in (0, 1) if floats else ():
        less = a | {"tables": a["tables"].clone()}
        less["tables"][index, 4] -= 1
        with pytest.raises(RuntimeError, match=f"state of table {index} reaches past the arena"):
            call(op, less)
    if floats:
        with pytest.raises(RuntimeError, match="state of table 1"):
            call(op, a | {"state": a["state"][:-1]})


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("op", LOOKUPS)
def test_rows_that_reach_past_their_arena(op, form):
    """One byte too few, for rows of any type."""
    a = arguments_for(op, form)
    call(op, a, columns=3 * form.dim)
    with pytest.raises(RuntimeError, match="table 1 reaches past"):
        call(op, a | {"arena": a["arena"][:-1]}, columns=3 * form.dim)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("op", LOOKUPS)
def test_arenas_that_begin_between_floats(op, first, form):
    a = arguments_for(op, form)
    block = torch.zeros(len(a["arena"]) + 8, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="arena is not aligned"):
        call(op, a | {"arena": block[first : first + len(a["arena"])]}, columns=3 * form.dim)


def test_packed_rows_that_begin_between_floats():
    block = torch.zeros(3 * 36 + 4, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="arena is not aligned"):
        ops.unpack(block[1:-3].view(3, 36), 20, 16)


@pytest.mark.parametrize("group", [-16, -1, 1, 8, 17, (1 << 63) - 1, -(1 << 63)])
def test_groups_of_columns_that_are_none(group):
    if group != -(1 << 63):  # a multiple of 16 too, were it not negative
        assert group < 0 or group % 16
    for op in (lambda: ops.pack(torch.ones(3, 20), group), lambda: ops.unpack(torch.zeros(3, 28).byte(), 20, group)):
        with pytest.raises(RuntimeError, match="16, or 0"):
            op()


def test_groups_wider_than_the_row_are_the_row():
    rows = torch.randn(5, 20)
    assert torch.equal(ops.pack(rows, 0), ops.pack(rows, 1 << 40))
    assert torch.equal(ops.unpack(ops.pack(rows, 0), 20, 1 << 62), ops.unpack(ops.pack(rows, 0), 20, 0))


@pytest.mark.parametrize("dim", [0, -1, 1 << 31, 1 << 62, -(1 << 63)])
def test_unpacking_to_columns_that_are_none(dim):
    with pytest.raises(RuntimeError, match=r"rowwise: rows of .*"):
        ops.unpack(torch.zeros(3, 28, dtype=torch.uint8), dim, 0)


@pytest.mark.parametrize("op", UPDATES)
def test_features_and_tables_that_do_not_match(op):
    a = arguments()
    for name in ("tables", "hyper", "keys"):
        a[name] = a[name][:1]
    with pytest.raises(RuntimeError, match="features without a table"):
        call(op, a)
    a = arguments()
    a["features"][1, MODE] = 0  # another pooling than the table's first feature
    with pytest.raises(RuntimeError, match="1 does not match"):
        call(op, a)


small = (-1, 0, 1, 2, 3, 4, 7, 8, 9, 12, 15, 16, 20, 31, 32, 36, 48, 63, 64, 96, 128, 288)
large = (1 << 20, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 60, 1 << 61, 1 << 62, (1 << 63) - 16, (1 << 63) - 1)
nasty = st.sampled_from((*small, *large, -(1 << 63)))
cells = st.lists(
    st.tuples(st.sampled_from(["features", "tables", "values", "offsets", "keys"]), st.integers(0, 26), nasty),
    max_size=3,
)
numbers = st.floats(width=32)


@given(
    op=st.sampled_from(LOOKUPS),
    form=st.sampled_from(FORMATS),
    cells=cells,
    both=st.booleans(),
    rule=st.integers(0, 6),
    hyper=st.lists(numbers, min_size=8, max_size=8),
    batch=st.sampled_from([0, 1, 2, 3, 6]),
    columns=st.sampled_from([0, 1, 12, 16, 60]),
)
@example(op="update", form=FP32, cells=[], both=False, rule=2, hyper=[0.1] * 8, batch=2, columns=12)
@settings(max_examples=500)
def test_any_metadata_is_refused_or_harmless(op, form, cells, both, rule, hyper, batch, columns):
    """Nothing outside the rows and the state is written, whatever the numbers say."""
    a = arguments_for(op, form)
    a["tables"][:, RULE] = rule
    a["tables"][:, 4] = 2 * form.dim
    a["tables"][1, 3] = 16 * form.dim
    a["hyper"][:] = torch.tensor(hyper)
    arena, state = Guarded(a["arena"]), Guarded(torch.zeros(32 * form.dim))
    a["arena"], a["state"] = arena.inner, state.inner
    for name, at, value in cells:
        a[name].view(-1)[at % a[name].numel()] = value
    if both:  # a table and its features agree on what is wrong
        for feature, table in ((0, 0), (1, 0), (2, 1)):
            a["features"][feature, [2, 3, 4, 7, 8]] = a["tables"][table, [0, 1, 2, 8, 9]]
    try:
        call(op, a, batch=batch, columns=columns)
    except RuntimeError as error:
        assert "rowwise: " in str(error)  # noqa: PT017 - either outcome is right
    assert arena.intact()
    assert state.intact()


@pytest.mark.slow
def test_sizes_past_any_memory_are_an_error_and_not_a_crash():
    """In another process, as the failure would be its end."""
    code = """
import torch
import rowwise.tables.ops
ops = torch.ops.rowwise
def features(*rows): return torch.tensor([(*row, 0, 0)[:9] for row in rows], dtype=torch.int64).view(-1, 9)
none, one, bounds = torch.empty(0, dtype=torch.int64), torch.tensor([1]), torch.tensor([0, 1])
arena, wrap = torch.zeros(256, dtype=torch.uint8), (1 << 62) + (1 << 16)
most = (1 << 31) - 1
calls = {
    "no memory": lambda: ops.zeros((1 << 60) - 1),
    "negative": lambda: ops.zeros(-1),
    "gather": lambda: ops.gather(ops.zeros(1 << 22), features(*[(0, 0, 0, 1, 1 << 20, 0, 0)] * 64),
                                 torch.zeros(1 << 20, dtype=torch.int64), torch.tensor([0, 1 << 20]), 1),
    "large output": lambda: ops.pool(arena, features(), none, torch.tensor([0]), None, 1 << 30, 1 << 30),
    "negative columns": lambda: ops.pool(arena, features((0, 0, 0, 8, 8, 1 << 45, 0)), one, bounds, None, 1, -1),
    "columns that wrap": lambda: ops.pool(arena, features((0, 0, 0, 8, 8, 1 << 45, 0)), one, bounds, None, 1, wrap),
    "less that wrap": lambda: ops.pool(arena, features((0, 0, 0, 8, 8, 0, 0)), one, bounds, None, 1, wrap - (1 << 63)),
    "rows that wrap": lambda: ops.gather(ops.zeros(1 << 32), features(*[(0, 0, 0, 1, 1 << 30, 0, 0)] * (1 << 14)),
                                         torch.zeros(1 << 20, dtype=torch.int64), torch.tensor([0, 1 << 20]), 1),
    "batch that wraps": lambda: ops.pool(arena, features(), none, torch.tensor([0]), None, wrap, 1),
    "rows of bytes that wrap": lambda: ops.pool(arena, features((0, 0, 0, 1 << 61, 8, 0, 0)), one, bounds, None, 1, 8),
    "widest row": lambda: ops.pool(arena, features((0, 0, 0, 1, most, 0, 0, 3, 16)), one, bounds, None, 1, most),
    "groups of the widest": lambda: ops.unpack(torch.zeros(1, 8).byte(), most, 16),
}
for name, call in calls.items():
    try:
        call()
    except (RuntimeError, MemoryError):
        print(name, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"after {done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"
    assert done.stdout.count("\n") == 12
