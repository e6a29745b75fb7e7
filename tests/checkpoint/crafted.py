"""Checkpoints as a stranger would craft them: whole by every checksum, and not what they say."""

import json
import shutil
import zlib
from pathlib import Path

import torch
from checkpoint.made import saved

from rowwise.checkpoint.delta import increment, rounded
from rowwise.checkpoint.manifest import BLANK, NAME
from rowwise.checkpoint.parts import Part
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.spec import RowType


def sound(folder: Path) -> Path:
    """Tables of four row types by three ranks, as files are that nobody has touched."""
    return saved(folder).folder


def rounded_increment(folder: Path) -> Path:
    """A table in 4 bits, and rows of it that changed since."""
    weights = torch.arange(320.0).view(20, 16)
    table = Part(name="model/e.t", tensor=weights, shape=(20, 16), rows=(0, 20), row_type=RowType.FP32)
    base = folder.with_name("base")
    write(base, rounded([table], 4), {"step": 1})
    touched = torch.zeros(20, dtype=torch.uint8)
    touched[[3, 7, 8]] = 1
    parts = increment([Part(**{**fields(table), "touched": touched})])
    write(folder, parts, {"step": 2}, base=Checkpoint.open(base))
    return folder


def fields(part: Part) -> dict:
    return {name: getattr(part, name) for name in part.__dataclass_fields__}


def plain(folder: Path) -> dict:
    """The manifest, without its checksum."""
    found = json.loads((folder / NAME).read_bytes())
    del found["crc32"]
    return found


def put(folder: Path, manifest: object) -> None:
    """Write a manifest that matches its checksum."""
    words = {"crc32": "00000000", **manifest} if isinstance(manifest, dict) else manifest
    body = json.dumps(words).encode()
    crc32 = BLANK.replace(b"00000000", f"{zlib.crc32(body):08x}".encode())
    (folder / NAME).write_bytes(body.replace(BLANK, crc32, 1))


def head_of(file: Path) -> tuple[dict, bytes]:
    """What stands before the tensors of a file, and what comes after it."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def put_head(folder: Path, name: str, head: object, rest: bytes) -> None:
    """Write a file with another head, of which the manifest knows size and checksum."""
    text = (head if isinstance(head, str) else json.dumps(head)).encode()
    put_file(folder, name, len(text).to_bytes(8, "little") + text + rest, 8 + len(text))


def put_file(folder: Path, name: str, content: bytes, head_bytes: int) -> None:
    """Write a file whatever it holds; the manifest believes it."""
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    manifest = plain(folder)
    manifest["files"][name] = {"size_bytes": len(content), "head_crc32": zlib.crc32(content[:head_bytes])}
    put(folder, manifest)


def copy(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return to
