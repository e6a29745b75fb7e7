"""Tables: what is refused when one is made or read, and that JSON gives the same table back."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import (
    Adagrad,
    Adam,
    Constant,
    Ftrl,
    Lamb,
    Normal,
    Pooling,
    RowType,
    RowWiseAdagrad,
    RowWiseAdam,
    RowwiseError,
    Schedule,
    Sgd,
    SpecError,
    Table,
    Topology,
    Uniform,
)
from rowwise.base.inside import fault_of_name
from rowwise.tables.row_optimizers import OPTIMIZERS
from rowwise.tables.spec import Codecs, Wire, check_tables, row_bytes

positive = st.floats(0, 100, allow_nan=False)
small = st.floats(2.0**-126, 100)
schedules = st.none() | st.builds(
    Schedule,
    warmup_steps=st.integers(0, 1 << 40),
    decay_start=st.integers(0, 1 << 40),
    decay_steps=st.integers(0, 1 << 40),
    shape=st.sampled_from(["linear", "cosine", "quadratic"]),
    end=positive,
)
common = {"lr": positive, "clip": st.none() | small}
decayed = {**common, "weight_decay": positive, "schedule": schedules}
moments = {**decayed, "eps": small, "beta1": st.floats(0, 1 - 2.0**-24), "beta2": st.floats(0, 1 - 2.0**-24)}
optimizers = st.one_of(
    st.builds(Sgd, **decayed),
    st.builds(Adagrad, **decayed, eps=small, initial=positive),
    st.builds(RowWiseAdagrad, **decayed, eps=small, initial=positive),
    st.builds(Adam, **moments),
    st.builds(RowWiseAdam, **moments),
    st.builds(Lamb, **moments),
    st.builds(Ftrl, **(common | {"lr": small}), l1=positive, l2=positive, beta=small, initial=positive),
    st.builds(Ftrl, beta=st.just(0.0), initial=small),
)
row_types = st.tuples(st.sampled_from(RowType), st.none()) | st.tuples(
    st.just(RowType.INT8), st.integers(1, 300).map(lambda n: 16 * n)
)
inits = st.one_of(
    st.builds(Uniform, bound=st.none() | positive),
    st.builds(Normal, std=positive),
    st.builds(Constant, value=st.floats(-100, 100)),
)
names = st.text(min_size=1, max_size=12).filter(lambda s: "." not in s and not fault_of_name(s))
tables = st.builds(
    lambda row_type, **fields: Table(row_type=row_type[0], column_group=row_type[1], **fields),
    row_type=row_types,
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
    assert (table.row_type, table.column_group, table.row_bytes) == (RowType.FP32, None, 16)
    assert msgspec.json.decode(written(), type=Table) == table
    assert Table(name="t", rows=10, dim=4, features=("a", "b")).feature_names == ("a", "b")


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", "/", "a\0", "user.id", "."])
def test_name_is_a_file_name(name):
    with pytest.raises(SpecError, match="without dots and slashes"):
        Table(name=name, rows=10, dim=4)


@pytest.mark.parametrize(("rows", "dim"), [(0, 4), (-1, 4), (10, 0), (10, -4)])
def test_sizes(rows, dim):
    with pytest.raises(SpecError, match=f"table 't' is {rows} x {dim}: expected at least one row and one column"):
        Table(name="t", rows=rows, dim=dim)


def test_most_rows():
    assert Table(name="t", rows=(1 << 40) - 1, dim=1).rows == (1 << 40) - 1
    with pytest.raises(SpecError, match="table 't' has 1099511627776"):
        Table(name="t", rows=1 << 40, dim=1)


def test_feature_named_twice():
    with pytest.raises(SpecError, match="'t' names a feature"):
        Table(name="t", rows=10, dim=4, features=("a", "b", "a"))


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), -float("inf"), 1e39])
@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, field) for kind in (*OPTIMIZERS.values(), Uniform, Normal) for field in kind.__struct_fields__
     if field != "schedule"],
)  # fmt: skip
def test_numbers_are_finite_and_not_negative(kind, field, value):
    place = "init" if kind in (Uniform, Normal) else "optimizer"
    with pytest.raises(SpecError, match=f"table 't': {field}=.*: expected a finite number that is not negative"):
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
        ({"row_type": "int3"}, "Invalid enum value 'int3'"),
        ({"row_type": "fp16", "column_group": 16}, "column_group=16 with rows of type 'fp16'"),
        ({"row_type": "int8", "column_group": 20}, "column_group=20 with rows of type 'int8'"),
        ({"row_type": "int8", "column_group": 16.5}, r"Expected `int \| null`, got `float` - at `\$.column_group`"),
        ({"optimizer": {"kind": "adam", "beta": 0.9}}, r"unknown field `beta` - at `\$.optimizer`"),
        ({"optimizer": {"kind": "adam", "beta1": 1.0}}, "beta1=1.0: expected less than 1"),
        ({"optimizer": {"kind": "ftrl", "schedule": {}}}, "unknown field `schedule`"),
        ({"optimizer": {"kind": "sgd", "schedule": {"warmup": 3}}}, r"unknown field `warmup` - at `\$.*schedule`"),
        ({"optimizer": {"kind": "sgd", "schedule": {"shape": "step"}}}, "Invalid enum value 'step'"),
        ({"optimizer": {"kind": "sgd", "schedule": {"decay_steps": -1}}}, "schedule: decay_steps=-1"),
        ({"optimizer": {"kind": "lamb", "clip": 0}}, "clip=0.0: expected more than 0"),
        ({"name": "a/b"}, "expected a name without dots"),
        ({"features": ("a", "\x07")}, "feature .*: expected a name without control characters"),
        ({"features": ("\x1b[2J",)}, r"feature '\\x1b\[2J': expected a name"),
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
        ([], "no tables: expected at least one"),
        ([table("a"), table("b"), table("a", "x")], "table 'a' is named twice"),
        ([table("a", "x"), table("b", "y", "x")], "feature 'x' is named twice"),
        ([table("a"), table("b", "a")], "feature 'a' is named twice"),
        ([table("a"), table("training")], "table name 'training': modules have an attribute of that name"),
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
        ({"rows": 10.5}, "rows=10.5: expected a whole number"),
        ({"dim": True}, "dim=True: expected a whole number"),
        ({"features": "ab"}, "features='ab': expected a tuple of names"),
        ({"pooling": "max"}, "pooling='max': expected one of 'sum', 'mean', 'weighted', 'sequence'"),
        ({"unknown": "maybe"}, "unknown='maybe': expected 'raise' or 'last_row'"),
        ({"optimizer": RowWiseAdagrad(eps=0)}, "eps=0: expected more than 0"),
        ({"optimizer": Adagrad(eps=1e-50)}, "eps=1e-50: expected more than 0 in 32 bits"),
        ({"optimizer": Adam(eps=0.0)}, "eps=0.0: expected more than 0 in 32 bits"),
        ({"optimizer": Adam(beta1=1.0)}, "beta1=1.0: expected less than 1 in 32 bits"),
        ({"optimizer": Lamb(beta2=1 - 1e-9)}, "beta2=0.999999999: expected less than 1 in 32 bits"),
        ({"optimizer": RowWiseAdam(beta2=1.5)}, "beta2=1.5: expected less than 1 in 32 bits"),
        ({"optimizer": Sgd(clip=0.0)}, "clip=0.0: expected more than 0 in 32 bits; None does not clip"),
        ({"optimizer": Ftrl(clip=1e-40)}, "clip=1e-40: expected more than 0 in 32 bits; None does not clip"),
        ({"optimizer": Ftrl(beta=0.0)}, "beta=0.0 and initial=0.0: expected at least one above 0"),
        (
            {"optimizer": Ftrl(beta=1e-40, initial=1e-40)},
            "beta=1e-40 and initial=1e-40: expected at least one above 0",
        ),
        ({"optimizer": Ftrl(lr=0.0)}, "lr=0.0: FTRL divides by it; expected more than 0"),
        ({"optimizer": Ftrl(lr=1e-39)}, "lr=1e-39: FTRL divides by it; expected more than 0"),
        (
            {"optimizer": Sgd(schedule=Schedule(warmup_steps=-1))},
            "schedule: warmup_steps=-1: expected a number that is not negative",
        ),
        ({"optimizer": Adam(schedule=Schedule(decay_start=-5))}, "schedule: decay_start=-5: expected a number"),
        ({"optimizer": Lamb(schedule=Schedule(decay_steps=-5))}, "schedule: decay_steps=-5: expected a number"),
        ({"optimizer": Adagrad(schedule=Schedule(end=-0.1))}, "schedule: end=-0.1: expected a number"),
        ({"optimizer": Adagrad(schedule=Schedule(end=float("nan")))}, "schedule: end=nan: expected a number"),
        ({"optimizer": Adagrad(schedule=Schedule(end=float("inf")))}, "schedule: end=inf: expected a number"),
        ({"row_type": "int3"}, "row_type='int3': expected one of 'fp32', 'fp16', 'bf16', 'int8', 'int4'"),
        ({"row_type": 8}, "row_type=8: expected one of 'fp32'"),
        ({"column_group": 16}, "column_group=16 with rows of type 'fp32': expected a multiple of 16, for rows of type"),
        ({"row_type": "fp16", "column_group": 16}, "column_group=16 with rows of type 'fp16'"),
        ({"row_type": "int8", "column_group": 0}, "column_group=0 with rows of type 'int8': expected a multiple of 16"),
        ({"row_type": "int8", "column_group": -16}, "column_group=-16 with rows of type 'int8'"),
        ({"row_type": "int8", "column_group": 24}, "column_group=24 with rows of type 'int8'"),
        ({"row_type": "int8", "column_group": 16.0}, "column_group=16.0 with rows of type 'int8'"),
        ({"row_type": "int8", "column_group": True}, "column_group=True with rows of type 'int8'"),
    ],
)
def test_code_is_held_to_the_types_of_files(wrong, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        Table(**{"name": "t", "rows": 10, "dim": 4, **wrong})


def test_pooling_by_name():
    assert Table(name="t", rows=10, dim=4, pooling="sequence").pooling is Pooling.SEQUENCE


def test_row_type_by_name():
    table = Table(name="t", rows=10, dim=40, row_type="int8", column_group=16)
    assert table.row_type is RowType.INT8
    assert table == msgspec.json.decode(written(dim=40, row_type="int8", column_group=16), type=Table)


@pytest.mark.parametrize(
    ("row_type", "dim", "group", "size"),
    [
        ("fp32", 7, None, 28),
        ("fp16", 7, None, 14),
        ("bf16", 7, None, 14),
        ("int8", 7, None, 8 + 8),
        ("int8", 64, None, 8 + 64),
        ("int8", 64, 16, 32 + 64),
        ("int8", 65, 16, 40 + 68),
        ("int8", 65, 128, 8 + 68),
    ],
)
def test_bytes_of_a_row(row_type, dim, group, size):
    table = Table(name="t", rows=10, dim=dim, row_type=row_type, column_group=group)
    assert table.row_bytes == row_bytes(RowType(row_type), dim, group or 0) == size


@given(schedules.filter(lambda s: s is not None))
def test_schedules_round_trip(schedule):
    assert msgspec.json.decode(msgspec.json.encode(schedule), type=Schedule) == schedule


@pytest.mark.parametrize(
    ("field", "value"),
    [("shape", "step"), ("warmup_steps", 2.5), ("warmup_steps", "3"), ("decay_steps", True), ("end", None)],
)
def test_schedules_in_code_are_held_to_the_types_of_files(field, value):
    schedule = Schedule(**{"decay_steps": 10, field: value})
    with pytest.raises(SpecError, match=rf"table 't': optimizer: .*schedule\.{field}"):
        Table(name="t", rows=10, dim=4, optimizer=Sgd(schedule=schedule))


@pytest.mark.parametrize(
    ("optimizer", "field"), [(Sgd(lr=None), "lr"), (Adam(beta1=None), "beta1"), (Ftrl(l1=None), "l1")], ids=str
)
def test_only_clip_bound_and_schedule_may_be_none(optimizer, field):
    with pytest.raises(SpecError, match=f"table 't': optimizer: Expected `float`, got `null` .*{field}"):
        Table(name="t", rows=10, dim=4, optimizer=optimizer)
    assert Table(name="t", rows=10, dim=4, optimizer=Sgd(clip=None, schedule=None), init=Uniform(bound=None))


@given(st.integers(1, 20), st.integers(1, 20))
def test_ranks_are_numbered_host_by_host(hosts, devices):
    topology = Topology(hosts=hosts, devices=devices)
    assert [rank for host in range(hosts) for rank in topology.ranks_of(host)] == list(range(topology.world))
    assert all(topology.host_of(rank) == host for host in range(hosts) for rank in topology.ranks_of(host))
    assert topology.link(0, devices - 1) == "host"
    assert hosts == 1 or topology.link(devices - 1, devices) == "network"


@pytest.mark.parametrize(("hosts", "devices"), [(0, 1), (1, 0), (2, -1)])
def test_a_topology_has_ranks(hosts, devices):
    with pytest.raises(SpecError, match=f"{hosts} hosts of {devices} devices: expected at least one of each"):
        Topology(hosts=hosts, devices=devices)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 3))
def test_near_ranks_and_links_are_those_of_groups_or_hosts(groups, devices):
    topology = Topology(hosts=sum(groups), devices=devices, groups=tuple(groups))
    near = topology.near_ranks
    assert [rank for ranks in near for rank in ranks] == list(range(topology.world))
    assert len(near) == (len(groups) if len(groups) > 1 else topology.hosts)
    far = "uplink" if len(groups) > 1 else "network"
    assert all((topology.link(a, b) == far) == (ranks != others) for ranks in near for others in near
               for a in ranks for b in others if a != b)  # fmt: skip
    ranks = range(topology.world)
    assert set(topology.links) == {topology.link(a, b) for a in ranks for b in ranks if a != b}


def test_a_wire_has_types_for_uplinks_or_those_of_the_network():
    narrow = Codecs(forward="int8", backward="fp16")
    assert Wire(network=narrow).codecs("uplink") == narrow
    wire = Wire(uplink=narrow)
    assert (wire.codecs("uplink"), wire.codecs("network")) == (narrow, Codecs())
    assert not wire.exact
    assert not wire.has_exact("backward")
    assert wire.has_exact_sums
    assert Wire(far="fp32").exact
    assert not Wire(far="int4").exact
    floats = "fp32 forward and fp32 back"
    racks = Topology(hosts=4, devices=2, groups=(2, 2))
    want = f"{floats} inside hosts, {floats} between them, int8 forward and fp16 back between groups"
    assert wire.in_words(racks) == want
    assert wire.in_words(Topology(hosts=4)) == Wire().in_words(racks) == floats
    assert wire.in_words(Topology()) == ""


def test_wires_take_types_by_name():
    wire = Wire(host=Codecs(forward="fp16"), dense="int8")
    assert (wire.host.forward, wire.dense, wire.exact) == (RowType.FP16, RowType.INT8, False)
    assert Wire(host=Codecs(forward="fp32", backward="fp32"), dense="fp32").exact
    with pytest.raises(SpecError, match="'fp32', 'fp16', 'bf16', 'int8'"):
        Codecs(backward="fp12")
    with pytest.raises(SpecError, match="Wire: dense='float'"):
        Wire(dense="float")
