"""Versions, records and pictures of strangers: opened and right, or refused in one line, and in bounded memory."""

import io
import json
import os
import resource
import shutil
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
import torch
from campaign import Campaign
from crafted_versions import changes_of, copy_of, read_table, replaced, write_json, write_table
from pyarrow import parquet as pq
from small import WORLD, trained
from towers import trained_towers

from rowwise import CheckpointError, DataError
from rowwise.base.errors import RowwiseError, one_line
from rowwise.base.inside import number_in
from rowwise.checkpoint.named import checkpoints_of
from rowwise.ingest.pictures import INDEX, PictureFolder, decode, open_picture
from rowwise.ingest.quarantine import count_quarantined
from rowwise.ingest.unpacked import read_arrow_file, read_parquet
from rowwise.recipes.audit import audit
from rowwise.recipes.export import export
from rowwise.recipes.served import open_version
from rowwise.serve.client import arrow_stream
from rowwise.serve.default_rows import MEANS, read_mean_rows
from rowwise.serve.forward import arrays_of
from rowwise.serve.hot_rows import HOT, read_hot_rows
from rowwise.serve.items import read_item_table
from rowwise.serve.package import GOLDEN, LOGIT, MODEL, STATS, ColumnStats, find_version, list_versions, read_golden
from rowwise.serve.record import REQUEST, VERSION
from rowwise.serve.request import RequestReader
from rowwise.serve.sides import read_sides
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import CheckpointFolder

ALLOWED_bytes = 120 << 20  # that refusing a file may take; each bomb is more than twice as large
MANY = 20_000_000
LONG = pa.array(["x" * (1 << 20)])
PACKED = {"options": pa.ipc.IpcWriteOptions(compression="zstd")}


def zeros(count=MANY):
    return pa.array(np.zeros(count, np.int64))


def long_texts(count=400):
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), LONG)


def lists(values):
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


BOMBS = {
    "golden": (GOLDEN, lambda: {"user": zeros(), "item": zeros()}, PACKED, read_golden),
    "golden, lists": (GOLDEN, lambda: {"user": lists(zeros(2 * MANY))}, PACKED, read_golden),
    "golden, texts": (GOLDEN, lambda: {"user": long_texts()}, {}, read_golden),
    "golden, nothing": (GOLDEN, lambda: {"user": pa.nulls(1 << 29)}, {}, read_golden),
    "hot rows": (HOT, lambda: {"row": zeros(2 * MANY)}, PACKED, read_hot_rows),
    "mean rows": (MEANS, lambda: {"row": lists(zeros(2 * MANY))}, PACKED, read_mean_rows),
    "sides": ("sides/k.parquet", lambda: {"k": zeros()}, {"row_group_size": MANY}, read_sides),
    "sides, texts": ("sides/k.parquet", lambda: {"k": long_texts()}, {"compression": "zstd"}, read_sides),
    "sides, prefixes": (
        "sides/k.parquet", lambda: {"k": pa.array(["x" * 1000] * 1000)},
        {"use_dictionary": False, "column_encoding": {"k": "DELTA_BYTE_ARRAY"}}, read_sides,
    ),
    "items": ("retrieval/items.parquet", lambda: {"k": lists(zeros())}, {}, read_item_table),
    "records": ("x.parquet", lambda: {REQUEST: zeros()}, {}, lambda at: list(audit(at, at))),
    "pictures": (INDEX, lambda: {"key": zeros()}, {}, PictureFolder.open),
    "quarantine": ("x.parquet", lambda: {"_place": long_texts(), "_reason": long_texts()}, {}, count_quarantined),
}  # fmt: skip


def ended(read):
    """How a call ended in a fork, and the memory that it took beyond that of this process."""
    here, there = os.pipe()
    if not (child := os.fork()):
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                read()
                said = "it was read"
            except (RowwiseError, OSError) as error:
                said = one_line(error)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            os.write(there, f"{grown << 10} {said}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(there)
    with open(here, "rb") as pipe:
        size, _, said = pipe.read().decode().partition(" ")
    os.waitpid(child, 0)
    return int(size), said


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", BOMBS)
def test_what_a_file_unpacks_to_is_bounded(kind, tmp_path):
    name, columns, how, read = BOMBS[kind]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write_table(tmp_path, name, pa.table(columns()), **how)
    assert (tmp_path / name).stat().st_size < 4 << 20
    size, said = ended(lambda: read(tmp_path))
    assert "when it is unpacked: expected at most" in said or "DELTA_BYTE_ARRAY" in said
    assert name.rpartition("/")[2] in said or kind == "pictures"
    assert size < ALLOWED_bytes


def test_a_request_is_as_large_as_its_texts():
    body = arrow_stream(pa.table({"x": long_texts(100)}))
    with pytest.raises(DataError, match=r"request: .* 104,858,400 bytes"):
        RequestReader(pa.schema([("x", pa.string())]), 1000).read_arrow(body)


def any_table(rows=1005):
    texts = pa.array(["a" * 10] * (rows - 5) + ["b"] * 5)
    return pa.table(
        {
            "text": texts,
            "lists": [["x", "yy", None]] * rows,
            "number": range(rows),
            "dictionary": texts.dictionary_encode(),
            "struct": [{"a": "x", "b": 1}] * rows,
            "views": pa.array(["abc" * 9, None, "x"] * (rows // 3), pa.string_view()),
            "nulls": pa.nulls(rows),
            "map": pa.array([[("k", 1)]] * rows, pa.map_(pa.string(), pa.int64())),
            "pairs": pa.array([[1, 2]] * rows, pa.list_(pa.int64(), 2)),
            "time": pa.array([3] * rows, pa.timestamp("us", "UTC")),
            "decimal": pa.array([None] * rows, pa.decimal128(9, 2)),
            "bytes": pa.array([b"ab"] * rows, pa.binary(2)),
            "large": pa.array([["q"]] * rows, pa.large_list(pa.large_string())),
            "a.b": pa.array([1] * rows, pa.uint8()),
        }
    )


@pytest.mark.parametrize("texts", ["plain", "as numbers"])
@pytest.mark.parametrize(
    "how",
    [{}, {"use_dictionary": False}, {"data_page_version": "2.0", "compression": "zstd"},
     {"row_group_size": 100, "store_schema": False}, {"compression": "lz4", "write_statistics": False}],
)  # fmt: skip
def test_tables_are_those_of_arrow(how, texts):
    table, sink = any_table(), io.BytesIO()
    if texts == "as numbers":  # as where each could be the longest, and all too long
        table = table.set_column(0, "text", [pa.array(["x" * 300_000, *table["text"].to_pylist()[1:]])])
    pq.write_table(table, sink, **how)
    wanted = pq.read_table(io.BytesIO(sink.getvalue()))
    found = read_parquet(sink.getvalue())
    assert found.schema.equals(wanted.schema)
    assert found.equals(wanted)
    assert read_parquet(sink.getvalue(), ["a.b", "lists"]).equals(wanted.select(["a.b", "lists"]))


def test_headers_of_pages_hold_anything():
    """Each byte of the headers becomes others: types of fields, sizes and numbers."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": ["a", "b"] * 5}), sink, compression="NONE")
    content, refused = sink.getvalue(), 0
    for at in range(4, 44):
        for value in (0, 5, 12, 28, 60, 200):
            try:
                read_parquet(content[:at] + bytes([value]) + content[at + 1 :])
            except pa.ArrowException:
                refused += 1
    assert refused > 50


def test_arrow_files_are_those_of_arrow(tmp_path):
    write_table(tmp_path, "x.arrow", any_table(), **PACKED)
    assert read_arrow_file(tmp_path / "x.arrow").equals(any_table())
    assert read_arrow_file((tmp_path / "x.arrow").read_bytes()).equals(any_table())


@pytest.mark.parametrize(
    ("name", "digits", "number"),
    [("7", 1, 7), ("000007", 6, 7), ("1234567", 6, 1234567), ("0", 1, 0), ("9" * 18, 1, 10**18 - 1),
     ("9" * 19, 1, None), ("07", 1, None), ("7", 6, None), ("0000007", 6, None), ("+7", 1, None),
     ("-7", 1, None), (" 7", 1, None), ("7_0", 1, None), ("\u0661", 1, None), ("\u00b2", 1, None), ("", 1, None),
     ("9" * 200, 1, None)],
)  # fmt: skip
def test_a_number_is_written_in_one_way(name, digits, number):
    assert number_in(name, digits) == number


def test_folders_in_other_digits_are_no_versions_and_no_checkpoints(increments, tmp_path):
    arabic = "\u0660\u0660\u0660\u0660\u0660\u0661"
    copy = copy_of(increments.models / "versions" / "000001", tmp_path / "models")
    shutil.copytree(copy, copy.with_name(arabic))
    shutil.copytree(copy, copy.with_name("000000"))
    assert list_versions(tmp_path / "models") == [1]
    assert find_version(copy.with_name(arabic)).number == 0
    run = tmp_path / "run" / "ckpt"
    for name in ("step-000000004", "step-4", "step-\u0664", "step-00000000004"):
        shutil.copytree(copy, run / name)
    assert [one.name for one in checkpoints_of(run.parent)] == ["step-000000004"]
    assert CheckpointFolder(run).steps() == [4]
    (tmp_path / "runs" / "x" / "\u0667").mkdir(parents=True)
    (tmp_path / "runs" / "x" / ("9" * 200)).mkdir()
    assert RunFolder.create(tmp_path / "runs", "x").path.name == "1"


def described(*place, value):
    return lambda at: write_json(at, MODEL, replaced(json.loads((at / MODEL).read_bytes()), place, value))


def golden(change):
    return lambda at: write_table(at, GOLDEN, change(read_table(at / GOLDEN)))


ODD = {
    "batch": (described("batch", value=-1), "model.json .*`int` >= 1.*batch"),
    "precision": (described("precision", value="zz"), "model.json .*zz.*precision"),
    "device": (described("parts", "device", value="zz"), "model.json .*parts.device='zz'"),
    "seed": (described("parts", "seed", value=-1), "model.json .*parts.seed=-1"),
    "tasks": (described("parts", "tasks", value=["label", "label"]), "model.json .*parts.tasks"),
    "more tasks": (described("parts", "tasks", value=["label", "other"]), r"got \(1, 8\).*expected \(2, 8\)"),
    "table": (described("parts", "tables", 0, "name", value="other"), "has no tensor"),
    "rows": (described("parts", "tables", 0, "rows", value=1 << 36), r"got \(20000, 8\).*expected \(68719476736, 8\)"),
    "layers": (described("parts", "model", "top", value=[65536, 65536]), r"model\.json .*layers of \(65536, "),
    "wide": (described("parts", "model", "bottom", 0, value=1 << 62), "model.json .*a layer cannot be made"),
    "stray logit": (
        golden(lambda t: t.append_column("logit:stray", t["logit:label"])), "has an unexpected column 'logit:stray'",
    ),
    "no logit": (golden(lambda t: t.drop_columns(["logit:label"])), "has no column 'logit:label'"),
    "logit twice": (golden(lambda t: t.append_column("logit:label", t["logit:label"])), "2 columns are called"),
    "text": (golden(lambda t: t.set_column(5, "logit:label", t["logit:label"].cast(pa.string()))), "holds string"),
    "null": (golden(lambda t: t.set_column(5, "logit:label", [pa.nulls(len(t), pa.float32())])), "with 64 nulls"),
    "no rows": (golden(lambda t: t.slice(0, 0)), "golden.arrow .*0 rows"),
    "no column": (golden(lambda t: t.drop_columns(["user"])), "golden.arrow .*no column 'user'"),
    "stats": (lambda at: (at / STATS).write_text('{"user": {"null_share": 7}}'), "stats.json .*null_share"),
    "no stats": (lambda at: (at / STATS).write_text("[]"), "stats.json is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_an_odd_version_is_refused_by_what_is_odd(name, increments, tmp_path):
    craft, message = ODD[name]
    version = copy_of(increments.models / "versions" / "000001", tmp_path / "models")
    craft(version)
    with pytest.raises(CheckpointError, match=message) as refused:
        open_version(tmp_path / "models")
    assert one_line(refused.value).isprintable()


@pytest.mark.parametrize("path", ["/etc/x.idmap", "../x.idmap", "maps/../../x.idmap"])
def test_paths_of_a_version_stay_inside(path, increments, tmp_path):
    version = copy_of(increments.models / "versions" / "000001", tmp_path / "models")
    stored = {"kind": "stored", "file": path}
    described("parts", "tables", 0, "id_map", value=stored)(version)
    with pytest.raises(CheckpointError, match=r"model.json names .*outside"):
        open_version(tmp_path / "models")


def test_the_mean_of_large_ids_is_a_number():
    ids = pa.chunked_array([[(1 << 63) - 1, (1 << 63) - 1]])
    assert ColumnStats.of(ids).mean == pytest.approx(2.0**63)


@pytest.fixture
def records(increments, tmp_path):
    """True records of the first version, and a place for others."""
    table = increments.table.append_column(REQUEST, pa.array(range(len(increments.table))))
    table = table.append_column(VERSION, pa.array([1] * len(table)))
    logits = pa.array(increments.logits[1].astype(np.float32))
    (tmp_path / "records").mkdir()
    return table.append_column(LOGIT + "label", logits), tmp_path / "records"


@pytest.mark.parametrize(
    ("column", "values"),
    [(VERSION, [["x"]]), (VERSION, [None]), (REQUEST, [{"x": 1}]), (LOGIT + "label", ["x"]), (LOGIT + "label", [None]),
     ("d0", [["x"]]), ("user", [{"x": 1}]), ("user", [-1]), ("seen", [{"x": 1}])],
)  # fmt: skip
def test_records_of_other_types_are_refused_by_the_file(column, values, records, increments):
    table, folder = records
    made = table.set_column(table.column_names.index(column), column, [pa.array(values * len(table))])
    pq.write_table(made, folder / "x.parquet")
    with pytest.raises(DataError, match="records of this folder"):
        list(audit(increments.models, folder))


def test_stored_pictures_are_jpegs_of_few_scans():
    pillow = pytest.importorskip("PIL.Image")
    png, jpeg = io.BytesIO(), io.BytesIO()
    pillow.new("RGB", (16, 16)).save(png, "PNG")
    pillow.new("RGB", (16, 16)).save(jpeg, "JPEG", progressive=True)
    assert open_picture(png.getvalue(), "x").format == "PNG"
    with pytest.raises(DataError, match="x is no picture"):
        decode(png.getvalue(), 8, "x")
    assert decode(jpeg.getvalue(), 8, "x").shape == (3, 8, 8)
    at = jpeg.getvalue().index(b"\xff\xda")
    scan = jpeg.getvalue()[at:-2]
    with pytest.raises(DataError, match=r"x has \d+ scans"):
        decode(jpeg.getvalue()[:-2] + scan * 130, 8, "x")


class TrueVersions:
    """A version with a side table, one of two towers, and what commands are called with."""

    def __init__(self, folder):
        torch.set_num_threads(1)
        (folder / "towers").mkdir()
        run, _ = trained(folder, train={"epochs": 1})
        numbers = np.linspace(0, 1, 30, dtype=np.float32)
        pq.write_table(pa.table({"item": range(30), "d1": numbers}), folder / "side.parquet")
        first = export(run.folder.path, folder / "models", sides=[f"{folder / 'side.parquet'}:item"])
        second = export(trained_towers(folder / "towers"), folder / "towers" / "models")
        self.paths = (first.folder.path, second.folder.path)
        self.rows = WORLD.rows(90_000, 40).drop_columns(["label", "logit"])
        pq.write_table(self.rows, folder / "new.parquet")

    def logits(self, version):
        return version.forward(arrays_of(self.rows.select(version.schema.names)), len(self.rows), 64).numpy()


@pytest.fixture(scope="module")
def true_versions(tmp_path_factory):
    return TrueVersions(tmp_path_factory.mktemp("true"))


def taken(changes, each):
    """Every so many of the many changes of JSON, and all others."""
    kept = 0
    for number, change in enumerate(changes):
        if ".json: " not in change.name or number % each == 0:
            kept += 1
            yield change


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["clicks", "towers"])
def test_crafted_versions_open_right_or_are_refused(which, true_versions, tmp_path):
    campaign, path, models = Campaign(f"versions {which}"), true_versions.paths[which], tmp_path / "models"
    wanted = true_versions.logits(open_version(path))

    def right(version):
        np.testing.assert_allclose(true_versions.logits(version), wanted, atol=1e-4)
        read_hot_rows(models / "versions" / path.name)
        read_mean_rows(models / "versions" / path.name)
        if version.retriever is not None:
            context = {name: true_versions.rows[name][0].as_py() for name in ("user", "seen", "d0")}
            assert len(version.retriever.retrieve(context, 5)[0]) == 5

    before = pa.total_allocated_bytes()
    for change in taken(changes_of(path, Random(which), 12), 7):
        change.craft(copy_of(path, models))
        campaign.take(change.name, lambda: open_version(models), right)
    campaign.finish()
    assert pa.total_allocated_bytes() - before < 1 << 28


DAMAGED = 1  # how `ckpt verify` ends where it has listed damage
COMMANDS = (
    "serve models --explain --memory 64MB --hit-rate 90% --default-row mean",
    "predict models --data parquet:new.parquet --out p.parquet",
    "audit models records",
    "ckpt verify models",
    "ckpt ls models",
)


@pytest.mark.slow
def test_commands_of_crafted_versions(true_versions, command, tmp_path):
    """Each ends with exit code 0, or with 2 and one line; one that looks for damage may list it."""
    path, counts = true_versions.paths[0], {0: 0, DAMAGED: 0, 2: 0}
    version, rows = open_version(path), true_versions.rows
    more = {REQUEST: range(40), VERSION: [1] * 40, LOGIT + "label": true_versions.logits(version)[:, 0]}
    (tmp_path / "records").mkdir()
    pq.write_table(rows, tmp_path / "new.parquet")
    columns = {name: rows[name] for name in version.schema.names}
    pq.write_table(pa.table(columns | more), tmp_path / "records" / "1.parquet")
    for number, change in enumerate(taken(changes_of(path, Random(2), 6), 60)):
        change.craft(copy_of(path, tmp_path / "models"))
        words = COMMANDS[number % len(COMMANDS)].split()
        code, out, said = command(*words)
        assert code in counts, (change.name, words, said)
        assert code != DAMAGED or ("verify" in words and "damaged chunks" in out)
        assert "Traceback" not in said
        if code == 2:
            assert len(said.splitlines()) == 1, (change.name, words, said)
            assert said.rstrip("\n").isprintable()
        counts[code] += 1
    print(f"\nCAMPAIGN commands of versions: {counts[2]} refused in one line, {counts[0] + counts[DAMAGED]} right")
    assert all(counts.values())


def test_the_changes_are_there(increments):
    """Of each file, and of each kind."""
    path: Path = increments.models / "versions" / "000001"
    names = [change.name for change in changes_of(path, Random(0), 1)]
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert {name.partition(": ")[0] for name in names} == files
    assert len(names) > 700
