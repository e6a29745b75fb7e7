"""Requests name items only: their other columns come from a table of the version, as if the request had them."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet as pq
from small import WORLD, trained

from rowwise import DataError
from rowwise.recipes.export import export
from rowwise.recipes.served import open_version
from rowwise.serve.client import arrow_stream
from rowwise.serve.request import RequestReader
from rowwise.serve.sides import SideTable, load_side

SCHEMA = pa.schema({"user": pa.int64(), "item": pa.int64(), "price": pa.float32(), "tags": pa.list_(pa.int64())})
ITEMS = pa.table({"item": [30, 10, 20], "price": pa.array([3.0, None, 2.0], pa.float32()), "tags": [[1], [2, 3], None]})
READER = RequestReader(SCHEMA, 100, [SideTable("item", ITEMS)])
OTHER_KEY = RequestReader(SCHEMA.remove(1), 100, [SideTable("sku", ITEMS.rename_columns(["sku", "price", "tags"]))])


def read(rows, reader=READER, **more):
    return reader.read_json(json.dumps({"rows": rows} | more).encode())


def test_columns_come_by_the_key():
    found = read({"user": [1, 2, 3, 4], "item": [20, 99, None, 10]})
    assert pa.table(dict(found.arrays)).schema.equals(SCHEMA)
    assert found.arrays["price"].to_pylist() == [2.0, None, None, None]
    assert found.arrays["tags"].to_pylist() == [None, None, None, [2, 3]]
    assert (found.rows, found.ignored, found.unknown) == (4, 0, 1)


def test_what_a_request_has_is_not_looked_up():
    found = read({"user": [1], "item": [99], "price": [5.0]})
    assert found.arrays["price"].to_pylist() == [5.0]
    assert found.arrays["tags"].to_pylist() == [None]
    whole = read({"user": [1], "item": [99], "price": [5.0], "tags": [[7]], "more": [1]})
    assert (whole.unknown, whole.ignored) == (0, 1)


def test_the_key_may_be_a_column_that_the_model_does_not_read():
    found = read({"user": [1, 2], "sku": [30, 31]}, OTHER_KEY)
    assert list(found.arrays) == ["user", "price", "tags"]
    assert found.arrays["price"].to_pylist() == [3.0, None]
    with pytest.raises(DataError, match="'sku', by which 'price'"):
        read({"user": [1]}, OTHER_KEY)


def test_candidates_and_arrow_are_joined_alike():
    found = READER.read_json(json.dumps({"context": {"user": 7}, "candidates": {"item": [10, 30]}}).encode())
    wanted = read({"user": [7, 7], "item": [10, 30]})
    assert found.arrays == wanted.arrays
    columns = {"user": pa.array([7, 7]), "item": pa.array([10, 30])}
    assert READER.read_arrow(arrow_stream(pa.table(columns))).arrays == wanted.arrays
    assert READER.read_columns(columns).arrays == wanted.arrays
    with pytest.raises(DataError, match="no column 'item'"):
        read({"user": [1]})


@given(
    st.lists(st.integers(-5, 5), unique=True, max_size=8),
    st.lists(st.none() | st.integers(-6, 6), min_size=1, max_size=12),
    st.booleans(),
)
def test_any_keys_are_found_as_a_dictionary_finds_them(keys, wanted, text):
    made = (lambda key: None if key is None else f"k{key}") if text else lambda key: key
    kind = pa.string() if text else pa.int64()
    values = dict(zip(map(made, keys), range(len(keys)), strict=True))
    side = SideTable(
        "key", pa.table({"key": pa.array(map(made, keys), kind), "value": pa.array(values.values(), pa.int32())})
    )
    found = side.join(pa.array(map(made, wanted), kind), ["value"])
    assert found.arrays["value"].to_pylist() == [values.get(made(key)) for key in wanted]
    assert found.unknown == sum(key is not None and made(key) not in values for key in wanted)


def test_side_tables_that_are_none(tmp_path):
    pq.write_table(ITEMS, tmp_path / "items.parquet")
    file = tmp_path / "items.parquet"

    def refused(message, text, table=None):
        if table is not None:
            pq.write_table(table, file)
        with pytest.raises(DataError, match=message):
            load_side(text, SCHEMA)

    refused("expected a Parquet file and the column of its keys", "items.parquet")
    refused("no such file: expected the path of a Parquet file", f"{tmp_path / 'none.parquet'}:item")
    refused("no column 'sku'; there are item, price, tags", f"{file}:sku")
    refused("the model reads none of its columns", f"{file}:item", pa.table({"item": [1], "z": [1]}))
    refused("key 10 occurs twice", f"{file}:item", pa.table({"item": [10, 10], "price": [1.0, 2.0]}))
    refused("key 'a' occurs twice", f"{file}:sku", pa.table({"sku": ["a", "a"], "price": [1.0, 2.0]}))
    refused("1 null keys", f"{file}:item", pa.table({"item": [10, None], "price": [1.0, 2.0]}))
    refused("expected the types of the training data", f"{file}:item", pa.table({"item": [10], "price": ["x"]}))
    refused("expected keys of whole numbers or text", f"{file}:sku", pa.table({"sku": [0.5], "price": [1.0]}))


def test_a_version_has_them(tmp_path):
    torch.set_num_threads(1)
    run, _ = trained(tmp_path, train={"epochs": 1})
    rows = WORLD.rows(90_000, 300).drop_columns(["label", "logit"])
    items = pa.table({"item": list(range(30)), "d1": pa.array(np.linspace(-1, 1, 30), rows.schema.field("d1").type)})
    pq.write_table(items, tmp_path / "items.parquet")
    export(run.folder.path, tmp_path / "models", sides=[f"{tmp_path / 'items.parquet'}:item"])
    version = open_version(tmp_path / "models")
    reader, plain = (RequestReader(version.schema, 1000, sides) for sides in (version.sides, ()))
    sent = rows.drop_columns(["row", "d1"]) if "row" in rows.column_names else rows.drop_columns(["d1"])
    full = sent.append_column("d1", items["d1"].take(sent["item"]))
    found, wanted = reader.read_lists(sent.to_pydict()), plain.read_lists(full.to_pydict())
    assert found.arrays == wanted.arrays
    logits = [version.forward(one.arrays, one.rows, 64) for one in (found, wanted)]
    assert torch.equal(*logits)
