"""Versions of models as a stranger may make them: a true one, with one file changed at one place.

`changes_of` lists changes of each file by name, and draws others with a `random.Random`. Checksums that a stranger can
make anew are made anew.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from checkpoint.crafted import put
from mutations import mutate_bytes, mutate_tree
from pyarrow import parquet as pq


class Change(NamedTuple):
    name: str
    craft: Callable[[Path], object]  # of the folder of a version


def changes_of(version: Path, random: Random, draws: int) -> Iterator[Change]:
    """Every kind of change of each file, and so many drawn ones of each."""
    for file in sorted(path for path in version.rglob("*") if path.is_file()):
        name = file.relative_to(version).as_posix()
        yield from _of_any(name)
        for number in range(draws):
            yield Change(f"{name}: bytes {number}", _bytes(name, random.getrandbits(32)))
        if file.suffix == ".json":
            yield from _of_json(name, json.loads(file.read_bytes()), random, draws)
        if file.suffix in (".arrow", ".parquet"):
            yield from _of_table(name, read_table(file))


def _of_any(name: str) -> Iterator[Change]:
    crafts: dict[str, Callable[[Path], object]] = {
        "missing": lambda path: path.unlink(),
        "empty": lambda path: path.write_bytes(b""),
        "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
        "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
        "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 64),
        "a folder": lambda path: (path.unlink(), path.mkdir()),
        "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
        "a link": lambda path: (
            path.rename(path.parent.parent / "aside"),
            path.symlink_to(path.parent.parent / "aside"),
        ),
        "large": lambda path: os.truncate(path, 3 << 30),
    }
    for how, craft in crafts.items():
        yield Change(f"{name}: {how}", lambda version, craft=craft: craft(version / name))


def _bytes(name: str, seed: int) -> Callable[[Path], object]:
    return lambda at: write(at, name, mutate_bytes((at / name).read_bytes(), Random(seed)))


def _of_json(name: str, good: Any, random: Random, draws: int) -> Iterator[Change]:
    for place, value in _leaves(good, ()):
        for wrong in (None, [], {}, "zz", -1, 1 << 62, 1e300, True, "__removed"):
            if wrong != value:
                label = f"{name}: {'.'.join(map(str, place))} = {wrong!r}"
                yield Change(label, lambda at, p=place, w=wrong: write_json(at, name, replaced(good, p, w)))
    for number in range(4 * draws):
        made = mutate_tree(good, random, changes=random.choice((1, 1, 2, 4)))
        yield Change(f"{name}: drawn {number}", lambda at, made=made: write_json(at, name, made))
    for text in ("[" * 50_000, '{"format": 1, "format": 1}', "null", "[]", "9" * 5000, "\ufeff{}"):
        yield Change(f"{name}: {text[:20]}", lambda at, text=text: write(at, name, text.encode()))


def _leaves(data: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (*place, key), value
        yield from _leaves(value, (*place, key))


def replaced(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    made = json.loads(json.dumps(data))
    inside = made
    for key in place[:-1]:
        inside = inside[key]
    if value == "__removed":
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    return made


def _of_table(name: str, good: pa.Table) -> Iterator[Change]:
    for label, made in _tables(good):
        yield Change(f"{name}: {label}", lambda at, made=made: write_table(at, name, made))


def _tables(good: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    rows = len(good)
    yield "no rows", good.slice(0, 0)
    yield "one row", good.slice(0, 1)
    yield "rows twice", pa.concat_tables([good, good])
    yield "many rows", good.take(np.zeros(70_000, np.int64)) if rows else good
    yield "no columns", good.select([])
    yield "a stray column", good.append_column("stray", [pa.array([1] * rows)])
    yield "a stray logit", good.append_column("logit:stray", [pa.array([0.5] * rows, pa.float32())])
    yield "a name of bytes", good.rename_columns(["\x1b[2J", *good.column_names[1:]])
    yield "backwards", good.select(good.column_names[::-1])
    for at, column in enumerate(good.column_names):
        kind = good.schema.field(column).type

        def as_column(made: pa.Array, at: int = at, column: str = column) -> pa.Table:
            return good.set_column(at, column, [made])

        yield f"no {column}", good.drop_columns([column])
        yield f"{column} twice", good.append_column(column, good[column])
        yield f"{column} is null", as_column(pa.nulls(rows, kind))
        yield f"{column} of no type", as_column(pa.nulls(rows))
        yield f"{column} is text", as_column(pa.array([f"{k}" for k in range(rows)]))
        yield f"{column} is lists of text", as_column(pa.array([["x", None]] * rows))
        yield f"{column} is a struct", as_column(pa.array([{"x": 1}] * rows))
        yield f"{column} is bytes", as_column(pa.array([b"\xff"] * rows))
        yield f"{column} is a dictionary", as_column(pa.array(["x"] * rows).dictionary_encode())
        yield f"{column} is NaN", as_column(pa.array([np.nan] * rows, pa.float32()))
        yield f"{column} is infinite", as_column(pa.array([np.inf] * rows, pa.float64()))
        yield f"{column} is negative", as_column(pa.array([-1] * rows, pa.int64()))
        yield f"{column} is huge", as_column(pa.array([(1 << 63) - 1] * rows, pa.int64()))
        yield f"{column} is uint64", as_column(pa.array([(1 << 64) - 1] * rows, pa.uint64()))
        yield f"{column} is a time", as_column(pa.array([0] * rows, pa.timestamp("us", "UTC")))
        yield f"{column} is lists", as_column(pa.array([[1, 2]] * rows, pa.list_(pa.int64())))
        yield f"{column} is views", as_column(pa.array(["x" * 20] * rows, pa.string_view()))
        if rows:
            yield f"{column} has a null", as_column(pa.array([None, *good[column].to_pylist()[1:]], kind))


def read_table(path: Path) -> pa.Table:
    return pq.ParquetFile(path).read() if path.suffix == ".parquet" else pa.ipc.open_file(path.read_bytes()).read_all()


def write_table(version: Path, name: str, table: pa.Table, **how: Any) -> None:
    sink = pa.BufferOutputStream()
    if name.endswith(".parquet"):
        pq.write_table(table, sink, **how)
    else:
        with pa.ipc.new_file(sink, table.schema, **how) as writer:
            writer.write_table(table)
    write(version, name, sink.getvalue().to_pybytes())


def write_json(version: Path, name: str, data: Any) -> None:
    """With a checksum that is right, in a manifest."""
    if name == "manifest.json" and isinstance(data, dict) and "crc32" in data:
        put(version, {key: value for key, value in data.items() if key != "crc32"})
    else:
        write(version, name, json.dumps(data).encode())


def write(version: Path, name: str, content: bytes) -> None:
    (version / name).write_bytes(content)
    facts = version / "retrieval" / "retrieval.json"
    if name.startswith("retrieval/") and facts.is_file() and (version / name) != facts:
        said = json.loads(facts.read_bytes())
        said["sha256"][Path(name).name] = hashlib.sha256(content).hexdigest()
        facts.write_bytes(json.dumps(said).encode())


def copy_of(version: Path, at: Path) -> Path:
    """A folder of versions with a copy of one, in place of what is there."""
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(version, at / "versions" / version.name)
    (at / "current.json").write_text(json.dumps({"current": int(version.name)}))
    return at / "versions" / version.name
