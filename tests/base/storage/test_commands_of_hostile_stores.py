"""Commands on stores that answer without end or by a redirect end in one line, within the time of their limits."""

import itertools

import pytest
from hostile import hostile, http_answer, http_that, list_page, until_gone
from launching import rowwise, write_recipe

from rowwise.base.storage.limits import VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.dist]
COMMANDS = {
    "watch": ("watch", "s3://bucket/run", "--once"),
    "resume": ("resume", "s3://bucket/run"),
    "ckpt copy": ("ckpt", "copy", "s3://bucket/run/ckpt/step-1", "here"),
    "ckpt ls": ("ckpt", "ls", "s3://bucket/run"),
    "mirror": ("train", "small.yaml", "--set", "save.mirror=s3://bucket/run"),
    "serve": ("serve", "s3://bucket/versions"),
}


def redirects(line, headers, send):
    send(http_answer(status=b"307 Go", Location="http://127.0.0.1:9/x"))


def is_endless(line, headers, send):
    send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n" % (1 << 40))
    if not line.startswith("HEAD"):
        until_gone(send)


def lists_without_end():
    number = itertools.count()

    def answers(line, headers, send):
        if "list-type=" in line:
            k = next(number)
            send(list_page([f"run/{k:06}-{one:03}" for one in range(100)], f"t{k}"))
        elif line.startswith(("PUT", "DELETE")):
            send(http_answer(ETag='"1"'))
        else:
            send(http_answer(b"" if line.startswith("HEAD") else b"{}", b"404 Not Found"))

    return answers


@pytest.mark.parametrize(
    ("command", "answers"),
    [
        ("watch", lists_without_end),
        ("resume", lambda: is_endless),
        ("ckpt copy", lambda: redirects),
        ("ckpt ls", lists_without_end),
        ("mirror", lambda: is_endless),
        ("serve", lambda: redirects),
    ],
    ids=COMMANDS,
)
def test_a_command_ends_in_one_line(command, answers, tmp_path):
    write_recipe(tmp_path, rows=800)
    with hostile(http_that(answers())) as server:
        done = rowwise(
            tmp_path,
            *COMMANDS[command],
            timeout=60,
            environment={
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
                "AWS_ACCESS_KEY_ID": "key-1",
                "AWS_SECRET_ACCESS_KEY": "secret-2",
                "AWS_SESSION_TOKEN": "token-3",
                "AWS_REGION": "x",
                VARIABLE: "names=1000,list_s=10",
            },
        )
    assert done.returncode, done.stdout
    assert "Traceback" not in done.stderr
    assert "s3://bucket" in done.stderr
    assert not any(secret in done.stderr + done.stdout for secret in ("key-1", "secret-2", "token-3"))
    assert max(server.sent_bytes.values(), default=0) < 32 << 20
