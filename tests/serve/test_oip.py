"""Tensors of the Open Inference Protocol are the rows that JSON would be, and mistakes are one clear error."""

import json
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import DataError
from rowwise.serve.oip import OFFSETS, VALUES, InferForm, describe
from rowwise.serve.request import RequestReader

SCHEMA = pa.schema(
    {"user": pa.int64(), "x": pa.float32(), "name": pa.string(), "seen": pa.list_(pa.int32()), "yes": pa.bool_()}
)
TENSORS = {
    "user": ("INT64", [7, 8]), "x": ("FP32", [0.5, 1.5]), "name": ("BYTES", ["a", "bé"]),
    "yes": ("BOOL", [True, False]),
    f"seen{VALUES}": ("INT32", [1, 2, 3]), f"seen{OFFSETS}": ("INT64", [0, 1, 3]),
}  # fmt: skip
ROWS = {"user": [7, 8], "x": [0.5, 1.5], "name": ["a", "bé"], "seen": [[1], [2, 3]], "yes": [True, False]}
NUMPY = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}
READER = RequestReader(SCHEMA, 100)


def tensor(name, kind, data, **more):
    return {"name": name, "shape": [len(data)], "datatype": kind, "data": data} | more


def body(tensors=TENSORS, **more):
    return json.dumps({"inputs": [tensor(name, *of) for name, of in tensors.items()]} | more).encode()


def binary_body(tensors=TENSORS, **more):
    """The same tensors in binary, and how long their JSON is."""
    inputs, parts = [], []
    for name, (kind, data) in tensors.items():
        if kind == "BYTES":
            parts.append(b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in data))
        else:
            parts.append(np.array(data, NUMPY[kind]).tobytes())
        size = {"binary_data_size": len(parts[-1])}
        inputs.append({"name": name, "shape": [len(data), 1], "datatype": kind, "parameters": size})
    text = json.dumps({"inputs": inputs} | more).encode()
    return text + b"".join(parts), str(len(text))


def test_tensors_are_columns():
    wanted = READER.read_lists(ROWS)
    assert InferForm(body(), None).read(READER) == wanted
    assert InferForm(*binary_body()).read(READER) == wanted
    more = InferForm(body(TENSORS | {"more": ("FP64", [1.0, 2.0])}), None).read(READER)
    assert (more.arrays, more.ignored) == (wanted.arrays, 1)
    missing = InferForm(body(TENSORS | {"x": ("FP32", [None, 1.5])}), None).read(READER)
    assert missing.arrays == READER.read_lists(ROWS | {"x": [None, 1.5]}).arrays


def test_outputs_are_those_that_were_asked_for():
    columns = {"a": pa.array([0.5, 2.0], pa.float32()), "b": pa.array([1.0, 3.0], pa.float32())}
    answer = InferForm(body(id="7"), None).answer("m", 3, columns)
    found = json.loads(answer.body)
    assert (found["id"], found["model_name"], found["model_version"], answer.json_bytes) == ("7", "m", "3", None)
    assert found["outputs"][1] == {"name": "b", "datatype": "FP32", "shape": [2], "data": [1.0, 3.0]}
    asked = [{"name": "b", "parameters": {"binary_data": True}}]
    answer = InferForm(body(outputs=asked), None).answer("m", 3, columns)
    (output,) = json.loads(answer.body[: answer.json_bytes])["outputs"]
    assert output["parameters"] == {"binary_data_size": 8}
    assert answer.body[answer.json_bytes :] == np.array([1, 3], np.float32).tobytes()
    both = InferForm(body(parameters={"binary_data_output": True}), None).answer("m", 3, columns)
    assert len(both.body) == both.json_bytes + 16
    with pytest.raises(DataError, match="output 'c'"):
        InferForm(body(outputs=[{"name": "c"}]), None).answer("m", 3, columns)


def test_a_model_describes_its_tensors():
    about = describe("m", [1, 2], SCHEMA, ["label_logit"])
    assert about.versions == ["1", "2"]
    assert {tensor.name: tensor.datatype for tensor in about.inputs} == {name: of[0] for name, of in TENSORS.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": ("INT64", [7])}, "column 'user' has 1 rows, others have 2"),
        ({"user": ("INT63", [7, 8])}, "tensor 'user' has datatype 'INT63': expected one of BOOL"),
        ({"user": ("INT64", [7, 2.5])}, "tensor 'user': "),
        ({"user": ("INT64", [7, True])}, "tensor 'user': .*expected int64"),
        ({"user": ("FP32", [7.0, 2.5])}, "column 'user' holds float: expected int64"),
        ({"x": ("FP32", [1.0, "2"])}, "tensor 'x': .*expected float"),
        ({"x": ("FP32", [1.0, True])}, "tensor 'x': values of bool, float: expected float"),
        ({"user": ("BOOL", [True, False])}, "column 'user' holds bool: expected int64"),
        ({"user": ("BYTES", ["1", "0x7"])}, "column 'user' holds string: expected int64"),
        ({"seen": ("INT32", [1, 2])}, "column 'seen' is given twice"),
        ({str(k): ("NONE", []) for k in range(300)}, "306 tensors: expected at most 266"),
        ({f"seen{OFFSETS}": ("INT64", [0, 1, 9])}, "tensor 'seen__offsets'"),
        ({f"seen{OFFSETS}": ("FP32", [0, 1, 3])}, "it has 3 of float: expected rows \\+ 1 whole numbers"),
        ({f"seen{OFFSETS}": ("INT64", [3, 1, 0])}, "tensor 'seen__offsets'"),
    ],
)
def test_what_mistakes_are_told(change, message):
    with pytest.raises(DataError, match=message):
        InferForm(body(TENSORS | change), None).read(READER)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([tensor("user", "INT64", [1]), tensor("user", "INT64", [1])], "tensor 'user' is given twice"),
        ([tensor("user", "INT64", [1], shape=[2])], "has 1 values and shape 2: expected 2 values"),
        ([tensor("user", "INT64", [1], shape=[1, 2])], "expected \\[rows\\] or \\[rows, 1\\]"),
        (
            [tensor("user", "INT64", [1], parameters={"binary_data_size": 8})],
            "expected either data or binary_data_size",
        ),
        ([{"name": "user", "shape": [1], "datatype": "INT64"}], "expected either data or binary_data_size"),
        ([{"name": "user", "shape": [1], "datatype": "INT64", "parameters": {"binary_data_size": 8}}], "0 are left"),
    ],
)
def test_what_wrong_tensors_are_told(inputs, message):
    others = [tensor(name, *of) for name, of in TENSORS.items() if name != "user"]
    with pytest.raises(DataError, match=message):
        InferForm(json.dumps({"inputs": inputs + others}).encode(), None).read(READER)


def test_what_missing_tensors_are_told():
    for inputs, message in (("x", "expected JSON with inputs"), ([], "no column 'user'")):
        with pytest.raises(DataError, match=message):
            InferForm(json.dumps({"inputs": inputs}).encode(), None).read(READER)
    with pytest.raises(DataError, match="tensor 'seen__offsets': there"):
        InferForm(body({name: of for name, of in TENSORS.items() if not name.endswith(OFFSETS)}), None).read(READER)


@pytest.mark.parametrize("header", ["x", "-1", "99999999", "1.5", "", "0" * 5000, "0" * 18 + "9999"])
def test_wrong_lengths_of_the_json(header):
    with pytest.raises(DataError, match="inference-header-content-length"):
        InferForm(body(), header)


@given(st.data())
def test_any_bytes_are_rows_or_one_clear_error(data):
    whole, header = binary_body()
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    try:
        found = InferForm(bytes(damaged[:cut]), data.draw(st.sampled_from([header, None, "10"]))).read(READER)
    except DataError:
        return
    assert pa.table(dict(found.arrays)).num_rows == found.rows
