"""`rowwise serve`: answers requests for predictions over HTTP."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rowwise.cli.terminal import print_line
from rowwise.errors import SpecError

PACKAGES = ("starlette", "uvicorn", "prometheus_client")


def serve(  # noqa: PLR0913 - one for each option
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that rowwise export wrote, or a version.")],
    version: Annotated[int | None, typer.Option(min=1, help="The version to serve (default: the current one).")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8080,
    expect: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="Serve a version with this digest only; see rowwise versions.")
    ] = None,
    rows_at_once: Annotated[int, typer.Option(min=1, max=65536, help="Most rows that are computed together.")] = 256,
    timeout: Annotated[
        int, typer.Option(min=1, max=3_600_000, metavar="MS", help="Milliseconds for requests that name none.")
    ] = 5000,
) -> None:
    """Answer requests for predictions over HTTP, with the bits that rowwise predict gives.

    Requests are JSON or Arrow. The server is ready when the rows that came with the version have come out right.
    Opening a version runs the transforms and models that are in it: serve only what you trust.

    Example: rowwise serve served/

    Example: rowwise serve served/ --version 2 --host 0.0.0.0 --port 9000 --timeout 50
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise SpecError(f"{', '.join(missing)} is not installed: want pip install 'rowwise[serve]'")
    from rowwise.recipes.served import open_version, read_model
    from rowwise.serve.package import find_version
    from rowwise.serve.server import bind
    from rowwise.serve.server import serve as answer
    from rowwise.serve.service import ServiceLimits

    limits = ServiceLimits(rows_at_once=rows_at_once, timeout_s=timeout / 1000)
    if expect is None:
        for code in read_model(find_version(folder, version).path).code:
            print_line(f"this version runs {code}: make sure that you trust it")
    with bind(host, port) as bound, open_version(folder, version, expect) as opened:
        if opened.identity == "close":
            print_line("this processor rounds in another way: logits are within 1e-5 of those of the export")
        answer(opened, limits, bound, lambda line: print(line, flush=True))
