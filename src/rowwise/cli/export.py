"""`rowwise export` and `versions`: versions of a model to serve, and models in formats of others."""

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
    from rowwise.recipes.formats.write import ForeignFormat, ForeignModel
    from rowwise.serve.package import VersionFolder
    from rowwise.serve.traffic import Canary, Traffic
    from rowwise.serve.version_store import StoredVersion

SHOWN = ("ne", "auc", "rmse", "loss")  # test metrics that --explain prints
ServedFolder = Annotated[str, typer.Argument(metavar="DIR|URL", help="Folder or URL of the served versions.")]


def export(  # noqa: PLR0913 - one for each option
    run: RunArgument,
    folder: Annotated[
        str, typer.Argument(metavar="OUT", help="Folder or URL of the served versions; file or folder of a format.")
    ],
    onnx: Annotated[bool, typer.Option("--onnx", help="Write an ONNX file instead of a version.")] = False,
    pt2: Annotated[bool, typer.Option("--pt2", help="Write an AOTInductor package for C++, without Python.")] = False,
    mlflow: Annotated[bool, typer.Option("--mlflow", help="Write an MLflow model.")] = False,
    triton: Annotated[bool, typer.Option("--triton", help="Write a model repository of Triton.")] = False,
    kserve: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a KServe manifest, too, that serves the URL.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image with rowwise, for --kserve.")] = None,
    rows: Annotated[
        RowType | None, typer.Option(help="Row type to quantize tables to, where it is smaller (default: as trained).")
    ] = None,
    side: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE:KEY", help="Parquet file with columns that requests omit, and its key; may be repeated."
        ),
    ] = None,
    items: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Parquet file with the items to retrieve (default: those of the training rows)."
        ),
    ] = None,
    recall: Annotated[float, typer.Option(help="Minimum recall of an index of 20,000 or more items.")] = 0.99,
    which: Which = "best",
    explain: Annotated[bool, typer.Option("--explain", help="Print the change of the test metrics by --rows.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Export each new checkpoint as a version, until the run has finished.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Write all rows, even if few differ from the newest version.")
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep the newest version of a URL here (default: it is downloaded again)."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory budget for rows, such as 8GB (default: free memory, or the run's)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a run as the next version of a model in a folder, and make it the current one.

    If few rows differ from the newest version, only these are written, beside hard links to its files. A version has
    the weights without optimizer state, the transforms, and golden rows: samples with their logits, which a server has
    to reproduce before it is ready. It needs neither the run nor its data. Rows are streamed in blocks, so tables may
    be larger than memory. At a URL a version becomes visible once it is complete.

    --onnx and --pt2 write a graph of raw columns and predictions, which has reproduced the golden rows within 1e-5;
    --mlflow and --triton a version that calls rowwise.

    Example: rowwise export runs/dlrm-synthetic/1 served/

    Example: rowwise export runs/dlrm-synthetic/1 served/ --rows int8 --explain

    Example: rowwise export runs/dlrm-synthetic/1 served/ --side items.parquet:item

    Example: rowwise export runs/dlrm-synthetic/1 served/ --follow

    Example: rowwise export runs/dlrm-synthetic/1 s3://models/clicks

    Example: rowwise export runs/dlrm-synthetic/1 served/ --memory 8GB

    Example: rowwise export runs/towers/1 served/ --items items.parquet --recall 0.999

    Example: rowwise export runs/dlrm-synthetic/1 clicks.onnx --onnx

    Example: rowwise export runs/dlrm-synthetic/1 s3://models/clicks --kserve clicks.yaml --image registry/rowwise:1
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
    form = _format_of(onnx=onnx, pt2=pt2, mlflow=mlflow, triton=triton)
    if form is not None:
        from rowwise.recipes.formats.write import export_as

        made = export_as(
            form, run, Path(folder), which=which, rows=rows, sides=side or (), memory_bytes=size, warn=warn
        )
        _show_foreign(made, form, as_json=as_json)
        return
    if kserve is not None:
        from rowwise.cli.kserve import check_kserve

        check_kserve(kserve, folder)
    with open_store(folder, cache) as store:
        local, after = (Path(folder), 0) if store is None else (store.folder, store.begin_export(full=full))
        write = partial(
            write_version, run, local, rows=rows, sides=side or (), items=options, full=full, after=after,
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
    if kserve is not None:
        from rowwise.cli.kserve import make_service

        kserve.write_text(make_service(written.served.name, folder, str(image), written.size_bytes))
    if not as_json:
        print_line(f"serve it with: {f'kubectl apply -f {kserve}' if kserve else f'rowwise serve {folder}'}")


def versions(
    folder: ServedFolder,
    current: Annotated[int | None, typer.Option(min=1, help="Make this version the current one.")] = None,
    canary: Annotated[
        str | None, typer.Option(metavar="N=SHARE", help="Route a share of the requests to a version, such as 3=5%.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions in a folder with their digests, or choose which of them are served.

    Running servers follow within a second. --current without --canary ends the canary.

    Example: rowwise versions served/

    Example: rowwise versions served/ --canary 3=5%

    Example: rowwise versions served/ --current 3

    Example: rowwise versions s3://models/clicks
    """
    from rowwise.serve.package import find_version, list_versions, read_traffic, version_folder, write_traffic
    from rowwise.serve.traffic import Traffic

    with open_store(folder, None) as store:
        local = Path(folder)
        read = partial(read_traffic, local) if store is None else store.read_traffic
        if current is not None or canary is not None:
            number = read().current if current is None else current
            traffic = Traffic(number, None if canary is None else _parse_canary(canary))
            write_traffic(local, traffic) if store is None else store.write_traffic(traffic)
        if store is None:
            find_version(local)
            numbers, listed = list_versions(local), partial(version_folder, local)
        else:
            numbers, listed = store.numbers(), store.read_list
        digests = {number: _digest_of(listed, number) for number in numbers}
        traffic_now = read()
    if as_json:
        rows = [{"version": number, "digest": digest} for number, digest in digests.items()]
        print_json({"current": traffic_now.current, "canary": traffic_now.canary, "versions": rows})
        return
    table = make_table(("version", "", "digest"))
    for number, digest in digests.items():
        table.add_row(str(number), _role(number, traffic_now), digest)
    make_terminal().print(table, markup=False)


def _format_of(*, onnx: bool, pt2: bool, mlflow: bool, triton: bool) -> "ForeignFormat | None":
    return "onnx" if onnx else "pt2" if pt2 else "mlflow" if mlflow else "triton" if triton else None


def _show_foreign(made: "ForeignModel", form: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(made.path), "format": form, "step": made.step, "difference": made.difference})
        return
    print_line(f"wrote {made.path}: {form}, step {made.step}")
    if made.difference is not None:
        print_line(f"logits of golden rows differ by at most {made.difference:.1e}")


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
        costs_by_task = {cost.task: {"run": cost.run, "version": cost.version} for cost in costs}
        facts = {"version": written.folder.number, "path": place, "digest": written.digest}
        facts |= {"base": written.base, "retrieval": None if written.items is None else to_builtins(written.items)}
        print_json(facts | {"step": written.step, "size_bytes": written.size_bytes, "cost": costs_by_task})
        return
    size = format_bytes(written.size_bytes) + ("" if written.base is None else f" beside version {written.base}'s")
    print_line(f"wrote {place}: version {written.folder.number}, step {written.step}, {size}")
    print_line(f"digest {written.digest}")
    for line in () if written.items is None else describe_items(written.items):
        print_line(line)
    for cost in costs:
        for name in SHOWN:
            if name in cost.run:
                change = cost.version[name] - cost.run[name]
                print_line(f"{cost.task} {name}: {cost.version[name]:.5f}, {change:+.5f} against the run")
