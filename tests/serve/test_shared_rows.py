"""Versions that are increments: equal to full ones, and served from the memory of the first with changed rows alone."""

import asyncio
import gc
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from increments import NUMBERS, TABLE_ROWS, predicted
from msgspec import structs
from mutations import flip
from small import RECIPE, trained

from rowwise import CheckpointError, RowType
from rowwise.checkpoint.check import verify
from rowwise.checkpoint.read import Checkpoint
from rowwise.recipes.export import export
from rowwise.recipes.served import load_rows, open_version
from rowwise.serve.admission import ServiceLimits
from rowwise.serve.app import make_app
from rowwise.serve.forward import arrays_of
from rowwise.serve.package import version_folder
from rowwise.serve.row_tiers import IN_MEMORY
from rowwise.serve.service import ScoringService
from rowwise.serve.shared_rows import newer_chunks
from rowwise.serve.traffic import Traffic


def scored(version, table):
    arrays = arrays_of(table.select(version.schema.names))
    return version.forward(arrays, table.num_rows, 256).flatten().numpy()


def loaded(models, *arguments):
    return load_rows(models, IN_MEMORY, *arguments)


def tensors(path):
    checkpoint = Checkpoint.open(path)
    return {name: checkpoint.load(name) for name in checkpoint.names()}


@pytest.fixture
def files():
    """Files in memory, which are closed at the end."""
    made = []

    def make():
        made.append(os.memfd_create("rows"))
        return made[-1]

    yield make
    for file in made:
        os.close(file)


def test_a_base_and_its_changes_are_a_full_version(increments, tmp_path):
    for number in NUMBERS:
        path, full = (version_folder(models, number).path for models in (increments.models, increments.full))
        found, wanted = tensors(path), tensors(full)
        assert found.keys() == wanted.keys()
        for name, x in found.items():
            assert torch.equal(x.reshape(-1).view(torch.uint8), wanted[name].reshape(-1).view(torch.uint8)), name
        assert verify(path).good
        own = [file.stat().st_size for file in path.glob(f"{number:06}.*.safetensors")]
        assert (number == 1 and not own) or 0 < sum(own) < 20_000
        assert len(Checkpoint.open(path).manifest.chain_bytes) == number
    models = shutil.copytree(increments.models, tmp_path / "models")
    shutil.rmtree(version_folder(models, 1).path)
    np.testing.assert_array_equal(predicted(models, 3, increments.data), increments.logits[3])


def test_versions_share_the_memory_of_the_first(increments, files):
    """All at once, in any order, and again after later ones were added; memory grows by the changed rows."""
    models, table, logits = increments.models, increments.table, increments.logits
    shared = loaded(models, 1, files(), None, None)
    before = os.fstat(shared.file).st_blocks * 512
    opened = {1: open_version(models, number=1, rows=shared)}
    for number in (2, 3, 4):
        fresh = files()
        shared = loaded(models, number, fresh, 1, shared)
        assert shared[1:3] == (1, number)
        assert os.fstat(fresh).st_size == 0
        opened[number] = open_version(models, number=number, rows=shared)
    assert os.fstat(shared.file).st_blocks * 512 - before < 100_000
    for number in (3, 1, 4, 2):
        np.testing.assert_array_equal(scored(opened[number], table), logits[number])
        assert opened[number].identity == "exact"
    grown = os.fstat(shared.file).st_blocks
    assert loaded(models, 2, files(), 4, shared) == shared
    assert os.fstat(shared.file).st_blocks == grown
    np.testing.assert_array_equal(scored(open_version(models, number=2, rows=shared), table), logits[2])


def test_a_server_may_start_with_an_increment(increments, files):
    models, table, logits = increments.models, increments.table, increments.logits
    shared = loaded(models, 3, files(), None, None)
    assert shared[1:3] == (3, 3)
    shared = loaded(models, 4, files(), 3, shared)
    assert shared[1:3] == (3, 4)
    for number in (3, 4):
        np.testing.assert_array_equal(scored(open_version(models, number=number, rows=shared), table), logits[number])
    own = loaded(models, 2, files(), 3, shared)  # earlier than all of the rows that are there
    assert own[1:3] == (2, 2)
    np.testing.assert_array_equal(scored(open_version(models, number=2, rows=own), table), logits[2])


def test_one_wrong_newer_row_is_seen(increments, files):
    """The comparison of the tests above is one that can fail."""
    models, table, logits = increments.models, increments.table, increments.logits
    shared = loaded(models, 2, files(), 1, loaded(models, 1, files(), None, None))
    version = open_version(models, number=2, rows=shared)
    np.testing.assert_array_equal(scored(version, table), logits[2])
    checkpoint = Checkpoint.open(version_folder(models, 2).path)
    (name,) = (name for name in checkpoint.names() if name.endswith(".user") and name.startswith("model/"))
    (chunk,) = (one for one in checkpoint.entry(name).chunks if one.ids is not None)
    at = checkpoint.read_ids(name, chunk).tolist().index(int(table["user"][0]))
    place = 32 * (TABLE_ROWS + at)  # of the first table in the file
    row = os.pread(shared.file, 32, place)
    os.pwrite(shared.file, bytes(32), place)
    assert (scored(version, table) != logits[2]).any()
    os.pwrite(shared.file, row, place)
    np.testing.assert_array_equal(scored(version, table), logits[2])


def test_a_version_that_is_closed_while_a_body_comes_still_answers(increments):
    service = ScoringService(ServiceLimits(timeout_s=60.0))
    for number in (1, 2):
        service.open(open_version(increments.models, number=number))
    service.move(Traffic(1))
    rows = increments.table.select(service.versions[1].schema.names).to_pydict()
    sent = []

    async def receive():
        service.move(Traffic(2))
        service.close(1)
        return {"type": "http.request", "body": json.dumps({"rows": rows}).encode()}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/models/small/score", "headers": [], "query_string": b""}
    asyncio.run(make_app(service, lambda _: nullcontext())(scope, receive, send))
    assert sent[0]["status"] == 200
    answer = json.loads(sent[1]["body"])
    assert answer["version"] == 1
    found = np.array(answer["outputs"]["label_logit"], np.float32)
    np.testing.assert_array_equal(found, increments.logits[1])


def test_versions_of_one_file_share_its_mapping(increments, files):
    """Until the last of them is closed."""
    shared, opened = loaded(increments.models, 1, files(), None, None), {}
    for number in NUMBERS:
        shared = loaded(increments.models, number, files(), 1, shared)
        opened[number] = open_version(increments.models, number=number, rows=shared)
    inode = f" {os.fstat(shared.file).st_ino} "
    assert Path("/proc/self/maps").read_text().count(inode) == 1
    for number in NUMBERS:
        np.testing.assert_array_equal(scored(opened.pop(number), increments.table), increments.logits[number])
    gc.collect()
    assert inode not in Path("/proc/self/maps").read_text()


def test_what_is_no_increment_gets_memory_of_its_own(increments, tmp_path, files):
    models, run = tmp_path / "models", increments.run.folder.path
    written = [
        export(run, models, which=f"step-{step}", rows=rows).base
        for step, rows in ((4, None), (8, RowType.INT8), (8, None), (12, None))
    ]
    assert written == [None, None, None, 3]
    first = loaded(models, 1, files(), None, None)
    for number in (2, 3):
        own = loaded(models, number, files(), 1, first)
        assert own[1:3] == (number, number)
        assert own.file != first.file
    assert loaded(models, 4, files(), 3, own)[1:3] == (3, 4)
    found = scored(open_version(models, number=1, rows=first), increments.table)
    np.testing.assert_array_equal(found, increments.logits[1])


def test_two_increments_of_one_base_do_not_share_places(increments, tmp_path, files):
    """The second has other rows where the first has its own, so it gets all rows anew."""
    models, run = tmp_path / "models", increments.run.folder.path
    table, logits = increments.table, increments.logits
    for step in (4, 8):
        export(run, models, which=f"step-{step}")
    shutil.move(version_folder(models, 2).path, tmp_path / "away")
    export(run, models, which="step-12")
    shutil.move(version_folder(models, 2).path, version_folder(models, 3).path)
    shutil.move(tmp_path / "away", version_folder(models, 2).path)
    shared = loaded(models, 2, files(), 1, loaded(models, 1, files(), None, None))
    assert shared[1:3] == (1, 2)
    second = open_version(models, number=2, rows=shared)
    own = loaded(models, 3, files(), 2, shared)
    assert own[1:3] == (3, 3)
    np.testing.assert_array_equal(scored(open_version(models, number=3, rows=own), table), logits[3])
    np.testing.assert_array_equal(scored(second, table), logits[2])


def test_a_damaged_increment_is_refused_and_changes_nothing(increments, tmp_path, files):
    models = shutil.copytree(increments.models, tmp_path / "models")
    (weights,) = version_folder(models, 2).path.glob("000002.*.safetensors")
    flip(weights, -5)
    shared = loaded(models, 1, files(), None, None)
    first = open_version(models, number=1, rows=shared)
    with pytest.raises(CheckpointError, match="do not match their"):
        loaded(models, 2, files(), 1, shared)
    np.testing.assert_array_equal(scored(first, increments.table), increments.logits[1])


def test_room_is_limited(increments, files):
    shared = loaded(increments.models, 1, files(), None, None)
    version = Checkpoint.open(version_folder(increments.models, 2).path).manifest
    assert [len(chunks) for chunks in newer_chunks(shared, version).values()] == [1, 1, 1]
    name, entry = next((name, entry) for name, entry in version.tensors.items() if entry.row_type is not None)
    for count, fits in ((TABLE_ROWS // 4 + 1024, True), (TABLE_ROWS // 4 + 1025, False)):
        many = structs.replace(entry.chunks[-1], ids=structs.replace(entry.chunks[-1].ids, count=count))
        chunks = (*entry.chunks[:-1], many)
        larger = structs.replace(version, tensors={**version.tensors, name: structs.replace(entry, chunks=chunks)})
        assert (newer_chunks(shared, larger) is not None) == fits


def test_tables_at_other_places_share_nothing(increments, tmp_path, files):
    """An increment by its files, of a recipe that names the same tables in another order: no row of others changes."""
    models, table = shutil.copytree(increments.models, tmp_path / "models"), increments.table
    tables = [{**one, "rows": TABLE_ROWS} for one in reversed(RECIPE["tables"]["list"])]
    run, _ = trained(
        tmp_path,
        tables={"list": tables},
        columns={"sparse": RECIPE["columns"]["sparse"][::-1]},
        init_from=str(increments.run.folder.path),
        train={"steps": 2},
    )
    assert export(run.folder.path, models, which="last").base == 4
    shared = loaded(models, 4, files(), 1, loaded(models, 1, files(), None, None))
    assert shared[1:3] == (1, 4)
    live = open_version(models, number=4, rows=shared)
    own = loaded(models, 5, files(), 4, shared)
    assert own[1:3] == (5, 5)
    np.testing.assert_array_equal(scored(live, table), increments.logits[4])
    np.testing.assert_array_equal(
        scored(open_version(models, number=5, rows=own), table), scored(open_version(models, number=5), table)
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3])
def test_ids_in_the_room_are_outside_their_table(increments, tmp_path, files, number):
    """Of versions with and without newer rows: as `rowwise predict`, which has no room."""
    tables = [{**one, "rows": 100, "unknown": "last_row"} for one in RECIPE["tables"]["list"]]
    run, _ = trained(tmp_path, tables={"list": tables}, train={"steps": 12}, save={"every": 4, "keep": 9})
    for step in (4, 8, 12):
        export(run.folder.path, tmp_path / "models", which=f"step-{step}")
    shared = None
    for one in range(1, number + 1):
        shared = loaded(tmp_path / "models", one, files(), None, shared)
    changed = increments.table.set_column(
        increments.table.column_names.index("user"), "user", [np.arange(90, 90 + increments.table.num_rows)]
    )
    served = open_version(tmp_path / "models", number=number, rows=shared)
    with pytest.warns(match="outside 0..99"):
        found = scored(served, changed)
    with pytest.warns(match="outside 0..99"):
        np.testing.assert_array_equal(found, scored(open_version(tmp_path / "models", number=number), changed))


def test_a_damaged_base_is_not_extended(increments, tmp_path):
    models, told = shutil.copytree(increments.models, tmp_path / "models"), []
    for path in version_folder(models, 4).path.glob("000004.*.safetensors"):
        path.unlink()
    written = export(increments.run.folder.path, models, which="step-16", warn=told.append)
    assert written.base is None
    (line,) = told
    assert line.startswith("version 4 cannot be extended, so all rows are written: ")
    assert verify(version_folder(models, 5).path).good


def test_versions_of_which_others_are_increments_may_go(increments, tmp_path, files):
    models = shutil.copytree(increments.models, tmp_path / "models")
    shared = loaded(models, 2, files(), None, loaded(models, 1, files(), None, None))
    for number in (1, 2):
        shutil.rmtree(version_folder(models, number).path)
    shared = loaded(models, 3, files(), None, shared)
    assert shared[1:3] == (1, 3)
    found = scored(open_version(models, number=3, rows=shared), increments.table)
    np.testing.assert_array_equal(found, increments.logits[3])
