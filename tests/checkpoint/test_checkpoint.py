"""A checkpoint gives back what was saved, bit for bit, or says which chunk of which tensor it cannot."""

import json

import pytest
import torch
from checkpoint.made import same, wholes
from hypothesis import given
from hypothesis import strategies as st

from rowwise import CheckpointError
from rowwise.base.inside import fault_of_name
from rowwise.checkpoint import files
from rowwise.checkpoint.manifest import NAME, CheckpointManifest
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import FileSizes, write

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.float64, torch.bool)


def made(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * 50).to(dtype)


tensors = st.dictionaries(
    st.text("abc./é", min_size=1, max_size=6).filter(lambda name: not any(map(fault_of_name, name.split("/")))),
    st.builds(
        made,
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.integers(0, 99),
    ),
    max_size=5,
)


@given(tensors, st.sampled_from((16, 100, 1 << 20)), st.sampled_from((64, 1000, 1 << 20)))
def test_round_trip(tmp_path_factory, saved, piece, file):
    folder = tmp_path_factory.mktemp("ckpt") / "one"
    sizes = FileSizes(piece, file)  # small ones, so that tensors are cut
    wholes(folder, saved, {"step": 7, "names": ["a", "é"]}, sizes=sizes)
    found = Checkpoint.open(folder)
    assert found.manifest.data == {"step": 7, "names": ["a", "é"]}
    assert found.names() == list(saved)
    found.verify()
    for name, tensor in saved.items():
        assert same(found.load(name), tensor)
    assert not list(folder.parent.glob("*.part"))


@given(rows=st.integers(0, 40), data=st.data())
def test_some_rows(tmp_path_factory, rows, data):
    tensor = made(torch.float32, (rows, 3))
    folder = tmp_path_factory.mktemp("ckpt") / "one"
    wholes(folder, {"t": tensor}, sizes=FileSizes(chunk_bytes=60))
    begin = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(begin, rows))
    assert same(Checkpoint.open(folder).load("t", (begin, end)), tensor[begin:end])


def test_only_what_is_needed_is_read(tmp_path):
    tensor = made(torch.float32, (100, 3))
    wholes(tmp_path / "one", {"t": tensor}, sizes=FileSizes(120, 120))
    files = sorted((tmp_path / "one").glob("*.safetensors"))
    assert len(files) == 10
    for file in files[1:]:
        file.unlink()
    assert same(Checkpoint.open(tmp_path / "one").load("t", (2, 9)), tensor[2:9])
    with pytest.raises(CheckpointError, match=r"00000-00001\.safetensors is missing"):
        Checkpoint.open(tmp_path / "one").load("t", (2, 11))


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (lambda m: m.update(format=99), "has format 99; this rowwise reads format 2"),
        (lambda m: m.update(extra=1), "is damaged: Object contains unknown field `extra`"),
        (lambda m: m["tensors"]["a"]["pieces"].clear(), "tensor 'a': rows 0 to 9 are in no chunk"),
        (lambda m: m["tensors"]["a"]["pieces"][0].update(rows=[1, 10]), "rows 0 to 0 are in no chunk"),
    ],
    ids=["format", "unknown key", "no pieces", "gap"],
)
def test_a_manifest_that_does_not_add_up(tmp_path, change, want):
    wholes(tmp_path / "one", {"a": made(torch.float32, (10, 4))})
    path = tmp_path / "one" / NAME
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=want):
        Checkpoint.open(tmp_path / "one")


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Checkpoint.open(tmp_path)


def test_a_name_is_used_once(tmp_path):
    write(tmp_path / "one", [], {})
    with pytest.raises(CheckpointError, match="it exists already"):
        write(tmp_path / "one", [], {})


def test_names_and_rows_that_are_not_there(tmp_path):
    wholes(tmp_path / "one", {"a": made(torch.float32, (10, 4))})
    found = Checkpoint.open(tmp_path / "one")
    with pytest.raises(CheckpointError, match="has no tensor 'b'"):
        found.load("b")
    with pytest.raises(CheckpointError, match="tensor 'a' has 10"):
        found.load("a", (5, 11))


def test_a_disk_that_is_full_leaves_no_half(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"saved: 00000-00000\.safetensors: No space"):
        wholes(tmp_path / "one", {"a": made(torch.float32, (10, 4))})
    assert not list(tmp_path.iterdir())


def test_manifest_is_json_that_others_can_read(tmp_path):
    manifest = wholes(tmp_path / "one", {"t": made(torch.float16, (3, 2)), "n": torch.tensor(5)}, {"step": 1})
    assert CheckpointManifest.read(tmp_path / "one") == manifest
    plain = json.loads((tmp_path / "one" / NAME).read_text())
    assert plain["tensors"]["t"]["shape"] == [3, 2]
    assert plain["tensors"]["t"]["dtype"] == "float16"
