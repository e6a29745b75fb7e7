"""`rowwise sid fit`, `append` and `show`: semantic ids of items, from their vectors."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rowwise.base.errors import SpecError
from rowwise.cli.code import warn_of_run_code
from rowwise.cli.options import MAX_SEED, AsJson
from rowwise.cli.terminal import make_table, make_terminal, print_json, print_line

if TYPE_CHECKING:
    from rowwise.recipes.semantic import IdsFolder, ItemVectors

IdsArgument = Annotated[Path, typer.Argument(metavar="IDS", help="Folder of rowwise sid fit.")]
ItemsArgument = Annotated[
    Path,
    typer.Argument(metavar="ITEMS", help="Parquet file of items with their vectors, or the run of a retrieval model."),
]
OutOption = Annotated[Path, typer.Option(metavar="FOLDER", help="New folder of the ids.")]
VectorsOption = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Column of lists of numbers, or columns of numbers between commas."),
]


def fit(  # noqa: PLR0913 - one for each option
    items: ItemsArgument,
    out: OutOption,
    key: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the items' keys.")] = None,
    vectors: VectorsOption = None,
    codes: Annotated[str, typer.Option(metavar="AxBx...", help="Codes of each level.")] = "256x256x256",
    balance: Annotated[
        float | None,
        typer.Option(metavar="N", help="No code has more than N times the mean number of items (default: no limit)."),
    ] = None,
    unit: Annotated[bool, typer.Option("--unit", help="Scale vectors to length 1 first: cosine similarity.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the first centroids.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Fit semantic ids by residual k-means: items with like vectors share their first codes.

    The same items give the same ids, in any order, for any number of threads and on any processor. The folder has a
    file for each prefix of codes, for the transform map_id of a recipe.

    Example: rowwise sid fit items.parquet --key item --vectors embedding --out ids

    Example: rowwise sid fit runs/movielens-two-tower/1 --codes 64x64 --balance 2 --out ids
    """
    from rowwise.recipes.semantic import FitOptions, fit_ids

    try:
        sizes = tuple(int(size) for size in codes.split("x"))
    except ValueError:
        raise SpecError(f"--codes {codes}", "numbers between x, such as 256x256x256") from None
    if items.is_dir() and key is not None:
        raise SpecError(f"--key {key}: {items} is a run", hint="leave it out")
    name, source, made = _read(items, key, vectors)
    ids = fit_ids(made, out, name, source, FitOptions(sizes=sizes, seed=seed, balance=balance, unit=unit))
    _show(ids, made, as_json=as_json)
    if not as_json:
        print_line(f"wrote {out}; in a recipe:")
        for level in range(1, len(sizes) + 1):
            file = out / f"prefix-{level}.tsv"
            print_line(f"  - {{kind: map_id, column: {name}, to: {name}_sid{level}, file: {file}}}")


def append(
    ids: IdsArgument,
    items: ItemsArgument,
    out: OutOption,
    vectors: VectorsOption = None,
    as_json: AsJson = False,
) -> None:
    """Give new items ids by the codebooks of a fit; items that have ids keep them.

    Example: rowwise sid append ids items.parquet --vectors embedding --out ids-2
    """
    from rowwise.recipes.semantic import append_ids, open_ids

    before = open_ids(ids)
    name, _, made = _read(items, before.facts.key, vectors)
    if name != before.facts.key:
        raise SpecError(f"{items}: the key is {name!r}", f"{before.facts.key!r}, as in {ids}")
    after = append_ids(before, made, out)
    _show(after, None, as_json=as_json)
    if not as_json:
        print_line(f"wrote {out}: {len(after.keys) - len(before.keys):,} new items")


def show(ids: IdsArgument, as_json: AsJson = False) -> None:
    """Show how items use the codes of a folder, and how many items share theirs.

    Example: rowwise sid show ids
    """
    from rowwise.recipes.semantic import open_ids

    _show(open_ids(ids), None, as_json=as_json)


def _read(items: Path, key: str | None, vectors: str | None) -> tuple[str, str, "ItemVectors"]:
    """The key column, the source and the vectors of items."""
    from rowwise.recipes.semantic import read_vectors, sorted_items

    if not items.is_dir():
        for option, column in (("--key", key), ("--vectors", vectors)):
            if column is None:
                raise SpecError(f"{option} is missing", f"the name of a column of {items}")
        assert key is not None
        assert vectors is not None
        return key, vectors, read_vectors(str(items), key, vectors)
    from rowwise.recipes.recommend import item_vectors

    if vectors is not None:
        raise SpecError(f"--vectors {vectors}: {items} is a run", hint="leave it out")
    warn_of_run_code(items)
    name, keys, vectors_ID = item_vectors(items)
    return name, str(items), sorted_items(keys, vectors_ID.numpy())


def _show(ids: "IdsFolder", vectors: "ItemVectors | None", *, as_json: bool) -> None:
    from rowwise.recipes.semantic import describe_ids

    report = describe_ids(ids, vectors)
    if as_json:
        print_json(report)
        return
    table = make_table(("level",), ("codes", "used", "entropy", "largest code"))
    for number, level in enumerate(report.levels, 1):
        cells = f"{level.codes:,}", f"{level.used:,}", f"{level.entropy:.1%}", f"{level.largest:.2%} of items"
        table.add_row(str(number), *cells)
    make_terminal().print(table, markup=False)
    print_line(
        f"{report.items:,} items; {report.unique:.1%} have codes of their own, the largest group {report.largest_group}"
    )
    print_line(f"the codes leave {report.error:.1%} of the vectors' variance")
    if report.agreement is not None and report.chance is not None:
        print_line(
            f"{report.agreement:.1%} of items have the first code of their nearest item (chance: {report.chance:.1%})"
        )
    if report.drift is not None:
        print_line(f"drift: what codes leave of appended items is {report.drift:.3g} times that of the fit")
