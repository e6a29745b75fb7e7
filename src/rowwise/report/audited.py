"""The page of an audit, as a single HTML file without script; reads what `rowwise audit --json` prints."""

import msgspec

from rowwise.quantity import DASH, format_percent
from rowwise.report.markup import Html, note, section, tag, text, text_table, tiles
from rowwise.report.page import draw_page
from rowwise.textfile import decode_json


class DrawnMeans(msgspec.Struct, frozen=True, kw_only=True):
    """Means of a column."""

    null_share: float | None
    mean: float | None = None
    mean_length: float | None = None


class DrawnColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column as training had it, and as requests had it."""

    trained: DrawnMeans
    recorded: DrawnMeans
    differs: bool


class DrawnFile(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a version in a file."""

    file: str
    version: int
    rows: int
    wrong: int


class DrawnAudit(msgspec.Struct, frozen=True, kw_only=True):
    """An audit; unknown keys are ignored."""

    rows: int
    wrong: int
    files: tuple[DrawnFile, ...]
    columns: dict[str, DrawnColumn]


def draw_audit(content: bytes) -> str:
    """The page of `rowwise audit --json`."""
    found = decode_json(content, DrawnAudit)
    others = sum(column.differs for column in found.columns.values())
    facts = (
        ("recorded rows", f"{found.rows:,}", ""),
        ("rows with other bits", f"{found.wrong:,}", ""),
        ("columns unlike training", f"{others:,}", f"of {len(found.columns)}"),
    )
    files = [(one.file, str(one.version), f"{one.rows:,}", f"{one.wrong:,}") for one in found.files]
    return draw_page(
        "Audit",
        tag("header", None, tag("h1", None, text("Audit"))),
        tiles(facts),
        section(
            "columns",
            "Columns in training and in requests",
            _draw_columns(found),
            note(
                "A column is unlike training if its share of nulls differs by a twentieth of the rows, or a mean by a "
                "quarter of a standard deviation and more than chance explains."
            ),
        ),
        section("files", "Answers", text_table(("File", "Version", "Rows", "With other bits"), files)),
        script=False,
    )


def _draw_columns(found: DrawnAudit) -> Html:
    """Columns that differ first."""
    ordered = sorted(found.columns.items(), key=lambda item: not item[1].differs)
    lines = [
        (
            name,
            "unlike training" if column.differs else "",
            *(format_percent(one.null_share) for one in (column.trained, column.recorded)),
            *(_number(one.mean) for one in (column.trained, column.recorded)),
            *(_number(one.mean_length) for one in (column.trained, column.recorded)),
        )
        for name, column in ordered
    ]
    pairs = (f"{what}, {where}" for what in ("Null", "Mean", "Length") for where in ("training", "requests"))
    return text_table(("Column", "", *pairs), lines)


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.4g}"
