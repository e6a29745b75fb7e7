"""The page of an audit, as a single HTML file without script."""

from collections.abc import Sequence

from rowwise.base.quantity import DASH, format_percent
from rowwise.base.records import AuditedFile, ColumnSkew
from rowwise.report.markup import Html, note, section, tag, text, text_table, tiles
from rowwise.report.page import draw_page


def draw_audit(found: Sequence[AuditedFile], skew: Sequence[ColumnSkew]) -> str:
    """The page of `rowwise audit`."""
    facts = (
        ("recorded rows", f"{sum(one.rows for one in found):,}", ""),
        ("rows with other bits", f"{sum(one.wrong for one in found):,}", ""),
        ("columns unlike training", f"{sum(one.is_large for one in skew):,}", f"of {len(skew)}"),
    )
    files = [(str(one.file), str(one.version), f"{one.rows:,}", f"{one.wrong:,}") for one in found]
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
    """Columns that differ first."""
    lines = [
        (
            one.column,
            "unlike training" if one.is_large else "",
            *(format_percent(means.null_share) for means in (one.trained, one.recorded)),
            *(_number(means.mean) for means in (one.trained, one.recorded)),
            *(_number(means.mean_length) for means in (one.trained, one.recorded)),
        )
        for one in sorted(skew, key=lambda one: not one.is_large)
    ]
    pairs = (f"{what}, {where}" for what in ("Null", "Mean", "Length") for where in ("training", "requests"))
    return text_table(("Column", "", *pairs), lines)


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.4g}"
