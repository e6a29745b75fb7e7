"""Thousands of crafted checkpoints, through what the commands use."""

import os
import pickle
import zlib
from pathlib import Path
from random import Random

import pytest
import torch
from campaign import Campaign
from checkpoint.crafted import copy, head_of, plain, put, put_file, put_head, rounded_increment, sound
from mutations import mutate_bytes, mutate_tree
from safetensors import safe_open
from torch.distributed import checkpoint as dcp

from rowwise.checkpoint.check import check
from rowwise.checkpoint.dcp_source import METADATA, open_dcp
from rowwise.checkpoint.diff import diff
from rowwise.checkpoint.export import load_window
from rowwise.checkpoint.listing import list_tensors
from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.named import open_named, tables_of
from rowwise.checkpoint.read import Checkpoint
from rowwise.errors import CheckpointError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("sound")
    return {"three ranks": sound(place / "three"), "increment": rounded_increment(place / "two")}


def read_all(folder: Path, whole: Path) -> Checkpoint:
    """What verify, ls, diff, export and import do, with all that there is."""
    found = open_named(folder)
    list_tensors(found.manifest)
    bad = check(folder).damage
    if bad:
        raise CheckpointError(bad[0].why)
    diff(found, Checkpoint.open(whole))
    for name in tables_of(found.manifest).values():
        load_window(found, name.name, (0, name.entry.rows))
    return found


def check_right(found: Checkpoint) -> None:
    """Each piece has the numbers that another reader finds under its key."""
    for name, entry in found.manifest.tensors.items():
        for piece in entry.pieces:
            with safe_open(found.folder / piece.file, "pt") as file:
                there = file.get_tensor(piece.key)
            assert zlib.crc32(there.contiguous().view(-1).view(torch.uint8).numpy().data) == piece.crc32
            if len(entry.pieces) == 1 and entry.row_type is None:
                assert torch.equal(found.load(name).view(there.shape), there)


def mutate(folder: Path, random: Random) -> str:
    """One change that a stranger may make; says which."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    name = random.choice(files)
    kind = random.choice(("manifest", "manifest", "manifest", "head", "head", "bytes", "size", "swap", "kind", "text"))
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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("three ranks", 400), ("increment", 2000)])
def test_crafted_checkpoints(folders, tmp_path, kind, count):
    campaign, whole = Campaign(f"checkpoints, {kind}"), folders[kind]
    for seed in range(count):
        folder = copy(whole, tmp_path / "one")
        label = f"{seed}: {mutate(folder, Random(seed))}"
        campaign.take(label, lambda folder=folder: read_all(folder, whole), check_right)
    campaign.finish()


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in ("three ranks", "increment") for seed in range(8)])
def test_some_of_them(folders, tmp_path, kind, seed):
    campaign, folder = Campaign("a seed"), copy(folders[kind], tmp_path / "one")
    label = mutate(folder, Random(seed))
    campaign.take(label, lambda: read_all(folder, folders[kind]), check_right)
    assert not campaign.wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_crafted_metadata(tmp_path):
    campaign, folder = Campaign("metadata of torch.distributed.checkpoint"), tmp_path / "dcp"
    tensors = {"a": torch.arange(48.0).view(8, 6), "b": {"c": torch.arange(5)}, "n": torch.tensor(3), "words": ["x"]}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder))
    good = (folder / METADATA).read_bytes()
    data = next(folder.glob("*.distcp"))
    content = data.read_bytes()

    def read():
        source = open_dcp(folder)
        return {name: source.read(name, (0, one.shape[0] if one.shape else 1)) for name, one in source.tensors.items()}

    def right(found):
        assert all(x.numel() <= 48 for x in found.values())

    for seed in range(400):
        random = Random(seed)
        (folder / METADATA).write_bytes(mutate_bytes(good, random) if seed % 3 else good)
        data.write_bytes(content if seed % 3 else mutate_bytes(content, random))
        campaign.take(seed, read, right)
    campaign.finish()
    assert pickle.loads(good).state_dict_metadata.keys() == {"a", "b.c", "n", "words"}
