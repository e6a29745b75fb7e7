"""The page of a plan: its explanation as a single HTML file without script."""

from rowwise.base.records import ExplainedPlan
from rowwise.report.markup import header, section
from rowwise.report.page import draw_page
from rowwise.report.placement import describe_plan, draw_ranks, draw_summary, draw_tables


def draw_plan(facts: ExplainedPlan) -> str:
    head = header("Plan", facts.step.hardware, describe_plan(facts))
    ranks = section("plan-ranks", "Ranks", draw_ranks(facts))
    tables = section("plan-tables", "Tables", draw_tables(facts))
    return draw_page("Plan", head, draw_summary(facts), ranks, tables, script=False)
