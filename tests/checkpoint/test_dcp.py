"""torch.distributed.checkpoint reads what we write, and we read what it writes, by however many ranks."""

import importlib
import os
import pickle
import re
import subprocess
import sys

import pytest
import torch
from checkpoint.made import TABLES, same, saved

from rowwise import CheckpointError
from rowwise.checkpoint import windows as seen
from rowwise.checkpoint.dcp import export_dcp
from rowwise.checkpoint.dcp_source import METADATA, open_dcp
from rowwise.checkpoint.export import own_names
from rowwise.checkpoint.foreign import import_matched, match, open_source
from rowwise.checkpoint.read import Checkpoint
from rowwise.tables.spec import RowType

ALONE = "ignore:torch.distributed is disabled"
QUIET = pytest.mark.filterwarnings(ALONE)


def outlines(source):
    return {name: torch.empty(one.shape, dtype=one.dtype) for name, one in source.tensors.items()}


@QUIET
@pytest.mark.parametrize("cut", [False, True])
def test_dcp_loads_what_we_write(tmp_path, monkeypatch, cut, dcp):
    first = saved(tmp_path / "three")
    if cut:
        monkeypatch.setattr(seen, "WINDOW_bytes", 400)
    names = own_names(first, state=True)
    export_dcp(first, tmp_path / "dcp", names)
    found = outlines(open_dcp(tmp_path / "dcp"))
    assert found.keys() == set(names.values())
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    for name, new in names.items():
        entry = first.entry(name)
        want = torch.empty(entry.shape, dtype=torch.float32 if entry.row_type else getattr(torch, entry.dtype))
        first.copy_into(want, name, row_type=RowType.FP32 if entry.row_type else None)
        assert same(found[new], want)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "three"]


@QUIET
@pytest.mark.parametrize("cut", [False, True])
def test_we_read_what_dcp_writes(tmp_path, monkeypatch, cut, dcp):
    tensors = {
        "sparse": {"embedding_bags": {"user": {"weight": torch.randn(50, 6)}}},
        "dense": {"weight": torch.randn(3, 4, 5).half(), "step": torch.tensor(7), "none": torch.empty(0, 3)},
    }
    dcp.save(tensors | {"words": ["not", "a", "tensor"]}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    if cut:
        monkeypatch.setattr(seen, "WINDOW_bytes", 100)
    source = open_source(tmp_path / "dcp")
    assert {"sparse.embedding_bags.user.weight", "dense.weight", "dense.step", "dense.none"} == set(source.tensors)
    assert same(source.read("dense.weight", (1, 3)), tensors["dense"]["weight"][1:3])
    assert same(source.read("dense.step", (0, 1)), torch.tensor([7]))
    found = match(source, ["dense.*=*"])
    import_matched(source, found, tmp_path / "start")
    start = Checkpoint.open(tmp_path / "start")
    assert same(start.load("model/embeddings.user"), tensors["sparse"]["embedding_bags"]["user"]["weight"])
    for name, tensor in tensors["dense"].items():
        assert same(start.load(f"model/{name}"), tensor)


SAVE = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(101 * 6, dtype=torch.float32).view(101, 6)
dcp.save(
    {
        "ebc.embedding_bags.rows.weight": distribute_tensor(whole, mesh, [Shard(0)]),
        "ebc.embedding_bags.columns.weight": distribute_tensor(whole + 0.5, mesh, [Shard(1)]),
        "top.weight": torch.full((2, 2), 3.0),
    },
    storage_writer=dcp.FileSystemWriter(sys.argv[1]),
)
dist.destroy_process_group()
# Threads of gloo that end after the interpreter does now and then abort a process that has done all it was to do.
os._exit(0)
"""


@pytest.mark.dist
def test_what_two_processes_wrote_is_read_whole(tmp_path, monkeypatch):
    (tmp_path / "save.py").write_text(SAVE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "save.py", "dcp"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "dcp").iterdir()} >= {"__0_0.distcp", "__1_0.distcp", METADATA}
    monkeypatch.setattr(seen, "WINDOW_bytes", 1000)
    source = open_source(tmp_path / "dcp")
    import_matched(source, match(source, ["top.weight=top.weight"]), tmp_path / "start")
    start = Checkpoint.open(tmp_path / "start")
    whole = torch.arange(101 * 6, dtype=torch.float32).view(101, 6)
    assert same(start.load("model/embeddings.rows"), whole)
    assert same(start.load("model/embeddings.columns"), whole + 0.5)
    assert same(start.load("model/top.weight"), torch.full((2, 2), 3.0))


def test_metadata_that_is_none_is_refused(tmp_path):
    (tmp_path / "dcp").mkdir()
    for content, want in (
        (pickle.dumps({"a": 1}), "holds a dict: expected the metadata of a"),
        (b"\x80", "not a pickle"),
    ):
        (tmp_path / "dcp" / METADATA).write_bytes(content)
        with pytest.raises(CheckpointError, match=want):
            open_dcp(tmp_path / "dcp")


@QUIET
def test_members_of_enumerations_may_be_asked_for_by_name(tmp_path, dcp):
    dcp.save({"t": torch.ones(4, 4)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    properties = metadata.state_dict_metadata["t"].properties
    kind = importlib.import_module(type(properties).__module__)._MEM_FORMAT_ENCODING

    class Older(pickle.Pickler):
        def reducer_override(self, thing):
            return (getattr, (kind, thing.name)) if isinstance(thing, kind) else NotImplemented

    with (tmp_path / METADATA).open("wb") as file:
        Older(file, 4).dump(metadata)
    assert b"getattr" in (tmp_path / METADATA).read_bytes()
    assert same(open_dcp(tmp_path).read("t", (0, 4)), torch.ones(4, 4))


@QUIET
def test_a_folder_that_is_not_complete_is_refused(tmp_path, dcp):
    (tmp_path / "dcp").mkdir()
    with pytest.raises(CheckpointError, match=re.escape(f"has no {METADATA}")):
        open_source(tmp_path / "dcp")
    dcp.save({"t": torch.ones(4, 4)}, storage_writer=dcp.FileSystemWriter(tmp_path / "two"))
    next((tmp_path / "two").glob("*.distcp")).unlink()
    source = open_source(tmp_path / "two")
    with pytest.raises(CheckpointError, match="t: a file"):
        import_matched(source, match(source, ["t=table:t"]), tmp_path / "start")
    assert not list(tmp_path.glob("start*"))


def test_a_checkpoint_that_is_damaged_is_not_exported(tmp_path):
    first = saved(tmp_path / "three")
    file = next(iter(first.manifest.files))
    (first.folder / file).unlink()
    with pytest.raises(CheckpointError, match="missing or damaged"):
        export_dcp(first, tmp_path / "dcp", own_names(first, [TABLES[0].name]))
    assert [path.name for path in tmp_path.iterdir()] == ["three"]
