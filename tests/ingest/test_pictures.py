"""Pictures are read by prefixes: as many bytes as their size needs, copies that are alike, bad files by name."""

import io
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet as pq

from rowwise.base.errors import DataError, SpecError, StorageError
from rowwise.ingest.pictures import (
    PictureFolder,
    calibrate,
    decode,
    pictures_in,
    pictures_of_rows,
    scan_ends,
    scans_needed,
    similarities,
    ssim,
    to_progressive,
    write_pictures,
)

SIZES = (16, 32, 64, 112, 160)
# The mean over 16 squares of two photographs of the share of bytes that a copy of each size needs for an SSIM of .95.
SHARES = {16: 0.15, 32: 0.21, 64: 0.30, 112: 0.38, 160: 0.47}


def as_file(picture: Image.Image, **how) -> bytes:
    out = io.BytesIO()
    picture.save(out, **({"format": "JPEG", "quality": 90, "progressive": True} | how))
    return out.getvalue()


GREY = as_file(Image.new("L", (9, 9)))


@pytest.fixture(scope="module")
def photos() -> list[tuple[int, bytes]]:
    """16 squares of 160 rows and columns."""
    from sklearn.datasets import load_sample_images  # which takes seconds to import

    found = []
    for photo in load_sample_images().images:
        for k in range(8):
            top, left = 160 * (k // 4), 160 * (k % 4)
            found.append((len(found) * 10, as_file(Image.fromarray(photo[top : top + 160, left : left + 160]))))
    return found


@pytest.fixture(scope="module")
def folder(photos, tmp_path_factory) -> PictureFolder:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "all", photos, SIZES)


def test_a_size_reads_the_bytes_that_it_needs(folder, photos):
    costs = [cost.share for cost in folder.costs()]
    assert costs == sorted(costs)
    whole_N = np.array([len(jpeg) for _, jpeg in photos])
    for size, most in SHARES.items():
        assert (folder.bytes_of(np.arange(16), size) / whole_N).mean() <= most
    before = folder.bytes_read
    rows = np.array([3, 0, 3])
    folder.read(rows, 32)
    assert folder.bytes_read - before == folder.bytes_of(rows, 32).sum() < 3 * 8000


def test_prefixes_are_continued(folder, photos, tmp_path):
    """What was read once may change in the file: it is not read again."""
    written = write_pictures(
        tmp_path / "one", photos[:4], SIZES, similar={8 * k: 0.9 + k / 1000 for k in (2, 4, 8, 14, 20)}
    )
    rows, held = np.array([2, 0]), dict[int, bytes]()
    wanted = {size: written.read(rows, size) for size in SIZES}
    small = PictureFolder.open(tmp_path / "one")
    np.testing.assert_array_equal(small.read(rows, 32, held), wanted[32])
    assert [len(held[row]) for row in rows.tolist()] == small.bytes_of(rows, 32).tolist()
    index = pq.read_table(tmp_path / "one/index.parquet")
    with (tmp_path / "one/pictures.jpegs").open("r+b") as file:
        for row in rows.tolist():
            file.seek(index["begin"][row].as_py())
            file.write(bytes(len(held[row])))
    for size in (64, 16, 160, 112):
        np.testing.assert_array_equal(small.read(rows, size, held), wanted[size])
    assert small.bytes_read == small.bytes_of(rows, 160).sum() == sum(map(len, held.values()))


def least_scans(reached_NK, wanted_NK, drop):
    """The scans of the least SSIM whose mean of `wanted_NK` is that of the last scan less `drop`, or more."""
    least = np.mean([wanted[-1] for wanted in wanted_NK]) - drop
    for similar in sorted({x for reached in reached_NK for x in reached}):
        scans_N = [next(k for k, x in enumerate(reached) if x >= similar) for reached in reached_NK]
        if np.mean([wanted[k] for wanted, k in zip(wanted_NK, scans_N, strict=True)]) >= least:
            return [k + 1 for k in scans_N]
    raise AssertionError


@pytest.mark.parametrize("drop", [0.0, 0.05, 0.3])
def test_ssim_is_calibrated_to_the_accuracy_of_a_network(tmp_path, photos, drop):
    """The network's accuracy is how near copies are to those of whole files; the oracle tries every threshold."""
    written = write_pictures(tmp_path / "one", photos[:4], (16, 32), similar=1)
    whole = {size: np.stack([decode(jpeg, size, "") for _, jpeg in photos[:4]]).astype(float) for size in (16, 32)}

    def near(copies, size):
        return 1 - np.abs(copies - whole[size]).mean((1, 2, 3)) / 20

    found = calibrate(written, lambda copies, size: float(near(copies, size).mean()), drop=drop, steps=14)
    for size, least in found.items():
        reached_NK, wanted_NK = [], []
        for n, (_, jpeg) in enumerate(photos[:4]):
            copies = [decode(jpeg[:end], size, "").astype(float) for end in scan_ends(jpeg, "")]
            reached_NK.append([ssim(copy, copies[-1]) for copy in copies])
            wanted_NK.append([1 - np.abs(copy - whole[size][n]).mean() / 20 for copy in copies])
        assert [scans_needed(reached, least) for reached in reached_NK] == least_scans(reached_NK, wanted_NK, drop)
    again = write_pictures(tmp_path / "two", written.files(), (16, 32), similar=found)
    assert (tmp_path / "two/pictures.jpegs").read_bytes() == (tmp_path / "one/pictures.jpegs").read_bytes()
    for size in (16, 32):
        accuracy = near(again.read(np.arange(4), size), size).mean()
        assert accuracy >= near(whole[size], size).mean() - drop
        assert (again.bytes_of(np.arange(4), size) <= written.bytes_of(np.arange(4), size)).all()


def test_copies_are_like_those_of_whole_files(folder, photos):
    for size in SIZES:
        copies = folder.read(np.arange(16), size)
        assert copies.shape == (16, 3, size, size)
        for copy, (_, jpeg) in zip(copies, photos, strict=True):
            assert ssim(copy, decode(jpeg, size, "")) >= 0.95


def test_pictures_are_found_by_their_keys(folder):
    np.testing.assert_array_equal(folder.find(pa.array([150, 0, 5, 10])), [15, 0, -1, 1])
    with pytest.raises(DataError, match="keys of int64"):
        folder.find(pa.array(["a"]))


@pytest.mark.slow
def test_scans_end_where_the_next_begin(photos):
    for _, jpeg in photos:
        ends = scan_ends(jpeg, "")
        assert len(ends) == 10
        assert jpeg[ends[-1] :] == b"\xff\xd9"
        sharper = [ssim(decode(jpeg[:end], 160, ""), decode(jpeg, 160, "")) for end in ends]
        assert sharper[-1] == 1.0
        assert sharper[0] < sharper[-2]


@given(cut=st.integers(0, 100_000), number=st.integers(0, 15))
def test_a_file_that_is_cut_is_named(photos, cut, number):
    jpeg = photos[number][1]
    with pytest.raises(DataError, match=r"picture 'a' is (cut|no)"):
        scan_ends(jpeg[: cut % (len(jpeg) - 1)], "picture 'a'")


@given(at=st.integers(2, 100_000), byte=st.integers(0, 255), number=st.integers(0, 15), size=st.sampled_from((8, 40)))
def test_a_damaged_file_is_an_error_or_a_picture(photos, at, byte, number, size):
    jpeg = bytearray(photos[number][1])
    jpeg[at % len(jpeg)] = byte
    with suppress(DataError):
        content, _ = to_progressive(bytes(jpeg), "picture 'a'")
        ends = scan_ends(content, "picture 'a'")
        assert 1 <= scans_needed(similarities(content, ends, size, "picture 'a'"), 0.95) <= len(ends)


@pytest.mark.parametrize(
    ("picture", "how"),
    [
        (Image.new("RGB", (1, 1), "blue"), {}),
        (Image.new("L", (300, 7), 9), {}),
        (Image.new("RGBA", (33, 40), (9, 8, 7, 100)), {"format": "PNG"}),
        (Image.new("RGB", (64, 64), "green"), {"progressive": False}),
    ],
    ids=["one pixel", "grey", "transparent", "baseline"],
)
def test_any_picture_becomes_a_progressive_one(picture, how, tmp_path):
    written = write_pictures(tmp_path / "one", [("a", as_file(picture, **how))], (8, 16))
    assert written.keys.to_pylist() == ["a"]
    copy = written.read(np.array([0]), 16)[0].transpose(1, 2, 0)
    white = Image.new("RGBA", picture.size, "white")
    wanted = np.asarray(Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB").resize((16, 16)))
    assert np.abs(copy.astype(int) - wanted).max() <= 3


def test_pictures_are_upright_on_white_and_of_eight_bits(tmp_path):
    turned, exif = Image.new("RGB", (40, 20), "white"), Image.Exif()
    turned.paste("black", (0, 0, 10, 20))  # of the upright picture the top
    exif[274] = 6
    clear = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    deep = Image.fromarray(np.full((20, 20), 30_000, np.uint16))
    files = [as_file(turned, exif=exif), as_file(clear, format="PNG"), as_file(deep, format="PNG")]
    upright, white, grey = write_pictures(tmp_path / "all", enumerate(files), (16,)).read(np.arange(3), 16)
    assert upright[:, :3].mean() < 30
    assert upright[:, 8:].mean() > 220
    assert white.min() > 250
    assert np.abs(grey.astype(int) - 30_000 // 256).max() <= 2


@pytest.mark.parametrize("change", [lambda j: j + b"\r\n", lambda j: j.replace(b"\xff\xda", b"\xff\xff\xda")])
def test_what_other_programs_write_is_read(photos, tmp_path, change):
    jpeg = photos[0][1]
    same, other = (
        write_pictures(tmp_path / name, [(0, one)], (64,)) for name, one in (("same", jpeg), ("other", change(jpeg)))
    )
    np.testing.assert_array_equal(same.read(np.array([0]), 64), other.read(np.array([0]), 64))
    assert len(scan_ends(change(jpeg), "")) == 10


def test_a_picture_without_scans_is_refused(photos):
    jpeg = photos[0][1]
    head = jpeg[: jpeg.index(b"\xff\xda")] + b"\xff\xd9"
    with pytest.raises(DataError, match="damaged after 0 scans"):
        scan_ends(head, "it")
    with pytest.raises(DataError, match="it cannot be decoded"):
        to_progressive(head, "it")


def test_a_folder_at_a_store_is_refused(photos):
    with pytest.raises(StorageError, match="folder of this machine"):
        write_pictures(Path("s3://b/x"), photos[:1], (16,))


def test_what_a_kill_leaves_is_removed(photos, tmp_path):
    (tmp_path / "one.part/old").mkdir(parents=True)
    write_pictures(tmp_path / "one", photos[:1], (16,))
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_picture_of_very_many_scans_is_encoded_again(photos, tmp_path):
    jpeg = photos[0][1]
    ends = scan_ends(jpeg, "")
    many = jpeg[: ends[-1]] + jpeg[ends[-2] : ends[-1]] * 70 + jpeg[ends[-1] :]
    with pytest.raises(DataError, match="80 scans"):
        scan_ends(many, "")
    with suppress(DataError):  # where the decoder does not take it either
        write_pictures(tmp_path / "one", [(0, many)], (16,))
        index = pq.read_table(tmp_path / "one/index.parquet")
        assert len(index["scan_ends"][0]) == 10


def test_no_other_program_is_started(monkeypatch):
    monkeypatch.setenv("PATH", "")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(DataError, match="'a' is no picture"):
        to_progressive(eps, "picture 'a'")


def test_names_that_are_all_numbers_are_numbers(tmp_path, photos):
    (tmp_path / "photos").mkdir()
    for name in ("007", "12"):
        (tmp_path / f"photos/{name}.jpg").write_bytes(photos[0][1])
    assert [key for key, _ in pictures_in(tmp_path / "photos")] == [7, 12]
    (tmp_path / "photos/a.jpg").write_bytes(photos[0][1])
    assert [key for key, _ in pictures_in(tmp_path / "photos")] == ["007", "12", "a"]


def test_sources_are_folders_and_columns(tmp_path, photos, command):
    (tmp_path / "photos").mkdir()
    for key, jpeg in photos[:3]:
        (tmp_path / f"photos/{key}.jpg").write_bytes(jpeg)
    assert [key for key, _ in pictures_in(tmp_path / "photos")] == [0, 10, 20]
    table = pa.table({"item": [key for key, _ in photos[:3]], "photo": [jpeg for _, jpeg in photos[:3]]})
    pq.write_table(table, tmp_path / "items.parquet")
    assert list(pictures_of_rows(tmp_path / "items.parquet", "item", "photo")) == photos[:3]
    source = f"{tmp_path / 'items.parquet'}:item:photo"
    code, out, err = command("data", "pictures", source, str(tmp_path / "out"), "--sizes", "16,64")
    assert code == 0, err
    assert "3 pictures" in out
    assert PictureFolder.open(tmp_path / "out").sizes == (16, 64)
    code, _, err = command("data", "pictures", source, str(tmp_path / "out"))
    assert code != 0
    assert "exists already" in err
    how = str(tmp_path / "out"), str(tmp_path / "less"), "--sizes", "16,64", "--ssim"
    code, out, err = command("data", "pictures", *how, "16:0.5,64:0.8")
    assert code == 0, err
    less, more = (PictureFolder.open(tmp_path / name) for name in ("less", "out"))
    assert list(less.files()) == list(more.files())
    assert less.bytes_of(np.arange(3), 64).sum() < more.bytes_of(np.arange(3), 64).sum()
    for wrong in ("x", "16:0.9,64", "16:0.9"):
        code, _, err = command("data", "pictures", *how[:1], str(tmp_path / "no"), *how[2:], wrong)
        assert code != 0
        assert "SSIM" in err or "--ssim" in err


@pytest.mark.parametrize(
    ("pictures", "sizes", "error", "text"),
    [
        ([], (16,), DataError, "no pictures for"),
        ([("a", b"")], (16,), DataError, "picture 'a' is no picture"),
        ([("a", b"nothing")], (16,), DataError, "picture 'a' is no picture: its format is not known"),
        ([("a", GREY)] * 2, (16,), DataError, "picture 'a' appears twice"),
        ([("a", GREY), (1, GREY)], (8,), DataError, "several"),
        ([([1], GREY)], (16,), DataError, "expected a key that is text or a whole number"),
        ([(2**70, GREY)], (16,), DataError, "expected a key that is text or a whole number"),
        ([(None, GREY)], (16,), DataError, "expected a key that is text or a whole number"),
        ([("a", GREY)], (), SpecError, "sizes are missing"),
        ([("a", GREY)], (4,), SpecError, "sizes 4: expected some from 8"),
    ],
)
def test_bad_pictures_leave_no_folder(tmp_path, pictures, sizes, error, text):
    with pytest.raises(error, match=text):
        write_pictures(tmp_path / "out", pictures, sizes)
    assert list(tmp_path.iterdir()) == []


def test_an_ssim_by_size_names_each_size(tmp_path, folder):
    with pytest.raises(SpecError, match="an SSIM of the sizes 8, 16: expected one of each size, 8"):
        write_pictures(tmp_path / "out", [("a", GREY)], (8,), similar={8: 0.9, 16: 0.9})
    with pytest.raises(SpecError, match="an SSIM of 0: expected more"):
        write_pictures(tmp_path / "out", [("a", GREY)], (8,), similar={8: 0})
    with pytest.raises(SpecError, match=r"drop=1\.5, steps=10: expected a drop"):
        calibrate(folder, lambda copies, size: 1.0, drop=1.5)


def test_a_folder_of_something_else(tmp_path, folder):
    with pytest.raises(DataError, match="folder of pictures"):
        PictureFolder.open(tmp_path)
    with pytest.raises(SpecError, match="no copies of size"):
        folder.read(np.array([0]), 17)
    for missing in (folder.find(pa.array([99])), np.array([0, len(folder)])):
        with pytest.raises(DataError, match=f"no picture has the number {missing[-1]}: expected 0 to 15"):
            folder.read(missing, 16)
    with pytest.raises(DataError, match="folder of pictures: No"):
        PictureFolder.open(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("column", "change", "text"),
    [
        ("begin", lambda x: [*x[:-1], 10**9], "has picture 150 where pictures.jpegs, of .* bytes, has none"),
        ("begin", lambda x: [-1, *x[1:]], "has picture 0 where"),
        ("begin", lambda x: [x[1], x[0], *x[2:]], "has picture 0 where"),
        ("begin", lambda x: [None, *x[1:]], "column begin of index.parquet has nulls"),
        ("begin", lambda x: ["a"] * len(x), "is no folder of pictures"),
        ("scan_ends", lambda x: [*x[:-1], [*x[-1][:-1], x[-1][-1] + 10**6]], "has picture 150 where"),
        ("scan_ends", lambda x: [x[0][::-1], *x[1:]], "has picture 0 where"),
        ("scan_ends", lambda x: [x[0], [], *x[2:]], "has picture 10 where"),
        ("scan_ends", lambda x: [0] * len(x), "is no folder of pictures"),
        ("scans_16", lambda x: [99, *x[1:]], "has picture 0 where"),
        ("scans_16", lambda x: [x[0], 0, *x[2:]], "has picture 10 where"),
        ("scans_a", lambda x: x, "is no folder of pictures"),
        ("key", lambda x: [None, *x[1:]], "column key of index.parquet has nulls"),
    ],
)
def test_an_index_that_does_not_fit_the_file_is_refused(tmp_path, photos, column, change, text):
    write_pictures(tmp_path / "one", photos, (16,))
    index = pq.read_table(tmp_path / "one/index.parquet")
    values = index[column if column in index.column_names else "begin"].to_pylist()
    columns = {name: index[name] for name in index.column_names} | {column: pa.array(change(values))}
    pq.write_table(pa.table(columns), tmp_path / "one/index.parquet")
    with pytest.raises(DataError, match=text):
        PictureFolder.open(tmp_path / "one")


def test_a_file_of_pictures_that_was_cut_is_refused(tmp_path, photos):
    write_pictures(tmp_path / "one", photos[:3], (16,))
    file = tmp_path / "one/pictures.jpegs"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError, match="has picture 20 where"):
        PictureFolder.open(tmp_path / "one")
    file.write_bytes(b"")
    with pytest.raises(DataError, match="folder of pictures"):
        PictureFolder.open(tmp_path / "one")
