"""`rowwise data pictures`: rewrites pictures as progressive JPEGs; each size reads only a prefix of a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rowwise.base.errors import SpecError
from rowwise.base.quantity import format_bytes, format_percent
from rowwise.base.textfile import parse_whole
from rowwise.cli.options import AsJson
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import make_table, make_terminal, print_json, print_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rowwise.ingest.pictures import Picture


def pictures(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="Folder of picture files, folder that this command wrote, or FILE.parquet:NAME:COLUMN."
        ),
    ],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="New folder.")],
    sizes: Annotated[
        str, typer.Option(help="Sizes in pixels (height and width) at which pictures are read.")
    ] = "16,32,64",
    ssim: Annotated[
        str,
        typer.Option(
            help="Minimum SSIM between the picture from a prefix and that from the whole file: a number, or one of "
            "each size, such as 16:0.9,32:0.97."
        ),
    ] = "0.95",
    quality: Annotated[int, typer.Option(help="JPEG quality for files that are not progressive JPEGs.")] = 90,
    as_json: AsJson = False,
) -> None:
    """Rewrite pictures as progressive JPEGs in one file, with the number of scans that each size needs.

    Keys are file names without suffixes, or the values of the column NAME.

    Example: rowwise data pictures photos/ pictures/ --sizes 16,32,64

    Example: rowwise data pictures items.parquet:item:photo pictures/ --ssim 0.98

    Example: rowwise data pictures pictures/ calibrated/ --sizes 16,32 --ssim 16:0.9,32:0.97
    """
    from rowwise.ingest.pictures import write_pictures

    wanted_sizes = [size for size in map(parse_whole, sizes.split(",")) if size is not None]
    if len(wanted_sizes) <= sizes.count(","):
        raise SpecError(f"--sizes {sizes}", "whole numbers such as 16,32,64")
    similar = _parse_ssim(ssim)
    console = make_terminal(stderr=True)
    images, total = _open_pictures(source)
    with splits_bar(console, "pictures") as tell:
        folder = write_pictures(
            dest, images, wanted_sizes, similar=similar, quality=quality, tell=lambda done: tell(done, max(done, total))
        )
    costs = folder.costs()
    if as_json:
        print_json({"path": str(dest), "pictures": len(folder), "sizes": [cost._asdict() for cost in costs]})
        return
    print_line(f"wrote {dest}: {len(folder):,} pictures")
    table = make_table((), ("size", "bytes of a picture", "of the file"))
    for cost in costs:
        table.add_row(str(cost.size), format_bytes(cost.mean_bytes), format_percent(cost.share))
    make_terminal().print(table, markup=False)


def _parse_ssim(text: str) -> float | dict[int, float]:
    """A number, or numbers by size."""
    try:
        if ":" not in text:
            return float(text)
        parts = (part.split(":") for part in text.split(","))
        return {int(size): float(least) for size, least in parts}
    except ValueError:
        raise SpecError(f"--ssim {text}", "a number such as 0.95, or one of each size such as 16:0.9,32:0.97") from None


def _open_pictures(source: str) -> "tuple[Iterable[Picture], int]":
    """The pictures and their number, or 0 if unknown."""
    from rowwise.ingest.pictures import INDEX, PictureFolder, pictures_in, pictures_of_rows

    folder = Path(source)
    if (folder / INDEX).is_file():
        written = PictureFolder.open(folder)
        return written.files(), len(written)
    if folder.is_dir():
        return pictures_in(folder), sum(path.is_file() for path in folder.iterdir())
    file, _, names = source.partition(":")
    key, _, column = names.partition(":")
    if not key or not column or not Path(file).is_file():
        raise SpecError(source, "a folder of pictures, or FILE.parquet:NAME:COLUMN")
    return pictures_of_rows(Path(file), key, column), 0
