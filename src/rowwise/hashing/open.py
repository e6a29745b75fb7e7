"""From a table of a recipe to its id map, and to the tables that are stored in its place."""

from typing import Any

import msgspec

from rowwise.errors import SpecError
from rowwise.hashing.file import load
from rowwise.hashing.idmap import IdMap, MapShape
from rowwise.hashing.rules import double_hashed, hashed, quotient_remainder
from rowwise.idmaps import DoubleHashIds, HashIds, QuotientRemainderIds, StoredIds
from rowwise.spec import Constant, Pooling, Table


def open_map(table: Table) -> IdMap | None:
    """The map that the table's `id_map` names; None: each id has its own row."""
    rule = table.id_map
    try:
        match rule:
            case None:
                return None
            case HashIds():
                return hashed(table.rows, rule.rows, rule.seed)
            case DoubleHashIds():
                return double_hashed(table.rows, rule.rows, rule.seed, rule.hashes)
            case QuotientRemainderIds():
                return quotient_remainder(table.rows, rule.rows, rule.seed, rule.combine)
            case StoredIds():
                return load(rule.file, msgspec.structs.replace(table, name=rule.table or table.name), rule.digest)
    except SpecError as error:
        raise SpecError(f"table {table.name!r}: id_map: {error}") from None


def _is_added(shape: MapShape, index: int) -> bool:
    """Whether rows of a part are added to others that an id has: then they begin at 0, and those as the table says."""
    begin = sum(part.rows for part in shape.parts[:index])
    end = begin + shape.parts[index].rows
    return all(section.column > 0 for section in shape.sections if begin <= section.base < end)


def stored_tables(table: Table, id_map: IdMap) -> tuple[Table, ...]:
    """One table for each part: as wide as the part, and as the table in all else.

    What is multiplied is looked up id by id, and its second factor begins at 1. Whoever asked knows how many ids a bag
    has, and divides.
    """
    parts, product = id_map.shape.parts, id_map.shape.combine == "product"
    pooling = Pooling.SUM if table.pooling is Pooling.MEAN else table.pooling
    found: list[Table] = []
    for index, part in enumerate(parts):
        end = f"-{index}" if len(parts) > 1 else ""
        names = tuple(name + end for name in table.features)
        dim = table.dim if part.dim is None else min(part.dim, table.dim)
        changes: dict[str, Any] = {
            "name": table.name + end,
            "rows": part.rows,
            "dim": dim,
            "features": names,
            "id_map": None,
        }
        changes["pooling"] = Pooling.SEQUENCE if product else pooling
        if product and index:
            changes["init"] = Constant(value=1.0)
        elif index and not product and _is_added(id_map.shape, index):
            changes["init"] = Constant(value=0.0)
        found.append(msgspec.structs.replace(table, **changes))
    return tuple(found)
