"""The OpenAPI description of a server, generated from the columns and tasks of the current version.

Bodies of the Open Inference Protocol are described by the types that decode and encode them.
"""

from collections.abc import Mapping
from importlib import metadata
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import types

from rowwise.ingest.kinds import is_list, is_text
from rowwise.serve.answer import prediction_names
from rowwise.serve.client import ARROW, JSON
from rowwise.serve.oip import (
    BINARY,
    HEADER,
    OFFSETS,
    InferRequest,
    InferResponse,
    ModelFacts,
    ModelHealth,
    ServerFacts,
    ServerHealth,
    TensorFacts,
    describe,
)
from rowwise.serve.request import WHOLE_NUMBER
from rowwise.serve.retrieval import MAX_ITEMS
from rowwise.serve.version import ServedVersion

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
BODIES = (InferRequest, InferResponse, ModelFacts, ModelHealth, ServerFacts, ServerHealth)
REFERENCE = "#/components/schemas/{name}"
MAX_FLOAT32 = 3.4028235677973362e38  # the next double is infinite in 32 bits
TIMEOUT_ms = {
    "name": "x-timeout-ms",
    "in": "header",
    "schema": WHOLE | {"minimum": 1, "maximum": 999_999_999},
    "example": 1000,
}
EXACT = {"name": "rowwise-exact", "in": "header", "schema": {"enum": ["true", "false"]}}
NOT_FOUND = {"404": "no such model or version"}
NOT_READY = {"503": "the server drains"}
REFUSED = NOT_FOUND | {
    "400": "a wrong request: the message names column, row and value",
    "413": "a body larger than its limit",
    "415": "another type or coding of the body",
    "500": "a fault of the server, with a line in its log",
    "503": "too little time, or too many requests: Retry-After has seconds to wait",
    "504": "the deadline passed",
}


def describe_api(version: ServedVersion) -> Schema:
    """OpenAPI description of a version."""
    live, ready, infer = "Liveness of the server", "Readiness of the server", "Open Inference Protocol: tensors in JSON"
    health, facts = _answer(_ref(ServerHealth)), _answer(_ref(ServerFacts))
    metrics = {"description": "text", "content": {"text/plain": {"schema": TEXT}}}
    example = {"inputs": [_example_tensor(tensor) for tensor in describe(version.name, [], version.schema, []).inputs]}
    tensors = _content(_ref(InferRequest), BINARY, example=example)
    of_model = {
        "/v1{}/score": _describe_score(version),
        "/v2{}/infer": _post(
            f"{infer}, or binary after {HEADER} bytes of JSON", tensors, _answer(_ref(InferResponse), BINARY), EXACT
        ),
        "/v2{}": _get("Tensors of the model", _answer(_ref(ModelFacts)), NOT_FOUND),
        "/v2{}/ready": _get("Readiness of the model", _answer(_ref(ModelHealth)), NOT_FOUND | NOT_READY),
    }
    if version.retriever is not None:
        of_model["/v1{}/retrieve"] = _describe_retrieval(version.retriever.schema, version.retriever.items.keys.type)
    model = f"/models/{version.name}"
    paths: Schema = {path.format(model): operation for path, operation in of_model.items()}
    number = {"name": "version", "in": "path", "required": True, "schema": WHOLE, "example": version.number}
    for path, operation in of_model.items():
        paths[path.format(f"{model}/versions/{{version}}")] = {"parameters": [number]} | operation
    status = {"model": TEXT, "version": WHOLE, "columns": OBJECT, "tasks": _list(TEXT), "wanted": WHOLE}
    paths |= {
        "/v1/versions": _get("Served versions, and their input columns", _answer(_object(status, list(status)))),
        "/v1/health/live": _get(live, health),
        "/v1/health/ready": _get(ready, health, NOT_READY),
        "/v2": _get("Metadata of the server", facts),
        "/v2/": _get("Metadata of the server", facts),
        "/v2/health/live": _get(live, health),
        "/v2/health/ready": _get(ready, health, NOT_READY),
        "/metrics": _get("Metrics for Prometheus", metrics),
    }
    schemas = msgspec.json.schema_components(BODIES, ref_template=REFERENCE)[1]
    schemas["Error"] = _object({"error": TEXT}, ["error"])
    info = {"title": f"rowwise serve: {version.name}", "version": metadata.version("rowwise")}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _describe_score(version: ServedVersion) -> Schema:
    in_sides = {name for side in version.sides for name in side.columns}
    kinds = {field.name: field.type for field in version.schema}
    kinds |= {side.key: side.kind for side in version.sides if side.key not in kinds}
    columns = {name: _schema_of(kind) for name, kind in kinds.items()}
    lists = {name: _list(schema) | {"minItems": 1} for name, schema in columns.items()}
    required = sorted({*version.schema.names} - in_sides)
    rows = {"rows": _columns(lists, required), "context": NULL, "candidates": NULL}
    candidates = {"rows": NULL, "context": _or_null(_object(columns)), "candidates": _columns(lists)}
    names = prediction_names(version.tasks, version.link)
    outputs = _object({name: _list({"type": ["number", "null"]}) for name in names}, names)
    scores = _object({"model": TEXT, "version": WHOLE, "outputs": outputs, "degraded": OBJECT}, ["outputs"])
    example = {"rows": {name: [_example(kind)] for name, kind in kinds.items()}}
    forms = [_closed(rows, ["rows"]), _closed(candidates, ["candidates"])]
    body = _content({"anyOf": forms}, ARROW, example=example)
    summary = "Logits and probabilities of rows, or outputs and amounts"
    return _post(summary, body, _answer(scores, ARROW), EXACT)


def _describe_retrieval(schema: pa.Schema, key: pa.DataType) -> Schema:
    context = _object({field.name: _schema_of(field.type) for field in schema})
    keys = _list(_schema_of(key))
    k, exact = WHOLE | {"minimum": 1, "maximum": MAX_ITEMS}, {"type": "boolean"}
    query = {"context": context, "k": k, "among": _or_null(keys), "without": keys, "exact": exact}
    found = {"items": keys, "scores": _list({"type": "number"}), "unknown": WHOLE}
    example = {"context": {field.name: _example(field.type) for field in schema}, "k": 10}
    body = _content(_closed(query, ["context"]), example=example)
    return _post("Items for a user", body, _answer(_object(found, list(found))))


def _schema_of(kind: pa.DataType) -> Schema:
    """JSON schema of a value of a column."""
    if is_list(kind):
        return _or_null(_list(_schema_of(kind.value_type)))
    if types.is_integer(kind):
        bits = kind.bit_width - types.is_signed_integer(kind)
        min_value = -(1 << bits) if types.is_signed_integer(kind) else 0
        digits = {"type": "string", "pattern": f"^{WHOLE_NUMBER.pattern}$"}
        return {"anyOf": [WHOLE | {"minimum": min_value, "maximum": (1 << bits) - 1}, digits, NULL]}
    if types.is_boolean(kind):
        return {"type": ["boolean", "null"]}
    if is_text(kind):
        return {"type": ["string", "null"]}
    return {"type": ["number", "null"], "minimum": -MAX_FLOAT32, "maximum": MAX_FLOAT32}


def _example(kind: pa.DataType) -> Any:
    """A value of a column."""
    if is_list(kind):
        return [_example(kind.value_type)]
    if types.is_boolean(kind):
        return True
    return "a" if is_text(kind) else 1


def _example_tensor(tensor: TensorFacts) -> Schema:
    """A tensor of one row."""
    data = [0, 1] if tensor.name.endswith(OFFSETS) else [{"BYTES": "a", "BOOL": True}.get(tensor.datatype, 1)]
    return {"name": tensor.name, "shape": [len(data)], "datatype": tensor.datatype, "data": data}


def _object(properties: Schema, required: list[str] | None = None) -> Schema:
    return {"type": "object", "properties": properties, "required": required or []}


def _columns(lists: Schema, required: list[str] | None = None) -> Schema:
    """Lists by column; others are ignored."""
    return _object(lists, required) | {"additionalProperties": _list({})}


def _closed(properties: Schema, required: list[str]) -> Schema:
    """An object without other properties."""
    return _object(properties, required) | {"additionalProperties": False}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(body: type) -> Schema:
    return {"$ref": REFERENCE.format(name=body.__name__)}


def _content(schema: Schema, *others: str, example: Any = None) -> Schema:
    """Content in JSON or of other types; `example`: in JSON."""
    described = {"schema": schema} if example is None else {"schema": schema, "example": example}
    return {"content": {JSON: described} | {kind: {} for kind in others}}


def _answer(schema: Schema, *others: str) -> Schema:
    return {"description": "the answer"} | _content(schema, *others)


def _errors(codes: Mapping[str, str]) -> Schema:
    body = _content({"$ref": REFERENCE.format(name="Error")})
    return {code: {"description": description} | body for code, description in codes.items()}


def _post(summary: str, body: Schema, answer: Schema, *headers: Schema) -> Schema:
    request, responses = {"required": True} | body, {"200": answer} | _errors(REFUSED)
    operation = {"summary": summary, "parameters": [TIMEOUT_ms, *headers], "requestBody": request}
    return {"post": operation | {"responses": responses}}


def _get(summary: str, answer: Schema, errors: Mapping[str, str] | None = None) -> Schema:
    return {"get": {"summary": summary, "responses": {"200": answer} | _errors(errors or {})}}
