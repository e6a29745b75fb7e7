"""What was found, as lines for people: what was measured of each table, what it is to be, and why. Pure."""

from collections.abc import Iterator

from rowwise.quantity import size
from rowwise.recipes.compress.advice import CompressionAdvice, TableAdvice


def explain(advice: CompressionAdvice) -> Iterator[str]:
    condition = f", rows with {' and '.join(advice.history)}" if advice.history else ", all training rows"
    yield f"history     of {advice.recipe}{condition}; measured on {advice.later}"
    if advice.rows is not None:
        yield f"trials      are trained on {advice.rows:,} rows at most"
    full = advice.full
    yield (
        f"whole model NE {full.ne:.5f}, log loss {full.loss:.5f}, AUC {full.auc:.5f}: the mean of {advice.seeds} "
        f"seeds, whose NE differ by {advice.noise:.5f} (standard deviation)"
    )
    for table in advice.tables:
        yield ""
        yield from _table(table, advice.noise)
    yield ""
    for left in advice.left:
        yield f"{left.name}: stays as it is, {size(left.size_bytes)}, as it {left.why}"
    yield from _whole(advice)


def of_method(table: TableAdvice) -> str:
    """What a table is to be, in a word."""
    return table.method or "as it is"


def _table(table: TableAdvice, noise: float) -> Iterator[str]:
    yield f"{table.name}: {table.ids:,} ids, {size(table.full_bytes)} as it is"
    for point in table.points:
        share = f"{point.map_bytes / point.size_bytes:4.0%} of it the map" if point.map_bytes else ""
        sizes = f"{size(point.size_bytes):>10} {table.full_bytes / point.size_bytes:6.1f}x"
        yield f"  {point.method:<20} {sizes}  NE {point.ne:+.5f}  AUC {point.auc:+.5f}  {share}".rstrip()
    if not table.method:
        yield "  to be as it is: no smaller size is worth it within the budget"
        return
    known = "as measured" if table.measured else "between two sizes that were measured"
    within = ", which is within the noise" if abs(table.ne) <= 2 * noise else ""
    yield f"  to be {table.method} in {size(table.size_bytes)}: NE {table.ne:+.5f} expected, {known}{within}"
    if table.ordered is not None:
        yield f"  neighbouring ids are alike, correlation {table.ordered:.2f}"


def _whole(advice: CompressionAdvice) -> Iterator[str]:
    sizes = f"{size(advice.size_bytes)} of {size(advice.full_bytes)}, for a budget of {size(advice.budget_bytes)}"
    error = f", and no choice among these is better by more than {advice.error:.5f}" if advice.error else ""
    yield f"all tables: {sizes}; NE {advice.ne:+.5f} expected, the sum over tables{error}"
    if advice.together is not None:
        yield f"  all as chosen in one model: NE {advice.together.ne:+.5f}, AUC {advice.together.auc:+.5f} measured"
