"""Whatever a stranger writes into a checkpoint: one line, nothing read outside of its folder, no memory for claims."""

import os
import stat
import zlib

import pytest
from checkpoint.crafted import copy, head_of, plain, put, put_file, put_head, rounded_increment, sound

from rowwise import CheckpointError
from rowwise.checkpoint.check import verify
from rowwise.checkpoint.export import export_parquet
from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.named import open_named
from rowwise.checkpoint.read import Checkpoint

USER, WORD, ITEM = "model/embeddings.user", "model/embeddings.word", "model/embeddings.item"
STATE = "rows/embeddings.user/exp_avg"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return sound(tmp_path_factory.mktemp("crafted") / "one")


@pytest.fixture
def one(whole, tmp_path):
    return copy(whole, tmp_path / "one")


def refused(folder) -> str:
    """The one line with which a folder is refused by what reads all of it."""
    with pytest.raises(CheckpointError) as raised:
        open_named(folder).verify()
    assert not verify(folder).good
    assert "\n" not in str(raised.value)
    return str(raised.value)


def piece_of(manifest, name=USER):
    return manifest["tensors"][name]["pieces"][0]


def rename(manifest, old, new):
    manifest["tensors"][new] = manifest["tensors"].pop(old)


def at(*path, value):
    """A change of one value of a manifest."""

    def change(manifest):
        inside = manifest
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value

    return change


def merge(piece, other):
    """Two pieces that are stored once."""
    other.update(file=piece["file"], key=piece["key"])


HUGE = 1 << 40
MANIFESTS = {
    "a table that is a path": (lambda m: rename(m, USER, "model/../../evil"), "it begins with a dot"),
    "a table at the root": (lambda m: rename(m, USER, "model//evil"), "it is empty"),
    "a table in a folder": (lambda m: rename(m, USER, "model/sub/evil"), "has a slash"),
    "a table without a name": (lambda m: rename(m, USER, "model/embeddings."), "it is empty"),
    "a table of a terminal": (lambda m: rename(m, USER, "model/e.\x1b[2J"), "a control character"),
    "a table of 5,000 letters": (lambda m: rename(m, USER, "model/" + "x" * 5000), "longer than 1000 bytes"),
    "a tensor with a backslash": (lambda m: rename(m, STATE, "rows/a\\b/exp_avg"), "it has a slash"),
    "a file outside": (lambda m: m["files"].update({"../x": {"size_bytes": 9, "head_crc32": 0}}), "it has a slash"),
    "a file at the root": (lambda m: m["files"].update({"/x": {"size_bytes": 9, "head_crc32": 0}}), "it has a slash"),
    "no file": (lambda m: piece_of(m).update(file="gone.safetensors"), "'gone.safetensors' is not listed"),
    "a function of torch": (at("tensors", USER, "dtype", value="load"), "numbers of 'load'"),
    "numbers that rows have not": (at("tensors", USER, "dtype", value="int64"), "fp32 rows, shape"),
    "no shape": (at("tensors", USER, "shape", value=[]), "fp32 rows, shape"),
    "a huge shape": (at("tensors", "model/top.weight", "shape", value=[HUGE, HUGE]), "in no chunk|want"),
    "too huge a shape": (at("tensors", "model/top.weight", "shape", value=[1 << 60, 4]), "expected at most 64 numbers"),
    "a negative shape": (at("tensors", "model/top.weight", "shape", value=[-4, -4]), "expected at most 64 numbers"),
    "1,000 dimensions": (at("tensors", "model/top.weight", "shape", value=[1] * 1000), "expected at most 64 numbers"),
    "a group of columns": (at("tensors", WORD, "column_group", value=17), "column_group=17"),
    "a group of no columns": (at("tensors", WORD, "column_group", value=0), "column_group=0"),
    "columns cut in a group": (lambda m: piece_of(m, WORD).update(cols=[0, 15]), "inside of a group"),
    "rows before the first": (lambda m: piece_of(m).update(rows=[-5, 20]), "are outside of its shape"),
    "rows backwards": (lambda m: piece_of(m).update(rows=[20, 0]), "are outside of its shape"),
    "bits of a layer": (lambda m: piece_of(m, "model/top.weight").update(bits=4), "but the tensor is no table"),
    "ids of more rows": (
        lambda m: m["tensors"][USER]["pieces"].append(
            {**piece_of(m), "ids": {"count": HUGE, "key": "k", "crc32": 0}}
        ),
        f"are {HUGE} of",
    ),
    "a file of no size": (lambda m: m["files"][piece_of(m)["file"]].update(size_bytes=0), "0 bytes, but its chunks"),
    "a piece twice": (lambda m: merge(*m["tensors"][ITEM]["pieces"][:2]), "two chunks have the same key"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_cannot_be_is_refused(one, kind):
    change, want = MANIFESTS[kind]
    manifest = plain(one)
    change(manifest)
    put(one, manifest)
    with pytest.raises(CheckpointError, match=want) as raised:
        Checkpoint.open(one)
    assert str(raised.value).startswith(f"{one / NAME}: ")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600


NO_MANIFESTS = (
    *(b"", b"[", b"[" * 100_000, b"[]", b"7", b"\xff", b'{"format": 2, "data": ' + b'{"a":' * 50_000),
    *(b'{"format": "' + b"9" * 5000 + b'"}', b'{"format": ' + b"9" * 5000 + b"}"),
)


@pytest.mark.parametrize("text", NO_MANIFESTS)
def test_what_is_no_manifest_is_refused(one, text):
    (one / NAME).write_bytes(text)
    assert str(one / NAME) in refused(one)


def test_a_table_that_is_a_path_is_not_exported(one, tmp_path):
    """As it was reported: its file would be outside of the folder."""
    manifest = plain(one)
    rename(manifest, USER, "model/embeddings.x/../../../evil")
    put(one, manifest)
    with pytest.raises(CheckpointError, match="is not used"):
        export_parquet(open_named(one), tmp_path / "deep" / "out")
    assert not list(tmp_path.rglob("*.parquet"))


def key_in(head):
    return next(key for key in head if key.startswith(f"{STATE}["))


HEADS = {
    "another type": (lambda h: h[key_in(h)].update(dtype="F64"), "as 'F64'"),
    "a type of as many bytes": (lambda h: h[key_in(h)].update(dtype="U32"), "are U32 of shape"),
    "a type that there is not": (lambda h: h[key_in(h)].update(dtype="F4"), "as 'F4'"),
    "another shape": (lambda h: h[key_in(h)]["shape"].reverse(), "in its header, expected"),
    "a shape of more": (lambda h: h[key_in(h)]["shape"].append(HUGE), "its size from byte"),
    "a shape that is negative twice": (lambda h: h[key_in(h)].update(shape=[-1, -1]), "its size from byte"),
    "another key": (lambda h: rename({"tensors": h}, key_in(h), "other"), "which has no"),
    "bytes of another": (lambda h: h[key_in(h)].update(data_offsets=[0, 8]), "its size from byte"),
    "bytes after the end": (lambda h: h[key_in(h)].update(data_offsets=[HUGE, 2 * HUGE]), "its size from byte"),
    "bytes before the first": (lambda h: h[key_in(h)].update(data_offsets=[-8, 0]), "its size from byte"),
    "more words": (lambda h: h[key_in(h)].update(note="hidden"), "unknown field `note`"),
    "no words": (lambda h: h.clear(), "keys of 0 bytes"),
    "words about it": (lambda h: h.update(__metadata__={"a": "b"}), "unknown field|missing required"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_disagrees_is_refused(one, kind):
    """`ckpt verify` said of each of these that it is whole."""
    change, want = HEADS[kind]
    file = piece_of(plain(one), STATE)["file"]
    head, rest = head_of(one / file)
    change(head)
    put_head(one, file, head, rest)
    said = refused(one)
    assert str(one / file) in said
    with pytest.raises(CheckpointError, match=want):
        open_named(one)


def test_a_head_with_a_key_twice_or_no_end_is_refused(one):
    file = piece_of(plain(one))["file"]
    head, rest = head_of(one / file)
    text = str(head).replace("'", '"')
    for crafted in (text[:-1] + ", " + text[1:], "{" * 50_000, "[" * 50_000, "7", "[]", ""):
        put_head(one, file, crafted, rest)
        assert f"{one / file} is damaged" in refused(one)
    for length in (1 << 63, 1 << 40, (1 << 64) - 1):
        put_file(one, file, length.to_bytes(8, "little") + b"{}" + rest + bytes(4096), 10)
        assert f"{one / file} is damaged" in refused(one)


@pytest.mark.parametrize("kind", ["link", "link inside", "pipe", "folder", "socket", "device"])
@pytest.mark.parametrize("manifest", [False, True])
def test_only_regular_files_of_the_folder_are_opened(one, tmp_path, kind, manifest):
    name = NAME if manifest else piece_of(plain(one))["file"]
    file = one / name
    secret = tmp_path / "secret"
    file.rename(one / "moved" if kind == "link inside" else secret)
    match kind:
        case "link":
            file.symlink_to(secret)
        case "link inside":
            file.symlink_to("moved")
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "socket":
            os.mknod(file, stat.S_IFSOCK | 0o600)
        case "device":
            file.symlink_to("/dev/zero")
    assert str(file) in refused(one)


def test_increments_are_checked_too(tmp_path):
    folder = rounded_increment(tmp_path / "two")
    assert verify(folder).good
    manifest = plain(folder)
    whole, changed = manifest["tensors"]["model/e.t"]["pieces"]
    head, rest = head_of(folder / changed["file"])
    places = {key: word["data_offsets"] for key, word in head.items()}
    begin, end = places[changed["ids"]["key"]]
    # Ids that fall, and ids of other rows, with the checksum of them.
    for ids in ([7, 3, 8], [3, 3, 8], [3, 7, 90], [-3, 7, 8]):
        content = b"".join(number.to_bytes(4, "little", signed=True) for number in ids)
        put_head(folder, changed["file"], head, rest[:begin] + content + rest[end:])
        again = plain(folder)
        again["tensors"]["model/e.t"]["pieces"][1]["ids"]["crc32"] = zlib.crc32(content)
        put(folder, again)
        assert "have row numbers that do not ascend" in refused(folder)
    # A row whose range is no number.
    head, rest = head_of(folder / whole["file"])
    begin, end = head[whole["key"]]["data_offsets"]
    content = b"\x00\x00\xc0\x7f" + rest[begin + 4 : end]
    put_head(folder, whole["file"], head, rest[:begin] + content + rest[end:])
    again = plain(folder)
    again["tensors"]["model/e.t"]["pieces"][0]["crc32"] = zlib.crc32(content)
    put(folder, again)
    assert "have a range that is not finite" in refused(folder)
