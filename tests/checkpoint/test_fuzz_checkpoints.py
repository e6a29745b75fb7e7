"""Thousands of crafted checkpoints, through what the commands use."""

import pickle
from pathlib import Path
from random import Random

import pytest
import torch
from campaign import Campaign
from checkpoint.crafted import check_right, copy, mutate, rounded_increment, sound
from mutations import mutate_bytes

from rowwise.base.errors import CheckpointError
from rowwise.checkpoint.check import check
from rowwise.checkpoint.dcp_source import METADATA, open_dcp
from rowwise.checkpoint.diff import diff
from rowwise.checkpoint.export import load_window
from rowwise.checkpoint.listing import list_tensors
from rowwise.checkpoint.named import open_named, tables_of
from rowwise.checkpoint.read import Checkpoint


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
def test_crafted_metadata(tmp_path, dcp):
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
