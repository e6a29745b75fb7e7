"""The page of a plan: an explanation as one HTML file that needs nothing else, not even a script."""

from rowwise.report.markup import section, span, tag, text
from rowwise.report.page import page
from rowwise.report.placement import drawn_ranks, drawn_tables, explained, in_one_line, summary


def plan_page(content: str | bytes) -> str:
    """The page, from an explanation's JSON."""
    facts = explained(content)
    title = tag("h1", None, text("Plan"), span("number", facts.step.hardware))
    head = tag("header", None, title, tag("p", {"class": "when"}, text(in_one_line(facts))))
    ranks = section("plan-ranks", "Ranks", drawn_ranks(facts))
    tables = section("plan-tables", "Tables", drawn_tables(facts))
    return page("Plan", head, summary(facts), ranks, tables, script=False)
