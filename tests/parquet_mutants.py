"""Mutants of a small Parquet file, read as training reads them; runs as a process of its own, which may crash.

Called with a folder, the name of a kind of file, and the first and the last seed; prints a line before each mutant and
one after it, so that whoever started it knows which one ended the process.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from mutations import mutate_bytes

from rowwise.base.errors import RowwiseError, one_line
from rowwise.ingest.parquet import ParquetReader

KINDS: dict[str, dict[str, Any]] = {
    "checksums": {"write_page_checksum": True, "compression": "none"},
    "checksums, packed": {"write_page_checksum": True, "compression": "zstd", "data_page_version": "2.0"},
    "no checksums": {"compression": "none"},
    "no checksums, packed": {"compression": "snappy"},
}


def rows() -> pa.Table:
    """A column of each kind that training takes."""
    count = range(60)
    return pa.table(
        {
            "label": pa.array([k % 2 for k in count], pa.int8()),
            "user": pa.array([k * 7919 for k in count], pa.int64()),
            "name": pa.array([None if k % 9 == 0 else f"u{k % 5}" for k in count]),
            "seen": pa.array([list(range(k % 4)) for k in count], pa.list_(pa.int32())),
            "price": pa.array([k / 4 for k in count], pa.float32()),
        }
    )


def whole(kind: str, at: Path) -> bytes:
    """The file that mutants are made of."""
    pq.write_table(rows(), at, row_group_size=25, **KINDS[kind])
    return at.read_bytes()


def mutant(good: bytes, seed: int) -> bytes:
    """One in three has its change in the footer, whose bytes are few and matter most."""
    random = Random(seed)
    body = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    if seed % 3:
        return mutate_bytes(good, random)
    made = bytearray(good)
    for _ in range(random.choice((1, 1, 2, 5))):
        made[random.randrange(body, len(made))] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
    return bytes(made)


def read(path: Path) -> pa.Table:
    """All rows of all columns that are left."""
    reader = ParquetReader(path, verify=True, threads=False)
    names = reader.schema.names
    return pa.concat_tables([reader.read(split, names) for split in reader.splits()] or [reader.schema.empty_table()])


def fault(found: pa.Table, kind: str) -> str:
    """Why what was read is not right; what pages without checksums hold may be anything, if it is sound."""
    if kind.startswith("no"):
        texts = [k for k, field in enumerate(found.schema) if pa.types.is_string(field.type)]
        for k in texts:  # are bytes, which nobody has said are UTF-8
            found = found.set_column(k, found.schema.field(k).name, found.column(k).cast(pa.binary()))
        found.validate(full=True)
        return ""
    found.validate(full=True)
    for name in rows().column_names:
        if name in found.column_names and found[name].type == rows()[name].type and found[name] != rows()[name]:
            return f"other values of {name}"
    return ""


def outcomes(at: Path, kind: str, seeds: range) -> Iterator[tuple[int, str]]:
    """How each ended, after a line that says which it is."""
    good = whole(kind, at / "good.parquet")
    for seed in seeds:
        yield seed, "begun"
        (at / "rows.parquet").write_bytes(mutant(good, seed))
        try:
            why = fault(read(at / "rows.parquet"), kind)
            yield seed, why or "accepted and right"
        except (RowwiseError, OSError) as error:
            line = one_line(error) or ""
            yield seed, "refused in one line" if line.isprintable() and line else f"not one line: {error!r}"
        except Exception as error:
            yield seed, f"{type(error).__name__}: {str(error)[:200]!r}"


if __name__ == "__main__":
    for number, how in outcomes(Path(sys.argv[1]), sys.argv[2], range(int(sys.argv[3]), int(sys.argv[4]))):
        print(number, how, flush=True)
