"""A `Reader` of a range of offsets of a Kafka topic: messages of JSON objects, a split is a range of one partition.

The range is fixed when a reader is opened, and a run has it in its recipe, so splits can be read again in any order, as
long as the broker keeps them. There is no consumer group, and offsets are never committed. The first messages tell the
types of the columns. Not read: topics with compaction or transactions, whose offsets have gaps.
"""

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import msgspec
import pyarrow as pa
from pyarrow import json as pajson
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.base.textfile import read_text
from rowwise.ingest.frames import SPLIT_ROWS
from rowwise.ingest.reader import Split, check_columns
from rowwise.ingest.union import flat_columns

NAME = re.compile(r"(?P<servers>[^@]+)/(?P<topic>[\w.-]+)(?:@(?P<ranges>\d+:\d+-\d*(?:,\d+:\d+-\d*)*))?")
HOW = "HOST:PORT/TOPIC, and @PARTITION:BEGIN-END,... for its offsets, such as localhost:9092/clicks@0:0-500,1:20-"
PROPERTIES = ".properties"  # ending of a file with settings of librdkafka
SAMPLE = 1000  # messages of each partition that tell the types
ANSWER_S, WAIT_S, POLL_S = 10.0, 30.0, 0.2  # of a request, of a fetch without messages, of a poll
KEEP = "a new run, if the broker has deleted them"
SETTINGS = {
    "group.id": "rowwise",
    "enable.auto.commit": False,
    "auto.offset.reset": "error",
    "fetch.wait.max.ms": 50,  # the end of a partition delays the first messages of another by this
    "queued.max.messages.kbytes": 16_384,  # fetched ahead of a split
    "log_level": 0,
}


class TopicRanges(msgspec.Struct, frozen=True):
    """Offsets of a topic by partition: from the first, up to and without the last."""

    servers: str
    topic: str
    ranges: dict[int, tuple[int, int]]

    @property
    def name(self) -> str:
        ranges = ",".join(f"{number}:{begin}-{end}" for number, (begin, end) in self.ranges.items())
        return f"{self.servers}/{self.topic}@{ranges}"


@final
class KafkaReader:
    """Reads the messages of a topic, see `HOW`; without offsets, all that are there now."""

    def __init__(self, name: str, split_rows: int = SPLIT_ROWS) -> None:
        """Fix the range of offsets, and infer the columns from the first messages."""
        self._split_rows = split_rows
        self._lock, self._consumer, self._next = threading.Lock(), None, None
        self._at = find_ranges(name)
        self._roots = self._infer()
        self._flat = flat_columns(self._roots)
        self._schema = pa.schema([(key, column.kind) for key, column in self._flat.items()])

    _consumer: Any
    _next: tuple[int, int] | None  # partition and offset that the consumer has come to

    @property
    def schema(self) -> pa.Schema:
        """The columns; fields of objects in objects are named a.b."""
        return self._schema

    def splits(self) -> tuple[Split, ...]:
        """The ranges of all partitions in turn."""
        step = self._split_rows
        parts = [
            (at, number, row, min(row + step, end))
            for number, (begin, end) in self._at.ranges.items()
            for at, row in enumerate(range(begin, end, step))
        ]
        return tuple(
            Split(source=self._source(number), start=begin, stop=end, first_row=begin, rows=end - begin)
            for _, number, begin, end in sorted(parts)
        )

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        check_columns(columns, self._schema, split.source)
        values = self._fetch(int(split.source.rpartition("/")[2]), split.start, split.stop)
        roots = dict.fromkeys(self._flat[name].root for name in columns)
        table = _parse(values, split.source, split.start, pa.schema([self._roots.field(root) for root in roots]))
        return pa.table({name: self._flat[name].take_from(table) for name in columns})

    def __getstate__(self) -> dict[str, object]:
        """Names and offsets; each process connects itself."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_consumer", "_next")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock, self._consumer, self._next = threading.Lock(), None, None

    def _source(self, number: int) -> str:
        return f"kafka:{self._at.servers}/{self._at.topic}/{number}"

    def _infer(self) -> pa.Schema:
        values = [
            value
            for number, (begin, end) in self._at.ranges.items()
            for value in self._fetch(number, begin, min(end, begin + SAMPLE))
        ]
        if not values:
            raise DataError(f"kafka:{self._at.name}: no message", "a range of offsets with messages")
        schema = _parse(values, f"kafka:{self._at.name}", None, None).schema
        return pa.schema([field for field in schema if not types.is_null(field.type)])

    def _fetch(self, number: int, begin: int, end: int) -> list[bytes]:
        """The messages of a partition, one for each offset."""
        values = list[bytes]()
        with self._lock:
            if self._next != (number, begin):  # else the consumer has them on their way
                kafka = _import()
                if self._consumer is None:
                    self._consumer = _connect(self._at.servers)
                self._consumer.assign([kafka.TopicPartition(self._at.topic, number, begin)])
            self._next = None
            limit_s = time.monotonic() + WAIT_S
            while begin + len(values) < end:
                messages = self._consumer.consume(end - begin - len(values), timeout=POLL_S)
                for message in messages:
                    offset = begin + len(values)
                    where = f"{self._source(number)}: offset {offset}"
                    if message.error() is not None:
                        raise DataError(f"{where} cannot be read: {message.error().str()}", hint=KEEP)
                    if message.offset() != offset or message.value() is None:
                        raise DataError(f"{where}: no message", "a topic without compaction and transactions")
                    values.append(message.value())
                if messages:
                    limit_s = time.monotonic() + WAIT_S
                elif time.monotonic() > limit_s:
                    raise DataError(
                        f"{self._source(number)}: no message from offset {begin + len(values)} on", hint=KEEP
                    )
            self._next = (number, end)
        return values


def has_fixed_end(name: str) -> bool:
    """Whether a name has the offsets of all its ends."""
    match = NAME.fullmatch(name)
    return match is not None and match["ranges"] is not None and not re.search("-(,|$)", match["ranges"])


def find_ranges(name: str) -> TopicRanges:
    """The topic and the offsets of a name; without offsets, or an end, those that are there now."""
    match = NAME.fullmatch(name)
    if match is None:
        raise DataError(f"kafka:{name}", HOW)
    kafka = _import()
    servers, topic = match["servers"], match["topic"]
    if servers.endswith(PROPERTIES):
        servers = str(Path(servers).absolute())
    consumer = _connect(servers)
    try:
        about = consumer.list_topics(topic, timeout=ANSWER_S).topics[topic]
        if about.error is not None:
            raise DataError(f"kafka:{servers}/{topic}: {about.error.str()}", "a topic that is there")
        kept = {
            number: consumer.get_watermark_offsets(kafka.TopicPartition(topic, number), timeout=ANSWER_S)
            for number in sorted(about.partitions)
        }
    except kafka.KafkaException as error:
        raise DataError(f"kafka:{servers}/{topic}: no answer: {error.args[0].str()}", "a broker that is up") from None
    finally:
        consumer.close()
    if match["ranges"] is None:
        return TopicRanges(servers, topic, kept)
    ranges = dict[int, tuple[int, int]]()
    for text in match["ranges"].split(","):
        number, begin, end = re.split("[:-]", text)
        low, high = kept.get(int(number), (0, -1))
        first, last = int(begin), int(end) if end else max(high, int(begin))
        if not low <= first <= last <= max(high, first):
            there = (
                f"its offsets are {low}-{high}"
                if int(number) in kept
                else f"partitions are {', '.join(map(str, kept))}"
            )
            raise DataError(f"kafka:{servers}/{topic}: no {text}, {there}", "offsets that are kept", hint=KEEP)
        ranges[int(number)] = first, last
    return TopicRanges(servers, topic, ranges)


def _connect(servers: str) -> Any:
    """A client with the settings of a file, a line `key=value` for each, or with plain connections to servers."""
    settings = {"bootstrap.servers": servers}
    if servers.endswith(PROPERTIES):
        lines = [line.strip() for line in read_text(servers).splitlines()]
        pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
        settings = {key.strip(): value.strip() for key, _, value in pairs}
    kafka = _import()
    try:
        return kafka.Consumer(SETTINGS | settings)
    except kafka.KafkaException as error:
        raise DataError(f"{servers}: {error.args[0].str()}", "settings of librdkafka") from None


def _import() -> Any:
    try:
        import confluent_kafka
    except ImportError:
        raise DataError("kafka: needs confluent-kafka", hint="pip install 'rowwise[kafka]'") from None
    return confluent_kafka


def _parse(values: Sequence[bytes], source: str, first: int | None, schema: pa.Schema | None) -> pa.Table:
    """A row for each message; fields that the schema lacks are ignored."""
    text = b"\n".join(values) + b"\n"
    parsing = pajson.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    reading = pajson.ReadOptions(use_threads=False, block_size=len(text) + 1)
    try:
        table = pajson.read_json(pa.BufferReader(text), reading, parsing)
        table.validate(full=True)  # text is not checked while it is parsed
    except pa.ArrowInvalid as error:
        _refuse_bad(values, source, first)
        kinds = "one type for each field" if schema is None else "the types of the first messages"
        where = "the first messages" if first is None else f"from offset {first}"
        raise DataError(f"{source}: {where}: {error}", kinds) from None
    if table.num_rows != len(values):
        _refuse_bad(values, source, first)
    return table


def _refuse_bad(values: Sequence[bytes], source: str, first: int | None) -> None:
    for at, value in enumerate(values):
        try:
            msgspec.json.decode(value, type=dict)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            where = f"offset {first + at}" if first is not None else f"message {at + 1} of the first ones"
            raise DataError(f"{source}: {where}: {error}", "a JSON object in each message") from None
