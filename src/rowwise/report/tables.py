"""The embedding tables: what each takes in memory and in traffic, and how its ids repeat."""

from collections.abc import Sequence

from rowwise import quantity
from rowwise.report.charts import stacked_bar
from rowwise.report.markup import Html, div, join, note, section, span, tag, text
from rowwise.report.read import RecordedRun, RecordedTable

MOST = 40
HEADS = ("Table", "Rows", "Stored", "Size", "Traffic a sample", "Different ids", "Top 1 %")
NOTE = (
    "Size: weights, then optimizer state. Traffic: bytes of rows read a sample. Different ids: part of a batch's ids "
    "that are not repeats. Top 1 %: part of all ids that the most frequent 1 % of them make up."
)


def tables(run: RecordedRun) -> Html:
    if not run.tables:
        return section("tables", "Tables", note("tables.csv has no rows, so there is nothing to show."))
    ranked = sorted(run.tables, key=lambda t: (-_known(t.weight_bytes) - _known(t.state_bytes), t.name))
    shown, left = ranked[:MOST], ranked[MOST:]
    most = (max(map(_size, shown)), max(_known(t.traffic_bytes) for t in shown))
    head = tag("tr", None, *(tag("th", None, text(name)) for name in HEADS))
    body = join(_row(table, most) for table in shown)
    grid = tag("table", {"class": "cards"}, tag("thead", None, head), tag("tbody", None, body))
    return section("tables", "Tables", _sum(run.tables), _legend(), div("wide", grid), _rest(left), note(NOTE))


def _sum(found: Sequence[RecordedTable]) -> Html:
    weights, states = sum(_known(t.weight_bytes) for t in found), sum(_known(t.state_bytes) for t in found)
    rows, traffic = sum(_known(t.rows) for t in found), sum(_known(t.traffic_bytes) for t in found)
    many = f"{len(found)} table{'s' * (len(found) > 1)} of {quantity.count(rows)} rows"
    size = f"{quantity.size(weights)} of weights and {quantity.size(states)} of optimizer state"
    return tag("p", {"class": "lead"}, text(f"{many}: {size}; a sample reads {quantity.size(traffic)}."))


def _legend() -> Html:
    entries = (("blue", "weights"), ("orange", "optimizer state"))
    made = (tag("span", {"class": "entry"}, span(f"swatch {colour}", ""), text(name)) for colour, name in entries)
    return div("legend", *made)


def _rest(left: Sequence[RecordedTable]) -> Html:
    if not left:
        return Html("")
    return note(f"The largest {MOST} are shown; {len(left)} more take {quantity.size(sum(map(_size, left)))}.")


def _row(table: RecordedTable, most: tuple[float, float]) -> Html:
    weights, state = _known(table.weight_bytes), _known(table.state_bytes)
    said = f"{table.name}: weights {quantity.size(weights)}, state {quantity.size(state)}"
    bars = (
        ("table-size", said, ((weights, "blue"), (state, "orange")), most[0], quantity.size(weights + state)),
        ("table-traffic", "", ((table.traffic_bytes, "sky"),), most[1], quantity.size(table.traffic_bytes)),
        ("table-unique", "", ((table.unique_share, "green"),), 1.0, quantity.share(table.unique_share)),
        ("table-top", "", ((table.top_share, "purple"),), 1.0, quantity.share(table.top_share)),
    )
    cells = [tag("th", {"scope": "row"}, text(table.name), _features(table))]
    cells.append(_cell("Rows", text(f"{quantity.count(table.rows)} \u00d7 {quantity.count(table.dim)}")))
    cells.append(_cell("Stored", text(table.row_type), tag("small", None, text(table.optimizer))))
    for head, (key, label, parts, whole, value) in zip(HEADS[3:], bars, strict=True):
        bar = stacked_bar(key, label or f"{table.name}: {value}", parts, whole)
        cells.append(_cell(head, tag("span", {"class": "amount"}, bar, text(value))))
    return tag("tr", None, *cells)


def _features(table: RecordedTable) -> Html:
    """The features, where they say more than the table's name."""
    names = table.features.split()
    if names in ([], [table.name]):
        return Html("")
    shown = " ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return tag("small", None, text(shown))


def _cell(head: str, *inside: Html) -> Html:
    return tag("td", {"data-head": head}, *inside)


def _size(table: RecordedTable) -> float:
    return _known(table.weight_bytes) + _known(table.state_bytes)


def _known(value: float) -> float:
    return value if quantity.usable(value) and value > 0 else 0.0
