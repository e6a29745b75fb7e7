"""`rowwise export` and `versions`: versions of a model to serve."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rowwise.cli.code import warn_of_run_code
from rowwise.cli.console import show_warning
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import make_terminal, print_json, print_line
from rowwise.errors import SpecError
from rowwise.quantity import format_bytes
from rowwise.spec import RowType

if TYPE_CHECKING:
    from rowwise.recipes.export import RowTypeCost

SHOWN = ("ne", "auc", "loss")  # of test metrics
ServedFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder that is served.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/dlrm-synthetic/1.")],
    folder: ServedFolder,
    rows: Annotated[
        RowType | None, typer.Option(help="Row type of the tables, where it is smaller (default: as trained).")
    ] = None,
    which: Annotated[str, typer.Option(help="The checkpoint to use: best, last or step-<number>.")] = "best",
    explain: Annotated[bool, typer.Option("--explain", help="Print what --rows costs on the test rows.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run as the next version of a model in a folder, and make it the current one.

    A version has the weights without optimizer state, the transforms, and rows with their logits, by which a server
    checks that it computes the same. It needs neither the run nor its data.

    Example: rowwise export runs/dlrm-synthetic/1 served/

    Example: rowwise export runs/dlrm-synthetic/1 served/ --rows int8 --explain
    """
    from rowwise.recipes.export import export as write_version
    from rowwise.recipes.export import row_type_cost

    if explain and rows is None:
        raise SpecError("--explain without --rows: nothing is rounded: want --rows int8, fp16 or bf16")
    warn_of_run_code(run)
    console = make_terminal(stderr=True)
    with splits_bar(console, "writing") as tell:
        written = write_version(run, folder, which=which, rows=rows, tell=tell, warn=partial(show_warning, console))
    costs = row_type_cost(run, written.folder, which) if explain else []
    if as_json:
        cost = {one.task: {"run": one.run, "version": one.version} for one in costs}
        facts = {"version": written.folder.number, "path": str(written.folder.path), "digest": written.digest}
        print_json(facts | {"step": written.step, "size_bytes": written.size_bytes, "cost": cost})
        return
    size = format_bytes(written.size_bytes)
    print_line(f"wrote {written.folder.path}: version {written.folder.number}, step {written.step}, {size}")
    print_line(f"digest {written.digest}")
    _show_costs(costs)
    print_line(f"serve it with: rowwise serve {folder}")


def versions(
    folder: ServedFolder,
    current: Annotated[int | None, typer.Option(min=1, help="Make this version the current one.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions in a folder with their digests, or choose the one that servers open when they start.

    Example: rowwise versions served/

    Example: rowwise versions served/ --current 1
    """
    from rowwise.serve.package import find_version, list_versions, read_current, version_folder, write_current

    if current is not None:
        write_current(folder, current)
    find_version(folder)
    now = read_current(folder)
    listed = [version_folder(folder, number) for number in list_versions(folder)]
    if as_json:
        print_json({"current": now, "versions": [{"version": one.number, "digest": one.digest} for one in listed]})
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("version", "", "digest"):
        table.add_column(name)
    for one in listed:
        table.add_row(str(one.number), "current" if one.number == now else "", one.digest)
    make_terminal().print(table, markup=False)


def _show_costs(costs: "list[RowTypeCost]") -> None:
    for one in costs:
        for name in SHOWN:
            if name in one.run:
                change = one.version[name] - one.run[name]
                print_line(f"{one.task} {name}: {one.version[name]:.5f}, {change:+.5f} against the run")
