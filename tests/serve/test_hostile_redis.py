"""A Redis that answers too slowly, too much or nonsense is one that does not answer: rows are missing, never wrong."""

import time
from contextlib import ExitStack

import numpy as np
import pytest
from hostile import hostile, redis_that, until_gone

from rowwise.serve.redis_rows import MAX_TIMEOUTS, PARTS, RedisAddress, RedisNodes, RedisRows, key_slot

BYTES, KEYS = 36, np.arange(40)
TAGS = np.full(40, 3, np.uint64)
PATIENT_s = 20.0  # what is refused so is not refused for its time
MAX_bytes = 20 << 20  # that the kernel takes from a server whose client reads nothing


def opened(server, timeout_s=PATIENT_s):
    return RedisRows(*(RedisNodes([RedisAddress("127.0.0.1", server.port)], "m", timeout_s) for _ in range(2)), BYTES)


def found(rows):
    return int(rows.read(KEYS, TAGS, np.zeros((len(KEYS), BYTES), np.uint8)).sum())


def array(words, item):
    return b"*%d\r\n" % (len(words) - 1) + item * (len(words) - 1)


def drip(words, send):
    for byte in array(words, b"$-1\r\n"):
        send(bytes([byte]))
        time.sleep(0.001)


ATTACKS = {
    "many items": lambda words, send: send(b"*2147483648\r\n"),
    "many items that come": lambda words, send: (
        send(b"*2147483648\r\n"),
        [send(b"$-1\r\n" * 9999) for _ in range(999)],
    ),
    "a large item": lambda words, send: (send(b"*1\r\n$8589934592\r\n"), until_gone(send)),
    "a large value": lambda words, send: (send(b"$536870912\r\n"), until_gone(send)),
    "a line without end": lambda words, send: (send(b"+"), until_gone(send)),
    "a long number": lambda words, send: send(b":" + b"9" * 9999 + b"\r\n"),
    "lists in lists": lambda words, send: send(b"*1\r\n" * 100_000),
    "items less than none": lambda words, send: send(b"*-2\r\n"),
    "bytes less than none": lambda words, send: send(b"*1\r\n$-2\r\n"),
    "no protocol": lambda words, send: send(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "a number": lambda words, send: send(b":1\r\n"),
    "a text": lambda words, send: send(b"+OK\r\n"),
    "nothing": lambda words, send: send(b"$-1\r\n"),
    "numbers": lambda words, send: send(array(words, b":7\r\n")),
    "lists": lambda words, send: send(array(words, b"*1\r\n$1\r\nx\r\n")),
    "errors": lambda words, send: send(array(words, b"-ERR\r\n")),
    "an item too few": lambda words, send: send(array(words[1:], b"$-1\r\n")),
    "an item too many": lambda words, send: send(array([*words, b""], b"$-1\r\n")),
    "an end": lambda words, send: end(send),
}


def end(send):
    send(b"*4\r\n$52\r\nabc")
    raise OSError("this side ends")


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_answer_that_was_not_asked_for_is_none(attack, capsys):
    """The connection is closed at once, with few bytes taken, and the node left alone."""
    asked = []
    with hostile(redis_that(lambda words, send: (asked.append(words[0]), attack(words, send)))) as server:
        rows = opened(server)
        assert found(rows) == 0
        server.wait()  # the other side has closed it
        assert found(rows) == 0
        assert server.connections == 1
        assert max(server.sent_bytes.values()) < MAX_bytes
        assert asked.count(b"MGET") <= PARTS
    assert "does not answer" in capsys.readouterr().err


def test_a_question_has_one_deadline_however_its_answer_drips(capsys):
    """The whole answer would be right."""
    with hostile(redis_that(drip)) as server:
        asked = opened(server, timeout_s=0.02)
        asked.read(KEYS[:8], TAGS[:8], np.zeros((8, BYTES), np.uint8))
        server.wait()
        assert max(server.sent_bytes.values()) < 8 * 9
    assert "does not answer" in capsys.readouterr().err


def slots_of(*nodes):
    """The answer to CLUSTER SLOTS in which nodes have the slots by turns."""
    share = -(-(1 << 14) // len(nodes))
    one = [
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n"
        % (k * share, min((k + 1) * share, 1 << 14) - 1, len(host), host, port)
        for k, (host, port) in enumerate(nodes)
    ]
    return b"*%d\r\n%b" % (len(one), b"".join(one))


def test_other_nodes_of_a_cluster_go_on():
    asked = []

    def good(words, send):
        asked.append(words[0])
        send(array(words, b"$-1\r\n"))

    with hostile(redis_that(good)) as other:

        def serve(send, reader):
            redis_that(ATTACKS["a number"], slots_of((b"127.0.0.1", bad.port), (b"127.0.0.1", other.port)))(
                send, reader
            )

        with hostile(serve) as bad:
            rows = opened(bad)
            for _ in range(2):
                assert found(rows) == 0
            bad.wait()
            assert other.connections == 1
            assert set(asked) == {b"MGET"}
            assert len(asked) > PARTS // 3


@pytest.mark.parametrize(
    "slots",
    [
        b":1\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n*2\r\n:0\r\n:1\r\n",
        slots_of((b"127.0.0.1", 0)),
        slots_of((b"127.0.0.1", 1 << 16)),
        slots_of((b"a\0b", 6379)),
        slots_of((b"\xff", 6379)),
        slots_of((b"a" * 300, 6379)),
        slots_of((b"a" * 100, 6379)),  # a name that no resolver takes
        b"*99999999\r\n",
    ],
)
def test_a_cluster_of_odd_nodes_has_none(slots, capsys):
    with hostile(redis_that(lambda words, send: send(b":1\r\n"), slots)) as server:
        assert found(opened(server)) == 0
    assert "does not answer" in capsys.readouterr().err


def test_slow_nodes_do_not_add_up():
    """A cluster whose nodes all say nothing costs a few timeouts, not one each."""
    with ExitStack() as stack:
        silent = [stack.enter_context(hostile(lambda send, reader: reader.read())) for _ in range(12)]
        slots = slots_of(*((b"127.0.0.1", one.port) for one in silent))
        seed = stack.enter_context(hostile(redis_that(lambda words, send: None, slots)))
        assert found(opened(seed, timeout_s=0.01)) == 0
        assert sum(one.connections for one in silent) <= MAX_TIMEOUTS + 1


def test_slots_of_keys():
    assert key_slot(b"{foo}") == 12182  # of the specification of clusters
    assert key_slot(b"{123456789}") == 12739
