"""Explains the advice in printed lines: measurements of each table, its choice, and totals."""

from collections.abc import Iterator

from rowwise.base.quantity import format_size
from rowwise.base.records import CompressionAdvice, TableAdvice


def explain_advice(advice: CompressionAdvice) -> Iterator[str]:
    condition = f", rows with {' and '.join(advice.history)}" if advice.history else ", all training rows"
    yield f"history     of {advice.recipe}{condition}; measured on {advice.later}"
    if advice.rows is not None:
        yield f"trials      train on at most {advice.rows:,} rows"
    full = advice.full
    yield (
        f"full model  NE {full.ne:.5f}, log loss {full.loss:.5f}, AUC {full.auc:.5f}: the mean of {advice.seeds} "
        f"seeds, whose NE differ by {advice.noise:.5f} (standard deviation)"
    )
    for table in advice.tables:
        yield ""
        yield from _explain_table(table, advice.noise)
    yield ""
    for left in advice.left:
        yield f"{left.name}: not compressed, {format_size(left.size_bytes)}, as it {left.why}"
    yield from _explain_total(advice)


def method_name(table: TableAdvice) -> str:
    return table.method or "uncompressed"


def _explain_table(table: TableAdvice, noise: float) -> Iterator[str]:
    yield f"{table.name}: {table.ids:,} ids, {format_size(table.full_bytes)} uncompressed"
    for point in table.points:
        map_size = f"{point.map_bytes / point.size_bytes:4.0%} in the map" if point.map_bytes else ""
        sizes = f"{format_size(point.size_bytes):>10} {table.full_bytes / point.size_bytes:6.1f}x"
        yield f"  {point.method:<20} {sizes}  NE {point.ne:+.5f}  AUC {point.auc:+.5f}  {map_size}".rstrip()
    if not table.method:
        yield "  choice: uncompressed, as no smaller size is worth it within the budget"
        return
    basis = "as measured" if table.measured else "between two measured sizes"
    within = ", which is within the noise" if abs(table.ne) <= 2 * noise else ""
    yield f"  choice: {table.method} in {format_size(table.size_bytes)}: NE {table.ne:+.5f} expected, {basis}{within}"
    if table.ordered is not None:
        yield f"  neighbouring ids are alike, correlation {table.ordered:.2f}"


def _explain_total(advice: CompressionAdvice) -> Iterator[str]:
    new, full, goal = map(format_size, (advice.size_bytes, advice.full_bytes, advice.budget_bytes))
    gap = f", at most {advice.error:.5f} above the best choice" if advice.error else ""
    yield f"all tables: {new} of {full}, for a budget of {goal}; NE {advice.ne:+.5f} expected, the sum over tables{gap}"
    if advice.together is not None:
        yield f"  all chosen tables in one model: NE {advice.together.ne:+.5f}, AUC {advice.together.auc:+.5f} measured"
