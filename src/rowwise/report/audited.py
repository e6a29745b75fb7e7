"""The page of an audit, as a single HTML file without script."""

from collections.abc import Sequence

from rowwise.base.quantity import DASH, format_percent
from rowwise.base.records import AuditedFile, ColumnSkew
from rowwise.report.markup import Html, note, section, tag, text, text_table, tiles
from rowwise.report.page import draw_page


def draw_audit(audited: Sequence[AuditedFile], skew: Sequence[ColumnSkew]) -> str:
    """The page of `rowwise audit`."""
    facts = (
        ("recorded rows", f"{sum(file.rows for file in audited):,}", ""),
        ("rows with other bits", f"{sum(file.wrong for file in audited):,}", ""),
        ("columns unlike training", f"{sum(column.is_large for column in skew):,}", f"of {len(skew)}"),
    )
    files = [(str(file.file), str(file.version), f"{file.rows:,}", f"{file.wrong:,}") for file in audited]
    return draw_page(
        "Audit",
        tag("header", None, tag("h1", None, text("Audit"))),
        tiles(facts),
        section(
            "columns",
            "Columns in training and in requests",
            _draw_columns(skew),
            note(
                "A column is unlike training if its share of nulls differs by a twentieth of the rows, or a mean by a "
                "quarter of a standard deviation and more than chance explains."
            ),
        ),
        section("files", "Answers", text_table(("File", "Version", "Rows", "With other bits"), files)),
        script=False,
    )


def _draw_columns(skew: Sequence[ColumnSkew]) -> Html:
    """A table of columns; columns with skew come first."""
    lines = [
        (
            column.column,
            "unlike training" if column.is_large else "",
            *(format_percent(means.null_share) for means in (column.trained, column.recorded)),
            *(_number(means.mean) for means in (column.trained, column.recorded)),
            *(_number(means.mean_length) for means in (column.trained, column.recorded)),
        )
        for column in sorted(skew, key=lambda column: not column.is_large)
    ]
    pairs = (f"{value}, {source}" for value in ("Null", "Mean", "Length") for source in ("training", "requests"))
    return text_table(("Column", "", *pairs), lines)


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.4g}"
