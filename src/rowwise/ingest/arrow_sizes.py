"""The decompressed size of the buffers of an Arrow IPC stream, computed before decompressing any.

Each compressed buffer begins with its decompressed size, which a reader allocates. The places of the buffers are in the
metadata of a message: a flatbuffer, of which four fields are read here. Arrow has validated it as a flatbuffer.
"""

import struct

import numpy as np
import pyarrow as pa

HEADER, BATCH, BUFFERS, COMPRESSION = 2, 1, 2, 3  # numbers of fields in their tables
LEGACY = b"ARROW:experimental_compression"  # compressed as before Arrow 1.0
PREFIX_bytes = 8  # decompressed size, in front of a compressed buffer
MAX_MESSAGES = 4096  # of a stream; each is read separately
MAX_METADATA_bytes = 1 << 20  # of a message; enough for a few thousand columns


def decompressed_bytes(stream: pa.Buffer) -> int:
    """The total declared size of all compressed buffers of a stream; 0 if none is compressed."""
    total = 0
    for number, message in enumerate(pa.ipc.MessageReader.open_stream(stream)):
        if number == MAX_MESSAGES:
            raise pa.ArrowInvalid(f"it has more than {MAX_MESSAGES} messages: expected fewer batches")
        if message.metadata.size > MAX_METADATA_bytes:
            problem = f"a message has {message.metadata.size:,} bytes of metadata"
            raise pa.ArrowInvalid(f"{problem}: expected at most {MAX_METADATA_bytes:,}; write fewer columns")
        if message.type in ("record batch", "dictionary"):
            try:
                total += _declared(message.metadata.to_pybytes(), message.body, dictionary=message.type == "dictionary")
            except (struct.error, ValueError) as error:
                raise pa.ArrowInvalid(f"buffers of an Arrow message are not where it says: {error}") from None
    return total


def _declared(metadata: bytes, body: pa.Buffer, *, dictionary: bool) -> int:
    if LEGACY in metadata:
        raise pa.ArrowInvalid("it is compressed as before Arrow 1.0: expected a newer writer")
    (root,) = struct.unpack_from("<I", metadata, 0)
    batch = _follow(metadata, root, HEADER)
    batch = _follow(metadata, batch, BATCH) if dictionary and batch is not None else batch
    if batch is None or _follow(metadata, batch, COMPRESSION) is None:
        return 0
    buffers = _follow(metadata, batch, BUFFERS)
    if buffers is None:
        return 0
    (count,) = struct.unpack_from("<I", metadata, buffers)
    places_N2 = np.frombuffer(metadata, "<i8", 2 * count, buffers + 4).reshape(-1, 2)
    sizes = (
        struct.unpack_from("<q", body, begin)[0] if begin >= 0 else 0
        for begin, length in places_N2.tolist()
        if length >= PREFIX_bytes
    )
    return sum(max(0, size) for size in sizes)  # -1: this buffer is not compressed


def _follow(metadata: bytes, table: int, field: int) -> int | None:
    """The offset that a field of a flatbuffer table refers to, or None if the field is absent."""
    (back,) = struct.unpack_from("<i", metadata, table)
    (size,) = struct.unpack_from("<H", metadata, table - back)
    if 4 + 2 * field >= size:
        return None
    (place,) = struct.unpack_from("<H", metadata, table - back + 4 + 2 * field)
    return table + place + struct.unpack_from("<I", metadata, table + place)[0] if place else None
