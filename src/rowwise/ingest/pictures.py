"""A folder of pictures as progressive JPEGs; a small copy is decoded from a prefix of its file.

A progressive JPEG is a header and scans, each of which adds detail to the whole picture. A small copy of the picture
needs only the first scans: less than half of the bytes of most files. `write_pictures` determines their number, by the
structural similarity (SSIM) of the copy made from a prefix to the copy made from all scans. `calibrate` finds the SSIM
that each size needs for a network's accuracy, as in "Characterizing and Taming Resolution in Convolutional Neural
Networks" (Yan, Luo and Ceze 2021, arXiv 2110.14819). A read may continue the prefixes of an earlier one.

    folder/pictures.jpegs   the files, one after the other
           index.parquet    a row for each: key, begin, scan_ends (bytes from begin), width, height, scans_SIZE

Sizes: N pictures, C = 3 channels, S rows and columns of a copy.
"""

import importlib.util
import io
import mmap
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import parquet as pq

from rowwise.base.errors import DataError, SpecError
from rowwise.base.storage.folder import refuse_url
from rowwise.ingest.block import Ints
from rowwise.ingest.unpacked import read_parquet

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]  # [C, S, S]
Picture = tuple[str | int, bytes]  # a key, and a file in one of FORMATS

INDEX, FILES = "index.parquet", "pictures.jpegs"
SCANS = "scans_"  # prefix of the columns with the number of scans for a size
QUALITY = 90  # of files converted to progressive JPEGs
SMALLEST, LARGEST = 8, 4096  # sizes of copies
MAX_PIXELS, MAX_SCANS = 1 << 26, 64  # of a picture; encoders make about ten scans
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # without formats that Pillow decodes by external programs
ORIENTATION = 274  # EXIF tag; 1 is upright
WINDOW = 7  # rows and columns over which SSIM is computed
CHANNELS = 3
# Markers of a JPEG. Inside a scan, 0xFF before one of `IN_SCAN` is data, not a marker.
START, END, SCAN = b"\xff\xd8", b"\xff\xd9", 0xDA
IN_SCAN = frozenset((0x00, 0xFF, *range(0xD0, 0xD8)))
PROGRESSIVE = 0xC2


class SizeCost(NamedTuple):
    """Bytes read for copies of a size."""

    size: int
    mean_bytes: float
    share: float  # of the size of whole files


def scan_ends(jpeg: bytes, what: str) -> list[int]:
    """End offset of each scan of a progressive JPEG; raises for other and truncated files."""
    kind, at = 0, len(START)
    ends: list[int] = []
    if not jpeg.startswith(START):
        raise DataError(f"{what} is no JPEG", "a progressive JPEG")
    while at + 3 < len(jpeg) and jpeg[at] == START[0] and jpeg[at + 1] != END[1]:
        marker = jpeg[at + 1]
        if marker == START[0]:  # fill bytes
            at += 1
            continue
        kind = marker if 0xC0 <= marker <= 0xC2 else kind
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if marker == SCAN:
            at = _end_of_scan(jpeg, at)
            ends.append(at)
    if jpeg[at : at + 2] != END or not ends:
        raise DataError(f"{what} is cut or damaged after {len(ends)} scans", "the whole file")
    if len(ends) > MAX_SCANS:
        raise DataError(f"{what} has {len(ends)} scans", f"at most {MAX_SCANS}, as each is decoded")
    if kind != PROGRESSIVE:
        raise DataError(f"{what} is no progressive JPEG", "a JPEG as `write_pictures` makes it")
    return ends


def _end_of_scan(jpeg: bytes, at: int) -> int:
    while (at := jpeg.find(b"\xff", at)) >= 0 and at + 1 < len(jpeg):
        if jpeg[at + 1] not in IN_SCAN:
            return at
        at += 1 if jpeg[at + 1] == START[0] else 2
    return len(jpeg)


def to_progressive(content: bytes, what: str, quality: int = QUALITY) -> tuple[bytes, list[int]]:
    """A picture as an upright progressive JPEG on white, and its `scan_ends`; keeps the scans of such a file."""
    with open_picture(content, what) as picture:
        if picture.format == "JPEG" and picture.info.get("progressive") and picture.getexif().get(ORIENTATION, 1) == 1:
            with suppress(DataError):  # truncated or unusual: encode it anew
                ends = scan_ends(content, what)
                return content[: ends[-1]] + END, ends
        try:
            out = io.BytesIO()
            _flat(picture).save(out, "JPEG", quality=quality, progressive=True)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{what} cannot be decoded: {error}", "a picture that is whole") from None
    return out.getvalue(), scan_ends(out.getvalue(), what)


def _flat(picture: "Image") -> "Image":
    """A picture in RGB, upright, on a white background."""
    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):  # 16-bit greyscale
        picture = Image.fromarray((np.asarray(picture).clip(0, 65535) >> 8).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")


def check_pillow() -> None:
    if importlib.util.find_spec("PIL") is None:
        raise SpecError("pictures need Pillow", hint="pip install 'rowwise[pictures]'")


def open_picture(content: bytes, what: str, formats: tuple[str, ...] = FORMATS) -> "Image":
    """The picture in a file, before its pixels are decoded."""
    check_pillow()
    from PIL import Image, UnidentifiedImageError

    try:
        picture = Image.open(io.BytesIO(content), formats=formats)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        problem = "its format is not known" if isinstance(error, UnidentifiedImageError) else str(error)[:200]
        raise DataError(f"{what} is no picture: {problem}", "a file that Pillow reads") from None
    if picture.width * picture.height > MAX_PIXELS:
        raise DataError(f"{what} has {picture.width} x {picture.height} pixels", f"at most {MAX_PIXELS:,}")
    return picture


def decode(prefix: bytes, size: int, what: str) -> Pixels:
    """A square copy of a picture (stretched), decoded from the first scans of its file."""
    from PIL.Image import Resampling

    scans = prefix.count(bytes((START[0], SCAN)))
    if scans > 2 * MAX_SCANS:  # counts the scans of a thumbnail in the header, too
        raise DataError(f"{what} has {scans} scans", f"at most {MAX_SCANS}, as each is decoded")
    with open_picture(prefix if prefix.endswith(END) else prefix + END, what, ("JPEG",)) as picture:
        try:
            picture.draft("RGB", (size, size))  # decode at a reduced scale, but at least this size
            copy = picture.convert("RGB").resize((size, size), Resampling.BILINEAR)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{what} cannot be decoded: {error}", "a picture that is whole") from None
    return np.ascontiguousarray(np.asarray(copy).transpose(2, 0, 1))


def ssim(a: Pixels, b: Pixels) -> float:
    """The mean structural similarity (Wang et al. 2004) of the grey values of two pictures, over square windows."""
    grey = [np.tensordot((0.299, 0.587, 0.114), picture.astype(np.float64), 1) for picture in (a, b)]
    window = min(WINDOW, *a.shape[1:])

    def means(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.lib.stride_tricks.sliding_window_view(x, (window, window)).mean((2, 3))

    mean_a, mean_b = map(means, grey)
    variance_a, variance_b = (means(x * x) - mean**2 for x, mean in zip(grey, (mean_a, mean_b), strict=True))
    covariance = means(grey[0] * grey[1]) - mean_a * mean_b
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    numerator = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    denominator = (mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2)
    return float((numerator / denominator).mean())


def similarities(jpeg: bytes, ends: Sequence[int], size: int, what: str) -> Iterator[float]:
    """The SSIM of the copies from one scan, from two, and so on, to the copy from all scans."""
    whole = decode(jpeg, size, what)
    yield from (ssim(decode(jpeg[:end], size, what), whole) for end in ends[:-1])
    yield 1.0


def scans_needed(similarities: Iterable[float], similar: float) -> int:
    """The minimum number of scans for a copy with at least this SSIM."""
    return next(scans for scans, reached in enumerate(similarities, 1) if reached >= similar)


def write_pictures(
    folder: Path | str,
    pictures: Iterable[Picture],
    sizes: Sequence[int],
    *,
    similar: float | Mapping[int, float] = 0.95,
    quality: int = QUALITY,
    tell: Callable[[int], None] | None = None,
) -> "PictureFolder":
    """Write pictures into a new folder.

    Args:
        folder: appears when it is complete.
        pictures: each with a key, all keys whole numbers or all text.
        sizes: of copies that will be read.
        similar: minimum SSIM of a copy to that of the whole file, for all sizes or by size; see `calibrate`.
        quality: JPEG quality of converted files, from 1 to 95.
        tell: called with the number of pictures done.
    """
    sizes = tuple(sorted(set(sizes)))
    if not sizes or not SMALLEST <= sizes[0] <= sizes[-1] <= LARGEST:
        raise SpecError(f"sizes {', '.join(map(str, sizes)) or 'are missing'}", f"some from {SMALLEST} to {LARGEST}")
    by_size = dict(similar) if isinstance(similar, Mapping) else dict.fromkeys(sizes, similar)
    if by_size.keys() != set(sizes):
        listing = ", ".join(map(str, sorted(by_size)))
        raise SpecError(f"an SSIM of the sizes {listing}", f"one of each size, {', '.join(map(str, sizes))}")
    for least in by_size.values():
        if not 0 < least <= 1:
            raise SpecError(f"an SSIM of {least}", "more than 0, and at most 1")
    if not 1 <= quality <= 95:
        raise SpecError(f"a quality of {quality}", "1 to 95")
    begin, seen, rows = 0, set[str | int](), list[dict[str, Any]]()
    with _new_folder(Path(folder)) as unfinished:
        with (unfinished / FILES).open("wb") as out:
            for key, content in pictures:
                what = f"picture {key!r}"[:80]
                _check_key(key, what, seen)
                seen.add(key)
                jpeg, ends = to_progressive(content, what, quality)
                with open_picture(jpeg, what) as picture:
                    shape = {"width": picture.width, "height": picture.height}
                scans = {
                    f"{SCANS}{size}": scans_needed(similarities(jpeg, ends, size, what), least)
                    for size, least in sorted(by_size.items())
                }
                rows.append({"key": key, "begin": begin, "scan_ends": ends} | shape | scans)
                begin += out.write(jpeg)
                if tell is not None:
                    tell(len(seen))
        if not seen:
            raise DataError(f"no pictures for {folder}", "at least one")
        try:
            index = pa.Table.from_pylist(rows)
        except pa.ArrowException:
            raise DataError("keys of pictures are of several types", "only whole numbers, or only text") from None
        with (unfinished / INDEX).open("wb") as file:  # a file, as pyarrow may mistake a path for a URL
            pq.write_table(index, file)
    return PictureFolder.open(folder)


Accuracy = Callable[[Pixels, int], float]  # of copies [N, C, S, S] of all pictures at a size


def calibrate(
    folder: "PictureFolder", accuracy: Accuracy, *, drop: float = 0.0005, steps: int = 10
) -> dict[int, float]:
    """The least SSIM, by size, at which accuracy is that of whole files less `drop` at most: a binary search.

    Args:
        folder: pictures that the network was not trained on.
        accuracy: of a network on copies of all pictures in their order, and their size.
        drop: of accuracy; the paper's is .05 points of 100.
        steps: halvings of the range of SSIM, whose upper end always keeps the accuracy.
    """
    if not (0 <= drop < 1 and steps >= 1):
        raise SpecError(f"drop={drop}, steps={steps}", "a drop from 0 to less than 1, and at least 1 step")
    found: dict[int, float] = {}
    for size in folder.sizes:
        reached = [folder.similarities(row, size) for row in range(len(folder))]

        def accuracy_at(similar: float, size: int = size, reached: list[list[float]] = reached) -> float:
            copies = [folder.copy(row, scans_needed(of_row, similar), size) for row, of_row in enumerate(reached)]
            return accuracy(np.stack(copies), size)

        least, low, high = accuracy_at(1.0) - drop, 0.0, 1.0
        for _ in range(steps):
            middle = (low + high) / 2
            low, high = (low, middle) if accuracy_at(middle) >= least else (middle, high)
        found[size] = high
    return found


def _check_key(key: object, what: str, seen: Collection[object]) -> None:
    if not (isinstance(key, str) or (type(key) is int and -(2**63) <= key < 2**63)):
        raise DataError(what, "a key that is text or a whole number of 64 bits")
    if key in seen:
        raise DataError(f"{what} appears twice", "each key once")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder, renamed on success; the next attempt removes the remains of a killed process."""
    refuse_url(folder, "copy it to a store when it is complete")
    if folder.exists():
        raise DataError(f"{folder} exists already", "a new folder")
    unfinished = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{folder} was not written: {error.strerror or error}", "a folder that can be written"
        ) from None


def pictures_in(folder: Path) -> Iterator[Picture]:
    """The files of a folder, keyed by their stems, as numbers if all stems are numbers."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        are_numbers = all(path.stem.isascii() and path.stem.isdecimal() for path in paths)
        for path in paths:
            yield int(path.stem) if are_numbers else path.stem, path.read_bytes()
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error}", "a folder of pictures") from None


def pictures_of_rows(path: Path, key: str, column: str) -> Iterator[Picture]:
    """The pictures in a column of bytes of a Parquet file."""
    try:
        file = pq.ParquetFile(path)
        missing = {key, column} - set(file.schema_arrow.names)
        if missing:
            raise DataError(f"{path} has no column {min(missing)!r}", f"one of {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(64, columns=[key, column]):
            for name, content in zip(batch[key].to_pylist(), batch[column].to_pylist(), strict=True):
                if not isinstance(content, bytes):
                    raise DataError(f"{path}: column {column!r}, picture {name!r}", "the bytes of a file")
                yield name, content
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {str(error)[:200]}") from None


@final
class PictureFolder:
    """Pictures written by `write_pictures`; reads only the prefixes that a size needs.

    Args:
        folder: made by `write_pictures`.
        index: the table of index.parquet.
    """

    def __init__(self, folder: Path, index: pa.Table) -> None:
        """See `open`, which reads the index."""
        names = [name for name in index.column_names if name.startswith(SCANS)]
        kinds = {"begin": pa.int64(), "scan_ends": pa.list_(pa.int64())} | dict.fromkeys(names, pa.int64())
        columns = {name: index[name].combine_chunks().cast(kind) for name, kind in kinds.items()}
        self.folder, self.keys, ends = folder, index["key"].combine_chunks(), columns["scan_ends"]
        nulls = [name for name, column in {"key": self.keys, **columns}.items() if column.null_count]
        if nulls:
            raise ValueError(f"column {nulls[0]} of {INDEX} has nulls")
        self._begins, self._ends, offsets = columns["begin"].to_numpy(), ends.values.to_numpy(), ends.offsets.to_numpy()
        self._first, self._last = offsets[:-1], offsets[1:]
        self.sizes = tuple(int(name.removeprefix(SCANS)) for name in names)
        self._scans = {size: columns[name].to_numpy() for size, name in zip(self.sizes, names, strict=True)}
        with (folder / FILES).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)
        self._check_places(offsets)
        self.bytes_read = 0

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        folder = Path(folder)
        try:
            return cls(folder, read_parquet(folder / INDEX, links=True))
        except (pa.ArrowException, OSError, LookupError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)[:200]
            raise DataError(
                f"{folder} is no folder of pictures: {reason}", "a folder that rowwise data pictures wrote"
            ) from None

    def __len__(self) -> int:
        return len(self._begins)

    def find(self, keys: pa.Array) -> Ints:
        """The picture number of each key; -1 for a key without a picture."""
        try:
            index_N = pc.call_function("index_in", [keys.cast(self.keys.type)], pc.SetLookupOptions(self.keys))
        except pa.ArrowException:
            raise DataError(
                f"{self.folder} has keys of {self.keys.type}, not {keys.type}",
                "pictures whose keys are those of the items",
            ) from None
        return index_N.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)

    def bytes_of(self, rows_N: Ints, size: int) -> Ints:
        """The lengths [N] in bytes of the prefixes for a size."""
        self._check(size)
        if len(rows_N) and not 0 <= rows_N.min() <= rows_N.max() < len(self):
            bad = next(row for row in rows_N.tolist() if not 0 <= row < len(self))
            raise DataError(f"{self.folder}: no picture has the number {bad}", f"0 to {len(self) - 1}")
        return self._ends[self._first[rows_N] + self._scans[size][rows_N] - 1]

    def read(self, rows_N: Ints, size: int, held: dict[int, bytes] | None = None) -> Pixels:
        """Copies [N, C, S, S] of pictures, by picture number.

        Args:
            rows_N: numbers of pictures.
            size: one of `sizes`.
            held: prefixes by picture number, which are continued and kept for the next read, so that no byte of a file
                is read twice; None: whole prefixes are read.
        """
        lengths_N = self.bytes_of(rows_N, size)
        out = np.empty((len(rows_N), CHANNELS, size, size), np.uint8)
        for place, (row, length) in enumerate(zip(rows_N.tolist(), lengths_N.tolist(), strict=True)):
            prefix = b"" if held is None else held.get(row, b"")
            if len(prefix) < length:
                prefix += self._part(row, len(prefix), length)
                if held is not None:
                    held[row] = prefix
            out[place] = decode(prefix[:length], size, self._name(row))
        return out

    def _part(self, row: int, first: int, last: int) -> bytes:
        begin = int(self._begins[row])
        self.bytes_read += last - first
        return self._map[begin + first : begin + last]

    def _name(self, row: int) -> str:
        return f"{self.folder}: picture {self.keys[row]}"

    def files(self) -> Iterator[Picture]:
        """Keys and whole files, as `write_pictures` takes them."""
        ends_N = np.append(self._begins[1:], len(self._map))
        for key, begin, end in zip(self.keys.to_pylist(), self._begins.tolist(), ends_N.tolist(), strict=True):
            yield key, self._map[begin:end]

    def similarities(self, row: int, size: int) -> list[float]:
        """The SSIM of a picture's copies from one scan, from two, and so on, to that of the whole file."""
        ends = self._ends_of(row)
        return list(similarities(self._part(row, 0, ends[-1]), ends, size, self._name(row)))

    def copy(self, row: int, scans: int, size: int) -> Pixels:
        """A picture's copy from so many scans."""
        return decode(self._part(row, 0, self._ends_of(row)[scans - 1]), size, self._name(row))

    def _ends_of(self, row: int) -> list[int]:
        return self._ends[self._first[row] : self._last[row]].tolist()

    def costs(self) -> list[SizeCost]:
        """The mean bytes read for each size."""
        rows_N = np.arange(len(self))
        whole = float(np.diff(np.append(self._begins, len(self._map))).mean())
        means = {size: float(self.bytes_of(rows_N, size).mean()) for size in self.sizes}
        return [SizeCost(size, mean, mean / whole) for size, mean in means.items()]

    def _check_places(self, offsets: Ints) -> None:
        """Raise if the index places a picture outside its range of the file, or has inconsistent scans."""
        counts_N = np.diff(offsets)
        wrong_N = (counts_N < 1) | (self._begins < 0) | (np.diff(self._begins, append=np.iinfo(np.int64).max) <= 0)
        for scans_N in self._scans.values():
            wrong_N |= (scans_N < 1) | (scans_N > counts_N)
        if not wrong_N.any():  # each picture has at least one scan
            rises_E = np.diff(self._ends, prepend=0)
            rises_E[self._first] = self._ends[self._first]
            wrong_N = np.logical_or.reduceat(rises_E <= 0, self._first)
            wrong_N |= self._begins + self._ends[offsets[1:] - 1] > np.append(self._begins[1:], len(self._map))
        if wrong_N.any():
            key = self.keys[int(wrong_N.argmax())]
            raise ValueError(f"{INDEX} has picture {key} where {FILES}, of {len(self._map):,} bytes, has none")

    def _check(self, size: int) -> None:
        if size not in self._scans:
            raise SpecError(f"{self.folder}: no copies of size {size}", f"one of {', '.join(map(str, self.sizes))}")
