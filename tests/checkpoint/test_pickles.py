"""Pickles from strangers: none of the published kinds of attack runs anything, or takes for ever."""

import importlib
import io
import operator
import os
import pathlib
import pickle
import struct
import subprocess
import time
import zipfile
from functools import partial

import pytest
import torch

from rowwise import CheckpointError
from rowwise.checkpoint.dcp_source import METADATA, open_dcp
from rowwise.checkpoint.pickled import read_pickle
from rowwise.checkpoint.source import load_tensor, open_torch

METADATA_HOME = b"torch.distributed.checkpoint.metadata"
FILES_HOME = b"torch.distributed.checkpoint.filesystem"


class Calling:
    """Pickled as a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def text(words: bytes) -> bytes:
    return b"\x8c" + bytes([len(words)]) + words


def name(home: bytes, what: bytes) -> bytes:
    """STACK_GLOBAL, which follows dots."""
    return text(home) + text(what) + b"\x93"


def program(*opcodes: bytes) -> bytes:
    return b"\x80\x04" + b"".join(opcodes) + b"."


def attacks(canary: str) -> dict[str, bytes]:
    """By what they are; each would make the canary if it ran."""
    touch, python = f"touch {canary}", f"open({canary!r}, 'w')"
    shell, code = text(touch.encode()), text(python.encode())
    nested = pickle.dumps(Calling(os.system, touch))
    called = {
        "os.system": Calling(os.system, touch),
        "os.popen": Calling(os.popen, touch),
        "subprocess": Calling(subprocess.call, ["touch", canary]),
        "Popen": Calling(subprocess.Popen, ["touch", canary]),
        "eval": Calling(eval, python),
        "exec": Calling(exec, python),
        "open": Calling(open, canary, "w"),
        "getattr": Calling(getattr, Calling(importlib.import_module, "os"), "system"),
        "import_module": Calling(importlib.import_module, "antigravity"),
        "partial": Calling(partial, os.system, touch),
        "attrgetter": Calling(operator.attrgetter, "system"),
        "methodcaller": Calling(operator.methodcaller, "touch"),
        "a path's touch": Calling(pathlib.Path.touch, pathlib.Path(canary)),
        "torch.load": Calling(torch.load, canary),
        "pickles inside": Calling(pickle.loads, nested),
        "map": Calling(map, os.system, [touch]),
        "an entry that is a call": {"a": [1, (Calling(os.system, touch),)]},
    }
    made = {
        "dotted, of a module of metadata": program(name(FILES_HOME, b"os.system"), shell, b"\x85R"),
        "dotted, of pathlib": program(name(b"pathlib", b"os.system"), shell, b"\x85R"),
        "dotted, of a class": program(name(METADATA_HOME, b"Metadata.__init__.__globals__"), b"."),
        "a function of a module of metadata": program(name(FILES_HOME, b"_create_file_view"), b")R"),
        "another name of such a module": program(name(METADATA_HOME, b"os"), b"."),
        "the old way to name": b"cposix\nsystem\n" + b"(S'" + touch.encode() + b"'\ntR.",
        "INST": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + touch.encode() + b"'\no.",
        "NEWOBJ_EX": program(name(b"subprocess", b"Popen"), b"(", shell, b"t}\x92"),
        "BUILD over a class": program(
            name(METADATA_HOME, b"Metadata"), b"}(", text(b"__setstate__"), name(METADATA_HOME, b"Metadata"), b"ub"
        ),
        "BUILD over an object twice": program(name(METADATA_HOME, b"Metadata"), b")\x81}b}b"),
        "a call of what a call gives": program(name(METADATA_HOME, b"Metadata"), b")R", code, b"\x85R"),
        "getattr of a class": program(
            name(b"builtins", b"getattr"), name(METADATA_HOME, b"Metadata"), text(b"__init__"), b"\x86R", code, b"\x85R"
        ),
        "a persistent id": program(text(b"x"), b"Q"),
        "EXT1": program(b"\x82\x01)R"),
        "EXT4": program(b"\x84" + struct.pack("<i", 9) + b")R"),
        "out of band": program(b"\x97"),
    }
    return {kind: pickle.dumps(one, 4) for kind, one in called.items()} | made


BOMBS = {
    "a text of 2**62 bytes": program(b"\x8d" + struct.pack("<Q", 1 << 62)),
    "a number of 2**31 - 1 bytes": program(b"\x8b" + struct.pack("<i", (1 << 31) - 1)),
    "bytes of 2**40": program(b"\x8e" + struct.pack("<Q", 1 << 40)),
    "a frame of 2**60": program(b"\x95" + struct.pack("<Q", 1 << 60)),
    "a memo with holes": program(b"Nr" + struct.pack("<I", (1 << 32) - 1)),
    "nobody's memo": program(b"h\x05"),
    "a key whose hash takes for ever": program(b"}", b")" + b"\x94h\x00\x86" * 1, *(
        b"\x94h" + bytes([k]) + b"\x86" for k in range(1, 90)), b"Ns"),
    "a list inside of itself": program(b"]\x94h\x00a"),
    "10,000 lists in lists": program(b"]" * 10_000 + b"a" * 9_999),
    "an empty stack": program(b"a"),
    "no end": b"\x80\x04N",
    "nothing": b"",
    "a thousand digits": b"L" + b"9" * 5000 + b"L\n.",
    "marks": program(b"(" * 1000),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, dcp):
    """A sound checkpoint, to put other metadata into."""
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save({"t": torch.ones(4, 4)}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    return tmp_path / "dcp"


def refused(folder):
    begin_s = time.process_time()
    with pytest.raises(CheckpointError) as raised:
        open_dcp(folder)
    assert time.process_time() - begin_s < 20  # against days
    said = str(raised.value)
    assert said.startswith(f"{folder / METADATA} cannot be read: ")
    assert "\n" not in said
    assert len(said) < 400


@pytest.mark.parametrize("kind", attacks(""))
def test_an_attack_runs_nothing(folder, tmp_path, kind):
    canary = tmp_path / "was-run"
    (folder / METADATA).write_bytes(attacks(str(canary))[kind])
    refused(folder)
    assert not canary.exists()


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused(folder, kind):
    (folder / METADATA).write_bytes(BOMBS[kind])
    refused(folder)


def test_nothing_that_is_named_is_imported(tmp_path):
    (tmp_path / "stranger.py").write_text("raise AssertionError('was imported')")
    found = read_pickle(program(name(b"stranger", b"Kind"), b")\x81"), None)
    assert (found.kind, found.args) == (("stranger", "Kind"), ())


# --- what torch.save wrote


def torch_file(path, pickled, compress=zipfile.ZIP_STORED):
    """A file of torch.save with another pickle in it."""
    torch.save({"t": torch.ones(4)}, path.with_suffix(".was"))
    with zipfile.ZipFile(path.with_suffix(".was")) as old, zipfile.ZipFile(path, "w", compress) as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(
                info.filename, pickled if pickled is not None and info.filename.endswith("data.pkl") else content
            )


@pytest.mark.parametrize("kind", [*attacks(""), *BOMBS])
def test_an_attack_in_a_state_dict_runs_nothing(tmp_path, kind):
    canary, file = tmp_path / "was-run", tmp_path / "model.pt"
    torch_file(file, (attacks(str(canary)) | BOMBS)[kind])
    with pytest.raises(CheckpointError) as raised:
        open_torch(file)
    assert str(raised.value).startswith(f"{file} ")
    assert "\n" not in str(raised.value)
    assert not canary.exists()


class Claiming(pickle.Pickler):
    """Pickles a tensor as torch.save does, whatever bytes there are."""

    def persistent_id(self, thing):
        return thing if isinstance(thing, tuple) and thing[:1] == ("storage",) else None


@pytest.mark.parametrize(
    ("numbers", "offset", "size", "stride"),
    [(1 << 24, 0, (1 << 24,), (1,)), (4, 0, (5,), (1,)), (4, 2, (4,), (1,)), (4, -1, (4,), (1,)),
     (4, 1 << 62, (1,), (1,)), (4, 0, (2, 2), (3, 1)), (4, 3, (4,), (-1,)), (4, 0, (1 << 40,), (0,))],
)  # fmt: skip
def test_a_tensor_of_more_than_its_bytes_is_refused(tmp_path, numbers, offset, size, stride):
    sink, stored = io.BytesIO(), ("storage", torch.FloatStorage, "0", "cpu", numbers)
    Claiming(sink, 2).dump(Calling(torch._utils._rebuild_tensor_v2, stored, offset, size, stride, False, {}))
    torch_file(tmp_path / "model.pt", sink.getvalue())
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_torch(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"^bytes 7 to 9 are no tensor of torch\.save: "):
        load_tensor((tmp_path / "model.pt").read_bytes(), "bytes 7 to 9")


def looped():
    found = {"t": torch.ones(2)}
    found["again"] = found
    return found


def doubled():
    """As many paths to one tensor as 2 ** 40."""
    found = {"t": torch.ones(2)}
    for _ in range(40):
        found = {"a": found, "b": found}
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("make", "want"),
    [
        (looped, "dicts more than 100 deep"),
        (doubled, "more than 100,000 entries"),
        (lambda: {"t": torch.ones(1).expand(1 << 40)}, "more than the file holds"),
        (lambda: {"t": torch.ones(4).to_sparse()}, "is not a plain tensor"),
        (lambda: {"a\x1b[2Jb\n": torch.ones(1)}, "expected a name without control characters"),
    ],
)
def test_a_state_dict_that_has_no_end_is_refused(tmp_path, make, want, old):
    torch.save(make(), tmp_path / "model.pt", _use_new_zipfile_serialization=not old)
    with pytest.raises(CheckpointError, match=want):
        open_torch(tmp_path / "model.pt")


def test_a_compressed_archive_is_refused(tmp_path):
    torch_file(tmp_path / "model.pt", None, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="its archive is compressed"):
        open_torch(tmp_path / "model.pt")


def test_a_pipe_is_not_waited_for(tmp_path):
    for pipe, opened in ((tmp_path / "model.pt", open_torch), (tmp_path / METADATA, open_dcp)):
        os.mkfifo(pipe)
        with pytest.raises(CheckpointError, match="expected a regular file"):
            opened(pipe if opened is open_torch else tmp_path)


# --- pieces of tensors


def pieces(folder):
    """The metadata of a folder, and the file that it names."""
    return pickle.loads((folder / METADATA).read_bytes()), next(folder.glob("*.distcp"))


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"relative_path": "../secret"}, "it has a slash"),
        ({"relative_path": "/etc/passwd"}, "it has a slash"),
        ({"relative_path": "link"}, "this is a link"),
        ({"relative_path": "pipe"}, "expected a regular file"),
        ({"offset": 1 << 50}, "has .* bytes: expected "),
        ({"offset": -1}, "has .* bytes: expected "),
        ({"length": 1 << 50}, "has .* bytes: expected "),
        ({"length": 70}, "no tensor of torch.save"),
    ],
)
def test_a_piece_is_read_from_its_folder_only(folder, tmp_path, change, want):
    (tmp_path / "secret").write_text("it")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    found, _ = pieces(folder)
    for info in found.storage_data.values():
        for field, value in change.items():
            setattr(info, field, value)
    (folder / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match=want):
        open_dcp(folder).read("t", (0, 4))


@pytest.mark.parametrize("sizes", [(4, 1 << 40), (1 << 45, 4), (3, 4), (5, 4), (4, 5), (4,)])
def test_a_piece_that_is_not_as_large_as_it_says_is_refused(folder, sizes):
    found, _ = pieces(folder)
    found.state_dict_metadata["t"].chunks[0].sizes = torch.Size(sizes)
    for both in (False, True):
        found.state_dict_metadata["t"].size = torch.Size(sizes if both else (4, 4))
        (folder / METADATA).write_bytes(pickle.dumps(found))
        with pytest.raises(CheckpointError):
            open_dcp(folder).read("t", (0, 4))
