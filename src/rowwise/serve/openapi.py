"""The OpenAPI description of a server, generated from the columns and tasks of the current version."""

from importlib import metadata
from typing import Any

import pyarrow as pa
from pyarrow import types

from rowwise.ingest.kinds import is_list, is_text
from rowwise.serve.answer import prediction_names
from rowwise.serve.client import ARROW, JSON
from rowwise.serve.version import ServedVersion

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}


def describe_api(version: ServedVersion) -> Schema:
    """OpenAPI description of a version."""
    in_sides = {name for side in version.sides for name in side.columns}
    columns = {field.name: _schema_of(field.type) for field in version.schema}
    columns |= {side.key: _schema_of(side.kind) for side in version.sides if side.key not in columns}
    required = sorted({field.name for field in version.schema} - in_sides)
    lists = {name: _list(schema) for name, schema in columns.items()}
    rows = _object({"rows": _object(lists, required)}, ["rows"])
    candidates = _object({"context": _object(columns), "candidates": _object(lists)}, ["candidates"])
    outputs = _object(
        {name: _list({"type": ["number", "null"]}) for name in prediction_names(version.tasks, version.link)}
    )
    scores = _object({"model": TEXT, "version": {"type": "integer"}, "outputs": outputs}, ["outputs"])
    tensors = _object({"inputs": _list({"type": "object"}), "outputs": _list({"type": "object"})}, ["inputs"])
    model = f"/models/{version.name}"
    score = _post(
        "Logits and probabilities of rows, or outputs and amounts", {"anyOf": [rows, candidates]}, scores, binary=ARROW
    )
    infer = _post("Open Inference Protocol", tensors, {"type": "object"}, binary="application/octet-stream")
    paths = {
        f"/v1{model}/score": score,
        f"/v2{model}/infer": infer,
        f"/v2{model}": _get("Tensors of the model"),
        f"/v2{model}/ready": _get("Readiness of the model", body=False),
        "/v1/versions": _get("Served versions, and their input columns"),
        "/v1/health/live": _get("Liveness of the server", body=False),
        "/v1/health/ready": _get("Readiness of the server", body=False),
        "/v2": _get("Metadata of the server"),
        "/v2/health/live": _get("Liveness of the server", body=False),
        "/v2/health/ready": _get("Readiness of the server", body=False),
        "/metrics": {"get": {"summary": "Metrics for Prometheus", "responses": {"200": {"description": "text"}}}},
    }
    if version.retriever is not None:
        context = _object({field.name: _schema_of(field.type) for field in version.retriever.schema})
        keys = _list(_schema_of(version.retriever.items.keys.type))
        options = {"k": {"type": "integer", "minimum": 1}, "among": keys, "without": keys, "exact": {"type": "boolean"}}
        result = _object(
            {"items": keys, "scores": _list({"type": "number"}), "unknown": {"type": "integer"}}, ["items"]
        )
        query = _object({"context": context} | options, ["context"])
        paths[f"/v1{model}/retrieve"] = _post("Items for a user", query, result)
    info = {"title": f"rowwise serve: {version.name}", "version": metadata.version("rowwise")}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def _schema_of(kind: pa.DataType) -> Schema:
    """JSON schema of a value of a column."""
    if is_list(kind):
        return {"type": ["array", "null"], "items": _schema_of(kind.value_type)}
    if types.is_integer(kind):
        return {"type": ["integer", "string", "null"], "pattern": "^-?[0-9]+$"}
    if types.is_boolean(kind):
        return {"type": ["boolean", "null"]}
    return {"type": ["string" if is_text(kind) else "number", "null"]}


def _object(properties: Schema, required: list[str] | None = None) -> Schema:
    return {"type": "object", "properties": properties, "required": required or []}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _content(schema: Schema, *others: str) -> Schema:
    return {"content": {JSON: {"schema": schema}} | {kind: {} for kind in others}}


def _post(summary: str, body: Schema, answer: Schema, binary: str | None = None) -> Schema:
    others = () if binary is None else (binary,)
    error = {"description": "the error"} | _content(_object({"error": TEXT}, ["error"]))
    responses = {"200": {"description": "the answer"} | _content(answer, *others), "default": error}
    timeout = {"name": "x-timeout-ms", "in": "header", "schema": {"type": "integer", "minimum": 1}}
    request = {"required": True} | _content(body, *others)
    return {"post": {"summary": summary, "parameters": [timeout], "requestBody": request, "responses": responses}}


def _get(summary: str, *, body: bool = True) -> Schema:
    answer = {"description": "the answer"} | (_content({"type": "object"}) if body else {})
    return {"get": {"summary": summary, "responses": {"200": answer}}}
