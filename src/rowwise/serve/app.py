"""The ASGI application: scores over HTTP as JSON or Arrow, health, metrics, and what is served.

It runs under any ASGI server. Metrics count each answer by its status; errors are JSON with one line.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rowwise.errors import DataError, RowwiseError, one_line
from rowwise.serve.answer import prediction_columns
from rowwise.serve.request import RequestRows
from rowwise.serve.service import BAD_REQUEST, Rejection, ScoringService

JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
OK, NOT_FOUND, TOO_LARGE = 200, 404, 413


def make_app(service: ScoringService) -> Starlette:
    """The application of a service whose version has been opened."""
    handlers = _Handlers(service)
    score = handlers.score
    routes = [
        Route("/v1/models/{model}/score", score, methods=["POST"]),
        Route("/v1/models/{model}/versions/{version}/score", score, methods=["POST"]),
        Route("/v1/versions", handlers.versions),
        Route("/v1/health/live", handlers.live),
        Route("/v1/health/ready", handlers.live),  # a version is opened before its port is
        Route("/metrics", handlers.metrics),
    ]
    return Starlette(routes=routes)


class _Handlers:
    """Functions from requests to responses."""

    def __init__(self, service: ScoringService) -> None:
        self.service = service

    async def live(self, request: Request) -> Response:
        return Response(status_code=OK)

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def versions(self, request: Request) -> Response:
        version = self.service.version
        columns = {field.name: str(field.type) for field in version.schema}
        found = {
            "model": version.name,
            "version": version.number,
            "digest": version.digest,
            "identity": version.identity,
            "blocks": version.forward.blocks.describe(),
            "columns": columns,
            "tasks": version.tasks,
        }
        return _respond(OK, found)

    async def score(self, request: Request) -> Response:
        """Rows in, logits and probabilities out."""
        service, begin_s = self.service, self.service.clock()
        rejection = self._check_path(request.path_params)
        body = None if rejection else await _read_body(request, service.limits.most_bytes)
        if body is None:
            most = f"the body is larger than {service.limits.most_bytes} bytes: send fewer rows"
            return self._refuse(rejection or Rejection(TOO_LARGE, most))
        try:
            timeout_s = _timeout_of(request)
            rows = self._read(request.headers.get("content-type", JSON), body)
        except RowwiseError as error:
            return self._refuse(Rejection(BAD_REQUEST, one_line(error) or ""))
        service.metrics.seconds.labels("decode").observe(service.clock() - begin_s)
        self._count(rows)
        outcome = await service.score(rows, timeout_s)
        if isinstance(outcome, Rejection):
            return self._refuse(outcome)
        answer_s = service.clock()
        response = self._answer(prediction_columns(service.version.tasks, outcome), request.headers.get("accept", JSON))
        end_s = service.clock()
        service.metrics.seconds.labels("answer").observe(end_s - answer_s)
        service.metrics.seconds.labels("request").observe(end_s - begin_s)
        service.metrics.requests.labels(OK).inc()
        return response

    def _check_path(self, params: Mapping[str, str]) -> Rejection | None:
        version = self.service.version
        if params["model"] != version.name:
            return Rejection(NOT_FOUND, f"no model {params['model'][:80]!r}: want {version.name!r}")
        if params.get("version", str(version.number)) != str(version.number):
            return Rejection(NOT_FOUND, f"version {params['version'][:20]!r} is not served: want {version.number}")
        return None

    def _read(self, kind: str, body: bytes) -> RequestRows:
        if kind.startswith(JSON):
            return self.service.reader.read_json(body)
        if kind.startswith(ARROW):
            return self.service.reader.read_arrow(body)
        raise DataError(f"content-type {kind[:80]!r}: want {JSON} or {ARROW}")

    def _count(self, rows: RequestRows) -> None:
        if rows.ignored:
            self.service.metrics.ignored.inc(rows.ignored)
        for name, array in rows.arrays.items():
            if array.null_count:
                self.service.metrics.nulls.labels(name).inc(array.null_count)

    def _answer(self, columns: Mapping[str, pa.Array], accept: str) -> Response:
        version = self.service.version
        headers = {"rowwise-model": version.name, "rowwise-version": str(version.number)}
        if accept.startswith(ARROW):
            table, sink = pa.table(dict(columns)), pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            return Response(sink.getvalue().to_pybytes(), headers=headers, media_type=ARROW)
        outputs = {name: array.to_pylist() for name, array in columns.items()}
        answer = {"model": version.name, "version": version.number, "outputs": outputs}
        return Response(msgspec.json.encode(answer), headers=headers, media_type=JSON)

    def _refuse(self, rejection: Rejection) -> Response:
        self.service.metrics.requests.labels(rejection.code).inc()
        response = _respond(rejection.code, {"error": rejection.message})
        if rejection.retry_after_s is not None:
            response.headers["retry-after"] = str(max(1, round(rejection.retry_after_s)))
        return response


def _respond(code: int, value: Any) -> Response:
    return Response(msgspec.json.encode(value), code, media_type=JSON)


async def _read_body(request: Request, most_bytes: int) -> bytes | None:
    """The body, or None if it is too large; the rest of that is not read."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            return None
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _timeout_of(request: Request) -> float | None:
    """Seconds of the header x-timeout-ms."""
    text = request.headers.get("x-timeout-ms")
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or not int(text[:9]) >= 1 or len(text) > 9:
        raise DataError(f"x-timeout-ms: {text[:80]!r}: want a whole number of milliseconds, such as 50")
    return int(text) / 1000
