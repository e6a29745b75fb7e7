"""`rowwise audit`: recomputes recorded answers."""

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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the served versions.")],
    records: Annotated[Path, typer.Argument(help="Folder of rowwise serve --record.")],
    html: HtmlFile = None,
    as_json: AsJson = False,
) -> None:
    """Recompute the recorded answers of a server, and compare them bit for bit.

    Exits with a code other than 0 if an answer differs. Reports training-serving skew: columns whose share of nulls,
    mean or list lengths differ from training. Opening versions runs the transforms and models in them.

    Example: rowwise audit served/ records/

    Example: rowwise audit served/ records/ --html audit.html
    """
    check_outputs({"--html": html})
    from rowwise.recipes.audit import audit as compute_again
    from rowwise.recipes.audit import skew_of

    files = []
    for audited in compute_again(folder, records):
        files.append(audited)
        if not as_json:
            print_line(f"{audited.file.name}: version {audited.version}, {audited.rows} rows, {audited.wrong} differ")
    rows, wrong, skew = sum(file.rows for file in files), sum(file.wrong for file in files), skew_of(files)
    listed = [{"file": str(o.file), "version": o.version, "rows": o.rows, "wrong": o.wrong} for o in files]
    columns = {
        column.column: {
            "trained": column.trained._asdict(),
            "recorded": column.recorded._asdict(),
            "differs": column.is_large,
        }
        for column in skew
    }
    result = {"rows": rows, "wrong": wrong, "files": listed, "columns": columns}
    if html is not None:
        from rowwise.report.audited import draw_audit

        write_atomically(html, draw_audit(files, skew))
    if as_json:
        print_json(result)
    else:
        print_line(f"{rows} recorded rows, {wrong} differ")
        for column in skew:
            if column.is_large:
                print_line(f"column {column.column!r} is not as in training: {_describe(column)}")
    if wrong:
        worst = next(file for file in files if file.wrong)
        raise DataError(f"{worst.file}: version {worst.version}, {worst.first}")


def _describe(skew: "ColumnSkew") -> str:
    """Statistics of the column in requests, against those in training."""
    before, now = skew.trained, skew.recorded
    parts = [f"null in {now.null_share:.1%} of rows, not {before.null_share:.1%}"]
    for name, current, trained in (("mean", now.mean, before.mean), ("length", now.mean_length, before.mean_length)):
        if current is not None and trained is not None:
            parts.append(f"{name} {current:.4g}, not {trained:.4g}")
    return "; ".join(parts)
