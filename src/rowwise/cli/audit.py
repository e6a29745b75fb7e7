"""`rowwise audit`: computes recorded answers again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rowwise.base.errors import DataError
from rowwise.cli.options import AsJson, HtmlFile
from rowwise.cli.plan import check_outputs, write_atomically
from rowwise.cli.terminal import print_json, print_line

if TYPE_CHECKING:
    from rowwise.base.records import ColumnSkew


def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of versions that was served.")],
    records: Annotated[Path, typer.Argument(help="The folder of rowwise serve --record.")],
    html: HtmlFile = None,
    as_json: AsJson = False,
) -> None:
    """Compute the recorded answers of a server again, and compare them bit by bit.

    The exit code is not 0 if one differs. Columns are named whose nulls, means or lengths of lists are not those of
    training: requests make them otherwise. Opening versions runs the transforms and models in them.

    Example: rowwise audit served/ records/

    Example: rowwise audit served/ records/ --html audit.html
    """
    check_outputs({"--html": html})
    from rowwise.recipes.audit import audit as compute_again
    from rowwise.recipes.audit import skew_of

    found = []
    for one in compute_again(folder, records):
        found.append(one)
        if not as_json:
            print_line(f"{one.file.name}: version {one.version}, {one.rows} rows, {one.wrong} differ")
    rows, wrong, skew = sum(one.rows for one in found), sum(one.wrong for one in found), skew_of(found)
    listed = [{"file": str(o.file), "version": o.version, "rows": o.rows, "wrong": o.wrong} for o in found]
    columns = {
        one.column: {"trained": one.trained._asdict(), "recorded": one.recorded._asdict(), "differs": one.is_large}
        for one in skew
    }
    result = {"rows": rows, "wrong": wrong, "files": listed, "columns": columns}
    if html is not None:
        from rowwise.report.audited import draw_audit

        write_atomically(html, draw_audit(found, skew))
    if as_json:
        print_json(result)
    else:
        print_line(f"{rows} recorded rows, {wrong} differ")
        for one in skew:
            if one.is_large:
                print_line(f"column {one.column!r} is not as in training: {_describe(one)}")
    if wrong:
        worst = next(one for one in found if one.wrong)
        raise DataError(f"{worst.file}: version {worst.version}, {worst.first}")


def _describe(skew: "ColumnSkew") -> str:
    """What requests have, and training had."""
    before, now = skew.trained, skew.recorded
    parts = [f"null in {now.null_share:.1%} of rows, not {before.null_share:.1%}"]
    for name, mine, theirs in (("mean", now.mean, before.mean), ("length", now.mean_length, before.mean_length)):
        if mine is not None and theirs is not None:
            parts.append(f"{name} {mine:.4g}, not {theirs:.4g}")
    return "; ".join(parts)
