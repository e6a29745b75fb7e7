"""Whatever byte of a checkpoint is changed, it is found, and what it spoils is named."""

import json
import re
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutations import flip

from rowwise import CheckpointError, RowType
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import FileSizes, write
from rowwise.parallel.comm.thread import run_threads
from rowwise.tables.ops.rowtype import pack

DIM = 32


def parts_of(comm):
    """A table whose columns are on two ranks, and one that is the same everywhere."""
    weights = torch.randn(40, DIM, generator=torch.Generator().manual_seed(0))
    codes = pack(weights[:, comm.rank * 16 : comm.rank * 16 + 16], RowType.INT8, 16)
    cols = comm.rank * 16, comm.rank * 16 + 16
    table = LocalShard(
        name="model/codes", tensor=codes, shape=(40, DIM), rows=(0, 40), cols=cols, row_type=RowType.INT8,
        column_group=16,
    )  # fmt: skip
    return [table, LocalShard.whole("model/layer", weights[:7].clone()), LocalShard.whole("n", torch.tensor(3))]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "one"
    sizes = FileSizes(24 * 10, 400, 1)
    run_threads(2, lambda comm: write(folder, parts_of(comm), {"step": 7}, comm, sizes=sizes))
    return folder


@given(st.data())
def test_a_changed_byte_is_found_wherever_it_is(tmp_path_factory, sound, data):
    folder = tmp_path_factory.mktemp("changed") / "one"
    shutil.copytree(sound, folder)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 40))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    if path.name == NAME:
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            Checkpoint.open(folder)
        return
    found = Checkpoint.open(folder).find_damage()
    manifest = json.loads((folder / NAME).read_text())
    there = {name: [p for p in e["pieces"] if p["file"] == path.name] for name, e in manifest["tensors"].items()}
    names = {name for name, pieces in there.items() if pieces}
    assert found
    assert {bad.tensor for bad in found} <= names
    head = int.from_bytes(sound.joinpath(path.name).read_bytes()[:8], "little") + 8
    if at < head:  # where the head is wrong nothing in the file is to be trusted
        assert {bad.tensor for bad in found} == names
    else:
        assert len(found) == 1
    with pytest.raises(CheckpointError) as raised:
        Checkpoint.open(folder).verify()
    for bad in found:
        assert bad.file == path.name
        assert bad.place in str(raised.value)
        assert repr(bad.tensor) in str(raised.value)
        assert str(path) in str(raised.value)


def test_all_damage_is_told_not_only_the_first(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "one")
    files = sorted((tmp_path / "one").glob("*.safetensors"))
    for path in files:
        flip(path)
    found = Checkpoint.open(tmp_path / "one").find_damage()
    assert {bad.file for bad in found} == {path.name for path in files}
    assert "rows 30 to 39, columns 16 to 31" in {bad.place for bad in found if bad.tensor == "model/codes"}


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_file_or_a_manifest_that_is_cut_short_is_refused(sound, tmp_path, cut):
    for path in sorted(sound.iterdir()):
        shutil.rmtree(tmp_path / "one", ignore_errors=True)
        shutil.copytree(sound, tmp_path / "one")
        target = tmp_path / "one" / path.name
        target.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(CheckpointError, match=re.escape(str(target))):
            Checkpoint.open(tmp_path / "one").verify()


def test_a_file_that_is_missing_or_too_long_is_refused(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "one")
    first, second = sorted((tmp_path / "one").glob("00000-*.safetensors"))[:2]
    first.write_bytes(first.read_bytes() + b" ")
    second.unlink()
    with pytest.raises(CheckpointError) as raised:
        Checkpoint.open(tmp_path / "one").verify()
    size = first.stat().st_size
    assert f"{first} is missing or damaged: it has {size} bytes: expected {size - 1}; use another" in str(raised.value)
    assert f"{second} is missing or damaged: No such file or directory; use another" in str(raised.value)
