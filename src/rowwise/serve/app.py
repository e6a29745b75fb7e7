"""The ASGI application: scores over HTTP as JSON, Arrow or tensors, health, metrics, and what is served.

It runs under any ASGI server. Metrics count each answer by its status; errors are JSON with one line.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from functools import partial
from importlib import metadata
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import pyarrow as pa
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rowwise.base.errors import DataError, RowwiseError, one_line
from rowwise.base.textfile import MAX_DIGITS, parse_whole
from rowwise.serve.answer import prediction_columns, prediction_names
from rowwise.serve.batches import BAD_REQUEST, UNAVAILABLE, Rejection
from rowwise.serve.client import ARROW, JSON, arrow_stream
from rowwise.serve.json_body import SMALL_bytes
from rowwise.serve.oip import HEADER, InferForm
from rowwise.serve.oip import describe as describe_tensors
from rowwise.serve.openapi import describe_api
from rowwise.serve.request import RequestReader, RequestRows
from rowwise.serve.retrieval import Retriever
from rowwise.serve.retrieval_service import RetrievalService
from rowwise.serve.service import Predictions, ScoringService
from rowwise.serve.version import ServedVersion

OK, NOT_FOUND, TOO_LARGE = 200, 404, 413
AGAIN_s = 1.0  # after which a request may come again that found no room
PAUSE_s = 0.03  # between two large bodies
SHOWN = 80  # characters of a path in a message
Answer = Callable[[ServedVersion, Predictions], Response]
T = TypeVar("T")


class RequestRefusedError(Exception):
    """Ends a request; the rejection is its answer."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


def make_app(service: ScoringService, lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]]) -> Starlette:
    """The application of a service that has versions open within `lifespan`."""
    handlers = _Handlers(service)
    models = ("models/{model}", "models/{model}/versions/{version}")
    routes = [
        *(Route(f"/v1/{model}/score", handlers.score, methods=["POST"]) for model in models),
        *(Route(f"/v1/{model}/retrieve", handlers.retrieve, methods=["POST"]) for model in models),
        *(Route(f"/v2/{model}/infer", handlers.infer, methods=["POST"]) for model in models),
        *(Route(f"/v2/{model}/ready", handlers.model_ready) for model in models),
        *(Route(f"/v2/{model}", handlers.about_model) for model in models),
        *(Route(f"/{api}/health/live", handlers.live) for api in ("v1", "v2")),
        *(Route(f"/{api}/health/ready", handlers.ready) for api in ("v1", "v2")),
        Route("/v1/versions", handlers.versions),
        Route("/v2", handlers.about_server),
        Route("/openapi.json", handlers.api),
        Route("/metrics", handlers.metrics),
    ]
    refusals = {HTTPException: handlers.refuse_path, RequestRefusedError: handlers.refuse_request}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=refusals)
    app.router.redirect_slashes = False  # it would send clients to the host that they name
    return app


class _Handlers:
    """Functions from requests to responses."""

    def __init__(self, service: ScoringService) -> None:
        self.service, self.retrieval = service, RetrievalService(service)
        self._large = ThreadPoolExecutor(1, "bodies")  # reads large bodies one after the other, beside the loop
        self._next_s = 0.0  # when the next one may be read
        self._bodies_bytes = 0  # of all requests that are not answered

    async def refuse_path(self, request: Request, error: Exception) -> Response:
        """Of a path that is none, or of a method that it does not know."""
        assert isinstance(error, HTTPException)
        path = f"{request.method} {request.url.path[:SHOWN]!r}"
        if error.status_code == NOT_FOUND:
            why = f"no {path}: expected POST /v1/models/{self.service.current.name}/score, or a path of /openapi.json"
        else:
            why = f"no {path}: expected {(error.headers or {}).get('Allow', 'another method')}"
        return self._refuse(Rejection(error.status_code, why))

    async def refuse_request(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefusedError)
        return self._refuse(error.rejection)

    async def api(self, request: Request) -> Response:
        """The paths, for programs: OpenAPI."""
        return _respond(OK, describe_api(self.service.current))

    async def live(self, request: Request) -> Response:
        return Response(status_code=OK)

    async def ready(self, request: Request) -> Response:
        """No connection is taken before versions are open, so a server is ready until it drains."""
        return Response(status_code=UNAVAILABLE if self.service.draining else OK)

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def versions(self, request: Request) -> Response:
        """The current version, the canary, what is wanted, and versions that were refused."""
        service, traffic = self.service, self.service.traffic
        canary = None if traffic is None else traffic.canary
        second = None if canary is None else _describe(service.versions[canary.version]) | {"share": canary.share}
        wanted, behind_s = service.metrics.read_wanted()
        more = {"canary": second, "wanted": wanted, "behind_s": behind_s, "refused": service.refused}
        return _respond(OK, _describe(service.current) | more)

    async def score(self, request: Request) -> Response:
        """Rows in, logits and probabilities out."""
        accept, kind = request.headers.get("accept", JSON), request.headers.get("content-type", JSON)
        return await self._answer(
            request,
            lambda reader, body: (
                _read(reader, kind, body),
                lambda version, predictions: _answer(version, predictions, accept),
            ),
        )

    async def infer(self, request: Request) -> Response:
        """Tensors in, tensors out."""

        def read(reader: RequestReader, body: bytearray) -> tuple[RequestRows, Answer]:
            form = InferForm(body, request.headers.get(HEADER), reader.limits)
            return form.read(reader), partial(_infer_answer, form)

        return await self._answer(request, read)

    async def about_server(self, request: Request) -> Response:
        found = {"name": "rowwise", "version": metadata.version("rowwise"), "extensions": ["binary_tensor_data"]}
        return _respond(OK, found)

    async def about_model(self, request: Request) -> Response:
        """The tensors of a version."""
        version = self._choose(request.path_params)
        outputs = prediction_names(version.tasks, version.link)
        return _respond(OK, describe_tensors(version.name, sorted(self.service.versions), version.schema, outputs))

    async def model_ready(self, request: Request) -> Response:
        """Whether a model, or a version of it, answers."""
        self._choose(request.path_params)
        return await self.ready(request)

    async def _answer(
        self, request: Request, read: Callable[[RequestReader, bytearray], tuple[RequestRows, Answer]]
    ) -> Response:
        """The predictions of rows in some form: how the rows are read, and how the predictions are written."""
        service, begin_s = self.service, self.service.clock()
        version = self._choose(request.path_params)
        reader = service.reader_of(version)  # now: the version may be closed while the body comes
        kind = _kind_of(request)
        max_bytes = service.limits.max_bytes if _may_be_binary(request) else service.limits.max_json_bytes

        async def answer(body: bytearray, timeout_s: float | None) -> Response:
            rows, write = await self._read(body, partial(read, reader))
            service.admission.observe_body(kind, max(1, len(body)), rows.rows)
            service.metrics.stage["decode"].observe(service.clock() - begin_s)
            self._count(rows)
            outcome = await service.score(version, rows, timeout_s, exact=_is_exact(request))
            if isinstance(outcome, Rejection):
                raise RequestRefusedError(outcome)
            if service.recorder is not None and not outcome.defaults_R:
                service.recorder.add(version, rows, outcome.values_RP)
            answer_s = service.clock()
            response = write(version, outcome)
            if outcome.defaults_R:
                response.headers["rowwise-degraded"] = _describe_defaults(outcome)
            service.metrics.stage["answer"].observe(service.clock() - answer_s)
            return response

        return await self._complete(request, version, max_bytes, partial(service.refusal_unread, kind), answer, begin_s)

    async def retrieve(self, request: Request) -> Response:
        """A user's columns in, items out."""
        service, begin_s = self.service, self.service.clock()
        version = self._choose(request.path_params)
        retriever = version.retriever
        if retriever is None:
            got = f"version {version.number} of {version.name!r} has no items to retrieve"
            raise RequestRefusedError(Rejection(NOT_FOUND, f"{got}: expected two towers, or a model of lists"))

        async def answer(body: bytearray, timeout_s: float | None) -> Response:
            query = await self._read(body, lambda body: retriever.read_json(body, service.body_limits))
            service.metrics.stage["decode"].observe(service.clock() - begin_s)
            self._count(query.rows)
            service.metrics.unknown_items.inc(query.unknown)
            found = await self.retrieval.retrieve(version, retriever, query, timeout_s)
            if isinstance(found, Rejection):
                raise RequestRefusedError(found)
            if service.recorder is not None:
                service.recorder.add_search(version, query, found)
            answer_s = service.clock()
            headers = {"rowwise-model": version.name, "rowwise-version": str(version.number)}
            named = {"model": version.name, "version": version.number} | found._asdict()
            response = Response(msgspec.json.encode(named), headers=headers, media_type=JSON)
            service.metrics.stage["answer"].observe(service.clock() - answer_s)
            return response

        def refusal(length: int, timeout_s: float | None) -> Rejection | None:
            return self.retrieval.refusal_unread(timeout_s)

        return await self._complete(request, version, service.limits.max_json_bytes, refusal, answer, begin_s)

    async def _read(self, body: bytearray, read: Callable[[bytearray], T]) -> T:
        """What a body has; other requests are answered while a large one is read."""
        if len(body) <= SMALL_bytes:
            return read(body)
        return await asyncio.get_running_loop().run_in_executor(self._large, self._read_large, body, read)

    def _read_large(self, body: bytearray, read: Callable[[bytearray], T]) -> T:
        """Read a body in a thread. Before the next one, requests have the interpreter for a while."""
        time.sleep(max(0.0, self._next_s - time.perf_counter()))
        try:
            return read(body)
        finally:
            self._next_s = time.perf_counter() + PAUSE_s

    async def _complete(
        self,
        request: Request,
        version: ServedVersion,
        max_bytes: int,
        refusal_unread: Callable[[int, float | None], Rejection | None],
        answer: Callable[[bytearray, float | None], Awaitable[Response]],
        begin_s: float,
    ) -> Response:
        """Read the body of a request, unless it is refused before, and answer it."""
        service = self.service
        body = bytearray()  # which grows in place
        try:
            timeout_s, length = _timeout_of(request), _length_of(request)
            # Before the body is read, as reading takes longer than refusing.
            self._check_size(length, max_bytes)
            refusal = refusal_unread(length, timeout_s)
            if refusal is not None:
                raise RequestRefusedError(refusal)
            async for part in request.stream():
                body += part
                self._bodies_bytes += len(part)
                self._check_size(len(body), max_bytes)  # the rest is not read
            response = await answer(body, timeout_s)
        except ClientDisconnect:
            return Response()  # to nobody
        except RowwiseError as error:
            return self._refuse(Rejection(BAD_REQUEST, one_line(error) or ""))
        except MemoryError:
            return self._refuse(Rejection(UNAVAILABLE, "no memory is left for this request: send fewer rows"))
        finally:
            self._bodies_bytes -= len(body)
        self._end_if_draining(response)
        service.metrics.stage["request"].observe(service.clock() - begin_s)
        service.metrics.count(OK, version.number)
        return response

    def _choose(self, params: Mapping[str, str]) -> ServedVersion:
        """The version that answers a request: the one of its path, or by the traffic."""
        service, model = self.service, params["model"]
        if model != service.current.name:
            got = f"no model {model[:80]!r}: expected {service.current.name!r}"
            raise RequestRefusedError(Rejection(NOT_FOUND, got))
        wanted = params.get("version")
        if wanted is None:
            return service.choose()
        for number, version in service.versions.items():
            if wanted == str(number):
                return version
        there = ", ".join(map(str, sorted(service.versions)))
        got = f"version {wanted[:20]!r} is not served: expected {there}"
        raise RequestRefusedError(Rejection(NOT_FOUND, got))

    def _count(self, rows: RequestRows) -> None:
        if rows.ignored:
            self.service.metrics.ignored.inc(rows.ignored)
        if rows.unknown:
            self.service.metrics.unknown.inc(rows.unknown)
        for name, array in rows.arrays.items():
            if array.null_count:
                self.service.metrics.nulls.labels(name).inc(array.null_count)

    def _end_if_draining(self, response: Response) -> None:
        """Let the connection end with this response, if the server does."""
        if self.service.draining:
            response.headers["connection"] = "close"

    def _check_size(self, size_bytes: int, max_bytes: int) -> None:
        """Refuse a body of so many bytes, alone or beside those of other requests."""
        if size_bytes > max_bytes:
            why = f"the body is larger than {max_bytes} bytes: send fewer rows"
            raise RequestRefusedError(Rejection(TOO_LARGE, why))
        most = self.service.limits.bodies_bytes
        if self._bodies_bytes > most:
            why = f"the bodies of other requests take {most} bytes: send it later"
            raise RequestRefusedError(Rejection(UNAVAILABLE, why, AGAIN_s))

    def _refuse(self, rejection: Rejection) -> Response:
        self.service.metrics.count(rejection.code)
        response = _respond(rejection.code, {"error": rejection.message})
        self._end_if_draining(response)
        if rejection.retry_after_s is not None:
            response.headers["retry-after"] = str(max(1, round(rejection.retry_after_s)))
        return response


def _read(reader: RequestReader, kind: str, body: bytearray) -> RequestRows:
    if kind.startswith(JSON):
        return reader.read_json(body)
    if kind.startswith(ARROW):
        return reader.read_arrow(body)
    raise DataError(f"content-type {kind[:80]!r}", f"{JSON} or {ARROW}")


def _infer_answer(form: InferForm, version: ServedVersion, predictions: Predictions) -> Response:
    columns = prediction_columns(version.tasks, version.link, predictions.values_RP)
    degraded = {"degraded_rows": _describe_defaults(predictions)} if predictions.defaults_R else {}
    body, json_bytes = form.answer(version.name, version.number, columns, degraded)
    if json_bytes is None:
        return Response(body, media_type=JSON)
    return Response(body, headers={HEADER: str(json_bytes)}, media_type="application/octet-stream")


def _answer(version: ServedVersion, predictions: Predictions, accept: str) -> Response:
    predictions_RP = predictions.values_RP
    headers = {"rowwise-model": version.name, "rowwise-version": str(version.number)}
    if accept.startswith(ARROW):
        table = pa.table(prediction_columns(version.tasks, version.link, predictions_RP))
        return Response(arrow_stream(table), headers=headers, media_type=ARROW)
    outputs = dict(zip(prediction_names(version.tasks, version.link), predictions_RP.T.tolist(), strict=True))
    answer: dict[str, Any] = {"model": version.name, "version": version.number, "outputs": outputs}
    if predictions.defaults_R:
        answer["degraded"] = {name: defaults_R.tolist() for name, defaults_R in predictions.defaults_R.items()}
    return Response(msgspec.json.encode(answer), headers=headers, media_type=JSON)


def _describe_defaults(predictions: Predictions) -> str:
    """How many ids of a request had default rows, by table; names as in a URL."""
    return ", ".join(f"{quote(name)}={defaults_R.sum()}" for name, defaults_R in predictions.defaults_R.items())


def _describe(version: ServedVersion) -> dict[str, Any]:
    return {
        "model": version.name,
        "version": version.number,
        "digest": version.digest,
        "identity": version.identity,
        "blocks": version.forward.blocks.describe(),
        "columns": {field.name: str(field.type) for field in version.schema},
        "sides": {side.key: side.columns for side in version.sides},
        "tasks": version.tasks,
        "retrieval": None if version.retriever is None else _describe_items(version.retriever),
    }


def _describe_items(retriever: Retriever) -> dict[str, Any]:
    facts = retriever.items.facts
    return {
        "context": {field.name: str(field.type) for field in retriever.schema},
        "key": facts.key,
        "items": facts.items,
        "dim": facts.dim,
        "index": facts.index,
    }


def _respond(code: int, value: Any) -> Response:
    return Response(msgspec.json.encode(value), code, media_type=JSON)


def _length_of(request: Request) -> int:
    """Bytes of the body, by its header; 0: it has none."""
    return parse_whole(request.headers.get("content-length", "")[:MAX_DIGITS]) or 0


def _kind_of(request: Request) -> str:
    """What has another number of rows to a byte: Arrow, tensors, or JSON."""
    if request.headers.get("content-type", JSON).startswith(ARROW):
        return ARROW
    return request.url.path.rpartition("/")[2]


def _may_be_binary(request: Request) -> bool:
    """Whether more than JSON is in the body: Arrow, or tensors in binary."""
    return HEADER in request.headers or request.headers.get("content-type", JSON).startswith(ARROW)


def _is_exact(request: Request) -> bool:
    """Whether the request waits for all rows, by the header rowwise-exact."""
    text = request.headers.get("rowwise-exact", "false")
    if text not in ("true", "false"):
        raise DataError(f"rowwise-exact: {text[:80]!r}", "true or false")
    return text == "true"


def _timeout_of(request: Request) -> float | None:
    """Seconds of the header x-timeout-ms."""
    text = request.headers.get("x-timeout-ms")
    if text is None:
        return None
    timeout_ms = parse_whole(text)
    if not timeout_ms or len(text) > 9:
        raise DataError(f"x-timeout-ms: {text[:80]!r}", "a whole number of milliseconds, such as 50")
    return timeout_ms / 1000
