"""The recipe that comes with a dataset card: it trains as it is, on whatever the columns are."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs
from pyarrow import csv
from pyarrow import parquet as pq

from rowwise import DataError
from rowwise.ingest import FrameReader
from rowwise.ingest.inspect import inspect
from rowwise.ingest.survey import borders_of
from rowwise.recipes.model_configs import DcnConfig, DlrmConfig
from rowwise.recipes.recipe import TimeShare
from rowwise.recipes.rows import open_reader
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.starter import make_starter, recipe_name
from rowwise.recipes.text import decode, parse, read
from rowwise.recipes.trained import predict_rows

ROWS = 3000


def frame(rows=ROWS, **columns):
    """Clicks that follow from the user, the item and the amount."""
    draw = np.random.default_rng(0)
    user, item, amount = draw.integers(0, 100, rows), draw.integers(0, 40, rows), np.exp(draw.normal(3, 2, rows))
    logit = draw.normal(size=100)[user] + draw.normal(size=40)[item] + 0.3 * np.log(amount) - 1.5
    clicked = draw.random(rows) < 1 / (1 + np.exp(-logit))
    words = [f"it{i}" for i in item]
    return pa.table({"user_id": user, "item": words, "amount": amount, "clicked": clicked.astype(int)} | columns)


def made(**columns):
    card = inspect(FrameReader(frame(**columns), split_rows=700), name="clicks.parquet").card
    text = make_starter(card, "parquet:clicks.parquet", "clicks.yaml")
    return text, decode(parse(text, "clicks.yaml"), "clicks.yaml")


def test_what_is_in_it():
    draw = np.random.default_rng(1)
    text, recipe = made(
        event=[f"e{i}" for i in range(ROWS)],
        at=1_700_000_000 + np.arange(ROWS) * 13,
        tags=[list(range(i % 4)) for i in range(ROWS)],
        age=[None if i % 7 == 0 else i % 50 + 0.5 for i in range(ROWS)],
        leak=frame()["clicked"].to_numpy() * 2.0 + draw.random(ROWS),
        country=["DE"] * ROWS,
    )
    columns = recipe.columns
    assert (columns.labels, columns.key, columns.time) == (("clicked",), "event", None)
    assert [s.column for s in columns.sparse] == ["user_id", "item", "tags", "amount_bucket", "age_bucket"]
    assert {d.column: d.log1p for d in columns.dense} == {"amount": True, "age": False}
    assert {s.table_name: s.rows for s in columns.sparse} == {
        "user_id": 1600, "item": 640, "tags": 48, "amount_bucket": 16, "age_bucket": 16,
    }  # fmt: skip
    assert {name: str(change.pooling) for name, change in recipe.tables.each.items()} == {"tags": "mean"}
    assert isinstance(recipe.model, DcnConfig)
    assert (recipe.data.dataset, recipe.data.label) == ("parquet:clicks.parquet", "clicked")
    assert (recipe.evaluate.every, recipe.evaluate.patience) == (9, None)
    assert recipe.train.schedule.decay_steps == 8 * 38
    assert recipe.about.run == "rowwise train clicks.yaml"
    head = text[: text.index("about:")]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "# Left out:\n#   'leak' leaks the label: " in head
    assert "#   'country' is constant\n" in head
    for shown in ("batch: ", "epochs: ", "lr: ", "valid_share: 0.1", "test_share: 0.1", "share: random", "metric: ne"):
        assert shown in text
    assert max(map(len, text.splitlines())) <= 120


ODD = {
    "no numbers": {"amount": ["a", "b", "c"] * (ROWS // 3)},
    "names that YAML would change": {
        "no": ["a", "b"] * (ROWS // 2),
        "1e-3": np.arange(ROWS) % 7,
        "a: b #c": np.arange(ROWS) % 5,
    },
    "names that are paths": {"a.b": np.arange(ROWS) % 3, "a_b": np.arange(ROWS) % 5, "a/b": np.arange(ROWS) % 7},
    "names of methods": {"forward": np.arange(ROWS) % 3, "training": np.arange(ROWS) % 5, "": np.arange(ROWS) % 7},
    "times": {"on": [datetime.datetime(2024, 1, 1) + datetime.timedelta(hours=i) for i in range(ROWS)]},
    "days": {"on": [datetime.date(2024, 1, 1) + datetime.timedelta(days=i % 90) for i in range(ROWS)]},
    "missing times": {"on": [None if i % 9 == 0 else datetime.date(2024, 1, 1) for i in range(ROWS)]},
    "missing keys": {"key": [None if i % 900 == 0 else f"k{i}" for i in range(ROWS)]},
    "missing words": {"word": [None if i % 3 else f"k{i % 10}" for i in range(ROWS)]},
    "all missing": {"nothing": pa.nulls(ROWS), "none": pa.nulls(ROWS, pa.float64())},
    "nan": {"x": [float("nan") if i % 3 else float(i) for i in range(ROWS)]},
    "infinite": {"x": [float("inf") if i == 77 else float(i) for i in range(ROWS)]},
    "too large for 32 bits": {"x": [1e300 if i == 77 else float(i) for i in range(ROWS)]},
    "lists of numbers": {"vector": [[0.5, 1.5]] * (ROWS // 2) + [[2.5, 1.5]] * (ROWS // 2)},
    "empty lists": {"bag": [[]] * ROWS},
    "structs": {"struct": [{"a": i % 3} for i in range(ROWS)]},
    "durations": {"took": [datetime.timedelta(seconds=i) for i in range(ROWS)]},
    "categories": {"kind": pa.array([f"k{i % 9}" for i in range(ROWS)]).dictionary_encode()},
    "categories of numbers": {"kind": pa.array([0.5 * (i % 9) for i in range(ROWS)]).dictionary_encode()},
    "bytes": {"kind": [bytes([i % 9]) for i in range(ROWS)]},
    "truth": {"flag": [i % 3 == 0 for i in range(ROWS)], "clicked": [i % 2 == 0 for i in range(ROWS)]},
    "large numbers": {"hash": (np.arange(ROWS, dtype=np.uint64) % 50 + 2**63).astype(np.uint64)},
    "decimals": {"price": pa.array([i % 90 for i in range(ROWS)]).cast(pa.decimal128(24, 2))},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", ODD.values(), ids=ODD.keys())
def test_it_trains_as_it_is(tmp_path, monkeypatch, columns):
    monkeypatch.chdir(tmp_path)
    table = frame(**columns)
    pq.write_table(table, "clicks.parquet", row_group_size=1000)
    text, _ = made(**columns)
    changed = [f"train.{x}" for x in ("epochs=1", "threads=1", "ahead=0", "steps=3")]
    (tmp_path / "clicks.yaml").write_text(text)
    result = TrainingRun.start(read(tmp_path / "clicks.yaml", changed), tmp_path / "runs").go()
    assert result.status == "finished"
    assert predict_rows(tmp_path / "runs" / "clicks" / "1", tmp_path / "p.parquet", data="clicks.parquet") == ROWS


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["string", "int64", "timestamp[s]", "timestamp[ns, tz=UTC]", "date32"])
def test_it_tests_on_later_rows_where_a_time_is_told(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    row = np.arange(ROWS)  # of days in order, most splits have no row to test
    day = (row if kind == "string" else np.random.default_rng(0).permutation(row)) // 30
    at = [datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(days=int(one)) for one in day]
    columns = {"at": day if kind == "int64" else pa.array([one.date() for one in at]).cast(pa.date32())}
    if kind.startswith("timestamp"):
        columns = {"at": pa.array(at, pa.timestamp("ns", "UTC") if "tz" in kind else pa.timestamp("s"))}
    if kind == "string":
        columns = {"at": columns["at"].cast(pa.string())}
    pq.write_table(frame(**columns), "clicks.parquet", row_group_size=1000)
    card = inspect(FrameReader(frame(**columns), split_rows=700), name="clicks.parquet", roles={"at": "time"}).card
    (tmp_path / "clicks.yaml").write_text(make_starter(card, "parquet:clicks.parquet", "clicks.yaml"))
    recipe = read(tmp_path / "clicks.yaml", ["train.threads=1", "train.ahead=0", "train.steps=3"])
    assert recipe.data.share == TimeShare(**structs.asdict(card.borders))
    run = TrainingRun.start(recipe, tmp_path / "runs")
    assert run.go().test["clicked"]["auc"] > 0
    assert not [line for line in (run.folder.path / "log.txt").read_text().splitlines() if "not used" in line]
    assert predict_rows(run.folder.path, tmp_path / "p.parquet", keep=("at",)) == 300
    assert set(pq.read_table("p.parquet")["at"].to_pylist()) == set(
        frame(**columns)["at"].filter(day >= 90).to_pylist()
    )


def test_what_it_leaves_out_it_says():
    text, recipe = made(
        struct=[{"a": i % 3} for i in range(ROWS)], x=[1e300 if i % 3 else 0.5 * i for i in range(ROWS)]
    )
    assert "#   'struct' has type struct<a: int64>, which models cannot use" in text
    assert "#   'x' holds mostly numbers that are infinite in 32 bits" in text
    assert {d.column for d in recipe.columns.dense} == {"amount"}


def test_logs_without_numbers_are_for_dlrm():
    recipe = made(amount=[f"a{i % 9}" for i in range(ROWS)])[1]
    assert isinstance(recipe.model, DlrmConfig)
    assert (recipe.model.bottom, recipe.train.schedule, recipe.evaluate.patience) == ((), None, 6)


def test_whole_numbers_are_ids_and_numbers_unless_their_name_or_the_user_says_ids():
    draw = np.random.default_rng(1)
    whole = {"age": draw.integers(18, 60, ROWS), "site_id": draw.integers(0, 60, ROWS)}
    columns = made(**whole)[1].columns
    assert {"age", "site_id"} <= {s.column for s in columns.sparse}
    assert [d.column for d in columns.dense] == ["amount", "age"]
    card = inspect(FrameReader(frame(**whole), split_rows=700), name="clicks.parquet", roles={"age": "sparse"}).card
    text = make_starter(card, "parquet:clicks.parquet", "clicks.yaml")
    assert [d.column for d in decode(parse(text, "clicks.yaml"), "clicks.yaml").columns.dense] == ["amount"]


def test_numbers_are_standardised_and_have_buckets():
    amount = np.exp(np.random.default_rng(0).normal(3, 2, ROWS)).astype(np.float32)
    recipe = made(amount=pa.array(amount, mask=np.arange(ROWS) % 5 == 0), size=np.arange(ROWS) % 4 - 1.5)[1]
    number, size = recipe.columns.dense
    kept = np.log1p(amount[np.arange(ROWS) % 5 != 0])
    assert (number.log1p, size.log1p) == (True, False)
    assert (number.mean, number.std) == pytest.approx((kept.mean(), kept.std()), rel=1e-3)
    assert number.fill == pytest.approx(np.expm1(kept.mean()), rel=1e-2)
    bucketed = {one.to: one.borders for one in recipe.transforms}
    assert bucketed["size_bucket"] == (-1.5, -0.5, 0.5)
    held = np.histogram(np.expm1(kept), [-np.inf, *bucketed["amount_bucket"], np.inf])[0]
    assert len(held) == 16
    assert held.min() > 0.9 * held.mean()
    rows = {s.column: s.rows for s in recipe.columns.sparse}
    assert (rows["amount_bucket"], rows["size_bucket"]) == (16, 4)


def test_a_common_number_has_a_bucket_of_its_own():
    zeros = np.where(np.arange(1000) % 10, 0, np.arange(1000))
    borders = borders_of(np.sort(zeros.astype(np.float32)), 8)
    assert borders[0] == 0
    assert len(borders) == 7
    assert borders_of(np.zeros(9, np.float32)) == borders_of(np.zeros(0, np.float32)) == ()


def test_logs_of_numbers_alone_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = frame().select(["amount", "clicked"]).append_column("amount_bucket", frame()["amount"])
    pq.write_table(table, "clicks.parquet")
    card = inspect(FrameReader(table), name="clicks.parquet").card
    text = make_starter(card, "parquet:clicks.parquet", "clicks.yaml")
    (tmp_path / "clicks.yaml").write_text(text)
    recipe = read(tmp_path / "clicks.yaml", ["train.threads=1", "train.ahead=0", "train.steps=3"])
    assert len({s.column for s in recipe.columns.sparse} - {"amount", "amount_bucket"}) == 2
    assert TrainingRun.start(recipe, tmp_path / "runs").go().status == "finished"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"clicked": ["a", "b", "c"] * (ROWS // 3)},
            "no label column: expected --label COLUMN, such as seen",
        ),
        ({"clicked": np.zeros(ROWS, int)}, "the label 'clicked' is the same in all rows"),
        ({"user_id": [[0.5]] * ROWS, "item": [0.5] * ROWS, "amount": [7] * ROWS}, "no column is left to learn from"),
    ],
)
def test_what_no_recipe_can_be_made_for(columns, message):
    with pytest.raises(DataError, match=r"clicks\.parquet: ") as caught:
        made(**{"seen": [0, 1, 1] * (ROWS // 3), **columns} if "user_id" not in columns else columns)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("clicks.parquet", "clicks"),
        ("a/b/clicks.v2.csv", "clicks.v2"),
        ("logs/", "logs"),
        ("logs/day=*/*.parquet", "logs"),
        ("my clicks (1).csv", "my_clicks_1_"),
        ("*.parquet", "recipe"),
        ("_x.csv", "x"),
        ("../..", "recipe"),
        ("/", "recipe"),
    ],
)
def test_names(path, name):
    assert recipe_name(path) == name


def test_the_command(command, tmp_path):
    csv.write_csv(frame(), tmp_path / "clicks.csv")
    code, out, err = command("data", "inspect", "clicks.csv")
    assert (code, err) == (0, "")
    assert out.endswith("\nwrote the recipe clicks.yaml; train it with: rowwise train clicks.yaml\n")
    recipe = read(tmp_path / "clicks.yaml")
    assert (recipe.name, recipe.data.dataset) == ("clicks", "csv:clicks.csv")
    (tmp_path / "clicks.yaml").write_text("mine")
    code, out, _ = command("data", "inspect", "clicks.csv")
    assert code == 0
    assert "clicks.yaml exists and was not changed; --recipe FILE writes another one" in out
    assert (tmp_path / "clicks.yaml").read_text() == "mine"
    command("data", "inspect", "clicks.csv", "--recipe", "other.yml")
    assert read(tmp_path / "other.yml").about.run == "rowwise train other.yml"
    assert command("data", "inspect", "clicks.csv", "--json")[1].startswith("{")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "clicks.csv", "clicks.ids", "clicks.yaml", "other.ids", "other.yml",
    ]  # fmt: skip


def test_how_text_is_written_is_said_and_kept(command, tmp_path):
    lines = [f"{k % 2};u{k % 5};{k % 9},5;1.{k % 7}00,00 \u20ac" for k in range(200)]
    (tmp_path / "a.csv").write_bytes("\n".join(["gekauft;wer;preis;umsatz", *lines, ""]).encode("cp1252"))
    copies = ("--unpack-to", str(tmp_path / "copies"))
    code, out, _ = command("data", "inspect", "a.csv", "--label", "gekauft", "--column-type", "wer=string", *copies)
    assert code == 0
    assert out.startswith("text: ';' between values; a header; cp1252; decimal comma; numbers with signs in umsatz")
    data = read(tmp_path / "a.yaml").data
    assert (data.text.delimiter, data.text.encoding, data.text.decimal) == (";", "cp1252", ",")
    reader = open_reader(f"csv:{tmp_path / 'a.csv'}", text=data.text)
    rows = reader.read(reader.splits()[0], ("preis", "umsatz")).to_pylist()
    assert rows[1] == {"preis": 1.5, "umsatz": 1100.0}
    code, out, err = command("data", "inspect", "a.csv", "--column-type", "nobody=float", *copies)
    assert (code, "no column 'nobody'" in err) == (2, True)
    assert command("data", "inspect", "a.csv", "--decimal", ";")[0] == 2


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--recipe", "there.yaml"), 2, "rowwise: --recipe there.yaml exists: expected another name"),
        (("--recipe", "a.txt"), 2, "rowwise: --recipe a.txt: expected a name that ends in .yaml"),
        (("--recipe", "a.yaml"), 2, "no label column: expected --label COLUMN, such as bought"),
        ((), 2, "no recipe: t.csv: no label column: expected --label COLUMN, such as bought"),
        (("--label", "word"), 2, "rowwise: t.csv: the label 'word' has 3 different words"),
    ],
)
def test_the_command_without_a_recipe(command, tmp_path, args, code, message):
    (tmp_path / "t.csv").write_text("word,bought,label\n" + "a,0,x\nb,1,y\nc,0,z\n" * 10)
    (tmp_path / "there.yaml").write_text("")
    ended, out, err = command("data", "inspect", "t.csv", *args)
    assert ended == code
    assert message in out + err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "there.yaml"]


def test_a_label_of_many_words_is_named(command, tmp_path):
    csv.write_csv(pa.table({"clicked": ["a", "b", "c", "d"] * 25, "user_id": list(range(10)) * 10}), tmp_path / "a.csv")
    code, _, err = command("data", "inspect", "a.csv")
    assert code == 2
    assert "no recipe: a.csv: the label 'clicked' has 4 different words" in err
    assert "--label clicked=a" in err


def test_of_many_columns_the_first_are_shown(command, tmp_path):
    columns = {"label": [0, 1] * 10} | {f"c{n}": [n, n, n + 1, n + 1] * 5 for n in range(250)}
    csv.write_csv(pa.table(columns), tmp_path / "a.csv")
    _, out, _ = command("data", "inspect", "a.csv")
    assert "and 51 more columns: --json prints all" in out
    assert len(read(tmp_path / "a.yaml").columns.sparse) == 250
