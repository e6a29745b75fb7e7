"""Tables: what is refused when one is made or read, and that JSON gives the same table back."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import Adagrad, Constant, Normal, Pooling, RowWiseAdagrad, RowwiseError, Sgd, SpecError, Table, Uniform
from rowwise.spec import check_tables

positive = st.floats(0, 100, allow_nan=False)
optimizers = st.one_of(
    st.builds(Sgd, lr=positive, weight_decay=positive),
    st.builds(Adagrad, lr=positive, eps=st.floats(2.0**-126, 100), weight_decay=positive, initial=positive),
    st.builds(RowWiseAdagrad, lr=positive, eps=st.floats(2.0**-126, 100), weight_decay=positive, initial=positive),
)
inits = st.one_of(
    st.builds(Uniform, bound=st.none() | positive),
    st.builds(Normal, std=positive),
    st.builds(Constant, value=st.floats(-100, 100)),
)
names = st.text(min_size=1, max_size=12).filter(lambda s: not set("./\\\0") & set(s))
tables = st.builds(
    Table,
    name=names,
    rows=st.integers(1, (1 << 40) - 1),
    dim=st.integers(1, 4096),
    features=st.lists(names, unique=True, max_size=4).map(tuple),
    pooling=st.sampled_from(Pooling),
    optimizer=optimizers,
    init=inits,
    unknown=st.sampled_from(["raise", "last_row"]),
)


def written(**changes) -> bytes:
    return msgspec.json.encode({"name": "t", "rows": 10, "dim": 4} | changes)


@given(tables)
def test_json_round_trip(table):
    assert msgspec.json.decode(msgspec.json.encode(table), type=Table) == table


@given(tables)
def test_tables_are_values(table):
    same = msgspec.structs.replace(table)
    assert same == table
    assert hash(same) == hash(table)
    with pytest.raises(AttributeError, match="immutable"):
        table.rows = 5


def test_defaults():
    table = Table(name="t", rows=10, dim=4)
    assert table.feature_names == ("t",)
    assert (table.pooling, table.optimizer, table.init, table.unknown) == ("sum", RowWiseAdagrad(), Uniform(), "raise")
    assert msgspec.json.decode(written(), type=Table) == table
    assert Table(name="t", rows=10, dim=4, features=("a", "b")).feature_names == ("a", "b")


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", "/", "a\0", "user.id", "."])
def test_name_is_a_file_name(name):
    with pytest.raises(SpecError, match="want one without dots and slashes"):
        Table(name=name, rows=10, dim=4)


@pytest.mark.parametrize(("rows", "dim"), [(0, 4), (-1, 4), (10, 0), (10, -4)])
def test_sizes(rows, dim):
    with pytest.raises(SpecError, match=f"table 't' is {rows} x {dim}: want at least one row and one column"):
        Table(name="t", rows=rows, dim=dim)


def test_most_rows():
    assert Table(name="t", rows=(1 << 40) - 1, dim=1).rows == (1 << 40) - 1
    with pytest.raises(SpecError, match=r"table 't' has 1099511627776 rows: .* hash the ids"):
        Table(name="t", rows=1 << 40, dim=1)


def test_feature_named_twice():
    with pytest.raises(SpecError, match="table 't' names a feature twice: a, b, a"):
        Table(name="t", rows=10, dim=4, features=("a", "b", "a"))


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), -float("inf"), 1e39])
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (Sgd, "lr"),
        (Sgd, "weight_decay"),
        (Adagrad, "lr"),
        (Adagrad, "eps"),
        (Adagrad, "initial"),
        (RowWiseAdagrad, "eps"),
        (RowWiseAdagrad, "weight_decay"),
        (Uniform, "bound"),
        (Normal, "std"),
    ],
)
def test_numbers_are_finite_and_not_negative(kind, field, value):
    place = "init" if kind in (Uniform, Normal) else "optimizer"
    with pytest.raises(SpecError, match=f"table 't': {field}=.*: want a finite number that is not negative"):
        Table(name="t", rows=10, dim=4, **{place: kind(**{field: value})})


def test_constant_may_be_negative_but_finite():
    assert Table(name="t", rows=10, dim=4, init=Constant(value=-1.0)).init.value == -1.0
    with pytest.raises(SpecError, match="table 't': value=nan"):
        Table(name="t", rows=10, dim=4, init=Constant(value=float("nan")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row": 10}, "unknown field `row`"),
        ({"optimizer": {"kind": "sgd", "learning_rate": 1}}, r"unknown field `learning_rate` - at `\$.optimizer`"),
        ({"optimizer": {"kind": "adamm"}}, "Invalid value 'adamm'"),
        ({"init": {"kind": "uniform", "std": 1}}, "unknown field `std`"),
        ({"rows": "10"}, r"Expected `int`, got `str` - at `\$.rows`"),
        ({"rows": 10.5}, r"Expected `int`, got `float` - at `\$.rows`"),
        ({"pooling": "max"}, "Invalid enum value 'max'"),
        ({"unknown": "ignore"}, "Invalid enum value 'ignore'"),
        ({"features": "a"}, r"Expected `array`, got `str` - at `\$.features`"),
        ({"rows": 0}, "table 't' is 0 x 4"),
        ({"name": "a/b"}, "want one without dots and slashes"),
    ],
)
def test_reading_is_strict(changes, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(written(**changes), type=Table)


def test_missing_key():
    with pytest.raises(msgspec.ValidationError, match="missing required field `dim`"):
        msgspec.json.decode(b'{"name": "t", "rows": 10}', type=Table)


def table(name: str, *features: str) -> Table:
    return Table(name=name, rows=10, dim=4, features=features)


def test_check_tables_accepts_distinct_names():
    check_tables([table("a"), table("b", "x", "y"), table("c", "z")])
    check_tables([table("a", "b"), table("b", "a")])  # tables and features are named apart


@pytest.mark.parametrize(
    ("given_tables", "message"),
    [
        ([], "no tables: want at least one"),
        ([table("a"), table("b"), table("a", "x")], "table 'a' is named twice"),
        ([table("a", "x"), table("b", "y", "x")], "feature 'x' is named twice"),
        ([table("a"), table("b", "a")], "feature 'a' is named twice"),
    ],
)
def test_check_tables_refuses(given_tables, message):
    with pytest.raises(SpecError, match=message):
        check_tables(given_tables)


def test_spec_errors_are_value_errors_of_ours():
    assert issubclass(SpecError, ValueError)
    assert issubclass(SpecError, RowwiseError)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 10.5}, "rows=10.5: want a whole number"),
        ({"dim": True}, "dim=True: want a whole number"),
        ({"features": "ab"}, "features='ab': want a tuple of names"),
        ({"pooling": "max"}, "pooling='max': want one of 'sum', 'mean', 'weighted', 'sequence'"),
        ({"unknown": "maybe"}, "unknown='maybe': want 'raise' or 'last_row'"),
        ({"optimizer": RowWiseAdagrad(eps=0)}, "eps=0: want more than 0"),
        ({"optimizer": Adagrad(eps=1e-50)}, "eps=1e-50: want more than 0 in 32 bits"),
    ],
)
def test_code_is_held_to_the_types_of_files(wrong, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        Table(**{"name": "t", "rows": 10, "dim": 4, **wrong})


def test_pooling_by_name():
    assert Table(name="t", rows=10, dim=4, pooling="sequence").pooling is Pooling.SEQUENCE
