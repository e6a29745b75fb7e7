"""The section with each table's memory, traffic and repetition of ids."""

from collections.abc import Sequence

from rowwise.base.quantity import format_count, format_percent, format_size
from rowwise.report.charts import draw_amount
from rowwise.report.markup import Html, data_table, lead, legend, named_cell, note, row, section, text
from rowwise.report.read import RecordedRun, RecordedTable
from rowwise.report.scale import positive

MAX_TABLES = 40
HEADERS = ("Table", "Rows", "Stored", "Size", "Traffic a sample", "Different ids", "Top 1 %")
NOTE = (
    "A table has a row for each id of a column, or for several ids: the vector that the model has learned for it. "
    "Rows: number of rows \u00d7 numbers per row. Size: weights, and the optimizer's state of each row. Traffic: bytes "
    "of rows read per sample. Different ids: share of distinct ids in the ids of a batch. Top 1 %: share of the most "
    "frequent 1 % of ids in all ids."
)


def draw_tables(run: RecordedRun) -> Html:
    if not run.tables:
        return section("tables", "Tables", note("tables.csv has no rows, so there is nothing to show."))
    ranked = sorted(run.tables, key=lambda t: (-positive(t.weight_bytes) - positive(t.state_bytes), t.name))
    shown, omitted = ranked[:MAX_TABLES], ranked[MAX_TABLES:]
    largest = (max(map(_total_bytes, shown)), max(positive(t.traffic_bytes) for t in shown))
    grid = data_table(HEADERS, [_draw_row(table, largest) for table in shown], "cards")
    colours = legend(("blue", "weights"), ("orange", "optimizer state"))
    return section("tables", "Tables", _sum_up(run.tables), colours, grid, _note_omitted(omitted), note(NOTE))


def _sum_up(tables: Sequence[RecordedTable]) -> Html:
    weights, states = sum(positive(t.weight_bytes) for t in tables), sum(positive(t.state_bytes) for t in tables)
    rows, traffic = sum(positive(t.rows) for t in tables), sum(positive(t.traffic_bytes) for t in tables)
    counts = f"{len(tables)} table{'s' * (len(tables) > 1)} of {format_count(rows)} rows"
    size = f"{format_size(weights)} of weights and {format_size(states)} of optimizer state"
    return lead(f"{counts}: {size}; a sample reads {format_size(traffic)}.")


def _note_omitted(omitted: Sequence[RecordedTable]) -> Html:
    if not omitted:
        return Html("")
    size = format_size(sum(map(_total_bytes, omitted)))
    return note(f"The largest {MAX_TABLES} are shown; {len(omitted)} more take {size}.")


def _draw_row(table: RecordedTable, largest: tuple[float, float]) -> Html:
    """The row of a table; `largest` are the size and the traffic of full bars."""
    weights, state = positive(table.weight_bytes), positive(table.state_bytes)
    size_label = f"{table.name}: weights {format_size(weights)}, state {format_size(state)}"
    bars = (
        ("table-size", size_label, ((weights, "blue"), (state, "orange")), largest[0], format_size(weights + state)),
        ("table-traffic", "", ((table.traffic_bytes, "sky"),), largest[1], format_size(table.traffic_bytes)),
        ("table-unique", "", ((table.unique_share, "green"),), 1.0, format_percent(table.unique_share)),
        ("table-top", "", ((table.top_share, "purple"),), 1.0, format_percent(table.top_share)),
    )
    cells = [
        named_cell("Rows", text(f"{format_count(table.rows)} \u00d7 {format_count(table.dim)}")),
        named_cell("Stored", text(table.row_type), table.optimizer),
    ]
    for head, (key, label, parts, full, value) in zip(HEADERS[3:], bars, strict=True):
        cells.append(named_cell(head, draw_amount(key, label or f"{table.name}: {value}", parts, full, value)))
    return row(table.name, _list_features(table), *cells)


def _list_features(table: RecordedTable) -> str:
    """The features, unless they are just the table's name."""
    names = table.features.split()
    if names in ([], [table.name]):
        return ""
    return " ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _total_bytes(table: RecordedTable) -> float:
    return positive(table.weight_bytes) + positive(table.state_bytes)
