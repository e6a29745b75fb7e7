"""The page around the sections, and one run's report as a file.

Style and script are files beside this one and are put into the page, which then asks for nothing from anywhere.
"""

import contextlib
import os
from pathlib import Path

from rowwise.errors import DataError
from rowwise.report.curves import curves
from rowwise.report.forecast import forecast
from rowwise.report.markup import Html, join, tag, text
from rowwise.report.overview import header, tiles, warnings
from rowwise.report.placement import placement
from rowwise.report.read import RecordedRun, read
from rowwise.report.settings import environment, recipe
from rowwise.report.slices import slices
from rowwise.report.speed import speed
from rowwise.report.tables import tables
from rowwise.textfile import write_new

HERE = Path(__file__).parent


def write(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run folder, as report.html inside it unless told otherwise."""
    out = out or run / "report.html"
    save(out, render(read(run)))
    return out


def render(run: RecordedRun) -> str:
    parts = (curves(run), speed(run), forecast(run), tables(run), placement(run.plan), slices(run))
    return page(run.name, header(run), tiles(run), warnings(run), *parts, environment(run), recipe(run))


def page(title: str, *parts: Html, script: bool = True) -> str:
    """A page that stands alone; the script says values at the pointer."""
    head = tag(
        "head",
        None,
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("meta", {"name": "color-scheme", "content": "light dark"}),
        tag("title", None, text(title)),
        tag("style", None, Html((HERE / "page.css").read_text("utf-8"))),
    )
    after = [tag("script", None, Html((HERE / "page.js").read_text("utf-8")))] if script else []
    body = tag("body", None, tag("main", None, *parts), *after)
    return "<!doctype html>\n" + join([tag("html", {"lang": "en"}, head, body)]) + "\n"


def save(out: Path, content: str) -> None:
    """Write a file so that nobody ever reads half of it."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_new(part, content.encode())
        part.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        reason = error.strerror or error
        raise DataError(f"the report was not written to {out}: {reason}; choose another place for it") from error
