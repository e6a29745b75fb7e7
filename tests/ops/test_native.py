"""A native library that was built from other sources than the Python beside it is refused in one line."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rowwise.errors import NativeError
from rowwise.ops import native

CPP = Path(native.__file__).parent / "_cpp"


def built(without=()):
    return SimpleNamespace(**{name: object() for name in native.OPERATORS if name not in without})


def test_all_operators_of_the_sources_are_expected():
    found = [name for path in CPP.glob("*.cpp") for name in re.findall(r'm\.def\(\s*"(\w+)\(', path.read_text())]
    assert sorted(found) == sorted(native.OPERATORS)


def test_a_library_of_these_sources_is_taken():
    native.check_library(built(), Path("lib.so"))


@pytest.mark.parametrize(
    ("without", "named"),
    [(["take"], "take"), (native.OPERATORS[:5], "offsets, lengths, take and 2 more")],
)
def test_a_library_that_lacks_operators_is_refused(without, named):
    with pytest.raises(NativeError) as caught:
        native.check_library(built(without), Path("lib.so"))
    got, way_out = "lib.so was built from other sources", "build it with `make build` or `pip install .`"
    assert str(caught.value) == f"{got}: it has no operator {named}; {way_out}"
