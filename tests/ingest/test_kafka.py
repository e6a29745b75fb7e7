"""Ranges of a topic as rows, and runs on them while the topic grows."""

import pickle
import re

import pytest
from kafka_broker import broker, create_topic, produce
from small import WORLD, check_resumed, same, saved, trained

from rowwise import DataError
from rowwise.ingest.datasets.files import open_named, pin
from rowwise.ingest.kafka import KafkaReader


def messages(first, count):
    return [
        {"user": n, "word": f"wört {n}", "price": n / 2 if n % 2 else n, "at": {"city": n % 3}, "seen": [n] * (n % 3)}
        for n in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def server():
    with broker() as address:
        yield address


@pytest.fixture
def topic(server, request):
    """A topic of 900 messages in two partitions; a third one is empty."""
    name = re.sub(r"\W+", ".", request.node.name)[:60]
    create_topic(server, name, 3)
    produce(server, name, messages(0, 500), 0)
    produce(server, name, messages(500, 400), 1)
    return f"kafka:{server}/{name}"


@pytest.mark.slow
def test_a_range_is_read_again_and_again(topic):
    assert pin(topic) == f"{topic}@0:0-500,1:0-400,2:0-0"
    reader = pickle.loads(pickle.dumps(KafkaReader(topic.removeprefix("kafka:"), split_rows=150)))
    assert reader.schema.names == ["user", "word", "price", "at.city", "seen"]
    splits = reader.splits()
    assert [(s.source[-1], s.start, s.stop) for s in splits[:3]] == [("0", 0, 150), ("1", 0, 150), ("0", 150, 300)]
    assert splits[3].locate_row(7) == f"{topic}/1: row 157"
    tables = [reader.read(split, reader.schema.names) for split in splits]
    rows = sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["user"])
    flat = [{"at.city" if name == "at" else name: value for name, value in row.items()} for row in messages(0, 900)]
    assert rows == [{**row, "at.city": row["at.city"]["city"]} for row in flat]
    back = [reader.read(split, ["at.city", "user"]) for split in reversed(splits)]
    assert all(a.select(["at.city", "user"]).equals(b) for a, b in zip(tables, reversed(back), strict=True))


@pytest.mark.slow
def test_ranges_are_fixed_or_end_now(topic, server):
    fixed = pin(topic)
    produce(server, topic.rpartition("/")[2], messages(900, 100), 1)
    assert pin(fixed) == fixed
    assert pin(f"{topic}@1:400-") == f"{topic}@1:400-500"
    assert pin(f"{topic}@0:20-30,1:0-1") == f"{topic}@0:20-30,1:0-1"
    reader = open_named(f"{topic}@1:400-,0:20-21")
    assert [reader.read(split, ["user"])["user"].to_pylist() for split in reader.splits()] == [
        [20],
        list(range(900, 1000)),
    ]


@pytest.mark.slow
def test_a_resumed_run_reads_the_range_of_its_start(tmp_path, server):
    create_topic(server, "clicks", 2)
    rows = WORLD.rows(0, 2000).drop_columns(["logit"]).to_pylist()
    for partition in range(2):
        produce(server, "clicks", rows[partition::2], partition)
    data = {"dataset": f"kafka:{server}/clicks"}

    def grow():
        produce(server, "clicks", rows[:700], 0)

    check_resumed(tmp_path, 5, {"epochs": 2}, before_resuming=grow, data=data)
    first = tmp_path / "runs/small/1"
    fixed = f"kafka:{server}/clicks@0:0-1000,1:0-1000"
    assert f"dataset: {fixed}\n" in (first / "recipe.yaml").read_text()
    more, _ = trained(tmp_path, train={"epochs": 2}, data=data)
    assert not same(saved(more.folder.path), saved(first))
    workers, _ = trained(tmp_path, train={"epochs": 2}, data={"dataset": fixed, "workers": 1})
    assert same(saved(workers.folder.path), saved(first))


@pytest.mark.slow
def test_messages_that_are_refused(server):
    name = f"kafka:{server}/bad"
    create_topic(server, "bad", 1)
    bad = [{"a": 1}] * 1500 + [{"a": "x"}, b"\xff", None, b"1", b'{"a": 1}{"a": 2}']
    produce(server, "bad", bad, 0)
    for offset, message in enumerate(
        (
            "column .a|/a",
            "offset 1501: .*",
            "offset 1502: no message: expected a topic without",
            "1503: Expected `obj",
            "1504: JSON is",
        ),
        1500,
    ):
        reader = open_named(f"{name}@0:0-{offset + 1}")
        (split,) = reader.splits()
        with pytest.raises(DataError, match=message) as met:
            reader.read(type(split)(source=split.source, start=offset, stop=offset + 1), ["a"])
        assert str(met.value).startswith(f"{name}/0: ")
        assert reader.read(type(split)(source=split.source, start=3, stop=9), ["a"]).num_rows == 6
    with pytest.raises(DataError, match=r"message 1 of the first ones: .*: expected a JSON object in each message"):
        open_named(f"{name}@0:1501-1502")
    with pytest.raises(DataError, match=r": the first messages: JSON parse error: .*: expected one type"):
        open_named(f"{name}@0:1499-1501")
    create_topic(server, "latin", 1)
    produce(server, "latin", [b'{"a": "b"}', b'{"a": "\xe9"}'], 0)
    with pytest.raises(DataError, match=r"message 2 of the first ones: Invalid UTF-8 encoded string: expected a JSON"):
        open_named(f"kafka:{server}/latin@0:0-2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TOPIC@0:5-99999", "no 0:5-99999, its offsets are 0-500: expected offsets that are kept; a new run, if"),
        ("TOPIC@7:0-1", "no 7:0-1, partitions are 0, 1, 2"),
        ("TOPIC@0:9-5", "no 0:9-5, its offsets"),
        ("TOPIC@2:0-", "no message: expected a range of offsets with messages"),
        ("TOPIC.not", "expected a topic that is there"),
        ("kafka:127.0.0.1:1/clicks", "no answer: .*: expected a broker that is up"),
    ],
)
def test_names_that_are_refused(topic, name, message):
    with pytest.raises(DataError, match=message):
        open_named(name.replace("TOPIC", topic))


@pytest.mark.parametrize("name", ["clicks", "localhost:9092/", "localhost:9092/clicks@3", "localhost/clicks@0:1-2-3"])
def test_names_that_are_none(name):
    with pytest.raises(DataError, match=f"kafka:{name}: expected HOST:PORT/TOPIC"):
        pin(f"kafka:{name}")


@pytest.mark.slow
def test_settings_of_a_file(topic, tmp_path):
    server, _, name = topic.removeprefix("kafka:").rpartition("/")
    file = tmp_path / "prod.properties"
    file.write_text(f"# of librdkafka\nbootstrap.servers = {server}\nsecurity.protocol=plaintext\n\n")
    assert pin(f"kafka:{file}/{name}") == f"kafka:{file}/{name}@0:0-500,1:0-400,2:0-0"
    file.write_text(f"bootstrap.servers={server}\nsecurity.protocoll=ssl\n")
    with pytest.raises(DataError, match=r"prod.properties: .*protocoll"):
        pin(f"kafka:{file}/{name}")
