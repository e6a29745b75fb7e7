"""Files of id maps: what is read is what was written, and what is not the table's is refused by name."""

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from conformance_idmap import every_case
from hypothesis import given
from safetensors.numpy import load_file, save_file
from tables.ids.maps import make_maps

from rowwise.base.errors import SpecError
from rowwise.recipes.id_maps import pin_map
from rowwise.tables.idmaps import DoubleHashIds, HashIds, QuotientRemainderIds, StoredIds
from rowwise.tables.ids import arrays, rules
from rowwise.tables.ids.check import find_fault
from rowwise.tables.ids.file import HEADER, load, save
from rowwise.tables.ids.idmap import IdMap, MapShape
from rowwise.tables.ids.open import open_map, stored_tables
from rowwise.tables.spec import Table


@given(case=every_case)
def test_what_is_read_is_what_was_written(tmp_path_factory, case):
    folder, id_map = tmp_path_factory.mktemp("maps"), case.id_map
    save(folder / "item.map", "item", id_map)
    assert [path.name for path in folder.iterdir()] == ["item.map"]
    table = Table(name="item", rows=min(id_map.shape.ids, (1 << 40) - 1), dim=4)
    found = load(folder / "item.map", table, id_map.digest)
    assert (found.shape, found.about, found.digest) == (id_map.shape, id_map.about, id_map.digest)
    assert np.array_equal(found.words, id_map.words)
    assert found.words.flags.writeable
    again = msgspec.json.decode(msgspec.json.encode(id_map.shape), type=MapShape)
    assert IdMap(shape=again, words=id_map.words).digest == id_map.digest


@pytest.fixture
def stored(tmp_path):
    rows_N = np.where(np.arange(1000) % 2, -1, np.arange(1000) % 77)
    id_map = arrays.entry_map(1000, rows_N, 77)
    save(tmp_path / "item.map", "item", id_map)
    return tmp_path / "item.map", id_map


def test_a_pipe_is_not_waited_for(tmp_path):
    """As it was: this hung."""
    os.mkfifo(tmp_path / "item.map")
    with pytest.raises(SpecError, match="read as an id"):
        load(tmp_path / "item.map", item())
    with pytest.raises(SpecError, match="this is a FIFO"):
        pin_map(item(id_map=StoredIds(file=str(tmp_path / "item.map"))))


def item(**changes):
    return Table(**({"name": "item", "rows": 1000, "dim": 8} | changes))


@pytest.mark.parametrize(
    ("table", "digest", "said"),
    [
        (item(name="user"), "", "that of table 'user' of 1000 ids"),
        (item(rows=999), "", "that of table 'item' of 999 ids"),
        (item(), "0" * 32, "that of table 'item' of 1000 ids and digest 00000000"),
    ],
)
def test_the_map_of_another_table_is_refused_by_name(stored, table, digest, said):
    path, id_map = stored
    with pytest.raises(SpecError) as told:
        load(path, table, digest)
    text = str(told.value)
    assert text.startswith(
        f"{path} is the id map of table 'item' of 1000 ids and digest {id_map.digest}: expected {said}"
    )
    assert "make it anew with `rowwise compress`" in text


def rewritten(path, *, words=None, **changes):
    """The file with other words or another header."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        header = msgspec.json.decode(file.metadata()[HEADER])
    words = load_file(path)["words"] if words is None else words
    save_file({"words": words}, path, metadata={HEADER: msgspec.json.encode(header | changes).decode()})


def test_damage_is_refused(stored):
    path, id_map = stored
    words = id_map.words.copy()
    words[3] ^= 1
    rewritten(path, words=words)
    with pytest.raises(SpecError, match=r"item\.map is damaged"):
        load(path, item())
    rewritten(path, words=words, digest=IdMap(shape=id_map.shape, words=words).digest)
    with pytest.raises(SpecError, match="column 0: its words"):
        load(path, item())
    rewritten(path, words=words.astype(np.int32))
    with pytest.raises(SpecError, match="its words are int32"):
        load(path, item())
    rewritten(path, format=2)
    with pytest.raises(SpecError, match="format is 2"):
        load(path, item())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SpecError, match="read as an id"):
        load(path, item())
    save_file({"words": words}, path)
    with pytest.raises(SpecError, match="its tensors or its header"):
        load(path, item())
    path.unlink()
    with pytest.raises(SpecError, match="id map: No such"):
        load(path, item())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "ranked", "count": 501}, "does not fit|no set"),
        ({"rows": 76}, "row 76, but the section has 76 rows"),
        ({"rows": 79}, "not inside one part"),
        ({"base": 5}, "not inside one part"),
        ({"at": 1}, "words 1 to"),
        ({"count": 0}, "does not fit"),
        ({"low_bits": 49}, "low_bits"),
        ({"column": 1}, "columns"),
        ({"kind": "quotient", "divisor": 3}, "does not fit"),
        ({"kind": "remainder", "divisor": 78}, "does not fit"),
        ({"divisor": 0}, "does not fit"),
        ({"kind": "hash", "divisor": -1 << 63}, "does not fit"),
        ({"divisor": 1 << 63}, "does not fit"),
        ({"kind": "rest"}, "1000 ids are in no set, but have 77 rows"),
        ({"kind": "hash", "seed": -1}, "seed"),
    ],
)
def test_sections_that_promise_what_they_do_not_hold_are_found(stored, changes, said):
    _, id_map = stored
    first, *others = id_map.shape.sections
    assert first.kind == "listed"
    sections = (msgspec.structs.replace(first, **changes), *(others if "column" not in changes else ()))
    shape = msgspec.structs.replace(id_map.shape, sections=sections)
    assert any(word in find_fault(IdMap(shape=shape, words=id_map.words)) for word in said.split("|"))


def test_sets_that_share_ids_are_found():
    one, two = arrays.ranked_map(100, [np.array([1, 2])], 0), arrays.ranked_map(100, [np.array([2, 3])], 0)
    both = arrays.add_maps(one, two)
    sections = tuple(msgspec.structs.replace(section, column=0) for section in both.shape.sections)
    assert "share ids" in find_fault(
        IdMap(shape=msgspec.structs.replace(both.shape, sections=sections), words=both.words)
    )


def test_a_recipe_s_rule_becomes_its_map(stored):
    path, id_map = stored
    assert open_map(item()) is None
    rules_ = {
        HashIds(rows=7, seed=2): rules.hash_map(1000, 7, 2),
        DoubleHashIds(rows=7, hashes=3): rules.double_hash_map(1000, 7, 0, 3),
        QuotientRemainderIds(rows=80, combine="product"): rules.quotient_remainder_map(1000, 80, 0, "product"),
        StoredIds(file=str(path)): id_map,
    }
    for rule, wanted in rules_.items():
        assert open_map(item(id_map=rule)).digest == wanted.digest
    with pytest.raises(SpecError, match="table 'item': id_map: 30"):
        open_map(item(id_map=QuotientRemainderIds(rows=30)))


def test_stored_tables_are_called_after_the_table():
    table = item(features=("seen", "clicked"), id_map=HashIds(rows=5))
    (one,) = stored_tables(table, rules.hash_map(1000, 5))
    assert one == msgspec.structs.replace(table, rows=5, id_map=None)
    wide, narrow = stored_tables(table, arrays.ranked_map(1000, [np.arange(9)], 4, dims=(16, 2)))
    assert (wide.name, wide.rows, wide.dim, wide.features) == ("item-0", 9, 8, ("seen-0", "clicked-0"))
    assert (narrow.name, narrow.rows, narrow.dim, narrow.features) == ("item-1", 4, 2, ("seen-1", "clicked-1"))
    plain = stored_tables(item(), arrays.ranked_map(1000, [np.arange(9)], 4, dims=(None, 2)))
    assert [part.feature_names for part in plain] == [("item-0",), ("item-1",)]


def test_maps_are_opened_without_torch():
    modules = "arrays, check, file, idmap, open, rows, rules, words"
    script = f"import sys; from rowwise.tables.ids import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_failed_write_leaves_nothing(tmp_path):
    folder = tmp_path
    (folder / "item.map").mkdir()
    (folder / "item.map" / "file").touch()
    with pytest.raises(OSError, match=r"directory|exists|empty"):
        save(folder / "item.map", "item", make_maps(5)["direct"])
    assert [path.name for path in folder.iterdir()] == ["item.map"]
