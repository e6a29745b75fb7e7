"""What is said of transforms that cannot be, and of columns and functions that do not fit them."""

import pyarrow as pa
import pytest

from rowwise import DataError, SpecError
from rowwise.ingest import Split
from rowwise.ingest.transform import (
    BoxCox,
    Bucketize,
    Cartesian,
    Clamp,
    ComputeScore,
    Fill,
    FirstX,
    GetLocalHour,
    IdListTransform,
    Logit,
    MapId,
    NGram,
    Onehot,
    PositiveModulus,
    RowPosition,
    Sampling,
    SigridHash,
    UserFunction,
    apply,
    from_json,
    load,
    schema_after,
)

IMPOSSIBLE = [
    (
        lambda: SigridHash(column="a", rows=0),
        r"transform sigrid_hash: rows=0: expected at least 1, and less than 2\*\*63",
    ),
    (
        lambda: SigridHash(column="a", rows=9, salt=2**63),
        "transform sigrid_hash: salt=9223372036854775808: expected a num",
    ),
    (lambda: PositiveModulus(column="a", rows=-1), "transform positive_modulus: rows=-1: expected at least 1"),
    (lambda: NGram(column="a", n=1), "transform ngram: n=1: expected at least 2"),
    (lambda: NGram(column="a", rows=0), "transform ngram: rows=0: expected at least 1"),
    (lambda: Cartesian(columns=("a", "b"), to="c", rows=0), "transform cartesian: rows=0"),
    (lambda: FirstX(column="a", count=0), "transform first_x: count=0: expected at least 1"),
    (lambda: Bucketize(column="a", borders=()), "transform bucketize: no borders: expected at least one, such as"),
    (
        lambda: Bucketize(column="a", borders=(1, 1)),
        "bucketize: borders: 1 comes after 1: expected each larger than the",
    ),
    (lambda: Bucketize(column="a", borders=(float("nan"),)), "bucketize: borders=nan: expected a finite number"),
    (lambda: Clamp(column="a"), "transform clamp: neither low nor high"),
    (lambda: Clamp(column="a", low=2, high=1), "clamp: low=2 and high=1: expected low at most as large as high"),
    (lambda: Clamp(column="a", low=float("-inf")), "clamp: low=-inf: expected a finite number"),
    (lambda: Logit(column="a", eps=0.5), "transform logit: eps=0.5: expected at least 1e-12, and less than 0.5"),
    (lambda: BoxCox(column="a", power=float("inf")), "transform box_cox: power=inf: expected a finite number"),
    (lambda: Fill(column="a", value=float("nan")), "transform fill: value=nan: expected a finite number"),
    (lambda: Onehot(column="a"), "transform onehot: got neither of classes and borders"),
    (lambda: Onehot(column="a", classes=(1,), borders=(1.0,)), "onehot: got both of classes and borders"),
    (lambda: Onehot(column="a", classes=(1, "1")), "onehot: classes: .*: expected whole numbers only, or texts only"),
    (lambda: Onehot(column="a", classes=(1, 2, 1)), "onehot: classes: 1 appears twice"),
    (lambda: Onehot(column="a", classes=(1,), into="rows"), "onehot: into='rows': expected 'columns' or 'lists'"),
    (lambda: MapId(column="a"), "transform map_id: got neither of mapping and file"),
    (lambda: MapId(column="a", mapping={1: 1}, file="f"), "map_id: got both of mapping and file"),
    (lambda: MapId(column="a", mapping={1: 1, "1": 1}), "mapping: an id appears"),
    (lambda: MapId(column="a", mapping={1: 1}, unknown="keep"), "unknown='keep': expected a number, 'drop' or 'raise'"),
    (lambda: MapId(column="a", mapping={1: 2**63}), "map_id: 9223372036854775808: expected numbers of 64 bits"),
    (lambda: ComputeScore(ids="a", scores="b", to="c", by="last"), "compute_score: by='last': expected 'sum', 'mean'"),
    (
        lambda: GetLocalHour(column="a", to="b", zone="Europe/Vienna", offset="c"),
        "got both zone and offset",
    ),
    (lambda: GetLocalHour(column="a", to="b", zone="Vienna"), "zone='Vienna': unknown time zone"),
    (lambda: GetLocalHour(column="a", to="b", unit="h"), "get_local_hour: unit='h': expected 's', 'ms', 'us' or 'ns'"),
    (lambda: Sampling(rate=1.5), "transform sampling: rate=1.5: expected 0 to 1, such as 0.1 to keep a tenth"),
    (lambda: Sampling(rate=0.5, seed=-1), "transform sampling: seed=-1: expected at least 0"),
    (lambda: UserFunction(function="mine.txt:f"), "transform own: function='mine.txt:f': expected path.py:function"),
    (lambda: UserFunction(function="f.py:f", to=("a", "a")), "own: f.py:f: to: a, a: expected each name once"),
    (lambda: load(["mine.py"]), "transform own: function='mine.py': expected path.py:function"),
    (lambda: from_json(b"[{"), "not a list of transforms"),
    (lambda: from_json(b'[{"kind": "sigrid_hahs"}]'), "not a list of transforms: Invalid value 'sigrid_hahs'"),
    (lambda: from_json(b'[{"kind": "first_x", "column": "a", "count": 1, "x": 1}]'), "unknown field `x`"),
]


@pytest.mark.parametrize(("make", "message"), IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_transforms_that_cannot_be(make, message):
    with pytest.raises(SpecError, match=message):
        make()


SCHEMA = pa.schema(
    {
        "id": pa.int64(), "word": pa.string(), "x": pa.float64(), "ids": pa.list_(pa.int64()), "big": pa.uint64(),
        "words": pa.list_(pa.string()), "xs": pa.list_(pa.float32()), "day": pa.date32(),
    }
)  # fmt: skip
UNFIT = [
    (
        SigridHash(column="x", rows=9),
        r"\(sigrid_hash\): column 'x' holds double: expected whole numbers or text, or lists",
    ),
    (SigridHash(column="idd", rows=9), r"\(sigrid_hash\): no column 'idd'; did you mean 'id'\? There are id, word"),
    (FirstX(column="id", count=2), r"\(first_x\): column 'id' holds int64: expected lists"),
    (PositiveModulus(column="word", rows=9), r"column 'word' holds string: expected whole numbers, or lists of them"),
    (NGram(column="id"), r"\(ngram\): column 'id' holds int64: expected lists of whole numbers or text"),
    (Bucketize(column="word", borders=(1.0,)), r"\(bucketize\): column 'word' holds string: expected numbers, or l"),
    (
        Fill(column="day", value=1),
        r"\(fill\): column 'day' holds date32\[day\]: expected numbers or text, or lists of them",
    ),
    (Fill(column="word", value=1), r"\(fill\): column 'word' \(string\): filled with 1: expected a text"),
    (Fill(column="x", value="a"), r"\(fill\): column 'x' \(double\): filled with 'a': expected a number"),
    (
        Fill(column="id", value=0.5),
        r"column 'id' \(int64\): whole numbers are filled with 0.5: expected a whole number that",
    ),
    (
        Fill(column="big", value=-1),
        r"column 'big' \(uint64\): whole numbers are filled with -1: expected a whole number",
    ),
    (Clamp(column="ids", low=0.5), r"column 'ids' \(list.*\): whole numbers are cut at 0.5: expected whole bounds"),
    (Onehot(column="id", classes=("a",)), r"column 'id' \(int64\): compared with class 'a': expected whole numbers"),
    (Onehot(column="word", classes=(1,)), r"\(onehot\): column 'word' .*: compared with class 1: expected texts"),
    (Onehot(column="big", classes=(-1,)), r"compared with class -1: expected 0 to 18446744073709551615"),
    (
        MapId(column="id", mapping={"a": 1}),
        r"ids such as 'a': expected whole numbers",
    ),
    (
        IdListTransform(columns=("ids", "words"), to="t"),
        r"column 'ids' .*, 'words' .*: ids are compared with ids of an",
    ),
    (ComputeScore(ids="ids", scores="ids", to="t", among="words"), "compared with ids of another"),
    (ComputeScore(ids="ids", scores="words", to="t"), "column 'words' holds .*: expected lists of numbers"),
    (GetLocalHour(column="x", to="t"), r"\(get_local_hour\): column 'x' holds double: expected times or whole numbers"),
    (GetLocalHour(column="id", to="t", offset="word"), r"column 'word' holds string: expected numbers"),
    (Sampling(rate=0.5, column="word"), r"\(sampling\): column 'word' .*: compared with 0: expected a text"),
    (Sampling(rate=0.5, column="x", value="a"), r"\(sampling\): column 'x' .*: compared with 'a': expected a number"),
    (Sampling(rate=0.5, key="x"), r"\(sampling\): column 'x' holds double: expected whole numbers or text"),
]


@pytest.mark.parametrize(("transform", "message"), UNFIT, ids=range(len(UNFIT)))
def test_columns_that_do_not_fit(transform, message):
    """Types are refused before anything is read, and again where rows are."""
    loaded = load([Fill(column="x", to="y", value=0), transform])
    with pytest.raises(
        DataError, match=r"clicks: transforms\[1\] .*" + message.removeprefix(f"\\({transform.kind}\\): ")
    ):
        schema_after(SCHEMA, loaded, "clicks")
    if "no column" not in message:
        with pytest.raises(DataError, match=message):
            apply(SCHEMA.empty_table(), loaded, [*transform.makes, "y"])


def test_a_column_that_is_made_too_late():
    loaded = load([SigridHash(column="t", rows=9), FirstX(column="ids", to="t", count=1)])
    message = r"data: transforms\[0\] \(sigrid_hash\): no column 't' yet: transforms\[1\] \(first_x\) makes it"
    with pytest.raises(DataError, match=message):
        schema_after(SCHEMA, loaded)


WHERE = RowPosition(split=Split(source="day.parquet", start=3, stop=4, first_row=100), index=3)


def test_values_that_do_not_fit():
    table = pa.table({"ids": [[1, 2], [3]], "xs": [[1.0, 2.0], [3.0, 4.0]], "word": ["a", "b"]})
    score = load([ComputeScore(ids="ids", scores="xs", to="t")])
    message = "day.parquet: row 101: 1 ids in 'ids' and 2 scores in 'xs': expected a score for each id"
    with pytest.raises(DataError, match=message):
        apply(table, score, ["t"], WHERE)
    known = load([MapId(column="ids", mapping={1: 0, 2: 1}, unknown="raise")])
    message = "day.parquet: row 101, column 'ids': id 3 is unknown: expected one of the 2 ids"
    with pytest.raises(DataError, match=message):
        apply(table, known, ["ids"], WHERE)
    with pytest.raises(DataError, match="column 'idss'; did you"):
        apply(table, known, ["idss"], WHERE)
    with pytest.raises(DataError, match=r"no column 'xs'"):
        apply(table.select(["ids"]), score, ["t"], WHERE)


def test_files_of_ids_that_cannot_be_read(tmp_path):
    place = tmp_path / "ids.txt"
    for text, message in (
        ("a\t1\nb\tx\n", r"ids.txt: line 2: 'x': expected a whole number after the tab"),
        ("a\nb\na\n", r"ids.txt: line 3: id 'a' appears twice"),
        ("", r"ids.txt: it has no ids"),
        ("a\t" + "9" * 5000, r"ids.txt: line 1: '9+': expected a whole number after the tab"),
    ):
        place.write_text(text)
        with pytest.raises(SpecError, match=message):
            load([MapId(column="a", file=str(place))])
    place.write_text("9" * 5000 + "\n7\n")  # words, as no number of 64 bits has so many digits
    assert load([MapId(column="a", file=str(place))]).transforms[0].mapping == {"9" * 5000: 0, "7": 1}
    with pytest.raises(SpecError, match=r"map_id: .*none.txt"):
        load([MapId(column="a", file=str(tmp_path / "none.txt"))])


FILES = [
    ("def f(:", "transform own: .*mine.py is not Python"),
    ("def g(a): return a\ndef h(a): return a", "mine.py has no function 'f'; it has g, h"),
    ("x = 1", "mine.py has no function 'f'; it has none"),
    ("def f(): return 1", "mine.py:f has no parameters"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=range(len(FILES)))
def test_own_files_that_cannot_be(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(SpecError, match=message):
        load([f"{tmp_path}/mine.py:f"])


def test_own_files_that_do_not_run(tmp_path):
    place = tmp_path / "mine.py"
    with pytest.raises(SpecError, match=r"transform own: .*mine.py"):
        load([f"{place}:f"])
    place.write_text("import no_such_package\ndef f(a): return a")
    with pytest.raises(DataError, match=r".*no_such_package.* \(line 1\)"):
        load([f"{place}:f"])
    place.write_text("def f(a, b): return a")
    with pytest.raises(SpecError, match=r"mine.py:f has 2"):
        load([UserFunction(function=f"{place}:f", columns=("a",))])


RETURNS = [
    ("a.to_pylist()", "it returned 3 columns: expected 1, t, as `to` says"),
    ("a.to_numpy()", "'t': it returned ndarray: expected an Arrow array; pa.array"),
    ("a.slice(1)", "'t': it returned 2 rows: expected 3, one for each row that it got"),
    ("pa.nulls(len(a))", "'t': it returned an array without a type"),
    ("{'u': a}", "it returned columns called u: expected t, as `to` says"),
    ("(a, a)", "it returned 2 columns: expected 1, t, as `to` says"),
    ("1 / 0", r"ZeroDivisionError: division by zero \(line 4\)"),
    ("a.cast(pa.int8())", r"ArrowInvalid: Integer value 1000 not in range.* \(line 4\)"),
]


@pytest.mark.parametrize(("returned", "message"), RETURNS, ids=range(len(RETURNS)))
def test_own_functions_that_go_wrong(returned, message, tmp_path):
    place = tmp_path / "mine.py"
    place.write_text(f"import pyarrow as pa\n\ndef f(a):\n    return {returned}\n")
    loaded = load([UserFunction(function=f"{place}:f", to=("t",))])
    with pytest.raises(DataError, match="mine.py:f, on the 3 rows from day.parquet: row 100: " + message):
        apply(pa.table({"a": [1, 2, 1000]}), loaded, ["t"], WHERE)
