"""The frame of all HTML pages, and the report of a run. Style and script are inlined, so a page is a single file."""

from pathlib import Path

from rowwise.base.errors import DataError
from rowwise.base.textfile import replace_file
from rowwise.report.caches import draw_caches
from rowwise.report.curves import draw_curves
from rowwise.report.explanation import draw_explanation
from rowwise.report.forecast import draw_forecast
from rowwise.report.markup import Html, join, tag, text
from rowwise.report.overview import draw_header, draw_tiles, draw_warnings
from rowwise.report.placement import draw_placement
from rowwise.report.read import RecordedRun, read_run
from rowwise.report.reliability import draw_reliability
from rowwise.report.settings import draw_environment, draw_recipe
from rowwise.report.slices import draw_slices
from rowwise.report.speed import draw_speed
from rowwise.report.tables import draw_tables
from rowwise.report.timeline import draw_timeline
from rowwise.report.towers import draw_recommended, draw_towers

HERE = Path(__file__).parent


def write(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run folder, by default as report.html inside it."""
    out = out or run / "report.html"
    write_page(out, draw_report(read_run(run)))
    return out


def draw_report(run: RecordedRun) -> str:
    top = draw_header(run), draw_tiles(run), draw_warnings(run)
    charts = draw_curves(run), draw_reliability(run), draw_speed(run), draw_timeline(run), draw_forecast(run)
    tables = draw_towers(run), draw_recommended(run), draw_tables(run), draw_caches(run), draw_placement(run.plan)
    learned = draw_slices(run), draw_explanation(run)
    return draw_page(run.name, *top, *charts, *tables, *learned, draw_environment(run), draw_recipe(run))


def draw_page(title: str, *parts: Html, script: bool = True) -> str:
    """A complete HTML page; its script shows the values under the pointer."""
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    colours = {"name": "color-scheme", "content": "light dark"}
    metadata = [tag("meta", attributes) for attributes in ({"charset": "utf-8"}, viewport, colours)]
    style = tag("style", None, Html((HERE / "page.css").read_text("utf-8")))
    head = tag("head", None, *metadata, tag("title", None, text(title)), style)
    scripts = [tag("script", None, Html((HERE / "page.js").read_text("utf-8")))] if script else []
    body = tag("body", None, tag("main", None, *parts), *scripts)
    return "<!doctype html>\n" + join([tag("html", {"lang": "en"}, head, body)]) + "\n"


def write_page(out: Path, content: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, content.encode())
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"the report was not written to {out}: {reason}", "another place") from error
