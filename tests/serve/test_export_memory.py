"""Exports whose rows are in memory a part at a time: the bytes of those with all rows there, in less memory."""

import json
import subprocess
import sys

import pytest
from serving import files_of
from small import RECIPE, trained
from towers import MANY, trained_towers, write_item_table

from rowwise import RowType, Table
from rowwise.recipes.export import export, max_changed
from rowwise.recipes.export_items import ItemOptions
from rowwise.serve.package import version_folder

SMALL = 200_000
LARGE_ROWS, DIM = 6_000_000, 32  # 768 MB
MAX_bytes = 350_000_000  # of the recipe's 120 MB, and of two windows of rows
PEAK = """
import json, resource, sys
from pathlib import Path
from rowwise.recipes.export import export

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

run, folder, *rows = sys.argv[1:]
before = peak()
written = export(Path(run), Path(folder), rows=rows[0] if rows else None)
print(json.dumps({"grown": peak() - before, "size": written.size_bytes}))
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [None, RowType.FP16, RowType.BF16, RowType.INT8, RowType.INT4])
def test_versions_have_the_same_bytes_with_less_memory(increments, tmp_path, rows):
    """Also that of an increment, and which rows training asked for most often."""
    run = increments.run.folder.path
    for step, number in ((4, 1), (8, 2)):
        for name, memory in (("whole", None), ("parts", SMALL)):
            written = export(run, tmp_path / name, which=f"step-{step}", rows=rows, memory_bytes=memory)
            assert written.base == (None if number == 1 else 1)
        whole, parts = (files_of(version_folder(tmp_path / name, number).path) for name in ("whole", "parts"))
        assert parts.keys() >= {"hot.arrow", "golden.arrow", "manifest.json"}
        assert parts == whole


@pytest.mark.slow
def test_items_have_the_same_bytes_with_less_memory(tmp_path):
    """Their vectors come from rows that a cache has a part of; so does the index."""
    run, file = trained_towers(tmp_path, MANY), write_item_table(tmp_path / "items.parquet")
    items = ItemOptions(str(file), recall=0.95)
    for name, memory in (("whole", None), ("parts", SMALL)):
        written = export(run, tmp_path / name, items=items, memory_bytes=memory)
        assert written.items.index is not None
    whole, parts = (files_of(version_folder(tmp_path / name, 1).path) for name in ("whole", "parts"))
    assert parts.keys() >= {"retrieval/items.vectors", "retrieval/items.faiss"}
    assert parts == whole


def test_changed_rows_are_as_many_as_fit():
    table = Table(name="t", rows=1_000_000, dim=8)
    assert max_changed(3, None, table) == max_changed(3, 1 << 40, table) > 250_000
    assert max_changed(3, 32 * 6 * 1000, table) == 1000


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, "int8"])
def test_a_table_on_disk_is_exported_in_less_memory_than_it_takes(tmp_path, rows):
    table = {**RECIPE["tables"]["list"][0], "rows": LARGE_ROWS, "dim": DIM}
    tables = {"list": [table, *({**one, "dim": DIM} for one in RECIPE["tables"]["list"][1:])]}
    run, _ = trained(
        tmp_path, tables=tables, train={"steps": 4}, memory="120MB", model={"kind": "dlrm", "bottom": [DIM], "top": [8]}
    )
    command = [sys.executable, "-c", PEAK, str(run.folder.path), str(tmp_path / "models"), *([rows] if rows else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["grown"] < MAX_bytes < LARGE_ROWS * DIM * 4 // 2
