"""What a run was made of: its environment and its recipe, as they were saved."""

import re

from rowwise import quantity
from rowwise.report.markup import Html, join, note, section, span, tag, text
from rowwise.report.read import RecordedRun

KEY = re.compile(r"^(\s*(?:- )*)([^\s:#'\"-][^:#]*:)(?=\s|$)(.*)$")


def environment(run: RecordedRun) -> Html:
    if not run.environment:
        return section("environment", "Environment", note("env.json has nothing to show."))
    facts = (
        tag("div", None, tag("dt", None, text(key)), tag("dd", None, text(_value(key, value))))
        for key, value in run.environment.items()
    )
    return section("environment", "Environment", tag("dl", None, *facts))


def _value(key: str, value: str) -> str:
    """As it was saved, but for bytes, whose digits nobody counts."""
    return quantity.size(float(value)) if key.endswith("bytes") and value.isdecimal() else value


def recipe(run: RecordedRun) -> Html:
    """The section: the text as it is, its keys set apart."""
    lines = run.recipe.rstrip().split("\n")
    return section("recipe", "Recipe", tag("pre", None, join(_line(line) for line in lines)))


def _line(line: str) -> Html:
    found = KEY.match(line)
    if not found:
        return text(line + "\n")
    indent, key, rest = found.groups()
    return join([text(indent), span("key", key), text(rest + "\n")])
