"""The sections with the environment and the recipe of a run."""

import re

from rowwise.base.quantity import format_size
from rowwise.base.textfile import parse_whole
from rowwise.report.markup import Html, join, note, section, span, tag, text
from rowwise.report.read import RecordedRun

KEY = re.compile(r"^(\s*(?:- )*)([^\s:#'\"-][^:#]*:)(?=\s|$)(.*)$")


def draw_environment(run: RecordedRun) -> Html:
    if not run.environment:
        return section("environment", "Environment", note("env.json has nothing to show."))
    facts = (
        tag("div", None, tag("dt", None, text(key)), tag("dd", None, text(_format_value(key, value))))
        for key, value in run.environment.items()
    )
    return section("environment", "Environment", tag("dl", None, *facts))


def _format_value(key: str, value: str) -> str:
    """The recorded text; byte counts get a unit."""
    return format_size(float(value)) if key.endswith("bytes") and parse_whole(value) is not None else value


def draw_recipe(run: RecordedRun) -> Html:
    """The section with the recipe's text and highlighted keys."""
    lines = run.recipe.rstrip().split("\n")
    return section("recipe", "Recipe", tag("pre", None, join(_draw_line(line) for line in lines)))


def _draw_line(line: str) -> Html:
    match = KEY.match(line)
    if not match:
        return text(line + "\n")
    indent, key, rest = match.groups()
    return join([text(indent), span("key", key), text(rest + "\n")])
