"""A store that answers without end, too slowly or by a redirect ends in one line, with few bytes taken."""

import datetime
import itertools
import socket
import ssl
import time

import pytest
from hostile import hostile, http_answer, http_that, list_page, until_gone

from rowwise.base.errors import StorageError
from rowwise.base.storage.cloud import CloudStorage, RetryPolicy
from rowwise.base.storage.folder import RANGE_bytes, StorageFolder, read_range
from rowwise.base.storage.gate import Gate
from rowwise.base.storage.limits import VARIABLE, Limits

QUICK = RetryPolicy(deadline_s=0.05, first_wait_s=0.01)
MAX_bytes = 32 << 20  # a page of a list, and what the kernel takes from a server whose client reads nothing
KEYS = {"access_key_id": "key-1", "secret_access_key": "secret-2", "token": "token-3", "region": "x"}
DO = {
    "stat": lambda store: store.stat("a"),
    "read": lambda store: store.read("a", 0, 100),
    "list": lambda store: store.list("p/"),
    "write": lambda store: store.write("a", lambda: [b"12"], 2),
    "create": lambda store: store.create("a", b"12"),
    "delete": lambda store: store.delete("a"),
}


def opened(server, scheme="http", **limits):
    return CloudStorage("s3://bucket", QUICK, Limits(**limits), endpoint=f"{scheme}://127.0.0.1:{server.port}", **KEYS)


def refused(action, store, why):
    with pytest.raises(StorageError, match=why) as raised:
        action(store)
    text = str(raised.value)
    assert "s3://bucket/" in text
    assert "\n" not in text
    assert not any(secret in text for secret in ("key-1", "secret-2", "token-3"))


def ranged(content, begin, end, size, tag="1"):
    """The answer to a request for a range."""
    return http_answer(
        content,
        b"206 Partial Content",
        Content_Range=f"bytes {begin}-{end - 1}/{size}",
        ETag=f'"{tag}"',
        Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT",
    )


def range_of(headers):
    first, _, last = headers["range"].removeprefix("bytes=").partition("-")
    return int(first), int(last) + 1


@pytest.mark.parametrize(
    ("action", "status"), list(zip(DO.values(), (301, 302, 307, 308, 303, 307), strict=True)), ids=DO
)
def test_a_redirect_is_refused_and_nobody_else_hears_of_it(action, status):
    with hostile(http_that(lambda line, headers, send: send(http_answer(b"other")))) as other:
        away = http_answer(b"", b"%d Go" % status, Location=f"http://127.0.0.1:{other.port}/bucket/a?signed=hidden")
        with hostile(http_that(lambda line, headers, send: send(away))) as server:
            refused(action, opened(server), f"redirects to 'http://127.0.0.1:{other.port}/bucket/a'")
        assert other.connections == 0


def endless(head):
    """A server whose answers begin so, and do not end."""
    return http_that(lambda line, headers, send: (send(head), until_gone(send)))


ENDLESS = {
    "by its end": b"HTTP/1.1 200 OK\r\n\r\n",
    "by its size": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 40),
    "of a range": b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-99/100\r\nContent-Length: %d\r\n\r\n" % (1 << 40),
    "in chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (1 << 40),
    "of an error": b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % (1 << 40),
    "of a fault": b"HTTP/1.1 503 Slow Down\r\n\r\n",
    "of a header": b"HTTP/1.1 200 OK\r\nX: ",
    "of a line": b"HTTP/1.1 200 ",
}


@pytest.mark.parametrize("action", ["read", "list", "write"])
@pytest.mark.parametrize("head", ENDLESS)
def test_an_answer_without_end_is_cut(action, head):
    with hostile(endless(ENDLESS[head])) as server:
        refused(DO[action], opened(server), "s3://bucket/")
        server.wait()
        assert all(count < MAX_bytes for count in server.sent_bytes.values())


def test_headers_and_answers_to_wait_without_end_are_cut():
    for piece in (b"X: 1\r\n", b"\r\nHTTP/1.1 100 Continue\r\n"):

        def answers(line, headers, send, piece=piece):
            send(b"HTTP/1.1 100 Continue\r\n")
            while True:
                send(piece * 1000)

        with hostile(http_that(answers)) as server:
            refused(DO["list"], opened(server, stall_s=0.05, bytes_s=1e12), "cannot be reached")
            server.wait()


def test_what_follows_an_answer_is_not_the_next_one():
    """The announced bytes are right; the next request has a connection of its own."""
    number = itertools.count()

    def answers(line, headers, send):
        begin, end = range_of(headers)
        send(ranged(b"%03d" % next(number), begin, end, 3) + http_answer(b"evil") * 3)

    with hostile(http_that(answers)) as server:
        store = opened(server)
        for k in range(3):
            assert bytes(store.read("a", 0, 3)) == b"%03d" % k


@pytest.mark.parametrize("ends", [b"Connection: close\r\n", b"Connection: close\r\nContent-Length: %d\r\n"])
def test_an_answer_may_end_with_its_connection(ends):
    size = 3 << 20

    def answers(line, headers, send):
        head = b"HTTP/1.1 206 Part\r\nContent-Range: bytes 0-%d/%d\r\n" % (size - 1, size)
        head += b"Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: 1\r\n" + ends.replace(b"%d", b"%d" % size)
        send(head + b"\r\n" + bytes(size))
        raise OSError("this side ends")

    with hostile(http_that(answers)) as server:
        store = opened(server)
        for _ in range(2):
            assert bytes(store.read("a", 0, size)) == bytes(size)
        assert server.connections == 2


def test_an_answer_that_ends_too_early_is_tried_again_until_the_deadline():
    def answers(line, headers, send):
        send(ranged(bytes(100), 0, 100, 100)[:-50])
        raise OSError("this side ends")

    with hostile(http_that(answers)) as server:
        refused(DO["read"], opened(server), "cannot be reached .* 50 bytes too early")
        assert server.connections > 1


def test_an_answer_that_drips_or_stops_is_left():
    """A byte at a time, it would be right in the end."""
    whole = ranged(bytes(100), 0, 100, 100)

    def drip(line, headers, send):
        for byte in whole:
            send(bytes([byte]))
            time.sleep(0.001)

    def stop(line, headers, send):
        send(whole[:-1])

    for answers, limits in ((drip, {"stall_s": 0.02, "bytes_s": 1e6}), (stop, {"stall_s": 0.02})):
        with hostile(http_that(answers)) as server:
            refused(DO["read"], opened(server, **limits), "cannot be reached")
            server.wait()
            assert all(count < len(whole) for count in server.sent_bytes.values())


def pages(next_page):
    """A server of lists: `next_page` is a function of the number of requests."""
    number = itertools.count()
    return http_that(lambda line, headers, send: send(next_page(next(number))))


def names_of(page):
    return [f"p/{page:06}-{one:02}" for one in range(10)]


@pytest.mark.parametrize(
    ("page", "limits", "why"),
    [
        (lambda k: list_page(names_of(k), f"t{k}"), {"names": 50}, f"more than 50 names.*{VARIABLE}"),
        (lambda k: list_page([f"p/{k:0999}"], f"t{k}"), {"names": 50}, f"more than 50 names.*{VARIABLE}"),
        (lambda k: list_page(names_of(0), "t"), {}, "lists 'p/000000-00' twice"),
        (lambda k: list_page([], "t"), {"list_s": 0.02}, f"takes more than 0.02 s.*{VARIABLE}"),
    ],
    ids=["names", "long names", "a token again", "no names"],
)
def test_a_list_without_end_is_refused(page, limits, why):
    with hostile(pages(page)) as server:
        refused(DO["list"], opened(server, **limits), why)


def test_a_list_of_as_many_names_as_there_may_be():
    with hostile(pages(lambda k: list_page(names_of(k), "t" if k < 4 else ""))) as server:
        assert len(opened(server, names=50).list("p/")) == 50


def test_an_object_that_changes_while_it_is_read_is_refused():
    size, tags = 2 * RANGE_bytes + 1, itertools.count()

    def answers(line, headers, send):
        if line.startswith("HEAD"):
            send(http_answer(Content_Length=str(size), Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT"))
        else:
            begin, end = range_of(headers)
            send(ranged(bytes(end - begin), begin, end, size, str(next(tags))))

    with hostile(http_that(answers)) as server:
        store = opened(server)
        refused(lambda store: store.read("a"), store, "has changed while it was read")
        refused(lambda store: read_range(StorageFolder(store), "a", 0, size), store, "has changed while it was read")


def test_the_gate_is_for_its_owner():
    with hostile(http_that(lambda line, headers, send: send(http_answer(b"yes")))) as server:
        store = opened(server)
        port = int(store._gate.proxy.rpartition(":")[2])
        for line in (f"GET http://127.0.0.1:{server.port}/ HTTP/1.1", f"CONNECT 127.0.0.1:{server.port} HTTP/1.1"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(f"{line}\r\n\r\n".encode())
                assert stranger.makefile("rb").read().startswith(b"HTTP/1.1 407")
        assert server.connections == 0


@pytest.fixture
def certificate(tmp_path, monkeypatch):
    """A file with a key and a certificate of 127.0.0.1, which this process trusts."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "store")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "store.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    return path


@pytest.mark.slow
def test_an_endpoint_by_tls_is_spoken_to_by_tls(certificate, monkeypatch):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    hosts = []

    def answers(line, headers, send):
        hosts.append(headers["host"])
        begin, end = range_of(headers)
        send(ranged(b"abc", begin, end, 3))

    with hostile(http_that(answers), context) as server:
        assert bytes(opened(server, "https").read("a", 0, 3)) == b"abc"
        assert hosts == [f"127.0.0.1:{server.port}"]
        monkeypatch.delenv("SSL_CERT_FILE")
        refused(DO["read"], opened(server, "https"), "certificate")
        assert len(hosts) == 1


@pytest.mark.parametrize("text", ["names", "names=0", "names=-1", "name=5", "names=1e3", "stall_s=nan", "bytes_s=٣"])
def test_limits_that_are_none(text):
    with pytest.raises(StorageError, match="names=400000,list_s=600"):
        Limits.parse(text)


@pytest.mark.parametrize("endpoint", ["http://me:hidden@127.0.0.1:99999", "http://[::1", "http://127.0.0.1:x"])
def test_an_endpoint_that_is_none(endpoint):
    with pytest.raises(StorageError, match="expected AWS_ENDPOINT_URL=") as raised:
        Gate(endpoint, Limits())
    assert "hidden" not in str(raised.value)


def test_limits_of_a_text():
    assert Limits.parse("names=7,stall_s=2") == Limits(names=7, stall_s=2)
    assert Limits.parse("") == Limits()
