"""The section with each table's memory, traffic and repetition of ids."""

from collections.abc import Sequence

from rowwise.quantity import format_count, format_percent, format_size, is_finite
from rowwise.report.charts import draw_strip
from rowwise.report.markup import Html, data_table, legend, note, section, tag, text
from rowwise.report.read import RecordedRun, RecordedTable

MOST_TABLES = 40
HEADERS = ("Table", "Rows", "Stored", "Size", "Traffic a sample", "Different ids", "Top 1 %")
NOTE = (
    "A table has a row for each id of a column, or for several ids: the vector that the model has learned for it. "
    "Rows: how many, and how many numbers each has. Size: these numbers (weights), and what the optimizer remembers "
    "of each row. Traffic: bytes of rows read for a sample. Different ids: of the ids in a batch, how many are "
    "distinct. Top 1 %: share of the most frequent 1 % of ids in all ids."
)


def draw_tables(run: RecordedRun) -> Html:
    if not run.tables:
        return section("tables", "Tables", note("tables.csv has no rows, so there is nothing to show."))
    ranked = sorted(run.tables, key=lambda t: (-_positive(t.weight_bytes) - _positive(t.state_bytes), t.name))
    shown, omitted = ranked[:MOST_TABLES], ranked[MOST_TABLES:]
    most = (max(map(_total_bytes, shown)), max(_positive(t.traffic_bytes) for t in shown))
    grid = data_table(HEADERS, [_draw_row(table, most) for table in shown], "cards")
    colours = legend(("blue", "weights"), ("orange", "optimizer state"))
    return section("tables", "Tables", _sum_up(run.tables), colours, grid, _note_omitted(omitted), note(NOTE))


def _sum_up(tables: Sequence[RecordedTable]) -> Html:
    weights, states = sum(_positive(t.weight_bytes) for t in tables), sum(_positive(t.state_bytes) for t in tables)
    rows, traffic = sum(_positive(t.rows) for t in tables), sum(_positive(t.traffic_bytes) for t in tables)
    counts = f"{len(tables)} table{'s' * (len(tables) > 1)} of {format_count(rows)} rows"
    size = f"{format_size(weights)} of weights and {format_size(states)} of optimizer state"
    return tag("p", {"class": "lead"}, text(f"{counts}: {size}; a sample reads {format_size(traffic)}."))


def _note_omitted(omitted: Sequence[RecordedTable]) -> Html:
    if not omitted:
        return Html("")
    size = format_size(sum(map(_total_bytes, omitted)))
    return note(f"The largest {MOST_TABLES} are shown; {len(omitted)} more take {size}.")


def _draw_row(table: RecordedTable, most: tuple[float, float]) -> Html:
    weights, state = _positive(table.weight_bytes), _positive(table.state_bytes)
    size_label = f"{table.name}: weights {format_size(weights)}, state {format_size(state)}"
    bars = (
        ("table-size", size_label, ((weights, "blue"), (state, "orange")), most[0], format_size(weights + state)),
        ("table-traffic", "", ((table.traffic_bytes, "sky"),), most[1], format_size(table.traffic_bytes)),
        ("table-unique", "", ((table.unique_share, "green"),), 1.0, format_percent(table.unique_share)),
        ("table-top", "", ((table.top_share, "purple"),), 1.0, format_percent(table.top_share)),
    )
    cells = [tag("th", {"scope": "row"}, text(table.name), _draw_features(table))]
    cells.append(_draw_cell("Rows", text(f"{format_count(table.rows)} \u00d7 {format_count(table.dim)}")))
    cells.append(_draw_cell("Stored", text(table.row_type), tag("small", None, text(table.optimizer))))
    for head, (key, label, parts, whole, value) in zip(HEADERS[3:], bars, strict=True):
        bar = draw_strip(key, label or f"{table.name}: {value}", parts, whole)
        cells.append(_draw_cell(head, tag("span", {"class": "amount"}, bar, text(value))))
    return tag("tr", None, *cells)


def _draw_features(table: RecordedTable) -> Html:
    """The features, unless they are just the table's name."""
    names = table.features.split()
    if names in ([], [table.name]):
        return Html("")
    shown = " ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return tag("small", None, text(shown))


def _draw_cell(header: str, *content: Html) -> Html:
    return tag("td", {"data-head": header}, *content)


def _total_bytes(table: RecordedTable) -> float:
    return _positive(table.weight_bytes) + _positive(table.state_bytes)


def _positive(value: float) -> float:
    return value if is_finite(value) and value > 0 else 0.0
