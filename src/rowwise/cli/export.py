"""`rowwise export` and `versions`: versions of a model to serve."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rowwise.base.errors import CheckpointError, SpecError
from rowwise.base.quantity import format_bytes
from rowwise.base.textfile import parse_whole
from rowwise.cli.code import warn_of_run_code
from rowwise.cli.console import show_warning
from rowwise.cli.options import AsJson, RunArgument, Which
from rowwise.cli.progress import splits_bar
from rowwise.cli.stored import open_store
from rowwise.cli.terminal import make_table, make_terminal, print_json, print_line
from rowwise.tables.spec import RowType

if TYPE_CHECKING:
    from collections.abc import Callable

    from rowwise.recipes.export import ExportedVersion, RowTypeCost
    from rowwise.serve.package import VersionFolder
    from rowwise.serve.traffic import Canary, Traffic
    from rowwise.serve.version_store import StoredVersion

SHOWN = ("ne", "auc", "rmse", "loss")  # of test metrics
ServedFolder = Annotated[str, typer.Argument(metavar="DIR|URL", help="The folder or URL that is served.")]


def export(  # noqa: PLR0913 - one for each option
    run: RunArgument,
    folder: ServedFolder,
    rows: Annotated[
        RowType | None, typer.Option(help="Row type of the tables, where it is smaller (default: as trained).")
    ] = None,
    side: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE:KEY", help="Columns of a Parquet file that requests leave out; give it for each file."
        ),
    ] = None,
    items: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Parquet file with the items to retrieve (default: those of the training rows)."
        ),
    ] = None,
    recall: Annotated[
        float, typer.Option(help="Share of the best items that an index of 20,000 or more items has to find.")
    ] = 0.99,
    which: Which = "best",
    explain: Annotated[bool, typer.Option("--explain", help="Print what --rows costs on the test rows.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Write each new checkpoint as a version, until the run has finished.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Write all rows, also where the newest version has most of them.")
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep the newest version of a URL here (default: it is read again)."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for rows, such as 8GB (default: what is free, or the run's)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as the next version of a model in a folder, and make it the current one.

    Where few rows differ from those of the newest version, these alone are written, beside hard links to its files.
    A version has the weights without optimizer state, the transforms, and rows with their logits, by which a server
    checks that it computes the same. It needs neither the run nor its data. Rows are read and written a part at a
    time, so tables may be larger than memory. At a URL a version appears when all of it is there.

    Example: rowwise export runs/dlrm-synthetic/1 served/

    Example: rowwise export runs/dlrm-synthetic/1 served/ --rows int8 --explain

    Example: rowwise export runs/dlrm-synthetic/1 served/ --side items.parquet:item

    Example: rowwise export runs/dlrm-synthetic/1 served/ --follow

    Example: rowwise export runs/dlrm-synthetic/1 s3://models/clicks

    Example: rowwise export runs/dlrm-synthetic/1 served/ --memory 8GB

    Example: rowwise export runs/towers/1 served/ --items items.parquet --recall 0.999
    """
    from rowwise.planning.planner.machines import parse_size
    from rowwise.recipes.export import export as write_version
    from rowwise.recipes.export import follow as follow_run
    from rowwise.recipes.export import row_type_cost
    from rowwise.recipes.export_items import ItemOptions

    options = ItemOptions(None if items is None else str(items), recall)
    size = None if memory is None else parse_size(memory, "--memory")
    warn_of_run_code(run)
    console = make_terminal(stderr=True)
    warn = partial(show_warning, console)
    with open_store(folder, cache) as store:
        here, after = (Path(folder), 0) if store is None else (store.folder, store.begin_export(full=full))
        write = partial(
            write_version, run, here, rows=rows, sides=side or (), items=options, full=full, after=after,
            memory_bytes=size, warn=warn,
        )  # fmt: skip
        if follow:
            for written in follow_run(run, write):
                if store is not None:
                    store.send(written.folder.number)
                    store.keep({written.folder.number})
                _show_version(written, folder, [], as_json=as_json)
            return
        with splits_bar(console, "writing") as tell:
            written = write(which=which, tell=tell)
        if store is not None:
            store.send(written.folder.number)
        costs = row_type_cost(run, written.folder, which, size) if explain else []
    _show_version(written, folder, costs, as_json=as_json)
    if not as_json:
        print_line(f"serve it with: rowwise serve {folder}")


def versions(
    folder: ServedFolder,
    current: Annotated[int | None, typer.Option(min=1, help="Make this version the current one.")] = None,
    canary: Annotated[
        str | None, typer.Option(metavar="N=SHARE", help="Let a version answer a share of the requests, such as 3=5%.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions in a folder with their digests, or choose those that servers answer by.

    Servers that run follow within a second. --current without --canary ends the canary.

    Example: rowwise versions served/

    Example: rowwise versions served/ --canary 3=5%

    Example: rowwise versions served/ --current 3

    Example: rowwise versions s3://models/clicks
    """
    from rowwise.serve.package import find_version, list_versions, read_traffic, version_folder, write_traffic
    from rowwise.serve.traffic import Traffic

    with open_store(folder, None) as store:
        here = Path(folder)
        read = partial(read_traffic, here) if store is None else store.read_traffic
        if current is not None or canary is not None:
            number = read().current if current is None else current
            traffic = Traffic(number, None if canary is None else _parse_canary(canary))
            write_traffic(here, traffic) if store is None else store.write_traffic(traffic)
        if store is None:
            find_version(here)
            numbers, listed = list_versions(here), partial(version_folder, here)
        else:
            numbers, listed = store.numbers(), store.read_list
        digests = {number: _digest_of(listed, number) for number in numbers}
        now = read()
    if as_json:
        rows = [{"version": number, "digest": digest} for number, digest in digests.items()]
        print_json({"current": now.current, "canary": now.canary, "versions": rows})
        return
    table = make_table(("version", "", "digest"))
    for number, digest in digests.items():
        table.add_row(str(number), _role(number, now), digest)
    make_terminal().print(table, markup=False)


def _digest_of(listed: "Callable[[int], VersionFolder | StoredVersion]", number: int) -> str:
    try:
        return listed(number).digest
    except (CheckpointError, OSError) as error:
        return f"damaged: {error}"


def _role(number: int, traffic: "Traffic") -> str:
    if traffic.canary is not None and number == traffic.canary.version:
        return f"canary, {100 * traffic.canary.share:g} %"
    return "current" if number == traffic.current else ""


def _parse_canary(text: str) -> "Canary":
    from rowwise.serve.traffic import Canary, parse_share

    version, _, share = text.partition("=")
    number = parse_whole(version)
    with suppress(ValueError):
        if number is not None:
            return Canary(number, parse_share(share))
    raise SpecError(f"--canary {text}", "a version and its share of requests, such as 3=5%")


def _show_version(written: "ExportedVersion", folder: str, costs: "list[RowTypeCost]", *, as_json: bool) -> None:
    from msgspec import to_builtins

    from rowwise.recipes.export_items import describe_items

    place = folder if "://" in folder else str(written.folder.path)
    if as_json:
        cost = {one.task: {"run": one.run, "version": one.version} for one in costs}
        facts = {"version": written.folder.number, "path": place, "digest": written.digest}
        facts |= {"base": written.base, "retrieval": None if written.items is None else to_builtins(written.items)}
        print_json(facts | {"step": written.step, "size_bytes": written.size_bytes, "cost": cost})
        return
    size = format_bytes(written.size_bytes) + ("" if written.base is None else f" beside version {written.base}'s")
    print_line(f"wrote {place}: version {written.folder.number}, step {written.step}, {size}")
    print_line(f"digest {written.digest}")
    for line in () if written.items is None else describe_items(written.items):
        print_line(line)
    for one in costs:
        for name in SHOWN:
            if name in one.run:
                change = one.version[name] - one.run[name]
                print_line(f"{one.task} {name}: {one.version[name]:.5f}, {change:+.5f} against the run")
