"""A small S3 server over a folder, with faults on purpose; for tests and benchmarks of object stores.

    python benchmarks/parts/s3_server.py FOLDER [--port PORT] [--faults JSON]

Objects are files, so a server that is killed and started again has the objects that were complete. It answers GET with
ranges, HEAD, PUT (also `If-None-Match: *`), DELETE, lists (version 2) and uploads in parts, as obstore asks for them.
Signatures are not checked; the SHA-256 of a signed payload is. Faults are drawn by a seeded generator for each request:
`errors` (500 or 503), `busy` (429), `resets` (the connection ends in the middle of an answer or before one) and `lost`
(the request has its effect, and its answer is lost), each as a share of all requests, and `slow_s`, the longest delay
of one request in ten. Requests whose time differs by more than `skew_s` from the server's are refused, as by S3.
"""

import argparse
import calendar
import hashlib
import json
import os
import random
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

PIECE_bytes = 1 << 20
PAGE = 1000  # objects in an answer to a list


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, port: int, faults: dict[str, float]) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder, self.faults = folder, faults
        self.lock, self.draw = threading.Lock(), random.Random(int(faults.get("seed", 0)))
        self.uploads = folder / ".uploads"
        self.uploads.mkdir(parents=True, exist_ok=True)

    def fault(self) -> str:
        """What goes wrong with this request: errors, busy, resets, lost, or nothing."""
        with self.lock:
            at, slow = self.draw.random(), self.draw.random()
        if slow < 0.1:
            time.sleep(slow * 10 * self.faults.get("slow_s", 0.0))
        for kind in ("errors", "busy", "resets", "lost"):
            at -= self.faults.get(kind, 0.0)
            if at < 0:
                return kind
        return ""

    def handle_error(self, request, client_address) -> None:
        pass  # clients go away as they like


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    rbufsize = PIECE_bytes
    disable_nagle_algorithm = True

    def log_message(self, format, *args) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def do_GET(self) -> None:
        self.serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def serve(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        self.bucket, self.key = self.server.folder / bucket, key
        body = self.server.uploads / secrets.token_hex(12)
        self.fault = self.server.fault()
        try:
            if not self.receive(body):
                self.answer_error(400, "XAmzContentSHA256Mismatch")
            elif self.is_skewed():
                self.answer_error(403, "RequestTimeTooSkewed")
            elif self.fault == "errors":
                self.answer_error(*((500, "InternalError"), (503, "SlowDown"))[body.name < "8"])
            elif self.fault == "busy":
                self.answer_error(429, "TooManyRequests")
            elif self.fault == "resets" and self.command != "GET":
                self.reset()
            else:
                self.act(body)
        finally:
            body.unlink(missing_ok=True)

    def is_skewed(self) -> bool:
        most_s = self.server.faults.get("skew_s")
        if most_s is None:
            return False
        signed = time.strptime(self.headers["x-amz-date"], "%Y%m%dT%H%M%SZ")
        return abs(time.time() - calendar.timegm(signed)) > most_s

    def act(self, body: Path) -> None:
        if not self.bucket.is_dir():
            self.answer_error(404, "NoSuchBucket")
        elif not self.key:
            self.delete_several(body) if self.command == "POST" else self.list()
        elif self.command == "PUT":
            self.put(body)
        elif self.command == "POST":
            self.post(body)
        elif self.command == "DELETE":
            if "uploadId" in self.query:
                shutil.rmtree(self.server.uploads / self.query["uploadId"], ignore_errors=True)
            else:
                self.path_of(self.key).unlink(missing_ok=True)
            self.answer(204)
        else:
            self.get()

    def path_of(self, key: str) -> Path:
        return self.bucket / quote(key, safe="")

    def delete_several(self, body: Path) -> None:
        keys = [one.text or "" for one in ElementTree.parse(body).iter() if one.tag.endswith("Key")]
        for key in keys:
            self.path_of(key).unlink(missing_ok=True)
        gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self.answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

    def list(self) -> None:
        prefix, after = self.query.get("prefix", ""), self.query.get("continuation-token", "")
        keys = sorted(key for key in map(unquote, os.listdir(self.bucket)) if key.startswith(prefix) and key > after)
        objects, more = [], len(keys) > PAGE
        for key in keys[:PAGE]:
            try:
                status = self.path_of(key).stat()
            except FileNotFoundError:
                continue
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
            objects.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified><ETag>{tag(status)}</ETag>"
                f"<Size>{status.st_size}</Size></Contents>"
            )
        token = f"<NextContinuationToken>{escape(keys[PAGE - 1])}</NextContinuationToken>" if more else ""
        self.answer(
            200,
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            f"<KeyCount>{len(objects)}</KeyCount>{''.join(objects)}</ListBucketResult>".encode(),
        )

    def put(self, body: Path) -> None:
        if "partNumber" in self.query:
            folder = self.server.uploads / self.query["uploadId"]
            if not folder.is_dir():
                return self.answer_error(404, "NoSuchUpload")
            body.rename(folder / f"{int(self.query['partNumber']):05}")
        elif not self.appear(body):
            return self.answer_error(412, "PreconditionFailed")
        return self.answer(200, headers={"ETag": f'"{secrets.token_hex(16)}"'})

    def appear(self, body: Path) -> bool:
        if self.headers.get("If-None-Match") != "*":
            body.rename(self.path_of(self.key))
            return True
        try:
            os.link(body, self.path_of(self.key))
        except FileExistsError:
            return False
        return True

    def post(self, body: Path) -> None:
        if "uploads" in self.query:
            upload = secrets.token_hex(8)
            (self.server.uploads / upload).mkdir()
            text = f"<Bucket>b</Bucket><Key>{escape(self.key)}</Key><UploadId>{upload}</UploadId>"
            return self.answer(200, f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>".encode())
        folder = self.server.uploads / self.query.get("uploadId", "none")
        if not folder.is_dir():
            return self.answer_error(404, "NoSuchUpload")
        parts = sorted(folder.iterdir())
        with parts[0].open("ab") as whole:
            for part in parts[1:]:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole, PIECE_bytes)
        if not self.appear(parts[0]):
            return self.answer_error(412, "PreconditionFailed")
        shutil.rmtree(folder)
        text = f"<Key>{escape(self.key)}</Key><ETag>&quot;{secrets.token_hex(16)}&quot;</ETag>"
        return self.answer(200, f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>".encode())

    def get(self) -> None:
        try:
            file = self.path_of(self.key).open("rb")
        except FileNotFoundError:
            return self.answer_error(404, "NoSuchKey")
        with file:
            status = os.fstat(file.fileno())
            begin, end, code = 0, status.st_size, 200
            headers = {"ETag": tag(status), "Last-Modified": formatdate(status.st_mtime, usegmt=True)}
            if wanted := self.headers.get("Range"):
                low, _, high = wanted.removeprefix("bytes=").partition("-")
                begin = int(low) if low else max(0, end - int(high))
                end = min(end, int(high) + 1) if low and high else end
                if begin >= status.st_size:
                    return self.answer_error(416, "InvalidRange")
                headers["Content-Range"], code = f"bytes {begin}-{end - 1}/{status.st_size}", 206
            if self.fault == "lost":
                return self.reset()
            self.head(code, end - begin, {**headers, "Accept-Ranges": "bytes"})
            if self.command == "HEAD":
                return None
            stop = begin + (end - begin) // 2 if self.fault == "resets" else end
            while begin < stop:
                begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, min(stop - begin, 8 << 20))
        return self.reset() if self.fault == "resets" else None

    def receive(self, body: Path) -> bool:
        """Write the request's body to a file; False if it does not match the checksum in its signature."""
        signed, sums = self.headers.get("x-amz-content-sha256", ""), hashlib.sha256()
        left = int(self.headers.get("Content-Length") or 0)
        with body.open("wb", buffering=0) as file:
            while left:
                piece = self.rfile.read(min(left, PIECE_bytes))
                if not piece:
                    raise ConnectionAbortedError
                sums.update(piece)
                file.write(piece)
                left -= len(piece)
        return len(signed) != 64 or sums.hexdigest() == signed

    def head(self, code: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, code: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        if self.fault in ("lost", "resets"):
            return self.reset()
        self.head(code, len(content), headers or {})
        return None if self.command == "HEAD" else self.wfile.write(content) and None

    def answer_error(self, code: int, kind: str) -> None:
        self.answer(code, f"<Error><Code>{kind}</Code><Message>{kind}</Message></Error>".encode())

    def reset(self) -> None:
        """End the connection without an answer, as a network that fails does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        raise ConnectionAbortedError


def tag(status: os.stat_result) -> str:
    return f'"{status.st_mtime_ns:016x}{status.st_size:016x}"'


class ServerProcess:
    """A server in a process of its own, which can be killed and started again at the same port."""

    def __init__(self, folder: Path, **faults: float) -> None:
        self.folder, self.faults, self.port = folder, faults, 0
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, __file__, str(self.folder), "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--faults", json.dumps(self.faults)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def s3_server(folder: Path, bucket: str = "bucket", **faults: float) -> Iterator[ServerProcess]:
    """A server with one bucket, and faults of the given shares."""
    (folder / bucket).mkdir(parents=True, exist_ok=True)
    server = ServerProcess(folder, **faults)
    try:
        yield server
    finally:
        server.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--faults", type=json.loads, default={})
    args = parser.parse_args()
    server = Server(args.folder, args.port, args.faults)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
