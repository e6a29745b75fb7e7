"""Connections that break a limit are closed with one line, and others go on; what is no path is one JSON error."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import pytest
import uvicorn
from openapi_spec_validator import OpenAPIV31SpecValidator
from prometheus_client.parser import text_string_to_metric_families
from uvicorn.server import ServerState

from rowwise.recipes.served import open_version
from rowwise.serve.admission import ServiceLimits
from rowwise.serve.app import make_app, refusal_of_head
from rowwise.serve.client import ARROW, JSON
from rowwise.serve.connection import BoundedConnection
from rowwise.serve.service import ScoringService
from rowwise.serve.traffic import Traffic

SCORE = "/v1/models/small/score"
SOON_s = 0.05


@pytest.fixture(scope="module")
def version(increments):
    return open_version(increments.models, number=1)


@pytest.fixture(scope="module")
def rows(increments, version):
    return increments.table.slice(0, 2).select(version.schema.names).to_pydict()


@asynccontextmanager
async def serving(version, prepare=lambda service: None, **limits):
    """Opens connections to a server in this loop; what it has of them; the statuses of its refusals."""
    service = ScoringService(ServiceLimits(timeout_s=60.0, **limits))
    prepare(service)
    service.open(version)
    service.move(Traffic(version.number))
    config = uvicorn.Config(make_app(service, lambda _: nullcontext()), log_level="error", ws="none")
    config.timeout_keep_alive = service.limits.idle_s
    config.load()
    state, counted, opened = ServerState(), [], []

    async def connect():
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # little is on its way to one that reads nothing
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, server.sockets[0].getsockname())
        reader, writer = await asyncio.open_connection(sock=client)
        opened.append(writer)
        return reader, writer

    server = await asyncio.get_running_loop().create_server(
        lambda: BoundedConnection(service.limits, counted.append, partial(refusal_of_head, service), config, state, {}),
        "127.0.0.1",
        0,
    )
    server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with server:
        try:
            yield connect, state, counted
        finally:
            for writer in opened:
                writer.transport.abort()
            while state.connections or state.tasks:
                await asyncio.sleep(0)


def overload(service):
    """Let rows wait for ever, which take 1 ms each."""
    service.admission.observe(1, 1e-3)
    service._loop._queue.add(-1, 100_000, float("inf"))


def run(version, go, **limits):
    async def whole():
        async with serving(version, **limits) as served:
            return await go(*served)

    return asyncio.run(asyncio.wait_for(whole(), 30))


def request(path, method="GET", body=b"", **headers):
    head = {"content-length": len(body), "content-type": "application/json"} | headers
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in head.items())
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n{lines}\r\n".encode() + body


async def answer(reader):
    """The next answer of a connection: its status, headers and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def ask(connect, *of, **more):
    reader, writer = await connect()
    writer.write(request(*of, **more))
    return await answer(reader)


@pytest.mark.parametrize(
    "begin",
    [
        b"GET / HTTP/1.1\r\nx: ",
        b"GET /",
        f"POST {SCORE} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;".encode(),
        f"POST {SCORE} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n \r\n0\r\nx: ".encode(),
    ],
    ids=["header", "path", "extension", "trailer"],
)
def test_what_never_ends_is_refused(version, begin):
    async def go(connect, state, counted):
        reader, writer = await connect()
        writer.write(begin)
        for _ in range(1000):
            writer.write(b"a" * 100)
            await asyncio.sleep(0)
            if counted:
                break
        assert counted == [431]
        code, headers, body = await answer(reader)
        assert (code, headers["connection"], "send fewer headers" in json.loads(body)["error"]) == (431, "close", True)
        assert (await ask(connect, "/v1/health/live"))[0] == 200

    run(version, go, head_bytes=10_000)


@pytest.mark.parametrize(
    ("begin", "what"),
    [
        (b"GET /", "head"),
        (b"\r\n", "head"),
        (f"POST {SCORE} HTTP/1.1\r\ncontent-length: 100\r\n\r\n{{".encode(), "body"),
        (b"GET /v1/versions HTTP/1.1\r\n\r\nGET /", "head"),
    ],
)
def test_what_comes_slowly_is_refused(version, begin, what):
    async def go(connect, state, counted):
        reader, writer = await connect()
        writer.write(begin)
        while not counted:  # a part at a time wins none
            writer.write(b" " if what == "body" else b"a" if begin.strip() else b"\r\n")
            await asyncio.sleep(SOON_s / 10)
        code, _, body = await answer(reader)
        if code == 200:
            code, _, body = await answer(reader)
        assert (code, counted) == (408, [408])
        assert f"the {what} of the request took more than {SOON_s} s" in json.loads(body)["error"]
        assert not await reader.read()
        writer.close()
        while state.connections:
            await asyncio.sleep(0)

    run(version, go, head_s=SOON_s if what == "head" else 30.0, body_s=SOON_s if what == "body" else 30.0)


def test_a_body_after_its_answer_is_cut(version):
    async def go(connect, state, counted):
        reader, writer = await connect()
        writer.write(b"POST /nothing HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        assert (await answer(reader))[0] == 404
        while not counted:
            writer.write(b"1\r\na\r\n")
            await asyncio.sleep(SOON_s / 10)
        assert (await answer(reader))[0] == 408

    run(version, go, body_s=SOON_s)


@pytest.mark.parametrize("sent", [b"", request("/v1/health/live"), request("/nothing", "POST", b"late")])
def test_idle_connections_are_closed(version, sent):
    async def go(connect, state, counted):
        reader, writer = await connect()
        writer.write(sent[:-4])
        if sent:
            await answer(reader) if sent.endswith(b"late") else None
        writer.write(sent[-4:])
        await reader.read()
        assert not state.connections
        assert not counted

    run(version, go, idle_s=SOON_s)


def test_a_client_that_reads_no_answer_is_cut(version):
    async def go(connect, state, counted):
        _, writer = await connect()
        writer.transport.pause_reading()
        while not state.connections:
            await asyncio.sleep(0)
        while state.connections and not writer.transport.is_closing():
            writer.write(request("/openapi.json") * 10)
            await asyncio.sleep(SOON_s / 10)

    run(version, go, body_s=SOON_s, idle_s=30.0)


@pytest.mark.parametrize(
    "sent",
    [
        f"POST {SCORE} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n".encode() + b"1\r\n \r\n" * 2000,
        request("/v1/versions") * 100,
    ],
    ids=["chunks", "pipelined"],
)
def test_too_many_parts_are_refused(version, sent, capsys):
    async def go(connect, state, counted):
        reader, writer = await connect()
        writer.write(sent)
        await reader.read()
        assert counted == [400]

    run(version, go)
    assert capsys.readouterr() == ("", "")


def test_too_many_connections(version):
    async def go(connect, state, counted):
        first = await connect()
        first[1].write(request("/v1/health/live"))
        assert (await answer(first[0]))[0] == 200
        reader, _ = await connect()
        code, headers, body = await answer(reader)
        assert (code, headers["connection"], counted) == (503, "close", [503])
        assert "1 connections are open" in json.loads(body)["error"]
        first[1].write(request("/v1/health/live"))
        assert (await answer(first[0]))[0] == 200

    run(version, go, connections=1)


def test_sizes_of_bodies(version, rows):
    body = json.dumps({"rows": rows}).encode()
    room = len(body) + 10

    async def go(connect, state, counted):
        assert (await ask(connect, SCORE, "POST", body))[0] == 200
        assert (await ask(connect, SCORE, "POST", body + b" " * 20))[0] == 413
        # Of all requests together: one that waits for the rest of its body takes the room.
        _, writer = await connect()
        writer.write(request(SCORE, "POST", body + b" " * 5)[:-1])
        for _ in range(100):
            code, headers, told = await ask(connect, SCORE, "POST", body)
            if code == 503:
                break
        assert (code, "retry-after" in headers, "all bodies would take" in json.loads(told)["error"]) == (
            503,
            True,
            True,
        )
        writer.transport.abort()
        while len(state.connections) > 100 or code != 200:
            code = (await ask(connect, SCORE, "POST", body))[0]

    run(version, go, max_json_bytes=room, bodies_bytes=room)


def test_clients_that_leave_or_speak_another_language_fill_no_log(version, capsys):
    async def go(connect, state, counted):
        for sent in (request(SCORE, "POST", b"{" * 100)[:-10], b"GET /", b"\x16\x03\x01", b"GET / HTTP/9.9\r\n\r\n"):
            reader, writer = await connect()
            writer.write(sent)
            while not state.connections:
                await asyncio.sleep(0)
            writer.transport.abort() if b"HTTP/1" in sent else writer.write_eof()
            while state.connections or state.tasks:
                await asyncio.sleep(0)
        headers = {"connection": "upgrade", "upgrade": "websocket"}
        assert (await ask(connect, "/v1/health/live", **headers))[0] == 200
        reader, writer = await connect()
        writer.write(b"nonsense\r\n\r\n")
        code, _, body = await answer(reader)
        assert (code, "invalid HTTP/1.1" in json.loads(body)["error"]) == (400, True)

    run(version, go)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("method", "path", "code", "hint"),
    [
        ("GET", "/nothing", 404, "expected POST /v1/models/small/score, or a path of /openapi.json"),
        ("GET", "/v1/", 404, "no GET '/v1/'"),
        ("GET", "//evil.example/..", 404, "no GET"),
        ("POST", SCORE + "/", 404, "no POST"),
        ("GET", SCORE, 405, "expected POST"),
        ("OPTIONS", SCORE, 405, "expected POST"),
        ("DELETE", "/v2", 405, "expected "),
    ],
)
def test_what_is_no_path_is_one_json_error(version, method, path, code, hint):
    async def go(connect, state, counted):
        found, headers, body = await ask(connect, path, method, host="evil.example")
        assert (found, headers["content-type"]) == (code, "application/json")
        assert "location" not in headers
        assert hint in json.loads(body)["error"]
        assert ("allow" in headers) == (code == 405)

    run(version, go)


@pytest.mark.parametrize(
    ("headers", "code", "content_type"),
    [
        ({"content-type": "Application/JSON; charset=utf-8"}, 200, JSON),
        ({"content-type": "application/jsonx"}, 415, JSON),
        ({"content-type": "text/plain"}, 415, JSON),
        ({"content_encoding": "gzip"}, 415, JSON),
        ({"content_encoding": "Identity"}, 200, JSON),
        ({"accept": "text/html, */*;q=0.8"}, 200, JSON),
        ({"accept": ARROW.title()}, 200, ARROW),
        ({"accept": f"{JSON};q=0.5, {ARROW}"}, 200, ARROW),
        ({"accept": f"{JSON}, {ARROW}"}, 200, JSON),
        ({"accept": f"{ARROW};q=0"}, 200, JSON),
        ({"accept": f"{ARROW};q=0.5, */*"}, 200, JSON),
        ({"expect": "100-continue"}, 100, None),
    ],
)
def test_types_and_codings_of_bodies(version, rows, headers, code, content_type):
    async def go(connect, state, counted):
        body = json.dumps({"rows": rows}).encode()
        found, told, _ = await ask(connect, SCORE, "POST", body, **headers)
        assert (found, told.get("content-type")) == (code, content_type)

    run(version, go)


def test_metrics_have_a_type_a_meaning_and_one_value_each(version, rows):
    async def go(connect, state, counted):
        for body in (json.dumps({"rows": rows}).encode(), b"{"):
            await ask(connect, SCORE, "POST", body)
        families = list(text_string_to_metric_families((await ask(connect, "/metrics"))[2].decode()))
        assert all(family.documentation and family.type != "unknown" for family in families)
        samples = [(sample.name, *sorted(sample.labels.items())) for family in families for sample in family.samples]
        assert len(set(samples)) == len(samples) > len({family.name for family in families}) == len(families)
        assert ("rowwise_requests_total", ("code", "400"), ("version", "")) in samples

    run(version, go)


def test_a_body_in_chunks_has_one_coding(version, rows):
    async def go(connect, state, counted):
        body = json.dumps({"rows": rows}).encode()
        for coding, code in (("chunked", 200), ("gzip, chunked", 415)):
            reader, writer = await connect()
            head = f"POST {SCORE} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: {coding}\r\n\r\n"
            writer.write(head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            assert (await answer(reader))[0] == code

    run(version, go)


def test_the_description_is_valid_and_its_paths_answer(version, rows):
    async def go(connect, state, counted):
        found = json.loads((await ask(connect, "/openapi.json"))[2])
        OpenAPIV31SpecValidator(found).validate()
        for path, operations in found["paths"].items():
            for method in {"get", "post"} & operations.keys():
                content = operations[method].get("requestBody", {}).get("content", {})
                body = json.dumps(content[JSON]["example"]).encode() if content else b""
                code, headers, told = await ask(connect, path.format(version=version.number), method.upper(), body)
                assert code == 200, (path, told)
                assert headers["content-type"].partition(";")[0] in operations[method]["responses"]["200"]["content"]
        columns = found["paths"][SCORE]["post"]["requestBody"]["content"][JSON]["schema"]["anyOf"][0]
        assert columns["properties"]["rows"]["properties"].keys() == rows.keys()

    run(version, go)


@pytest.mark.parametrize("path", [SCORE, "/v2/models/small/infer"])
def test_a_request_is_refused_by_its_head_as_by_the_application(version, rows, path):
    """Both refusals of one connection, each with half of its body later; then what is no score is answered."""
    body = json.dumps({"rows": rows}).encode()

    async def go(connect, state, counted):
        reader, writer = await connect()
        refusals = []
        for more in ({}, {"expect": "200-ok"}):  # the application decides about requests with this header
            sent = request(path, "POST", body, x_timeout_ms="50", **more)
            writer.write(sent[:-5])
            refusals.append(await answer(reader))
            writer.write(sent[-5:])
        for _, headers, _ in refusals:
            for name in ("date", "server"):
                headers.pop(name, None)
        assert refusals[0] == refusals[1]
        assert (refusals[0][0], counted) == (503, [503])
        assert "100,000 rows wait before its 1" in json.loads(refusals[0][2])["error"]
        writer.write(request("/v1/health/live"))
        assert (await answer(reader))[0] == 200
        writer.write(request(path, "POST", body, x_timeout_ms="50") * 3)
        assert [(await answer(reader))[0] for _ in range(3)] == [503] * 3

    run(version, go, prepare=overload)


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/v1/models/other/score", {}, 404),
        ("/v1/models/small/versions/7/score", {}, 404),
        (SCORE, {"x_timeout_ms": "0"}, 400),
        (SCORE, {"x_timeout_ms": "soon"}, 400),
        (SCORE, {"content-length": 1 << 30}, 413),
        (SCORE, {"connection": "close"}, 503),
        (SCORE, {"x_timeout_ms": "500000"}, None),
    ],
)
def test_the_application_decides_about_requests_that_are_not_only_late(version, rows, path, headers, code):
    async def go(connect, state, counted):
        reader, writer = await connect()
        writer.write(request(path, "POST", b"{}", **headers))
        if code is None:  # there is time for it, and its body has no rows
            assert (await answer(reader))[0] == 400
        else:
            assert (await answer(reader))[0] == code
        assert counted == []

    run(version, go, prepare=overload)
