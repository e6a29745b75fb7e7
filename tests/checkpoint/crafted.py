"""Checkpoints as a stranger would craft them: whole by every checksum, and not what they say."""

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from checkpoint.made import saved
from mutations import mutate_bytes, mutate_tree
from safetensors import safe_open

from rowwise.checkpoint.delta import changed_rows, round_shards
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import BLANK, NAME
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.tables.spec import RowType


def sound(folder: Path) -> Path:
    """Tables of four row types by three ranks, as files are that nobody has touched."""
    return saved(folder).folder


def rounded_increment(folder: Path) -> Path:
    """A table in 4 bits, and rows of it that changed since."""
    weights = torch.arange(320.0).view(20, 16)
    table = LocalShard(name="model/e.t", tensor=weights, shape=(20, 16), rows=(0, 20), row_type=RowType.FP32)
    base = folder.with_name("base")
    write(base, round_shards([table], 4), {"step": 1})
    touched = torch.zeros(20, dtype=torch.uint8)
    touched[[3, 7, 8]] = 1
    parts = changed_rows([dataclasses.replace(table, touched=touched)])
    write(folder, parts, {"step": 2}, base=Checkpoint.open(base))
    return folder


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


def check_right(found: Checkpoint) -> None:
    """Each piece has the numbers that another reader finds under its key."""
    for name, entry in found.manifest.tensors.items():
        for piece in entry.chunks:
            with safe_open(found.folder / piece.file, "pt") as file:
                there = file.get_tensor(piece.key)
            assert zlib.crc32(there.contiguous().view(-1).view(torch.uint8).numpy().data) == piece.crc32
            if len(entry.chunks) == 1 and entry.row_type is None:
                assert torch.equal(found.load(name).view(there.shape), there)


KINDS = ("manifest", "manifest", "manifest", "head", "head", "bytes", "size", "swap", "kind", "text")


def mutate(folder: Path, random: Random, kinds: Sequence[str] = KINDS) -> str:
    """One change that a stranger may make; says which."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    name = random.choice(files)
    kind = random.choice(kinds)
    match kind:
        case "manifest":
            put(folder, mutate_tree(plain(folder), random, changes=random.choice((1, 1, 2, 3))))
        case "head":
            head, rest = head_of(folder / name)
            put_head(folder, name, mutate_tree(head, random, changes=random.choice((1, 1, 2))), rest)
        case "bytes":
            content = mutate_bytes((folder / name).read_bytes(), random)
            size = 8 + int.from_bytes(content[:8], "little")
            put_file(folder, name, content, min(size, len(content)))
        case "size":
            size = random.choice((0, 1, 7, 8, 9, 100, 1 << 20, 1 << 40))
            replace(folder / name, b"")
            os.truncate(folder / name, size)  # a file of holes takes no space
            manifest = plain(folder)
            manifest["files"][name]["size_bytes"] = size
            put(folder, manifest)
        case "swap":
            other = random.choice(files)
            (folder / name).rename(folder / "was")
            if other != name:
                (folder / other).rename(folder / name)
            (folder / "was").rename(folder / other)
        case "kind":
            target = folder / random.choice((name, NAME))
            target.unlink()
            make = random.choice((os.mkfifo, os.mkdir, lambda at: os.symlink("/etc/hostname", at),
                                  lambda at: os.symlink("/dev/zero", at), lambda at: None))  # fmt: skip
            make(target)
        case "text":
            content = mutate_bytes((folder / NAME).read_bytes(), random)
            replace(folder / NAME, content)
    return f"{kind} {name}"


def replace(path: Path, content: bytes) -> None:
    path.unlink()  # of an increment it may be linked
    path.write_bytes(content)
