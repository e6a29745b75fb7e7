"""Opens the id map of a recipe's table, and derives its stored tables: a table in memory for each part of the map."""

from typing import Any

import msgspec

from rowwise.base.errors import SpecError
from rowwise.tables.idmaps import DoubleHashIds, HashIds, QuotientRemainderIds, StoredIds
from rowwise.tables.ids.file import load
from rowwise.tables.ids.idmap import IdMap, MapShape
from rowwise.tables.ids.rules import double_hash_map, hash_map, quotient_remainder_map
from rowwise.tables.spec import Constant, Pooling, Table


def open_map(table: Table) -> IdMap | None:
    """The map that the table's `id_map` names; None if each id has its own row."""
    source = table.id_map
    try:
        match source:
            case None:
                return None
            case HashIds():
                return hash_map(table.rows, source.rows, source.seed)
            case DoubleHashIds():
                return double_hash_map(table.rows, source.rows, source.seed, source.hashes)
            case QuotientRemainderIds():
                return quotient_remainder_map(table.rows, source.rows, source.seed, source.combine)
            case StoredIds():
                return load(source.file, msgspec.structs.replace(table, name=source.table or table.name), source.digest)
    except SpecError as error:
        raise SpecError(f"table {table.name!r}: id_map: {error}") from None


def stored_tables(table: Table, id_map: IdMap) -> tuple[Table, ...]:
    """A table for each part of the map, with the part's rows and dim and the other settings of `table`."""
    parts, product = id_map.shape.parts, id_map.shape.combine == "product"
    # `combine` computes means, as it knows the ids of each bag, and products, which need a vector for each id.
    sum_pooling = Pooling.SUM if table.pooling is Pooling.MEAN else table.pooling
    pooling = Pooling.SEQUENCE if product else sum_pooling
    tables: list[Table] = []
    for index, part in enumerate(parts):
        suffix = f"-{index}" if len(parts) > 1 else ""
        changes: dict[str, Any] = {
            "name": table.name + suffix,
            "rows": part.rows,
            "dim": table.dim if part.dim is None else min(part.dim, table.dim),
            "features": tuple(name + suffix for name in table.features),
            "id_map": None,
            "pooling": pooling,
        }
        # Initially the first row of an id is its whole vector: later factors are 1, later summands 0.
        if product and index:
            changes["init"] = Constant(value=1.0)
        elif index and not product and _is_summand(id_map.shape, index):
            changes["init"] = Constant(value=0.0)
        tables.append(msgspec.structs.replace(table, **changes))
    return tuple(tables)


def _is_summand(shape: MapShape, index: int) -> bool:
    """Whether rows of a part are only added to a row that the id has in column 0."""
    begin = sum(part.rows for part in shape.parts[:index])
    end = begin + shape.parts[index].rows
    return all(section.column > 0 for section in shape.sections if begin <= section.base < end)
