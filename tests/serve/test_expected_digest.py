"""A version of the digest that is expected is what was exported, whatever happens to its folder."""

import json
import os
import py_compile
import shutil
import signal
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from launching import started, wait_for
from pyarrow import parquet as pq
from serving import about, server, workers_of
from small import RECIPE, WORLD, trained

from rowwise import CheckpointError
from rowwise.checkpoint.check import verify
from rowwise.checkpoint.manifest import CheckpointManifest
from rowwise.checkpoint.read import Checkpoint
from rowwise.recipes.export import export
from rowwise.recipes.served import golden_logits, open_predictor, open_version
from rowwise.recipes.user_model import load_class
from rowwise.serve.contents import LIST, digest_of, hash_files, read_files
from rowwise.serve.items import damaged_files
from rowwise.serve.package import version_folder
from rowwise.serve.row_tiers import IN_MEMORY, make_tiers

ROWS, UNUSED = 4096, 200  # of users; ids from here on are in no data
NET = """
import importlib
import torch
import parts.layers
from torch import nn
from helper import SCALE

importlib.import_module("colorsys")  # of Python, which nothing else has imported

class Net(nn.Module):
    def __init__(self, embeddings, dense, tasks):
        super().__init__()
        self.embeddings = embeddings
        self.top = parts.layers.linear(dense + sum(t.dim for t in embeddings.tables), tasks)

    def forward(self, batch):
        import late
        vectors = self.embeddings(batch.sparse).values()
        return late.times(self.top(torch.cat([batch.dense_BF, vectors], 1)), SCALE)
"""
FILES = {
    "net.py": NET,
    "helper.py": "SCALE = {scale}",
    "late.py": "def times(x, scale): return x * scale",
    "parts/__init__.py": "from . import layers",
    "parts/layers.py": "from torch import nn\nlinear = nn.Linear",
    "unused.py": "",
}


def write_code(folder, scale):
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("{scale}", str(scale)))
    return f"{folder / 'net.py'}:Net"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A version with a model of its own, whose code is gone elsewhere, and a table by key."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("exported")
    user, *others = RECIPE["tables"]["list"]
    tables, model = {"list": [{**user, "rows": ROWS}, *others]}, write_code(folder / "code", 2)
    run, _ = trained(folder, model=model, tables=tables, train={"epochs": 1})
    pq.write_table(WORLD.rows(0, 30).select(["row", "d1"]), folder / "side.parquet")
    made = export(run.folder.path, folder / "models", sides=[f"{folder / 'side.parquet'}:row"])
    shutil.rmtree(folder / "code")
    return made


@pytest.fixture
def version(exported, tmp_path):
    return shutil.copytree(exported.folder.path, tmp_path / "versions" / "000001")


def answers(version):
    """Logits of users whose rows no golden row has."""
    rows = WORLD.rows(0, 20)
    rows = rows.set_column(rows.column_names.index("user"), "user", [np.arange(UNUSED, UNUSED + 20)])
    return golden_logits(version.forward, rows.select(version.schema.names), 20).numpy().tobytes()


def forge(content, wanted):
    """Change the last four bytes so that the CRC-32 of all is `wanted`, which is linear in them."""
    start = zlib.crc32(content[:-4])
    sums = [zlib.crc32((1 << bit).to_bytes(4, "little"), start) for bit in range(32)]
    none, pivots = zlib.crc32(bytes(4), start), {}
    for bit, found in enumerate(sums):
        value, bits = found ^ none, 1 << bit
        while value.bit_length() in pivots:
            other, more = pivots[value.bit_length()]
            value, bits = value ^ other, bits ^ more
        pivots[value.bit_length()] = value, bits
    left, bits = wanted ^ none, 0
    while left:
        other, more = pivots[left.bit_length()]
        left, bits = left ^ other, bits ^ more
    content[-4:] = bits.to_bytes(4, "little")
    assert zlib.crc32(content) == wanted


def change_rows(version):
    """Other rows of users whom no golden row has, in place, with the checksum that they had."""
    checkpoint = Checkpoint.open(version)
    (name,) = (name for name in checkpoint.names() if name.endswith(".user"))
    entry = checkpoint.entry(name)
    (chunk,) = entry.chunks
    begin, end = checkpoint.find_rows(name, chunk)[:2]
    with (version / chunk.file).open("r+b") as file:
        file.seek(begin)
        rows = bytearray(file.read(end - begin))
        at = UNUSED * entry.row_bytes
        rows[at:] = np.full((len(rows) - at) // 4, 3.0, np.float32).tobytes()
        forge(rows, chunk.crc32)
        file.seek(begin)
        file.write(rows)


def plant(file, marker):
    """Code that says that it ran."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n" + (NET if file.name == "net.py" else ""))
    return file


def test_the_digest_is_the_same_wherever_it_is_named(exported, version, command):
    digest = digest_of(hash_files(version))
    assert digest == exported.digest == exported.folder.digest == open_version(version, digest).digest
    _, out, _ = command("versions", str(exported.folder.path.parents[1]), "--json")
    assert [one["digest"] for one in json.loads(out)["versions"]] == [digest]
    (version / LIST).write_text("{}")  # it is believed by those alone who expect nothing
    assert open_version(version, digest).digest == digest
    (version / LIST).unlink()  # as of an earlier rowwise
    assert open_version(version, digest).digest == version_folder(version.parents[1], 1).digest == digest
    assert open_version(version).digest is None
    assert open_predictor(version, expect=digest).parts.tasks == ("label",)
    assert not damaged_files(version)
    with pytest.raises(CheckpointError, match=f"has digest {digest}: expected digest 00ff"):
        open_predictor(version, expect="00ff")


def test_each_file_of_an_increment_is_listed(increments):
    for number in (1, 3):
        path = version_folder(increments.models, number).path
        assert hash_files(path) == read_files(path)
        assert open_version(increments.models, digest_of(hash_files(path)), number).number == number


@pytest.mark.parametrize("expect", [True, False])
@pytest.mark.parametrize("place", ["code/extra", "code/parts/deep.py", "sides/x.parquet", "sides/fifo.parquet", "maps"])
def test_a_version_has_no_links_and_nothing_odd(exported, version, tmp_path, place, expect):
    plant(tmp_path / "foreign/__init__.py", tmp_path / "ran")
    pq.write_table(pa.table({"x": [1], "d1": [0.5]}), tmp_path / "foreign/part.parquet")
    if "fifo" in place:
        os.mkfifo(version / place)
    else:
        (version / place).symlink_to(tmp_path / "foreign")
    with pytest.raises(OSError, match=r"this is (a link|no regular file)") as raised:
        open_version(version, exported.digest if expect else None)
    assert raised.value.filename == str(version / place)


def test_changed_weights_of_the_same_checksum_are_refused(exported, version, command):
    before = answers(open_version(version))
    change_rows(version)
    opened = open_version(version)
    assert (opened.identity, verify(version).good) == ("exact", True)  # so nothing else would tell
    assert answers(opened) != before
    with pytest.raises(CheckpointError, match=f"expected digest {exported.digest}"):
        open_version(version, exported.digest)
    code, out, _ = command("ckpt", "verify", str(version), "--json")
    (weights,) = version.glob("*.safetensors")
    assert (code, [one["file"] for one in json.loads(out)["checked"][0]["damage"]]) == (1, [weights.name])


@pytest.mark.parametrize("memory_bytes", [None, 1 << 16])
def test_what_changes_after_it_was_hashed_is_not_used(exported, version, tmp_path, memory_bytes):
    tiers = IN_MEMORY if memory_bytes is None else make_tiers(CheckpointManifest.read(version), memory_bytes)
    before, changes = answers(open_version(version)), []

    def change():
        if not changes:
            changes.append(1)
            change_rows(version)
            plant(version / "code/net.py", tmp_path / "ran")
            plant(version / "code/helper.py", tmp_path / "ran")

    opened = open_version(version, exported.digest, pause=change, tiers=tiers)
    assert (opened.digest, opened.identity, changes) == (exported.digest, "exact", [1])
    change_rows(version)
    assert answers(opened) == before
    assert not (tmp_path / "ran").exists()


def test_a_model_has_its_neighbours_and_nobody_else_does(exported, version, tmp_path):
    """Other modules find those of Python, and another model its own."""
    assert sorted(path.name for path in (version / "code").rglob("*")) == [
        "__init__.py", "helper.py", "late.py", "layers.py", "net.py", "parts",
    ]  # fmt: skip
    for name in ("colorsys.py", "json/__init__.py", "torch/nn/functional.py"):
        plant(version / "code" / name, tmp_path / "ran")
    assert open_version(version).identity == open_version(exported.folder.path, exported.digest).identity == "exact"
    assert not (tmp_path / "ran").exists()
    assert not list(version.rglob("*.pyc"))
    assert load_class(f"{version}/code/net.py:Net").forward.__globals__["SCALE"] == 2
    assert load_class(write_code(tmp_path / "code", 3)).forward.__globals__["SCALE"] == 3


def test_a_compilation_beside_the_code_is_not_used(version, tmp_path):
    code = version / "code"
    size = (code / "helper.py").stat().st_size
    planted = plant(tmp_path / "helper.py", tmp_path / "ran")
    planted.write_text(f"import pathlib;pathlib.Path({str(tmp_path / 'ran')!r}).touch();SCALE = 5")
    stale = Path(py_compile.compile(str(planted), doraise=True))
    compiled = bytearray(stale.read_bytes())
    compiled[8:16] = int((code / "helper.py").stat().st_mtime).to_bytes(4, "little") + size.to_bytes(4, "little")
    (code / "__pycache__").mkdir()
    (code / "__pycache__" / stale.name).write_bytes(compiled)
    assert open_version(version).identity == "exact"
    assert not (tmp_path / "ran").exists()


def test_a_model_outside_of_its_version_is_refused(version, tmp_path):
    content = (version / "model.json").read_bytes()
    for outside in ("../net.py", str(plant(tmp_path / "net.py", tmp_path / "ran"))):
        (version / "model.json").write_bytes(content.replace(b"code/net.py", outside.encode()))
        with pytest.raises(CheckpointError, match=r"net\.py:Net'"):
            open_version(version)


@pytest.mark.slow
@pytest.mark.dist
def test_a_server_goes_on_with_the_version_that_it_expects(exported, version):
    """Its workers, too, that start when the version in the folder is another or gone."""
    models = version.parents[1]
    shutil.copytree(version, models / "versions/000002")
    (models / "current.json").write_text('{"current": 1}')
    with started(models, "serve", str(models), "--port", "0", "--expect", "00ff") as process:
        assert process.wait(60) == 2
        assert f"has digest {exported.digest}: expected digest 00ff" in process.stderr.read()
    with server(models, "--workers", "1", "--expect", exported.digest) as (url, process):
        (models / "current.json").write_text('{"current": 2}')
        change_rows(version)
        shutil.rmtree(version)
        (worker,) = workers_of(process.pid)
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: worker not in (now := workers_of(process.pid)) and len(now) == 1)
        told = about(url)  # once it is ready
        assert (told["version"], told["digest"]) == (1, exported.digest)
