"""Models leave in the formats of others, and answer there what `rowwise predict` says."""

import itertools
import json
import re
import subprocess
import sys
import time
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
import typer
import yaml
from google.protobuf import text_format
from launching import ENVIRONMENT, rowwise
from pyarrow import parquet as pq
from small import RECIPE, recipe, trained, write_rows
from test_kubernetes import check

from rowwise import SpecError
from rowwise.base.errors import CheckpointError, RowwiseError, UnknownIdWarning
from rowwise.cli.kserve import check_kserve, make_service
from rowwise.cli.main import make_app
from rowwise.ingest.columns import Dense
from rowwise.ingest.encode import scale
from rowwise.ingest.native import HASH, RowMapping, map_ids
from rowwise.ingest.reader import Split
from rowwise.ingest.transform import (
    BoxCox,
    Bucketize,
    Clamp,
    Enumerate,
    Fill,
    FirstX,
    Log1p,
    Logit,
    MapId,
    PositiveModulus,
    RowPosition,
)
from rowwise.recipes.ensemble import predict_ensemble
from rowwise.recipes.export import export
from rowwise.recipes.formats.columns import GraphColumn, apply_transform, dense_numbers, hashed_rows
from rowwise.recipes.formats.graph import (
    GatheredTables,
    GraphIds,
    check_exportable,
    check_golden,
    inputs_of,
    tensors_of,
)
from rowwise.recipes.formats.write import export_as
from rowwise.recipes.served import open_version
from rowwise.serve.forward import arrays_of
from rowwise.serve.package import GoldenRows, read_golden
from rowwise.tables.batch import Jagged
from rowwise.tables.embedding import Embeddings
from rowwise.tables.spec import Normal, Table

ROOT = Path(__file__).parents[2]
NUMBERS = pa.array([0.0, None, -3.5, 2.5, float("nan"), 0.25, 1e9, 1e-9, float("inf"), 1.0], pa.float64())
WHOLE = pa.array([0, None, 3, -4, 1 << 40, 7, 7, -(1 << 62), 12, 5], pa.int64())
LISTS = pa.array([[3, 7, 7], None, [], [5, None, -2, 12], [1 << 20]], pa.list_(pa.int32()))
FLOATS = pa.array([[0.5, None, 2.0, -1.0], [], None, [float("nan"), 3.0]], pa.large_list(pa.float32()))
BORDERS = (-1.0, 0.25, 1.0)
KNOWN = {"7": 2, "3": 0, "-4": 5, "1099511627776": 1}
CASES = [
    *((transform, array) for transform in (
        Clamp(column="x", low=-2, high=3), Log1p(column="x"), Logit(column="x"), BoxCox(column="x", power=0.0),
        BoxCox(column="x", power=0.5, shift=4.0), Bucketize(column="x", borders=BORDERS),
    ) for array in (NUMBERS, NUMBERS.cast(pa.float32()), WHOLE, FLOATS)),
    *((Fill(column="x", value=2), array) for array in (NUMBERS, WHOLE)),
    *((transform, array) for transform in (
        PositiveModulus(column="x", rows=5), MapId(column="x", mapping=KNOWN), MapId(column="x", mapping={"7": 9}),
        MapId(column="x", mapping=KNOWN, unknown=4),
    ) for array in (WHOLE, LISTS)),
    *((FirstX(column="x", count=2), array) for array in (LISTS, FLOATS)),
]  # fmt: skip


def column_of(array):
    """A column of the data, as the graph gets it."""
    inputs = inputs_of(pa.field("x", array.type))
    values, *offsets = tensors_of(inputs, pa.table({"x": array}))
    return GraphColumn.of(values, *offsets or [None])


def kept(column):
    """The values of each row that count."""
    ends = range(len(column.values_N) + 1) if column.offsets_B1 is None else column.offsets_B1.tolist()
    used = [x if not missing else None for x, missing in zip(*map(torch.Tensor.tolist, column[:2]), strict=True)]
    return [[x for x in used[begin:end] if x is not None] for begin, end in itertools.pairwise(ends)]


def counted(array):
    rows = [row if isinstance(row, list) else [row] for row in array.to_pylist()]
    return [[x for x in row or () if x is not None and x == x] for row in rows]


@pytest.mark.parametrize(("transform", "array"), CASES)
def test_transforms_of_a_graph_are_those_of_training(transform, array):
    (expected,) = transform.run((array,), RowPosition(split=Split(source="x", start=0, stop=0, first_row=0)))
    made = kept(apply_transform(transform, column_of(array)))
    for row, wanted in zip(made, counted(expected), strict=True):
        assert row == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_a_transform_without_operators_is_named():
    with pytest.raises(SpecError, match=r"transform enumerate of x: a graph has no operators.*--triton"):
        apply_transform(Enumerate(column="x"), column_of(LISTS))
    with pytest.raises(SpecError, match="cannot tell a null list from an empty one"):
        apply_transform(Fill(column="x", value=1), column_of(LISTS))
    with pytest.raises(SpecError, match=r"column 'x' holds text, and a graph has no hash of text"):
        inputs_of(pa.field("x", pa.list_(pa.string())))
    with pytest.raises(SpecError, match=r"column 'x' holds uint64"):
        inputs_of(pa.field("x", pa.uint64()))


@pytest.mark.parametrize("rows", [1, 64, 50, (1 << 39) + 7])
def test_ids_are_hashed_to_the_rows_of_training(rows):
    ids = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 1000)
    assert hashed_rows(torch.from_numpy(ids), rows).tolist() == map_ids(ids, RowMapping(HASH, rows)).tolist()


@pytest.mark.parametrize("dense", [Dense(column="x", fill=3.0), Dense(column="x", log1p=True, mean=1.5, std=0.5)])
def test_numbers_are_those_of_training(dense):
    x_FR = np.array([[dense.fill if x is None or x != x else x for x in NUMBERS.to_pylist()]], np.float32)
    scale(x_FR, [dense])
    assert dense_numbers(column_of(NUMBERS), dense).tolist() == pytest.approx(x_FR[0].tolist(), rel=1e-6)


@pytest.mark.parametrize("row_type", ["fp32", "fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_tables_are_gathered_and_summed(pooling, row_type):
    settings = {"pooling": pooling, "row_type": row_type, "init": Normal(), "dim": 12}
    tables = [
        Table(name="a", rows=9, features=("one", "many"), **settings),
        Table(name="b", rows=5, unknown="last_row", **settings),
    ]
    embeddings = Embeddings(tables, seed=1)
    lists = {"one": [[3], [], [8]], "many": [[1, 1, 8], [], [0]], "b": [[7], [-2], [1]]}
    with pytest.warns(UnknownIdWarning):
        expected = embeddings(Jagged.from_lists(lists)).values()
    features = {
        "one": column_of(pa.array([3, None, 8])),
        "many": column_of(pa.array(lists["many"])),
        "b": column_of(pa.array([7, -2, 1])),
    }
    gathered = GatheredTables(embeddings)
    torch.testing.assert_close(gathered(GraphIds(features, 3)).values(), expected)
    for bad in (-1, 9):  # neither is wrapped around, nor clipped
        with pytest.raises(IndexError):
            gathered(GraphIds(features | {"one": column_of(pa.array([3, bad, 8]))}, 3))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": {"kind": "sasrec", "length": 5, "heads": 1, "layers": 1}}, "model.kind=sasrec answers with items"),
        ({"precision": "bf16"}, "train.precision=bf16: a graph multiplies in 32 bits"),
        ({"table": {"pooling": "sequence"}}, "table 'user' has pooling sequence: .* lists that attention reads"),
        ({"table": {"managed": {}}}, "table 'user' is managed"),
        ({"table": {"id_map": {"kind": "hash", "rows": 20}}}, "table 'user' has an id_map of kind hash"),
    ],
    ids=["items", "precision", "sequence", "managed", "mapped"],
)
def test_what_a_graph_cannot_hold_is_named(changes, problem, tmp_path):
    first, *others = RECIPE["tables"]["list"]
    tables = [first | changes.get("table", {}), *others]
    made = recipe(tmp_path, tables={"list": tables})
    parts = SimpleNamespace(model=made.model, tables=made.tables.list)
    if "model" in changes:
        parts.model = recipe(tmp_path, model=changes["model"]).model
    with pytest.raises(SpecError, match=problem) as error:
        check_exportable(parts, changes.get("precision", "fp32"))
    assert "--mlflow or --triton" in str(error.value)


RICH = {  # what a graph has operators for
    "columns": {
        "labels": ["label", "d1 >= 0"],
        "sparse": [
            {"column": "user"},
            {"column": "item_row", "ids": "direct", "table": "item"},
            {"column": "seen", "first": 2},
            {"column": "d0_bucket", "ids": "direct", "table": "bucket"},
        ],
        "dense": [{"column": "d0", "log1p": True, "mean": 0.2, "std": 0.7}, {"column": "d2", "fill": 1.5}],
    },
    "transforms": [
        {"kind": "map_id", "column": "item", "mapping": {str(k): 29 - k for k in range(25)}, "to": "item_row"},
        {"kind": "bucketize", "column": "d0", "borders": [-0.5, 0, 0.5], "to": "d0_bucket"},
        {"kind": "clamp", "column": "d1", "low": -1, "high": 1, "to": "d2"},
    ],
    "tables": {
        "list": [
            {"name": "user", "rows": 64, "dim": 8, "row_type": "fp16"},
            {"name": "item", "rows": 30, "dim": 8, "features": ["item_row"]},
            {"name": "seen", "rows": 13, "dim": 8, "pooling": "mean", "row_type": "bf16"},
            {"name": "bucket", "rows": 4, "dim": 8, "features": ["d0_bucket"]},
        ]
    },
}
NULLS = {name: lambda table, name=name: pa.array(
    [None if k % 7 == len(name) else x for k, x in enumerate(table[name].to_pylist())], table[name].type
) for name in ("user", "item", "seen", "d0", "d1")}  # fmt: skip


def trained_on_nulls(folder, **changes):
    write_rows(folder / "rows.parquet", 600, **NULLS)
    base = RICH | changes
    return trained(folder, **base, train={"epochs": 1, "steps": 4})[0].folder.path


def predicted(run, folder):
    """Rows that no run has seen, and the predictions of `rowwise predict` for them."""
    write_rows(folder / "new.parquet", 40, first=90_000, **NULLS)
    export(run, folder / "models", warn=lambda _: None)
    predict_ensemble([folder / "models"], folder / "p.parquet", data=f"parquet:{folder / 'new.parquet'}")
    return pq.read_table(folder / "new.parquet"), pq.read_table(folder / "p.parquet")


def graph_inputs(rows, names):
    """Tensors of raw rows as numpy, made without the code of the export: by the names of a graph's inputs."""
    least, made = np.iinfo(np.int64).min, {}
    for name in names:
        column, _, part = name.partition("__")
        cells = rows[column].to_pylist()
        if part == "values":
            made[name] = np.array([x for cell in cells for x in cell or ()], np.int64)
        elif part == "offsets":
            made[name] = np.cumsum([0, *(len(cell or ()) for cell in cells)])
        elif pa.types.is_integer(rows[column].type):
            made[name] = np.array([least if x is None else x for x in cells])
        else:
            made[name] = np.array([np.nan if x is None else x for x in cells], np.float32)
    return made


@pytest.mark.slow
def test_onnx_answers_as_predict_does(tmp_path):
    import onnxruntime

    run = trained_on_nulls(tmp_path)
    made = export_as("onnx", run, tmp_path / "small.onnx")
    assert made.difference < 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "small.onnx"), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    assert set(names) == {"user", "item", "seen__values", "seen__offsets", "d0", "d1"}
    rows, expected = predicted(run, tmp_path)
    for begin, count in ((0, 40), (3, 1), (7, 2)):
        part = rows.slice(begin, count)
        outputs = session.run(None, graph_inputs(part, names))
        for output, values in zip(session.get_outputs(), outputs, strict=True):
            wanted = expected[output.name].to_numpy()[begin : begin + count]
            np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-5)
    bad = graph_inputs(rows, names)
    bad["item"][:] = 27  # not in the mapping: no id at all
    session.run(None, bad)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The example in C++, compiled against the libtorch of this environment."""
    built, home = tmp_path_factory.mktemp("cpp") / "score", Path(torch.__file__).parent
    source = (ROOT / "examples/score.cpp").read_text()
    command = " ".join(re.findall(r"//     ( *c\+\+ .*|    -L.*)", source)).replace("score.cpp -o score", "")
    words = command.replace("$TORCH", str(home)).split()
    subprocess.run([*words[:1], str(ROOT / "examples/score.cpp"), "-o", str(built), *words[1:]], check=True)
    linked = subprocess.run(["ldd", built], check=True, capture_output=True, text=True).stdout
    names = [line.split()[0] for line in linked.splitlines()]
    assert "libtorch_cpu.so" in names
    assert not [name for name in names if "python" in name]
    return built


def run_program(program, *words):
    """What it prints, and its error, in an environment without paths."""
    done = subprocess.run([program, *words], capture_output=True, text=True, env={}, check=False)
    return done.stdout if done.returncode == 0 else "", done.stderr


@pytest.mark.slow
def test_a_package_answers_in_cpp_without_python(tmp_path, program):
    run, package, tensors = trained_on_nulls(tmp_path), tmp_path / "small.pt2", tmp_path / "in.pt"
    assert export_as("pt2", run, package).difference < 1e-5
    rows, expected = predicted(run, tmp_path)
    inputs, outputs = map(json.loads, run_program(program, package)[0].splitlines())
    names = [one["name"] for one in inputs]
    for begin, count, calls in ((0, 40, 1), (3, 1, 2000)):
        part = rows.slice(begin, count)
        arrays = graph_inputs(part, names)
        torch.save([torch.from_numpy(arrays[name]) for name in names], tensors)
        said, error = run_program(program, package, tensors, tmp_path / "out.pt", str(calls))
        assert error == ""
        for name, values in zip(outputs, torch.load(tmp_path / "out.pt"), strict=True):
            np.testing.assert_allclose(values.numpy(), expected[name].to_numpy()[begin : begin + count], atol=1e-5)
    print(f"one row: {said.strip()} in C++, {1e6 * seconds_of_forward(tmp_path, part):.0f} us by the server's forward")


def seconds_of_forward(folder, rows, calls=500):
    torch.set_num_threads(1)
    version = open_version(folder / "models")
    arrays = arrays_of(rows)
    begin = time.perf_counter()
    for _ in range(calls):
        version.forward(arrays, 1, 16)
    return (time.perf_counter() - begin) / calls


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        {"kind": "autoint"},
        {"kind": "dcn"},
        {"kind": "deepfm", "deep": [8]},
        {"kind": "dhen", "interactions": ["dot", "attention", "cross"]},
        {"kind": "dhen", "interactions": ["linear", "convolution", "factorization"]},
        {"kind": "dlrm", "bottom": [8], "top": [8], "norm": "batch"},
        {"kind": "final_mlp"},
        {"kind": "masknet"},
        {"kind": "mmoe", "experts": 2, "expert_sizes": [8], "tower": [4]},
        {"kind": "ple"},
        {"kind": "wide_deep", "deep": [8]},
        {"kind": "wukong"},
        {"kind": "xdeepfm"},
    ],
    ids=lambda model: model["kind"],
)
def test_every_model_of_labels_is_exported(model, tmp_path):
    run, _ = trained(tmp_path, model=model, train={"epochs": 1, "steps": 2})
    assert export_as("onnx", run.folder.path, tmp_path / "small.onnx").difference < 1e-5


@pytest.mark.slow
def test_own_models_are_exported_unless_their_rows_depend_on_others(tmp_path, capfd):
    own = tmp_path / "net.py"
    own.write_text(OWN_MODEL)
    run, _ = trained(tmp_path, model=f"{own}:Net", train={"epochs": 1, "steps": 2})
    assert export_as("onnx", run.folder.path, tmp_path / "own.onnx").difference < 1e-5
    own.write_text(OWN_MODEL.replace("batch.dense_BF,", "batch.dense_BF - batch.dense_BF.mean(0),"))
    run, _ = trained(tmp_path, model=f"{own}:Net", train={"epochs": 1, "steps": 2})
    with pytest.raises(CheckpointError, match=r"onnxruntime: logits of golden rows differ by .*at most 1e-05"):
        export_as("onnx", run.folder.path, tmp_path / "other.onnx", warn=lambda _: None)
    own.write_text(OWN_MODEL.replace("return", "return 0 * batch.dense_BF[:, :1] if batch.dense_BF[0, 0] > 9 else"))
    run, _ = trained(tmp_path, model=f"{own}:Net", train={"epochs": 1, "steps": 2})
    with pytest.raises(SpecError, match=r"model.kind=own is not traced by torch.export: .*--mlflow or --triton"):
        export_as("onnx", run.folder.path, tmp_path / "other.onnx", warn=lambda _: None)
    assert {path.name for path in tmp_path.glob("*o*.onnx*")} == {"own.onnx"}
    assert capfd.readouterr() == ("", "")


OWN_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, embeddings, dense, tasks):
        super().__init__()
        self.embeddings = embeddings
        self.top = nn.Linear(dense + sum(t.dim for t in embeddings.tables), tasks)

    def forward(self, batch):
        return self.top(torch.cat([batch.dense_BF, self.embeddings(batch.sparse).values()], 1))
"""
LOAD = """
import sys, mlflow, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
frame = pandas.read_parquet(sys.argv[2], columns=model.metadata.get_input_schema().input_names())
model.predict(frame).to_parquet(sys.argv[3])
"""


@pytest.mark.slow
def test_an_mlflow_model_has_the_bits_of_predict(tmp_path):
    write_rows(tmp_path / "rows.parquet", 600, item=NULLS["item"], seen=NULLS["seen"])
    run, _ = trained(tmp_path, train={"epochs": 1, "steps": 4})
    made = export_as("mlflow", run.folder.path, tmp_path / "mlflow")
    assert made.difference is None
    rows, expected = predicted(run.folder.path, tmp_path)
    used = rows.filter(pa.compute.invert(rows["user"].is_null()))  # training had none, so the signature has none
    pq.write_table(used, tmp_path / "used.parquet")
    words = [sys.executable, "-c", LOAD, made.path, tmp_path / "used.parquet", tmp_path / "answers.parquet"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = pq.read_table(tmp_path / "answers.parquet")
    wanted = expected.filter(pa.compute.invert(rows["user"].is_null())).select(answers.column_names)
    assert answers.column_names == ["label_logit", "label_probability"]
    assert answers.equals(wanted)
    about = yaml.safe_load((made.path / "MLmodel").read_text())
    kinds = {one["name"]: one["type"] for one in json.loads(about["signature"]["inputs"])}
    assert kinds == {"user": "long", "item": "any", "seen": "any", "d0": "float", "d1": "float"}


def read_config(file):
    """By the message of Triton's clients; that file of theirs needs no gRPC."""
    home = Path(find_spec("tritonclient").origin).parent
    spec = spec_from_file_location("model_config_pb2", home / "grpc/model_config_pb2.py")
    messages = module_from_spec(spec)
    spec.loader.exec_module(messages)
    made = text_format.Parse(file.read_text(), messages.ModelConfig())
    return made, messages.DataType.Name


UTILS = """
class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array

class TritonError(Exception):
    pass

class InferenceResponse:
    def __init__(self, output_tensors, error=None):
        self.output_tensors, self.error = output_tensors, error
"""  # of what Triton's own module has, what a model calls
ANSWER = """
import importlib.util, json, sys
import numpy as np
import triton_python_backend_utils as pb_utils

spec = importlib.util.spec_from_file_location("model", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
model = module.TritonPythonModel()
model.initialize({})

def array(values, kind):
    return np.array([x.encode() if kind == "object" else x for x in values], kind)

class Request:
    def __init__(self, columns):
        self.tensors = [pb_utils.Tensor(name, array(*x)) for name, x in columns.items()]

    def inputs(self):
        return self.tensors

for answer in model.execute([Request(columns) for columns in json.load(open(sys.argv[2]))]):
    error = None if answer.error is None else str(answer.error)
    print(json.dumps([{t.name(): t.as_numpy().view(np.int32).tolist() for t in answer.output_tensors}, error]))
"""


@pytest.mark.slow
def test_a_triton_repository_is_what_triton_reads(tmp_path):
    write_rows(tmp_path / "rows.parquet", 600, item=lambda table: table["item"].cast(pa.string()))
    sparse = [{"column": "user", "ids": "direct"}, {"column": "item"}, {"column": "seen", "ids": "direct"}]
    run, _ = trained(tmp_path, columns={"sparse": sparse}, train={"epochs": 1, "steps": 4})
    made = export_as("triton", run.folder.path, tmp_path / "triton")
    config, name_of = read_config(made.path / "small/config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == ("small", "python", 0)
    kinds = {one.name: (name_of(one.data_type), list(one.dims)) for one in config.input}
    assert kinds["item"] == ("TYPE_STRING", [-1])
    assert kinds["seen__offsets"] == kinds["seen__values"] == ("TYPE_INT64", [-1])
    assert [one.name for one in config.output] == ["label_logit", "label_probability"]

    golden = read_golden(made.path / "small/1/version")
    rows = golden.rows.slice(0, 5)
    columns = {name: [x.tolist(), str(x.dtype)] for name, x in graph_inputs(rows.drop_columns("item"), [
        name for name in kinds if name != "item"
    ]).items()}  # fmt: skip
    columns["item"] = [rows["item"].to_pylist(), "object"]
    wrong = {name: x for name, x in columns.items() if name != "user"}
    (tmp_path / "triton_python_backend_utils.py").write_text(UTILS)
    (tmp_path / "requests.json").write_text(json.dumps([columns, wrong]))
    words = [sys.executable, "-c", ANSWER, made.path / "small/1/model.py", tmp_path / "requests.json"]
    done = subprocess.run(words, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (outputs, error), (none, problem) = map(json.loads, done.stdout.splitlines())
    assert (error, none) == (None, {})
    assert outputs["label_logit"] == golden.logits["label"].to_numpy()[:5].view(np.int32).tolist()
    assert "no column 'user'" in problem


def test_a_manifest_of_kserve_has_fields_of_the_api(tmp_path):
    service = yaml.safe_load(make_service("My clicks", "s3://models/$(x)", "registry/rowwise:1", 3 << 30))
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    check(service["metadata"], "V1ObjectMeta")
    assert service["metadata"]["name"] == "my-clicks"
    predictor = service["spec"]["predictor"]
    check(predictor, "V1PodSpec")
    (container,) = predictor["containers"]
    assert container["name"] == "kserve-container"
    assert container["command"][:3] == ["rowwise", "serve", "s3://models/$$(x)"]
    assert container["resources"]["requests"] == {"memory": "7168Mi"}
    serve = next(one for name, one in typer.main.get_command(make_app()).commands.items() if name == "serve")
    options = {name for param in serve.params for name in param.opts}
    assert {word for word in container["command"] if word.startswith("--")} <= options
    with pytest.raises(SpecError, match="--kserve with the folder served: expected a URL"):
        check_kserve(tmp_path / "a.yaml", "served")
    for wrong in (tmp_path, tmp_path / "nope/a.yaml"):
        with pytest.raises(SpecError, match="no file can be written there"):
            check_kserve(wrong, "s3://models/clicks")


@pytest.mark.parametrize("logit", [2.0, float("nan")])
def test_golden_rows_that_differ_are_refused(logit):
    graph = SimpleNamespace(inputs=inputs_of(pa.field("x", pa.int64())), outputs=("label_logit", "label_probability"))
    golden = GoldenRows(pa.table({"x": [1, 2, 3]}), pa.table({"label": pa.array([1.0, 1, 1], pa.float32())}))
    same = check_golden(lambda x: [torch.ones(len(x[0]))] * 2, graph, golden, "here")
    assert same == 0
    with pytest.raises(CheckpointError, match=r"here: logits of golden rows differ by .*at most 1e-05"):
        check_golden(lambda x: [torch.where(x[0] == 2, logit, 1.0)] * 2, graph, golden, "here")


def test_an_output_of_another_name_is_refused(tmp_path):
    for form, name, problem in (
        ("onnx", "a.pt2", "--onnx writes .*a.pt2: expected a name that ends in .onnx"),
        ("pt2", "a", "--pt2 writes .*a: expected a name that ends in .pt2"),
        ("mlflow", "", "exists already"),
        ("triton", "s3:/bucket/a", "expected a folder of this machine"),
    ):
        out = Path(name) if ":" in name else tmp_path / name
        with pytest.raises(RowwiseError, match=problem):
            export_as(form, tmp_path / "run", out)


@pytest.mark.slow
def test_what_cannot_leave_is_said_in_a_line(tmp_path):
    run, _ = trained(tmp_path, train={"epochs": 1, "steps": 2})
    folder = str(run.folder.path)
    two_tower = {"kind": "two_tower", "item": "item", "user_features": ["user"], "sizes": [8]}
    evaluate = {"metric": "recall@10"}
    towers, _ = trained(tmp_path, name="towers", model=two_tower, evaluate=evaluate, train={"epochs": 1, "steps": 2})
    (tmp_path / "empty").mkdir()
    for name in ("recipe.yaml",):
        (tmp_path / "empty" / name).write_bytes((run.folder.path / name).read_bytes())
    large = {"name": "item", "rows": 3_000_000, "dim": 8}
    tables = [large if table["name"] == "item" else table for table in RECIPE["tables"]["list"]]
    big, _ = trained(tmp_path, name="big", tables={"list": tables}, train={"epochs": 1, "steps": 2})
    for words, problem in (
        ((folder, "a.onnx", "--onnx", "--which", "step-9"), "step-9"),
        (("empty", "a.onnx", "--onnx"), "empty"),
        ((str(towers.folder.path), "a.onnx", "--onnx"), "model.kind=two_tower answers with items"),
        ((str(big.folder.path), "a.pt2", "--pt2", "--memory", "64MiB"), "'item' 96.0 MB"),
        ((folder, "models", "--kserve", "a.yaml", "--image", "x"), "--kserve with the folder models"),
    ):
        done = rowwise(tmp_path, "export", *words)
        assert (done.returncode, done.stdout) == (2, ""), (words, done.stderr)
        assert problem in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    done = rowwise(tmp_path, "export", folder, "a.pt2", "--pt2", environment={"CXX": "/nope/c++"})
    assert done.stderr == "rowwise: --pt2 needs a C++ compiler; install g++, or name one in CXX\n"
    assert not [*tmp_path.glob("a*"), *tmp_path.glob(".*")]
