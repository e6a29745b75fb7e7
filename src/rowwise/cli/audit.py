"""`rowwise audit`: computes recorded answers again."""

from pathlib import Path
from typing import Annotated

import typer

from rowwise.cli.terminal import print_json, print_line
from rowwise.errors import DataError


def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of versions that was served.")],
    records: Annotated[Path, typer.Argument(help="The folder of rowwise serve --record.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Compute the recorded answers of a server again, and compare them bit by bit.

    The exit code is not 0 if one differs. Opening versions runs the transforms and models in them.

    Example: rowwise audit served/ records/
    """
    from rowwise.recipes.audit import audit as compute_again

    found = []
    for one in compute_again(folder, records):
        found.append(one)
        if not as_json:
            print_line(f"{one.file.name}: version {one.version}, {one.rows} rows, {one.wrong} differ")
    rows, wrong = sum(one.rows for one in found), sum(one.wrong for one in found)
    if as_json:
        listed = [{"file": str(o.file), "version": o.version, "rows": o.rows, "wrong": o.wrong} for o in found]
        print_json({"rows": rows, "wrong": wrong, "files": listed})
    else:
        print_line(f"{rows} recorded rows, {wrong} differ")
    if wrong:
        worst = next(one for one in found if one.wrong)
        raise DataError(f"{worst.file}: version {worst.version}, {worst.first}")
