"""The ASGI application: scores over HTTP as JSON, Arrow or tensors, health, metrics, and the served versions.

It runs under any ASGI server. Metrics count responses by status; errors are JSON with a one-line message.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from rowwise.serve.oip import BINARY, HEADER, InferForm, ModelHealth, ServerFacts, ServerHealth
from rowwise.serve.oip import describe as describe_tensors
from rowwise.serve.openapi import describe_api
from rowwise.serve.request import RequestReader, RequestRows
from rowwise.serve.retrieval import Retriever
from rowwise.serve.retrieval_service import RetrievalService
from rowwise.serve.service import Predictions, ScoringService
from rowwise.serve.version import ServedVersion

OK, NOT_FOUND, TOO_LARGE, WRONG_TYPE = 200, 404, 413, 415
RETRY_s = 1.0  # Retry-After of a request that found no memory
PAUSE_s = 0.03  # between two large bodies, for other requests
SHOWN = 80  # characters of a path in a message
CODINGS = {b"content-encoding": b"identity", b"transfer-encoding": b"chunked"}
ANY = ("application/*", "*/*")  # of an Accept header
WEIGHT = re.compile(r"\bq=([01](?:\.[0-9]{0,3})?)")
CONTINUING = frozenset((b"expect", b"transfer-encoding", b"upgrade"))  # headers that change what follows a head
TIMEOUT_ms = re.compile(rb"0*[1-9][0-9]{0,8}")
Answer = Callable[[ServedVersion, Predictions], Response]
T = TypeVar("T")


class RequestRefusedError(Exception):
    """Ends a request with a rejection."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


def make_app(service: ScoringService, lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]]) -> Starlette:
    """The application of a service whose versions are open within `lifespan`."""
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
        *(Route(path, handlers.about_server) for path in ("/v2", "/v2/")),
        Route("/openapi.json", handlers.api),
        Route("/metrics", handlers.metrics),
    ]
    error_handlers = {HTTPException: handlers.refuse_path, RequestRefusedError: handlers.refuse_request}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=error_handlers)
    app.router.redirect_slashes = False  # it would redirect clients to the host of their Host header
    return app


def refusal_of_head(service: ScoringService, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Rejection | None:
    """The rejection of a POST request for scores by its head, as the application would send it.

    Most requests of an overload are refused so, before a layer of the application sees them. None: the application
    decides.
    """
    if not service.rows or service.draining:
        return None
    kind, name = url.rpartition(b"/")[2], service.current.name.encode()
    if url not in (b"/v1/models/%b/score" % name, b"/v2/models/%b/infer" % name):
        return None
    fields = dict(reversed(headers))  # the first of equal names
    length, timeout_ms = fields.get(b"content-length", b"0"), fields.get(b"x-timeout-ms")
    if not CONTINUING.isdisjoint(fields) or int(length) > service.limits.max_json_bytes:
        return None
    if timeout_ms is not None and not TIMEOUT_ms.fullmatch(timeout_ms):
        return None
    timeout_s = None if timeout_ms is None else int(timeout_ms) / 1000
    is_arrow = fields.get(b"content-type", b"").startswith(ARROW.encode())
    return service.refusal_unread(ARROW if is_arrow else kind.decode(), int(length), timeout_s)


class _Handlers:
    """HTTP handlers of one service, with the limit on bodies in flight."""

    def __init__(self, service: ScoringService) -> None:
        self.service, self.retrieval = service, RetrievalService(service)
        self._large = ThreadPoolExecutor(1, "bodies")  # decodes large bodies, one at a time, outside of the loop
        self._next_s = 0.0  # earliest time of the next large body
        self._bodies_bytes = 0  # of all requests in flight

    async def refuse_path(self, request: Request, error: Exception) -> Response:
        """404 for an unknown path, 405 for an unknown method."""
        assert isinstance(error, HTTPException)
        path = f"{request.method} {request.url.path[:SHOWN]!r}"
        if error.status_code == NOT_FOUND:
            message = (
                f"no {path}: expected POST /v1/models/{self.service.current.name}/score, or a path of /openapi.json"
            )
        else:
            message = f"no {path}: expected {(error.headers or {}).get('Allow', 'another method')}"
        response = self._refuse(Rejection(error.status_code, message))
        response.headers.update(error.headers or {})  # Allow, of a 405
        return response

    async def refuse_request(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefusedError)
        return self._refuse(error.rejection)

    async def api(self, request: Request) -> Response:
        """The OpenAPI description."""
        return _json_response(OK, describe_api(self.service.current))

    async def live(self, request: Request) -> Response:
        return _json_response(OK, ServerHealth(live=True, ready=not self.service.draining))

    async def ready(self, request: Request) -> Response:
        """Ready until the server drains, as it accepts no connections before its versions are open."""
        return self._health(ServerHealth(live=True, ready=not self.service.draining))

    def _health(self, health: ServerHealth | ModelHealth) -> Response:
        return _json_response(OK if health.ready else UNAVAILABLE, health)

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def versions(self, request: Request) -> Response:
        """The current version, the canary, the wanted version, and refused versions."""
        service, traffic = self.service, self.service.traffic
        canary = None if traffic is None else traffic.canary
        canary_facts = None if canary is None else _describe(service.versions[canary.version]) | {"share": canary.share}
        wanted, behind_s = service.metrics.read_wanted()
        status = {"canary": canary_facts, "wanted": wanted, "behind_s": behind_s, "refused": service.refused}
        return _json_response(OK, _describe(service.current) | status)

    async def score(self, request: Request) -> Response:
        """Rows in, logits and probabilities out."""
        to_arrow, content_type = _prefers_arrow(request.headers.get("accept", JSON)), _content_type(request)
        if content_type not in (JSON, ARROW):
            message = f"content-type {content_type[:SHOWN]!r}: expected {JSON} or {ARROW}"
            raise RequestRefusedError(Rejection(WRONG_TYPE, message))
        return await self._answer(
            request,
            lambda reader, body: (
                reader.read_arrow(body) if content_type == ARROW else reader.read_json(body),
                partial(_format_answer, to_arrow=to_arrow),
            ),
        )

    async def infer(self, request: Request) -> Response:
        """Tensors in, tensors out."""

        def read(reader: RequestReader, body: bytearray) -> tuple[RequestRows, Answer]:
            form = InferForm(body, request.headers.get(HEADER), reader.limits)
            return form.read(reader), partial(_infer_answer, form)

        return await self._answer(request, read)

    async def about_server(self, request: Request) -> Response:
        return _json_response(OK, ServerFacts("rowwise", metadata.version("rowwise"), ["binary_tensor_data"]))

    async def about_model(self, request: Request) -> Response:
        """The tensors of a version."""
        version = self._choose(request.path_params)
        outputs = prediction_names(version.tasks, version.link)
        return _json_response(
            OK, describe_tensors(version.name, sorted(self.service.versions), version.schema, outputs)
        )

    async def model_ready(self, request: Request) -> Response:
        """Whether a model, or a version of it, is ready."""
        version = self._choose(request.path_params)
        return self._health(ModelHealth(version.name, ready=not self.service.draining))

    async def _answer(
        self, request: Request, read: Callable[[RequestReader, bytearray], tuple[RequestRows, Answer]]
    ) -> Response:
        """Score a request; `read` decodes its rows and returns the function that encodes the predictions."""
        service, begin_s = self.service, self.service.clock()
        version = self._choose(request.path_params)
        reader = service.reader_of(version)  # before the body is received, as the version may be closed meanwhile
        body_format = _body_format(request)
        max_bytes = service.limits.max_bytes if _may_be_binary(request) else service.limits.max_json_bytes

        async def answer(body: bytearray, timeout_s: float | None) -> Response:
            rows, write = await self._read(body, partial(read, reader))
            service.admission.observe_body(body_format, max(1, len(body)), rows.rows)
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

        return await self._complete(
            request, version, max_bytes, partial(service.refusal_unread, body_format), answer, begin_s
        )

    async def retrieve(self, request: Request) -> Response:
        """A user's columns in, items out."""
        service, begin_s = self.service, self.service.clock()
        version = self._choose(request.path_params)
        retriever = version.retriever
        if retriever is None:
            problem = f"version {version.number} of {version.name!r} has no items to retrieve"
            raise RequestRefusedError(Rejection(NOT_FOUND, f"{problem}: expected a two-tower or sequence model"))

        async def answer(body: bytearray, timeout_s: float | None) -> Response:
            query = await self._read(body, lambda body: retriever.read_json(body, service.body_limits))
            service.metrics.stage["decode"].observe(service.clock() - begin_s)
            self._count(query.rows)
            service.metrics.unknown_items.inc(query.unknown)
            result = await self.retrieval.retrieve(version, retriever, query, timeout_s)
            if isinstance(result, Rejection):
                raise RequestRefusedError(result)
            if service.recorder is not None:
                service.recorder.add_search(version, query, result)
            answer_s = service.clock()
            headers = {"rowwise-model": version.name, "rowwise-version": str(version.number)}
            content = {"model": version.name, "version": version.number} | result._asdict()
            response = Response(msgspec.json.encode(content), headers=headers, media_type=JSON)
            service.metrics.stage["answer"].observe(service.clock() - answer_s)
            return response

        def refusal(length: int, timeout_s: float | None) -> Rejection | None:
            return self.retrieval.refusal_unread(timeout_s)

        return await self._complete(request, version, service.limits.max_json_bytes, refusal, answer, begin_s)

    async def _read(self, body: bytearray, read: Callable[[bytearray], T]) -> T:
        """Decode a body; a large one in a thread, so that other requests are answered meanwhile."""
        if len(body) <= SMALL_bytes:
            return read(body)
        return await asyncio.get_running_loop().run_in_executor(self._large, self._read_large, body, read)

    def _read_large(self, body: bytearray, read: Callable[[bytearray], T]) -> T:
        """Decode a body in a thread, with a pause before the next one that leaves the interpreter to requests."""
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
        """Receive the body of a request, unless it is refused before, and answer it."""
        service = self.service
        body = bytearray()  # grows in place
        try:
            timeout_s, length = _timeout_of(request), _length_of(request)
            _check_coding(request)
            # Before the body is received, as this takes longer than a refusal.
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
            return Response()  # the client is gone
        except RowwiseError as error:
            return self._refuse(Rejection(BAD_REQUEST, one_line(error) or ""))
        except MemoryError:
            return self._refuse(Rejection(UNAVAILABLE, "out of memory for this request: send fewer rows"))
        finally:
            self._bodies_bytes -= len(body)
        self._end_if_draining(response)
        service.metrics.stage["request"].observe(service.clock() - begin_s)
        service.metrics.count(OK, version.number)
        return response

    def _choose(self, params: Mapping[str, str]) -> ServedVersion:
        """The version for a request: from its path, else by the traffic split."""
        service, model = self.service, params["model"]
        if model != service.current.name:
            problem = f"no model {model[:80]!r}: expected {service.current.name!r}"
            raise RequestRefusedError(Rejection(NOT_FOUND, problem))
        requested = params.get("version")
        if requested is None:
            return service.choose()
        for number, version in service.versions.items():
            if requested == str(number):
                return version
        served = ", ".join(map(str, sorted(service.versions)))
        problem = f"version {requested[:20]!r} is not served: expected {served}"
        raise RequestRefusedError(Rejection(NOT_FOUND, problem))

    def _count(self, rows: RequestRows) -> None:
        if rows.ignored:
            self.service.metrics.ignored.inc(rows.ignored)
        if rows.unknown:
            self.service.metrics.unknown.inc(rows.unknown)
        for name, array in rows.arrays.arrays.items():  # numbers in blocks are not null
            if array.null_count and name in rows.arrays.names:
                self.service.metrics.nulls.labels(name).inc(array.null_count)

    def _end_if_draining(self, response: Response) -> None:
        """Close the connection after this response if the server drains."""
        if self.service.draining:
            response.headers["connection"] = "close"

    def _check_size(self, size_bytes: int, max_bytes: int) -> None:
        """Refuse a body that exceeds its limit, or the limit of all bodies in flight."""
        if size_bytes > max_bytes:
            message = f"the body is larger than {max_bytes} bytes: send fewer rows"
            raise RequestRefusedError(Rejection(TOO_LARGE, message))
        limit_bytes = self.service.limits.bodies_bytes
        if self._bodies_bytes > limit_bytes:
            message = f"all bodies would take {self._bodies_bytes:,} of at most {limit_bytes:,} bytes: send it later"
            raise RequestRefusedError(Rejection(UNAVAILABLE, message, RETRY_s))

    def _refuse(self, rejection: Rejection) -> Response:
        self.service.metrics.count(rejection.code)
        response = _json_response(rejection.code, {"error": rejection.message})
        self._end_if_draining(response)
        if rejection.retry_after_s is not None:
            response.headers["retry-after"] = str(max(1, round(rejection.retry_after_s)))
        return response


def _infer_answer(form: InferForm, version: ServedVersion, predictions: Predictions) -> Response:
    columns = prediction_columns(version.tasks, version.link, predictions.values_RP)
    degraded = {"degraded_rows": _describe_defaults(predictions)} if predictions.defaults_R else {}
    body, json_bytes = form.answer(version.name, version.number, columns, degraded)
    if json_bytes is None:
        return Response(body, media_type=JSON)
    return Response(body, headers={HEADER: str(json_bytes)}, media_type=BINARY)


def _format_answer(version: ServedVersion, predictions: Predictions, *, to_arrow: bool) -> Response:
    predictions_RP = predictions.values_RP
    headers = {"rowwise-model": version.name, "rowwise-version": str(version.number)}
    if to_arrow:
        table = pa.table(prediction_columns(version.tasks, version.link, predictions_RP))
        return Response(arrow_stream(table), headers=headers, media_type=ARROW)
    outputs = dict(zip(prediction_names(version.tasks, version.link), predictions_RP.T.tolist(), strict=True))
    answer: dict[str, Any] = {"model": version.name, "version": version.number, "outputs": outputs}
    if predictions.defaults_R:
        answer["degraded"] = {name: defaults_R.tolist() for name, defaults_R in predictions.defaults_R.items()}
    return Response(msgspec.json.encode(answer), headers=headers, media_type=JSON)


def _describe_defaults(predictions: Predictions) -> str:
    """Number of ids with default rows by table, in a header; names are URL-quoted."""
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


def _json_response(code: int, value: Any) -> Response:
    return Response(msgspec.json.encode(value), code, media_type=JSON)


def _length_of(request: Request) -> int:
    """Content-Length of the body, or 0 if absent."""
    return parse_whole(request.headers.get("content-length", "")[:MAX_DIGITS]) or 0


def _body_format(request: Request) -> str:
    """Format of the body; rows per byte are estimated per format."""
    if _content_type(request) == ARROW:
        return ARROW
    path: str = request.scope["path"]
    return path.rpartition("/")[2]


def _may_be_binary(request: Request) -> bool:
    """Whether the body may be Arrow or have binary tensors."""
    return HEADER in request.headers or _content_type(request) == ARROW


def _content_type(request: Request) -> str:
    """Media type of the body, without parameters."""
    return request.headers.get("content-type", JSON).partition(";")[0].strip().lower()


def _prefers_arrow(accept: str) -> bool:
    """Whether an Accept header has Arrow with the highest weight, first of those with it."""
    if ARROW not in accept.lower():
        return False
    weights: dict[str, float] = {}
    for option in accept.lower().split(","):
        kind, _, parameters = option.partition(";")
        weight = WEIGHT.search(parameters)
        weights[kind.strip()] = float(weight[1]) if weight else 1.0
    offered = {kind: weight for kind, weight in weights.items() if weight and kind in (ARROW, JSON, *ANY)}
    return max(offered, key=offered.__getitem__, default=JSON) == ARROW


def _check_coding(request: Request) -> None:
    """Refuse compressed bodies; one pass over the headers, as each look-up is one."""
    for name, coding in request.scope["headers"]:
        if name in CODINGS and coding.lower() != CODINGS[name]:
            problem = f"{name.decode()} {coding[:SHOWN].decode('latin-1')!r}"
            message = f"{problem}: expected a plain body, or Arrow with compressed buffers"
            raise RequestRefusedError(Rejection(WRONG_TYPE, message))


def _is_exact(request: Request) -> bool:
    """Header rowwise-exact: whether the request waits for all rows."""
    text = request.headers.get("rowwise-exact", "false")
    if text not in ("true", "false"):
        raise DataError(f"rowwise-exact: {text[:80]!r}", "true or false")
    return text == "true"


def _timeout_of(request: Request) -> float | None:
    """Header x-timeout-ms, in seconds; None if absent."""
    text = request.headers.get("x-timeout-ms")
    if text is None:
        return None
    timeout_ms = parse_whole(text)
    if not timeout_ms or len(text) > 9:
        raise DataError(f"x-timeout-ms: {text[:80]!r}", "milliseconds such as 50, of at most 9 digits")
    return timeout_ms / 1000
