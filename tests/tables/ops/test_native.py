"""A native library that was built from other sources is refused in one line, and all records agree."""

import re
from pathlib import Path
from types import SimpleNamespace

import problems
import pytest
import torch

from rowwise.base.errors import NativeError
from rowwise.tables.ops import native
from rowwise.tables.ops.reference.apply import REFERENCE, RowRule
from rowwise.tables.ops.rowtype import dtype_of
from rowwise.tables.row_optimizers import OPTIMIZERS
from rowwise.tables.spec import ROW_TYPES, TRAINED_TYPES, RowType, Table, state_width

CPP = Path(native.__file__).parent / "_cpp"


def built(without=(), **lists):
    names = {"row_types": ",".join(RowType), "optimizers": ",".join(OPTIMIZERS)} | lists
    operators = {name: object() for name in native.NAMES} | {name: lambda x=x: x for name, x in names.items()}
    return SimpleNamespace(**{name: x for name, x in operators.items() if name not in without})


def test_all_operators_of_the_sources_are_expected():
    found = [name for path in CPP.glob("*.cpp") for name in re.findall(r'm\.def\(\s*"(\w+)\(', path.read_text())]
    assert sorted(found) == sorted(native.NAMES)


def test_a_library_of_these_sources_is_taken():
    native.check_library(built(), Path("lib.so"))


@pytest.mark.parametrize(
    ("without", "named"),
    [(["take"], "take"), (native.NAMES[:5], "pool, pool_weight_grad, gather and 2 more")],
)
def test_a_library_that_lacks_operators_is_refused(without, named):
    with pytest.raises(NativeError) as caught:
        native.check_library(built(without), Path("lib.so"))
    got, way_out = "lib.so was built from other sources", "build it with `make build` or `pip install .`"
    assert str(caught.value) == f"{got}: it has no operator {named}; {way_out}"


@pytest.mark.parametrize(
    ("what", "names", "expected"),
    [
        ("row_types", "fp32,bf16,fp16,int8", RowType),
        ("row_types", "fp32,fp16,bf16", RowType),
        ("optimizers", "adam,sgd", OPTIMIZERS),
    ],
)
def test_a_library_with_other_enumerators_is_refused(what, names, expected):
    with pytest.raises(NativeError) as caught:
        native.check_library(built(**{what: names}), Path("lib.so"))
    got, way_out = "lib.so was built from other sources", "build it with `make build` or `pip install .`"
    assert str(caught.value) == f"{got}: its {what} are {names}: expected {','.join(expected)}; {way_out}"


def test_every_row_type_has_a_record():
    assert list(ROW_TYPES) == list(RowType)
    assert {kind for kind, _ in problems.ROW_TYPES} == set(TRAINED_TYPES)
    assert all(dtype_of(kind).itemsize == max(1, kind.facts.weight_bits // 8) for kind in RowType)


def test_every_optimizer_has_a_reference_that_sums_columns_if_it_says_so():
    assert list(REFERENCE) == list(OPTIMIZERS.values())
    assert {type(optimizer) for optimizer in problems.OPTIMIZERS} == set(REFERENCE)
    for kind, rule in REFERENCE.items():
        state, ones = torch.ones(2, state_width(Table(name="t", rows=2, dim=3, optimizer=kind()))), torch.ones(2, 3)
        terms = rule.terms(lambda ones=ones: ones, state, ones, torch.ones(8)) if isinstance(rule, RowRule) else None
        assert kind.sums_columns == (0 if terms is None else terms.values_MDn.shape[2])
