"""Rows in 16 and 8 bits: rounding that keeps the expectation, the noise behind it, packing, and state dicts.

A row type is a way in and out of float32 arithmetic, so a float32 table that starts from the same rows and sees the
same gradients is the oracle: what it holds after a step is what the stored rows round.
"""

import copy
import io
import math
import re

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import OPTIMIZERS, ROW_TYPES, make_problem
from table_state import everything, outputs, same
from torch import nn

from rowwise import (
    Adagrad,
    Adam,
    Constant,
    Embeddings,
    Jagged,
    Normal,
    Pooling,
    RowType,
    Schedule,
    Sgd,
    StateError,
    Table,
    Uniform,
)
from rowwise.tables.ops import reference, rowtype

ops = torch.ops.rowwise
NARROW = ROW_TYPES[1:]
HALVES = (RowType.FP16, RowType.BF16)
MOST = {RowType.FP16: 65504.0, RowType.BF16: 2.0**127 * (2 - 2.0**-7), RowType.INT8: float(np.float32(1e38))}


def table(row_type: RowType, column_group=None, **changes) -> Table:
    kept = {"name": "t", "rows": 50, "dim": 20, "pooling": Pooling.SEQUENCE, "optimizer": Sgd(lr=1.0)}
    return Table(**(kept | {"row_type": row_type, "column_group": column_group} | changes))


def step(embeddings: Embeddings, grads: torch.Tensor, ids: torch.Tensor | None = None) -> None:
    """Give some rows of a sequence table, or all, their gradients."""
    ids = torch.arange(len(grads)) if ids is None else ids
    jagged = Jagged(features=("t",), values_N=ids, lengths_FB=torch.tensor([len(ids)]))
    embeddings(jagged)["t"].backward(grads)
    embeddings.update()


def set_rows(embeddings: Embeddings, rows: torch.Tensor) -> None:
    t = embeddings.tables[0]
    embeddings.table("t").copy_(rowtype.pack(rows, t.row_type, t.column_group))


def rounded(x: float, row_type: RowType, seed=0, rows=1000, dim=20) -> torch.Tensor:
    """What `x` became in each column of many rows."""
    embeddings = Embeddings([table(row_type, rows=rows, dim=dim, init=Constant(value=0.0))], seed=seed)
    step(embeddings, torch.full((rows, dim), -x))
    return embeddings.weights("t")


def neighbours(x: float, row_type: RowType) -> tuple[float, float, float]:
    """The largest number of the type that is not above a magnitude, the next one, and a finer multiple of both."""
    digits, smallest = (10, -24) if row_type is RowType.FP16 else (7, -133)
    spacing = 2.0 ** max(smallest, math.floor(math.log2(abs(x))) - digits) if x else 2.0**smallest
    low = math.floor(abs(x) / spacing) * spacing
    return math.copysign(low, x), math.copysign(low + spacing, x), spacing


# Rounding

NUMBERS = [
    1.0 + 0.3 * 2.0**-10,
    -1.0 - 0.7 * 2.0**-8,
    0.1,
    -1234.567,
    60000.1,
    1e-4,  # just above halves that are multiples of 2^-24
    2.0**-14 * 0.9999,
    3.3e-5,
    -1e-6,
    2.0**-24 * 1.25,
    2.0**-24 * 0.75,  # less than the smallest half
    -3e-9,
    7e-20,  # nothing as a half
    1e-39,  # and below float32's normal numbers
]


@pytest.mark.parametrize("row_type", HALVES)
@pytest.mark.parametrize("x", NUMBERS)
def test_rounding_is_to_a_neighbour_and_unbiased(x, row_type):
    """The mean over rows, columns and seeds is the number, within five standard errors and 2^-13 of a step."""
    x = float(np.float32(x))
    found = torch.cat([rounded(x, row_type, seed) for seed in range(5)]).double()
    low, high, spacing = neighbours(x, row_type)
    assert set(found.unique().tolist()) <= {low, high}
    share = abs(x - low) / spacing
    error = spacing * math.sqrt(share * (1 - share) / found.numel())
    assert abs(float(found.mean()) - x) <= 5 * error + spacing * 2.0**-13
    if 0.01 < share < 0.99:
        assert len(found.unique()) == 2


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("x", [0.0137, -0.61, 0.999, 1e-5, -1e-9])
def test_rounding_of_codes_is_to_a_neighbour_and_unbiased(x, group):
    """Two columns of each group hold its range; the others round between codes."""
    dim, rows = 64, 500
    w = torch.full((rows, dim), x)
    ends = torch.arange(0, dim, 16)
    w[:, ends], w[:, ends + 1] = -1.0, 1.0
    others = [c for c in range(dim) if c % 16 > 1]
    found = []
    for seed in range(4):
        t = table(RowType.INT8, group, rows=rows, dim=dim, init=Constant(value=0.0))
        embeddings = Embeddings([t], seed=seed)
        step(embeddings, -w)
        rows_ND = embeddings.weights("t").double()
        torch.testing.assert_close(rows_ND[:, ends], torch.full((rows, 4), -1.0).double(), atol=1e-6, rtol=0)
        torch.testing.assert_close(rows_ND[:, ends + 1], torch.full((rows, 4), 1.0).double(), atol=1e-6, rtol=0)
        found.append(rows_ND[:, others])
    found = torch.cat(found)
    spacing = 2.0 / 255
    low = math.floor((x + 1) / spacing) * spacing - 1
    assert float((found - x).abs().max()) <= spacing * (1 + 1e-5)
    assert len(found.unique()) == 2
    share = (x - low) / spacing
    assert abs(float(found.mean()) - x) <= 5 * spacing * math.sqrt(share * (1 - share) / found.numel()) + 1e-7


@pytest.mark.parametrize(("row_type", "tiny"), [(RowType.FP16, 2.0**-14), (RowType.BF16, 2.0**-11)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_steps_that_nearest_rounding_would_lose_arrive(row_type, tiny, sign):
    steps, rows, dim = 100, 500, 20
    embeddings = Embeddings([table(row_type, rows=rows, dim=dim, init=Constant(value=1.5))])
    for _ in range(steps):
        step(embeddings, torch.full((rows, dim), -sign * tiny))
    assert rowtype.pack(torch.tensor([[1.5 + sign * tiny]]), row_type).float().item() == 1.5
    spacing = neighbours(1.5, row_type)[2]
    deviation = spacing * math.sqrt(steps * (tiny / spacing) * (1 - tiny / spacing) / (rows * dim))
    assert abs(float(embeddings.weights("t").double().mean()) - (1.5 + sign * steps * tiny)) < 5 * deviation


def test_steps_that_nearest_codes_would_lose_arrive():
    steps, rows, dim = 100, 500, 16
    embeddings = Embeddings([table(RowType.INT8, rows=rows, dim=dim, init=Constant(value=0.25))])
    w = torch.full((rows, dim), 0.25)
    w[:, 0], w[:, 1] = -1.0, 1.0
    set_rows(embeddings, w)
    before = embeddings.weights("t")[:, 2:].double().mean()
    tiny, spacing = 1e-3, 2.0 / 255
    grads = torch.full((rows, dim), -tiny)
    grads[:, :2] = 0.0
    for _ in range(steps):
        step(embeddings, grads)
    moved = float(embeddings.weights("t")[:, 2:].double().mean() - before)
    deviation = spacing * math.sqrt(steps * (tiny / spacing) * (1 - tiny / spacing) / (rows * (dim - 2)))
    assert abs(moved - steps * tiny) < 5 * deviation + 1e-5


@pytest.mark.parametrize(("row_type", "group"), NARROW)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_training_is_float32s_within_a_step_of_the_row_type(optimizer, row_type, group):
    """Every weight is one of the two neighbours of what float32 rows become."""
    narrow = table(row_type, group, optimizer=optimizer, dim=100, init=Uniform(bound=0.5))
    wide = msgspec.structs.replace(narrow, row_type=RowType.FP32, column_group=None)
    one, two = Embeddings([narrow]), Embeddings([wide])
    for number in range(3):
        two.table("t").copy_(one.weights("t"))
        grads = torch.randn(50, 100, generator=torch.Generator().manual_seed(number))
        for embeddings in (one, two):
            step(embeddings, grads)
        found, wanted = one.weights("t"), two.table("t")
        if row_type in HALVES:
            dtype = rowtype.dtype_of(row_type)
            below, above = (
                torch.nextafter(wanted.to(dtype), torch.full((), end, dtype=dtype)).float()
                for end in (-math.inf, math.inf)
            )
            nearest = wanted.to(dtype).float()
            low = torch.where(nearest <= wanted, nearest, below)
            high = torch.where(nearest >= wanted, nearest, above)
            assert ((found == low) | (found == high)).all()
        else:
            scales = one.table("t")[:, : 8 * -(-100 // (group or 100))].clone().view(torch.float32)[:, 0::2]
            column_scale = scales[:, torch.arange(100) // (group or 100)]
            assert ((found - wanted).abs() <= column_scale * (1 + 1e-4)).all()
        assert not torch.equal(found, wanted)
        for name, state in one.optimizer_state()["t"].items():
            assert torch.equal(state, two.optimizer_state()["t"][name])  # state is in float32 whatever the rows are


@pytest.mark.parametrize(("row_type", "group"), NARROW)
def test_weights_past_the_range_become_its_end(row_type, group):
    most = MOST[row_type]
    for pushed in (2.0, 1e3, 3e38):
        embeddings = Embeddings([table(row_type, group, rows=3, dim=32, init=Constant(value=0.0))])
        grads = torch.zeros(3, 32)
        grads[1] = -min(most * pushed, 3.4e38)
        grads[2] = -grads[1]
        for _ in range(2):
            step(embeddings, grads)
        wanted = torch.tensor([0.0, most, -most]).unsqueeze(1).expand(3, 32)
        assert torch.equal(embeddings.weights("t"), wanted)


@pytest.mark.parametrize("row_type", HALVES)
def test_what_the_type_holds_stays(row_type):
    """Every number of the type, by a gradient of zero and by steps from one to another."""
    dtype = rowtype.dtype_of(row_type)
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = every[every.isfinite()]
    rows = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).view(-1, 64)
    embeddings = Embeddings([table(row_type, rows=len(rows), dim=64)])
    embeddings.table("t").copy_(rows)
    step(embeddings, torch.zeros(rows.shape))
    assert torch.equal(embeddings.table("t"), rows)
    step(embeddings, rows.float())  # to zero: x - x is exact
    assert not embeddings.table("t").any()
    step(embeddings, -rows.float())
    assert torch.equal(embeddings.table("t"), rows)


@pytest.mark.slow
def test_codes_that_a_gradient_of_zero_reaches_hardly_change_and_do_not_drift():
    """Scale and offset are found anew each time, with rounding errors far below a code."""
    rows, dim, steps = 4000, 64, 200
    w = torch.rand(rows, dim, generator=torch.Generator().manual_seed(0))
    w[:, 0] = -1.0  # so that most codes are large ones
    embeddings = Embeddings([table(RowType.INT8, rows=rows, dim=dim)])
    set_rows(embeddings, w)
    up = down = 0
    for _ in range(steps):
        before = embeddings.table("t")[:, 8:].to(torch.int16)
        step(embeddings, torch.zeros(rows, dim))
        moved = embeddings.table("t")[:, 8:].to(torch.int16) - before
        assert int(moved.abs().max()) <= 1
        up, down = up + int((moved > 0).sum()), down + int((moved < 0).sum())
    assert up + down < 1e-4 * steps * rows * dim
    assert abs(up - down) < 4 * math.sqrt(up + down + 1), f"{up} codes went up and {down} down"


# The noise


def pattern(seed=0, name="t", steps=0, rows=400, dim=32, row_type=RowType.FP16) -> torch.Tensor:
    """Which weights half-way between two numbers went up."""
    t = table(row_type, name=name, features=("t",), rows=rows, dim=dim, init=Constant(value=1.0))
    embeddings = Embeddings([t], seed=seed)
    half = neighbours(1.0, row_type)[2] / 2
    for number in range(steps + 1):
        embeddings.table(name).fill_(1.0)
        step(embeddings, torch.full((rows, dim), -half if number == steps else 0.0))
    return (embeddings.weights(name) > 1.0).double()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In standard errors."""
    a, b = a.flatten(), b.flatten()
    return abs(float(((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std()))) * math.sqrt(a.numel())


@pytest.mark.parametrize("row_type", HALVES)
def test_noise_differs_between_steps_rows_columns_tables_and_seeds(row_type):
    first = pattern(row_type=row_type)
    assert abs(float(first.mean()) - 0.5) < 5 * 0.5 / math.sqrt(first.numel())
    assert torch.equal(first, pattern(row_type=row_type))  # and is the same where they are
    others = {
        "step": pattern(steps=1, row_type=row_type),
        "later step": pattern(steps=7, row_type=row_type),
        "seed": pattern(seed=1, row_type=row_type),
        "table": pattern(name="u", row_type=row_type),
        "row": first.roll(1, 0),
        "far row": first.roll(64, 0),
        "column": first.roll(1, 1),
        "far column": first.roll(16, 1),
        "row and column": first.roll((1, 1), (0, 1)),
    }
    assert {what: c for what, other in others.items() if (c := correlation(first, other)) > 5} == {}
    for axis in (0, 1):  # as many up in each row and in each column as in a game of coins
        deviations = (first.mean(axis) - 0.5) / (0.5 / math.sqrt(first.shape[axis]))
        assert float(deviations.abs().max()) < 5
        assert 0.5 < float(deviations.square().mean()) < 2


def test_noise_of_codes_differs_between_rows_and_columns():
    rows, dim = 400, 32
    w = torch.full((rows, dim), 0.5)
    w[:, 0], w[:, 1] = 0.0, 255.0
    embeddings = Embeddings([table(RowType.INT8, rows=rows, dim=dim, init=Constant(value=0.0))])
    step(embeddings, -w)
    up = (embeddings.weights("t")[:, 2:] > 0.5).double()
    assert abs(float(up.mean()) - 0.5) < 5 * 0.5 / math.sqrt(up.numel())
    for moved in (up.roll(1, 0), up.roll(1, 1), up.roll((1, 1), (0, 1))):
        assert correlation(up, moved) < 5


def test_noise_depends_on_the_table_and_not_on_its_neighbours():
    """The same bits whatever stands beside a table, in which order, and with which features."""
    t = {
        name: Table(
            name=name,
            rows=60,
            dim=24,
            features=(f"{name}1", f"{name}2"),
            row_type=row_type,
            column_group=group,
            optimizer=optimizer,
        )
        for name, (row_type, group), optimizer in zip(
            "abcdef", ROW_TYPES, (Adam(), Sgd(lr=0.1), Adagrad(), Adam(clip=0.1), Adagrad(), Sgd(lr=0.1)), strict=True
        )
    }
    jagged = make_problem(tuple(t.values()), batch=40, most=4, seed=0).jagged
    orders = ["abcdef", "fedcba", "cabfed", *"abcdef", "ce", "fb"]
    first: dict[str, torch.Tensor] = {}
    for order in orders:
        embeddings = Embeddings([t[name] for name in order], seed=2)
        for number in range(3):
            found = embeddings(jagged)
            names = [f for table_ in embeddings.tables for f in table_.feature_names]
            sum(((number + k) * found[f]).cos().sum() for k, f in ((ord(f[0]), f) for f in names)).backward()
            embeddings.update()
        for name in order:
            assert torch.equal(embeddings.table(name), first.setdefault(name, embeddings.table(name).clone())), order


# Packing


def shapes():
    return st.tuples(st.integers(0, 20), st.integers(1, 150), st.sampled_from([None, 16, 32, 48, 64, 160]))


def some_rows(shape: tuple[int, int], seed: int, scale: float, shift: float) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + shift


def scales_of(packed: torch.Tensor, dim: int, group: int | None) -> torch.Tensor:
    """The scale of each column."""
    header = 8 * -(-dim // (group or dim))
    scales = packed[:, :header].clone().view(torch.float32).view(len(packed), header // 4)[:, 0::2]
    return scales[:, torch.arange(dim) // (group or dim)]


@given(shapes(), st.integers(0, 100), st.sampled_from([0.0, 1e-36, 1e-3, 1.0, 1e30]), st.sampled_from([0.0, 1.0, -7.5]))
@settings(max_examples=100)
def test_packing_errs_by_half_a_step_at_most(shape, seed, scale, shift):
    rows_n, dim, group = shape
    rows = some_rows((rows_n, dim), seed, scale, shift)
    packed = rowtype.pack(rows, RowType.INT8, group)
    assert packed.shape == (rows_n, table(RowType.INT8, group, dim=dim).row_bytes)
    found = rowtype.unpack(packed, dim, RowType.INT8, group)
    column_scales = scales_of(packed, dim, group)
    bound = (
        column_scales * 0.5 + rows.abs() * 2e-7 + column_scales * 255 * 2e-7 + 255 * 2.0**-126
    )  # narrower rows are flat
    assert ((found - rows).abs() <= bound).all()
    low, high = (f(rows, 1).values if rows_n else rows.new_empty(0) for f in (torch.min, torch.max))
    if not group and rows_n:  # scales are as narrow as they can be
        torch.testing.assert_close(column_scales[:, 0], (high - low) / 255, rtol=1e-6, atol=2.0**-125)


@pytest.mark.usefixtures("isa")
@given(shapes(), st.integers(0, 100), st.sampled_from([0.0, 1e-38, 1.0, 3e37]), st.floats(0, 0.05))
def test_packing_is_the_references(shape, seed, scale, broken):
    """With numbers that are none, infinite, negative zeros, and past what a scale can span."""
    rows_n, dim, group = shape
    rows = some_rows((rows_n, dim), seed, scale, 0.0)
    chance = torch.rand(rows_n, dim, generator=torch.Generator().manual_seed(seed + 1))
    for index, value in enumerate((math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, -0.0, 0.0, 1e-45)):
        rows[(chance > index * broken / 8) & (chance < (index + 1) * broken / 8)] = value
    mine, theirs = ops.pack(rows, group or 0), reference.pack(rows, group or 0)
    assert torch.equal(mine, theirs)
    found, wanted = ops.unpack(mine, dim, group or 0), reference.unpack(mine, dim, group or 0)
    assert torch.equal(found.view(torch.int32)[~found.isnan()], wanted.view(torch.int32)[~found.isnan()])
    assert torch.equal(found.isnan(), wanted.isnan())


@given(shapes(), st.floats(-(2.0**123), 2.0**123, width=32))
def test_rows_of_one_number_are_kept_exactly(shape, value):
    rows_n, dim, group = shape
    rows = torch.full((rows_n, dim), value)
    packed = rowtype.pack(rows, RowType.INT8, group)
    assert torch.equal(rowtype.unpack(packed, dim, RowType.INT8, group), rows)
    assert not scales_of(packed, dim, group).any()


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 17, 36])
def test_a_row_that_is_not_finite_comes_back_as_nan(bad, column, group):
    """All of it, and none of the others."""
    rows = torch.randn(5, 37, generator=torch.Generator().manual_seed(0))
    rows[2, column] = bad
    found = rowtype.unpack(rowtype.pack(rows, RowType.INT8, group), 37, RowType.INT8, group)
    assert found[2].isnan().all()
    assert found[[0, 1, 3, 4]].isfinite().all()


@given(shapes(), st.integers(0, 100))
def test_packing_twice_is_packing_once(shape, seed):
    rows_n, dim, group = shape
    rows = some_rows((rows_n, dim), seed, 1.0, 0.3)
    once = rowtype.unpack(rowtype.pack(rows, RowType.INT8, group), dim, RowType.INT8, group)
    twice = rowtype.unpack(rowtype.pack(once, RowType.INT8, group), dim, RowType.INT8, group)
    torch.testing.assert_close(twice, once, rtol=0, atol=2e-6)


@pytest.mark.parametrize("row_type", HALVES)
def test_packing_to_halves_is_torchs(row_type):
    rows = torch.tensor([[1.0, 1 + 2.0**-11, 1e6, math.nan, -math.inf, 1e-8]])
    dtype = rowtype.dtype_of(row_type)
    packed = rowtype.pack(rows, row_type)
    assert packed.dtype == dtype
    assert torch.equal(packed.view(torch.int16), rows.to(dtype).view(torch.int16))
    again = rowtype.unpack(packed, 6, row_type)
    assert again.dtype == torch.float32
    assert torch.equal(again.isnan(), rows.isnan())


@given(st.integers(0, 1000), st.sampled_from([16, 32, 48]), st.integers(0, 2))
@settings(max_examples=20)
def test_columns_of_one_group_do_not_touch_another(seed, group, which):
    """Whatever happens to a group, the bytes of the others are the same."""
    dim = 3 * group - 5
    t = table(RowType.INT8, group, dim=dim, rows=30, init=Uniform(bound=0.5))
    g = torch.Generator().manual_seed(seed)
    grads = torch.randn(2, 30, dim, generator=g)
    mine = slice(which * group, (which + 1) * group)
    grads[1][:, mine] = torch.randn(30, dim, generator=g)[:, mine] * 100
    grads[1][:, [c for c in range(dim) if c // group != which]] = grads[0][
        :, [c for c in range(dim) if c // group != which]
    ]
    found = []
    for grad in grads:
        embeddings = Embeddings([t])
        step(embeddings, grad)
        found.append(embeddings.table("t").clone())
    header = 3 * 8
    same_scales = (found[0][:, :header] == found[1][:, :header]).view(30, 3, 8).all(2).all(0)
    codes = (found[0][:, header : header + dim] == found[1][:, header : header + dim]).all(0)
    assert same_scales.tolist() == [k != which for k in range(3)]
    assert codes[[c for c in range(dim) if c // group != which]].all()
    assert not codes[mine].all()


def test_bytes_between_codes_stay_zero():
    """A row is padded to whole floats; saved files hold nothing by chance."""
    embeddings = Embeddings([table(RowType.INT8, dim=21)])
    for number in range(3):
        step(embeddings, torch.randn(50, 21, generator=torch.Generator().manual_seed(number)))
    assert embeddings.table("t").shape == (50, 8 + 24)
    assert not embeddings.table("t")[:, 8 + 21 :].any()


# Tables


@pytest.mark.parametrize("init", [Uniform(), Normal(std=0.3), Constant(value=0.1)], ids=str)
@pytest.mark.parametrize(("row_type", "group"), NARROW)
def test_initial_rows_are_those_of_float32_rounded(row_type, group, init):
    one = Embeddings([table(row_type, group, init=init, rows=300)], seed=4)
    two = Embeddings([table(RowType.FP32, init=init, rows=300)], seed=4)
    wanted = rowtype.pack(two.table("t"), row_type, group)
    assert torch.equal(one.table("t").view(torch.uint8), wanted.view(torch.uint8))


def test_initial_rows_of_many_pieces(monkeypatch):
    whole = Embeddings([table(RowType.INT8, 16, rows=300, dim=40)])
    monkeypatch.setattr("rowwise.tables.ops.arena.CHUNK", 1 << 10)
    assert torch.equal(Embeddings([table(RowType.INT8, 16, rows=300, dim=40)]).table("t"), whole.table("t"))


@pytest.mark.parametrize(("row_type", "group"), ROW_TYPES)
def test_rows_as_stored_and_as_floats(row_type, group):
    embeddings = Embeddings([table(row_type, group, dim=50)])
    stored, weights = embeddings.table("t"), embeddings.weights("t")
    assert stored.dtype == rowtype.dtype_of(row_type)
    assert stored.nbytes == 50 * embeddings.tables[0].row_bytes
    assert (weights.dtype, weights.shape) == (torch.float32, (50, 50))
    assert (weights.data_ptr() == stored.data_ptr()) == (row_type is RowType.FP32)
    looked_up = embeddings(Jagged.from_lists({"t": [list(range(50))]}))["t"]
    assert torch.equal(looked_up, weights)
    assert not any(p.requires_grad for p in embeddings.parameters())


# State dicts

MIXED = tuple(
    Table(
        name=f"t{k}",
        rows=30,
        dim=20,
        features=(f"{k}a", f"{k}b"),
        row_type=row_type,
        column_group=group,
        optimizer=OPTIMIZERS[k],
        pooling=Pooling.SEQUENCE if k % 2 else Pooling.SUM,
    )
    for k, (row_type, group) in enumerate(ROW_TYPES)
)


def train(embeddings: Embeddings, steps, tables=None) -> None:
    for number in steps:
        jagged = make_problem(tables or embeddings.tables, batch=16, most=3, seed=number).jagged
        outs = outputs(embeddings, jagged)
        # Not a line in x: rows that only stretch and move keep their codes, whatever the noise.
        torch.autograd.backward(outs, [(20 * x.detach() + number).cos() / 10 for x in outs])
        embeddings.update()


def through_a_file(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("keep", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("inside", [False, True])
def test_state_dicts_of_all_row_types_at_once(inside, keep):
    """Exactly, through memory and through a file, alone and as a part of a model."""
    source, target = Embeddings(MIXED, seed=1), Embeddings(MIXED, seed=2)
    train(source, range(2))
    saved = keep((nn.Sequential(source).state_dict() if inside else source.state_dict(), source.optimizer_state()))
    (nn.Sequential(target) if inside else target).load_state_dict(saved[0])
    target.load_optimizer_state(saved[1])
    same(everything(target), everything(source))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("naming", ["{}", "{}.weight", "embedding_bags.{}.weight"])
def test_float_rows_are_taken_by_tables_of_any_row_type(naming, dtype):
    """To the nearest: a checkpoint of nn.EmbeddingBag becomes 16-bit and int8 rows."""
    rows = {t.name: torch.randn(30, 20, generator=torch.Generator().manual_seed(1)).to(dtype) for t in MIXED}
    embeddings = Embeddings(MIXED)
    state = {naming.format(name): x for name, x in rows.items()}
    embeddings.load_state_dict(state)
    assert all(torch.equal(state[naming.format(name)], x) for name, x in rows.items())  # the caller's is left alone
    for t in MIXED:
        wanted = rowtype.pack(rows[t.name], t.row_type, t.column_group)
        assert torch.equal(embeddings.table(t.name), wanted)
        step_ = 0.05 if t.row_type is RowType.INT8 else 2.0**-6
        torch.testing.assert_close(embeddings.weights(t.name), rows[t.name].float(), atol=step_, rtol=0)


UINT8 = torch.uint8
OTHER_ROWS = [  # a table's rows, and rows that are not its own
    (RowType.FP32, None, (50, 20), torch.float32, (50, 20), UINT8),
    (RowType.FP16, None, (50, 20), torch.float16, (50, 20), UINT8),
    (RowType.BF16, None, (50, 20), torch.bfloat16, (50, 40), UINT8),
    (RowType.INT8, None, (50, 28), UINT8, (50, 20), UINT8),
    (RowType.INT8, 16, (50, 36), UINT8, (50, 28), UINT8),
    (RowType.INT8, None, (50, 28), UINT8, (50, 28), torch.float32),
    (RowType.INT8, None, (50, 28), UINT8, (51, 20), torch.float32),
    (RowType.INT8, None, (50, 28), UINT8, (50, 20), torch.int64),
    (RowType.FP32, None, (50, 20), torch.float32, (50, 20), torch.int8),
    (RowType.FP16, None, (50, 20), torch.float16, (50, 20), torch.int64),
    (RowType.BF16, None, (50, 20), torch.bfloat16, (50, 20), torch.bool),
    (RowType.FP32, None, (50, 20), torch.float32, (50, 20), torch.complex64),
]


@pytest.mark.parametrize(("row_type", "group", "shape", "dtype", "other_shape", "other_dtype"), OTHER_ROWS, ids=str)
def test_rows_of_another_kind_are_refused_by_name(row_type, group, shape, dtype, other_shape, other_dtype):
    embeddings = Embeddings([table(row_type, group)])
    before = everything(embeddings)
    message = f"table 't': got {other_shape} of {other_dtype}: expected {shape} of {dtype}"
    with pytest.raises(StateError, match=re.escape(message)):
        embeddings.load_state_dict({"t": torch.zeros(other_shape, dtype=other_dtype)})
    same(everything(embeddings), before)


MOVES = {
    "to cpu": lambda m: m.to("cpu"),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "cpu and float": lambda m: m.cpu().float(),
    "double inside": lambda m: nn.Sequential(m).double()[0],
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("move", MOVES)
def test_moves_and_copies_keep_the_row_types(move):
    one, two = (Embeddings(MIXED, seed=1) for _ in range(2))
    train(one, range(2))
    train(two, range(2))
    moved = MOVES[move](one)
    assert (moved is one) == (move != "copy")
    same(everything(moved), everything(two))
    train(moved.float(), range(2, 4))  # `half` and `double` change the type of vectors
    train(two, range(2, 4))
    same(everything(moved), everything(two))
    for t in MIXED:
        assert torch.equal(moved.state_dict()[t.name], moved.table(t.name))


RESUMED = [
    *OPTIMIZERS,
    Sgd(lr=0.1, schedule=Schedule(warmup_steps=6, decay_start=8, decay_steps=8)),
    Adam(lr=0.1, schedule=Schedule(decay_steps=30, shape="cosine")),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", RESUMED, ids=lambda o: type(o).__name__)
def test_resuming_gives_the_bits_of_an_uninterrupted_run(optimizer):
    """For every row type; of pooled tables, and of sequences, whose steps are counted apart."""
    tables = tuple(msgspec.structs.replace(t, optimizer=optimizer) for t in MIXED)
    straight, before = Embeddings(tables, seed=7), Embeddings(tables, seed=7)
    train(straight, range(20))
    train(before, range(10))
    saved = copy.deepcopy((dict(before.state_dict()), before.optimizer_state()))
    resumed = Embeddings(tables, seed=7)
    resumed.load_state_dict(saved[0])
    resumed.load_optimizer_state(saved[1])
    train(resumed, range(10, 20))
    same(everything(resumed), everything(straight))
    assert all(int(s["step"]) == 20 for s in resumed.optimizer_state().values())
    # The steps are part of the state: without them noise, correction or rate would differ.
    forgot = Embeddings(tables, seed=7)
    forgot.load_state_dict(saved[0])
    forgot.load_optimizer_state({n: s | {"step": torch.tensor(0)} for n, s in saved[1].items()})
    train(forgot, range(10, 20))
    narrow = [t.name for t in tables if t.row_type is not RowType.FP32]
    assert not any(torch.equal(forgot.table(name), straight.table(name)) for name in narrow)
