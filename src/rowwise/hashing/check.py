"""Checks an id map from a file: whether its sections fit its words and its rows.

The kernel reads nothing outside the words either way; here a map is refused that would quietly leave ids without the
rows that it promises.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from rowwise.hashing.idmap import IdMap, MapSection, MapShape
from rowwise.hashing.placed import fold_maps
from rowwise.hashing.words import each_entries, read_set, words_needed

MOST_ids, MOST_columns, MOST_bits = 1 << 40, 256, 48  # what kernels take


def fault_of(id_map: IdMap) -> str | None:
    """The fault of a map; None if it has none."""
    fault = next(_faults(id_map), None)
    for index, one in enumerate(fold_maps(id_map)):
        if fault is None and (one.shape.parts, one.shape.columns) != (id_map.shape.parts, id_map.shape.columns):
            fault = f"fold {index} has other parts"
        if fault is None and (inside := next(_faults(one), None)) is not None:
            fault = f"fold {index}: {inside}"
    return fault


def _faults(id_map: IdMap) -> Iterator[str]:
    shape = id_map.shape
    if not 0 < shape.ids < MOST_ids or any(part.rows < 1 or (part.dim or 1) < 1 for part in shape.parts):
        yield f"{shape.ids} ids, parts of {', '.join(str(part.rows) for part in shape.parts)} rows"
    columns = {section.column for section in shape.sections}
    if not columns or columns != set(range(len(columns))) or len(columns) > MOST_columns:
        yield f"columns {sorted(columns)}"
    for index, section in enumerate(shape.sections):
        for fault in _section_faults(section, id_map):
            yield f"section {index} ({section.kind}): {fault}"
    for column in sorted(columns):
        yield from _column_faults(column, id_map)


def _section_faults(section: MapSection, id_map: IdMap) -> Iterator[str]:
    shape = id_map.shape
    begins = np.cumsum([0, *(part.rows for part in shape.parts)]).tolist()
    inside = any(first <= section.base and section.base + section.rows <= last for first, last in pairwise(begins))
    if section.rows < 1 or not inside:
        yield f"rows {section.base} to {section.base + section.rows - 1} are not those of one part"
    numbers = (section.seed, section.at, section.count, section.low_bits, section.entry_bits)
    bits = max(section.low_bits, section.entry_bits)
    if min(numbers) < 0 or section.seed >= 1 << 63 or bits > MOST_bits or section.count > shape.ids:
        yield f"seed, at, count, low_bits, entry_bits are {numbers}"
    needs = words_needed(section, shape.ids)
    if section.at + needs > len(id_map.words):
        yield f"words {section.at} to {section.at + needs - 1} of {len(id_map.words)}"
    if not _numbers_fit(section, shape):
        yield f"its numbers are not below its {section.rows} rows"
    if section.kind in ("every", "listed"):
        most = max(int(some.max()) for some in each_entries(section, id_map.words, shape.ids))
        if most >= section.rows:
            yield f"an id has row {most} of its {section.rows}"


def _numbers_fit(section: MapSection, shape: MapShape) -> bool:
    match section.kind:
        case "quotient":
            return section.divisor > 0 and (shape.ids - 1) // section.divisor < section.rows
        case "remainder":
            return 0 < section.divisor <= section.rows
        case "ranked":
            return 0 < section.count <= section.rows
        case "listed":
            return section.count > 0
        case "hash" | "every" | "rest":
            return True


def _column_faults(column: int, id_map: IdMap) -> Iterator[str]:
    """Sets that are damaged, or share ids; a rest without rows."""
    shape = id_map.shape
    taken_C = np.empty(0, np.int64)
    for section in (section for section in shape.sections if section.column == column):
        if section.kind == "rest" and shape.ids - len(taken_C) > section.rows:
            yield f"column {column}: {shape.ids - len(taken_C)} other ids have {section.rows} rows"
        if section.kind not in ("ranked", "listed"):
            continue
        set_C = read_set(section, id_map.words, shape.ids)
        if set_C is None:
            yield f"column {column}: its words are no set of {section.count} ids"
            return
        taken_C = np.sort(np.concatenate([taken_C, set_C]))
        if len(taken_C) > 1 and bool((np.diff(taken_C) == 0).any()):
            yield f"column {column}: its sets share ids"
