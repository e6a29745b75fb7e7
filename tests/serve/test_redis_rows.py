"""Rows in a real Redis or Valkey and a real cluster: they are right or missing, whatever becomes of the servers."""

import time
from contextlib import contextmanager

import numpy as np
import pytest
from launching import wait_for
from redis_server import one_server, three_servers

from rowwise import SpecError
from rowwise.serve.redis_rows import PARTS, NodeState, RedisCommand, RedisNodes, RedisRows, parse_addresses

pytestmark = pytest.mark.slow
BYTES = 36


def rows_of(keys_M, tags_M):
    words = keys_M[:, None].astype(np.uint64) * np.uint64(31) + tags_M[:, None] + np.arange(9, dtype=np.uint64)
    return words.astype(np.uint32).view(np.uint8)


@pytest.fixture(params=[("redis", "one"), ("redis", "three"), ("valkey", "one"), ("valkey", "three")], ids="-".join)
def nodes(request, tmp_path):
    """The nodes of a Redis or Valkey, which is one server or a cluster of three."""
    name, count = request.param
    if count == "one":
        with one_server(tmp_path, name) as server:
            yield [server]
    else:
        with three_servers(tmp_path, name) as servers:
            yield servers


def opened(nodes, name="model", timeout_s=10.0):
    """Rows by an address of some node; a machine that is busy answers within the timeout."""
    addresses = parse_addresses(nodes[-1].address)
    return RedisRows(*(RedisNodes(addresses, name, timeout_s) for _ in range(2)), BYTES)


def read(rows, keys_M, tags_M):
    """Which rows are found; those are right."""
    out = np.zeros((len(keys_M), BYTES), np.uint8)
    found_M = rows.read(keys_M, tags_M, out)
    np.testing.assert_array_equal(out[found_M], rows_of(keys_M, tags_M)[found_M])
    return found_M


@contextmanager
def filled(nodes, keys_M, tags_M, **options):
    rows = opened(nodes, **options)

    def is_filled():
        rows.write_later(keys_M, tags_M, rows_of(keys_M, tags_M))
        time.sleep(0.05)
        return read(rows, keys_M, tags_M).all()

    wait_for(is_filled)
    yield rows


def test_rows_are_found_by_their_keys_and_tags(nodes):
    keys_M = np.random.default_rng(0).permutation(50_000)[:3000]
    tags_M = np.where(keys_M % 3 == 0, 7, 1 << 63).astype(np.uint64)
    assert not read(opened(nodes), keys_M, tags_M).any()
    with filled(nodes, keys_M, tags_M) as rows:
        assert not read(rows, keys_M + 50_000, tags_M).any()
        other_M = np.where(keys_M % 3 == 0, 7, 5).astype(np.uint64)
        np.testing.assert_array_equal(read(rows, keys_M, other_M), keys_M % 3 == 0)
        assert not read(opened(nodes, "other"), keys_M, tags_M).any()
        assert sum(node.keys for node in nodes) == 3000
        assert all(node.keys for node in nodes)


def test_damaged_values_are_missing(nodes):
    keys_M, tags_M = np.arange(200), np.full(200, 9, np.uint64)
    with filled(nodes, keys_M, tags_M) as rows:
        draw, damaged = np.random.default_rng(1), 0
        for node in nodes:
            client, address = RedisNodes(parse_addresses(node.address), "m", 10.0), parse_addresses(node.address)[0]
            (names,) = client._exchange(address, [RedisCommand([b"KEYS", b"*"], 1 << 20, bool)])
            for name in names:
                (value,) = map(bytearray, client._exchange(address, [RedisCommand([b"GET", name], 1 << 20, bool)]))
                damaged += 1
                match damaged % 3:
                    case 0:
                        value[draw.integers(len(value))] ^= 1 << draw.integers(8)
                    case 1:
                        value = value[: draw.integers(len(value))]
                    case 2:
                        value += b"1"
                assert client._exchange(address, [RedisCommand([b"SET", name, bytes(value)], 1 << 20, bool)]) == [b"OK"]
        assert damaged == 200
        assert not read(rows, keys_M, tags_M).any()
        rows.write_later(keys_M, tags_M, rows_of(keys_M, tags_M))  # the nodes are asked, and answer
        wait_for(lambda: read(rows, keys_M, tags_M).all())


def test_servers_may_be_emptied_killed_and_started_again(nodes):
    keys_M, tags_M = np.arange(2000), np.full(2000, 3, np.uint64)
    with filled(nodes, keys_M, tags_M) as rows:
        for node in nodes:
            node.flush()
        assert not read(rows, keys_M, tags_M).any()
        rows.write_later(keys_M, tags_M, rows_of(keys_M, tags_M))
        wait_for(lambda: read(rows, keys_M, tags_M).all())
        nodes[0].kill()
        left = read(rows, keys_M, tags_M)
        assert not left.all()
        assert left.any() or len(nodes) == 1
        assert nodes[0].start()

        def again():
            rows.write_later(keys_M, tags_M, rows_of(keys_M, tags_M))
            time.sleep(0.1)
            return read(rows, keys_M, tags_M).all()

        wait_for(again)


def test_a_server_that_does_not_answer_costs_its_timeout_once(nodes):
    """And what it answers late is no answer to a later question."""
    keys_M, tags_M = np.arange(500), np.full(500, 3, np.uint64)
    with filled(nodes, keys_M, tags_M, timeout_s=0.05) as rows:
        nodes[0].stop()
        begin_s = time.monotonic()
        assert not read(rows, keys_M, tags_M).all()
        for _ in range(20):
            read(rows, keys_M, tags_M)
        assert time.monotonic() - begin_s < 2  # 21 timeouts would be more than one second each way
        nodes[0].go_on()
        other_M = keys_M[::-1].copy()
        wait_for(lambda: read(rows, other_M, tags_M).all())


def test_a_node_is_left_alone_for_longer_each_time():
    node, now_s, away = NodeState(), 100.0, []
    for _ in range(9):
        assert node.is_available(now_s)
        node.fail(now_s)
        away.append(node.retry_at_s - now_s)
        assert not node.is_available(now_s)
        now_s = node.retry_at_s
    assert away[:4] == [0.5, 1, 2, 4]
    assert away[-1] == 30
    node.answer()
    node.fail(now_s)
    assert node.retry_at_s == now_s + 0.5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:6379",
        "http://x:1",
        "redis://x:99999",
        "redis://u:p@x:1",
        "redis://x/1",
        "redis://x:0",
        "redis://[::1",
    ],
)
def test_addresses_that_are_none(text):
    with pytest.raises(SpecError, match="--redis"):
        parse_addresses(text)


def test_addresses():
    assert parse_addresses("redis://a:1, redis://b") == (("a", 1), ("b", 6379))
    assert len(RedisNodes(parse_addresses("redis://a"), "m").prefixes) == PARTS
