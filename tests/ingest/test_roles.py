"""Roles of columns are those that the owner of a log would give, whatever the log is."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from logs import LOGS
from pyarrow import csv
from pyarrow import parquet as pq

from rowwise.ingest import CsvReader, FrameReader, ParquetReader
from rowwise.ingest.inspect import find_separators, inspect
from rowwise.ingest.names import sense_of, words_of
from rowwise.ingest.readings import find_readings

ROWS = 2000
SHOWN = {"dense": "number", "sparse": "id", "key": "out", "unused": "out", "time": "time", "group": "group"}
RIGHT = 0.95


def roles_of(column):
    return {"number", "id"} if column.both else {SHOWN[column.role]}


def look(table, **more):
    return inspect(FrameReader(table, split_rows=700), **more).card


def column(card, name):
    return next(c for c in card.columns if c.name == name)


def frame(rows=ROWS, **columns):
    draw = np.random.default_rng(0)
    made = {"label": draw.integers(0, 2, rows), "user_id": draw.integers(0, rows // 20, rows)}
    return pa.table(made | columns)


def read_logs(folder, seed):
    """Each column of each log that is not read as its owner reads it, and the number of columns."""
    wrong, columns = [], 0
    for number, (name, (make, rows)) in enumerate(LOGS.items()):
        log = make(np.random.default_rng(seed), rows)
        if number % 2:
            csv.write_csv(log.table, folder / f"{name}.csv")
            reader = CsvReader(folder / f"{name}.csv")
        else:
            pq.write_table(log.table, folder / f"{name}.parquet", row_group_size=900)
            reader = ParquetReader(folder / f"{name}.parquet")
        card = inspect(reader, log.label, separators=find_separators(reader)).card
        columns += len(log.roles)
        for one in card.columns:
            if one.name != log.label and not roles_of(one) & set(log.roles[one.name].split()):
                wrong.append(f"{name}: {one.name}: {log.roles[one.name]}, read as {one.role}: {one.why or one.note}")
    return wrong, columns


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_columns_are_read_as_their_owners_read_them(tmp_path, seed):
    wrong, columns = read_logs(tmp_path, seed)
    assert len(wrong) <= (1 - RIGHT) * columns, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("user_id", ("user", "id")), ("userId", ("user", "id")), ("User ID", ("user", "id")),
        ("user-id", ("user", "id")),
        ("user.id", ("user", "id")), ("HTTPCode", ("http", "code")), ("Unnamed: 0", ("unnamed", "0")), ("", ()),
    ],
)  # fmt: skip
def test_words_of_a_name(name, words):
    assert words_of(name) == words


SENSES = {
    "id": "uid anon_uid asin sku msno cid pid order_no InvoiceNo customerID jobId employer_key zip 'Zip Code' phone ip "
          "device_ip custid acct_num product_ids sku_codes user last_item advertiser",
    "amount": "age user_age n_children num_items no_of_orders NumberOfCalls days_since_last_order tenure_months paid "
              "views item_count total_users lat longitude price_eur website_load 'discount %' capital_run_length items "
              "cigsPerDay",
    "time": "created_at timestamp InvoiceDate dob event_time",
    "part of time": "hour month day_of_week_quarter",
    "row": "'Unnamed: 0' rownames index",
    "": "x1 V7 foo bd",
}  # fmt: skip


@pytest.mark.parametrize("sense", SENSES)
def test_names_are_evidence(sense):
    import shlex

    assert {name: sense_of(name) for name in shlex.split(SENSES[sense])} == dict.fromkeys(
        shlex.split(SENSES[sense]), sense
    )


def test_a_column_whose_most_is_zero_is_shown(command, tmp_path):
    csv.write_csv(frame(depth=-(np.arange(ROWS) % 700)), tmp_path / "a.csv")
    code, out, err = command("data", "inspect", "a.csv")
    assert (code, err) == (0, "")
    assert "-699 to 0" in out


@pytest.mark.parametrize("base", [2**63, 2**64 + 10, 2**70])
def test_ids_beyond_64_bits_stay_distinct(tmp_path, base):
    ids = [str(base + n % 50) for n in range(ROWS)]
    csv.write_csv(
        frame().append_column("ad", pa.array(ids)), tmp_path / "a.csv", csv.WriteOptions(quoting_style="none")
    )
    card = inspect(CsvReader(tmp_path / "a.csv")).card
    assert (column(card, "ad").role, column(card, "ad").distinct) == ("sparse", 50)
    if base == 2**63:
        card = look(frame(ad=pa.array([int(one) for one in ids], pa.uint64())))
        assert (column(card, "ad").role, column(card, "ad").distinct) == ("sparse", 50)


def test_whole_numbers_in_floats_are_ids(tmp_path):
    seller = pa.array([float(n * 31 % 90) for n in range(ROWS)], mask=np.arange(ROWS) % 9 == 0)
    card = look(frame(seller=seller, odd=[float(n % 5) if n < 1500 else 0.5 for n in range(ROWS)]))
    assert (column(card, "seller").role, column(card, "seller").reading.how) == ("sparse", "whole")
    odd = column(card, "odd")  # only late rows show that it has fractions
    assert (odd.role, odd.reading, odd.type) == ("dense", None, "double")


@pytest.mark.parametrize(
    ("form", "formats"),
    [
        ("%Y-%m-%dT%H:%M:%S+02:00", ("iso",)), ("%d/%m/%Y %H:%M", ("%d/%m/%Y %H:%M",)), ("%b %d %Y", ("%b %d %Y",)),
        ("%m/%d/%y %I:%M %p", ("%m/%d/%y %I:%M %p",)), ("%d.%m.%Y", ("%d.%m.%Y",)), ("%d-%b-%y", ("%d-%b-%y",)),
        ("%d.%m.%y", ("%d.%m.%y",)), ("%m-%d-%y", ("%m-%d-%y",)),
    ],
)  # fmt: skip
def test_times_in_text(form, formats):
    start = datetime.datetime(2024, 1, 1)
    texts = [(start + datetime.timedelta(hours=7 * n % 9000)).strftime(form) for n in range(400)]
    (reading,) = find_readings({"when": pa.array(texts)}).values()
    assert (reading.how, reading.formats, reading.doubt) == ("time", formats, "")


def test_mixed_times_and_what_is_ambiguous():
    mixed = ["2024-01-03", "13/01/2024 10:15", "Jan 3 2024", "2024-02-05", "25/03/2024 11:15"] * 9
    (reading,) = find_readings({"when": pa.array(mixed)}).values()
    assert reading.formats == ("iso", "%d/%m/%Y %H:%M", "%b %d %Y")
    assert reading.read(pa.array(mixed)).null_count == 0
    swapped = ["2/14/2005", "3/25/2006", "01-02-05", "11-07-06", "03-04-07"] * 9  # by Excel, where it can be both
    (reading,) = find_readings({"when": pa.array(swapped)}).values()
    assert (reading.formats, reading.doubt) == (("%m/%d/%Y", "%m-%d-%y"), "")
    (reading,) = find_readings({"when": pa.array(["03/01/2024", "04/05/2024", "01/02/2024"])}).values()
    assert reading.formats == ("%m/%d/%Y",)
    assert "the order of day and month" in reading.doubt


@pytest.mark.parametrize(
    "texts",
    [["01234", "04567", "00001"], ["1.2.3", "1.4.5", "2.0.0"], ["10.0.0.1", "10.0.0.2", "10.1.0.1"], ["7", "8", "9"]],
)
def test_texts_that_are_no_numbers_and_no_times(texts):
    assert find_readings({"x": pa.array(texts * 20)}) == {}


def test_groups_of_rows_with_one_label_stay_together(tmp_path):
    draw = np.random.default_rng(0)
    patient = draw.permutation(np.repeat(np.arange(300), 4))
    label = draw.integers(0, 2, 300)[patient]
    table = pa.table(
        {"label": label, "patient_id": patient, "kind": draw.integers(0, 4, 1200), "x": draw.normal(size=1200)}
    )
    card = look(table)
    assert card.group == "patient_id"
    assert column(card, "patient_id").role == "group"
    assert "'patient_id'" in card.division
    user = draw.integers(0, 300, 1200)  # some users like more than others, which is no reason
    liked = draw.random(1200) < draw.beta(2, 2, 300)[user]
    assert look(pa.table({"label": liked.astype(int), "user_id": user, "x": draw.normal(size=1200)})).group is None


def test_a_good_column_of_few_rows_is_no_leak():
    draw = np.random.default_rng(0)
    label = draw.integers(0, 2, 344)
    card = look(frame(344, label=label, flipper=200 + 17.0 * label + draw.normal(0, 3.4, 344)))
    assert column(card, "flipper").role == "dense"
    few = np.arange(344) < 6
    assert (
        column(look(frame(344, label=few.astype(int), flag=["a" if x else "b" for x in few])), "flag").role == "sparse"
    )
    copy = look(frame(344, label=label, told=["won" if x else "lost" for x in label]))
    assert column(copy, "told").role == "unused"


def test_what_missing_values_tell_of_the_label():
    label, rows = np.arange(ROWS) % 3 == 0, np.arange(ROWS)

    def where(mask):
        return pa.array([f"w{n % 7}" for n in rows], mask=~mask)

    often = label ^ (rows % 10 == 0)
    card = look(pa.table({"label": label, "user_id": rows % 91, "closed": where(label ^ (rows % 100 == 1)),
                          "delay": where(often), "code": where(rows < 2)}))  # fmt: skip
    assert {c.name: c.role for c in card.columns if c.note} == {"closed": "unused", "code": "unused"}
    assert "in all but 2 of 2,000 rows" in column(card, "code").note
    assert "'delay' by 70%" in card.warnings[-1]


def test_of_two_times_the_one_of_the_row_divides():
    draw = np.random.default_rng(0)
    at = np.sort(draw.integers(0, 60 * 86_400, 4000)) + 1_700_000_000
    late = at + 10**6
    session = np.arange(4000) // 6
    table = frame(4000, updated_at=late.astype("datetime64[s]"), created_at=at.astype("datetime64[s]"), visitor=session)
    card = look(table)
    assert card.borders.column == "created_at"
    assert "'updated_at' may be times, too: --time chooses" in card.division
    assert column(card, "created_at").parts == ("hour", "weekday")
    assert column(card, "visitor").role == "unused"  # all of test rows are new
    assert "unseen in training" in column(card, "visitor").note


def test_small_counts_in_few_rows_are_amounts():
    draw = np.random.default_rng(0)
    card = look(frame(700, marks=draw.geometric(0.15, 700) - 1, age=draw.integers(18, 90, 700)))
    assert {roles_of(column(card, name)) & {"number"} == {"number"} for name in ("marks", "age")} == {True}


def test_times_since_1970_are_no_ids():
    at = 1_500_000_000_000 + np.arange(ROWS) * 777
    card = look(frame(at_id=at, seen=(at / 1000).round()))
    assert [column(card, name).role for name in ("at_id", "seen")] == ["time", "time"]


def test_postal_codes_stay_text(tmp_path):
    (tmp_path / "a.csv").write_text("label,zip,n\n" + "".join(f"{i % 7 % 2},{i % 40:05},{i}\n" for i in range(200)))
    reader = CsvReader(tmp_path / "a.csv")
    assert [str(kind) for kind in reader.schema.types] == ["int64", "string", "int64"]
    assert column(inspect(reader).card, "zip").role == "sparse"


def test_a_group_is_told():
    table = frame(shelf=np.arange(ROWS) // 400)
    card = look(table, roles={"shelf": "group"})
    assert (card.group, column(card, "shelf").role) == ("shelf", "group")
