"""Made-up people, and items with pictures: each person likes the items of one colour, and the picture alone shows it.

An item's picture is a disc, small or large, on grey ground. Items are numbered at random, so that their ids do not tell
the colour, and the last `NEW_ITEMS` of them have test rows only: what is known of them is their pictures.
"""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.datasets.dataset import PARTS, Dataset, open_stored
from rowwise.ingest.pictures import Picture, check_pillow, write_pictures
from rowwise.tables.spec import Pooling, Table

COLOURS = ("firebrick", "seagreen", "steelblue", "goldenrod", "orchid", "sienna", "teal", "slateblue")
PEOPLE, ITEMS, NEW_ITEMS = 1_000, 800, 160
LIKED, GROUND, RADII = 30, 120, (6, 50)  # items that each person liked; pixels
SIZES = (16, 32, 64)
PICTURES = "pictures"  # the folder beside the rows


def get_discs(folder: Path) -> None:
    """Write train.parquet, valid.parquet, test.parquet and pictures/."""
    check_pillow()
    draw = np.random.default_rng(0)
    colour_I = draw.permutation(np.arange(ITEMS) % len(COLOURS))
    person_R = np.repeat(np.arange(PEOPLE), LIKED)
    of_colour = [np.flatnonzero(colour_I == colour) for colour in range(len(COLOURS))]
    item_R = np.concatenate([draw.choice(of_colour[p % len(COLOURS)], LIKED, replace=False) for p in range(PEOPLE)])
    is_new_R = item_R >= ITEMS - NEW_ITEMS
    part_R = np.where(is_new_R, PARTS.index("test"), draw.random(len(item_R)) < 0.1)  # 0 trains, 1 validates
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(PARTS):
        row_R = np.flatnonzero(part_R == number)
        columns = {
            "row": row_R,
            "label": np.ones(len(row_R), np.int8),
            "person": person_R[row_R],
            "item": item_R[row_R],
        }
        pq.write_table(pa.table(columns), folder / f"{part}.parquet")
    if not (folder / PICTURES).exists():
        write_pictures(folder / PICTURES, _draw_discs(colour_I, draw), SIZES)


def _draw_discs(colour_I: np.ndarray, draw: np.random.Generator) -> Iterator[Picture]:
    from PIL import Image, ImageDraw

    for item, colour in enumerate(colour_I):
        ground = Image.fromarray(draw.integers(90, 140, (16, 16, 3), dtype=np.uint8)).resize((GROUND, GROUND))
        radius = int(draw.integers(*RADII))
        left, top = draw.integers(0, GROUND - 2 * radius, 2).tolist()
        ImageDraw.Draw(ground).ellipse((left, top, left + 2 * radius, top + 2 * radius), fill=COLOURS[colour])
        file = io.BytesIO()
        ground.save(file, "PNG")
        yield item, file.getvalue()


def discs(folder: Path, dim: int = 16) -> Dataset:
    train, valid, test = open_stored(folder, PARTS, "discs")
    sparse = tuple(Sparse(column=name, ids="direct") for name in ("person", "item"))
    tables = tuple(
        Table(name=name, rows=rows, dim=dim, pooling=Pooling.MEAN)
        for name, rows in (("person", PEOPLE), ("item", ITEMS))
    )
    columns = Columns(labels=("label",), sparse=sparse, key="row")
    return Dataset(train=train, valid=valid, test=test, columns=columns, tables=tables)
