"""Checks that the sections of an id map from a file fit its words and its rows.

The kernel never reads outside the words. A damaged map would silently leave ids without rows.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from rowwise.tables.ids.arrays import fold_maps
from rowwise.tables.ids.idmap import IdMap, MapSection, MapShape
from rowwise.tables.ids.words import entry_chunks, read_set, words_needed

MAX_ids, MAX_columns, MAX_bits = 1 << 40, 256, 48  # limits of the kernels


def find_fault(id_map: IdMap) -> str | None:
    """The first fault of a map or of its folds' maps; None if all are valid."""
    fault = next(_map_faults(id_map), None)
    for index, fold in enumerate(fold_maps(id_map)):
        if fault is None and (fold.shape.parts, fold.shape.columns) != (id_map.shape.parts, id_map.shape.columns):
            fault = f"fold {index} has other parts"
        if fault is None and (fold_fault := next(_map_faults(fold), None)) is not None:
            fault = f"fold {index}: {fold_fault}"
    return fault


def _map_faults(id_map: IdMap) -> Iterator[str]:
    shape = id_map.shape
    if not 0 < shape.ids < MAX_ids or any(not 0 < part.rows <= MAX_ids or (part.dim or 1) < 1 for part in shape.parts):
        yield f"{shape.ids} ids, parts of {', '.join(str(part.rows) for part in shape.parts)} rows"
    columns = {section.column for section in shape.sections}
    if not columns or columns != set(range(len(columns))) or len(columns) > MAX_columns:
        yield f"columns {sorted(columns)}"
    for index, section in enumerate(shape.sections):
        for fault in _section_faults(section, id_map):
            yield f"section {index} ({section.kind}): {fault}"
    for column in sorted(columns):
        yield from _column_faults(column, id_map)


def _section_faults(section: MapSection, id_map: IdMap) -> Iterator[str]:
    shape = id_map.shape
    offsets = np.cumsum([0, *(part.rows for part in shape.parts)]).tolist()
    inside = any(begin <= section.base and section.base + section.rows <= end for begin, end in pairwise(offsets))
    if section.rows < 1 or not inside:
        yield f"rows {section.base} to {section.base + section.rows - 1} are not inside one part"
    numbers = (section.seed, section.at, section.count, section.low_bits, section.entry_bits)
    bits = max(section.low_bits, section.entry_bits)
    if min(numbers) < 0 or section.seed >= 1 << 63 or bits > MAX_bits or section.count > shape.ids:
        yield f"seed, at, count, low_bits, entry_bits are {numbers}"
    needs = words_needed(section, shape.ids)
    if section.at + needs > len(id_map.words):
        yield f"words {section.at} to {section.at + needs - 1} of {len(id_map.words)}"
    if not _rows_fit(section, shape):
        yield f"divisor {section.divisor} or count {section.count} does not fit {section.rows} rows"
    if section.kind in ("every", "listed"):
        max_row = max(int(chunk.max()) for chunk in entry_chunks(section, id_map.words, shape.ids))
        if max_row >= section.rows:
            yield f"an id has row {max_row}, but the section has {section.rows} rows"


def _rows_fit(section: MapSection, shape: MapShape) -> bool:
    if not 0 < section.divisor < 1 << 63:  # the kernel reads the divisor of every kind
        return False
    match section.kind:
        case "quotient":
            return (shape.ids - 1) // section.divisor < section.rows
        case "remainder":
            return section.divisor <= section.rows
        case "ranked":
            return 0 < section.count <= section.rows
        case "listed":
            return section.count > 0
        case "hash" | "every" | "rest":
            return True


def _column_faults(column: int, id_map: IdMap) -> Iterator[str]:
    """Faults that need the column's sets: damaged sets, sets that share ids, and too few rows for the rest."""
    shape = id_map.shape
    in_sets_C = np.empty(0, np.int64)
    for section in (section for section in shape.sections if section.column == column):
        if section.kind == "rest" and shape.ids - len(in_sets_C) > section.rows:
            yield f"column {column}: {shape.ids - len(in_sets_C)} ids are in no set, but have {section.rows} rows"
        if section.kind not in ("ranked", "listed"):
            continue
        set_C = read_set(section, id_map.words, shape.ids)
        if set_C is None:
            yield f"column {column}: its words do not encode a set of {section.count} ids"
            return
        in_sets_C = np.sort(np.concatenate([in_sets_C, set_C]))
        if len(in_sets_C) > 1 and bool((np.diff(in_sets_C) == 0).any()):
            yield f"column {column}: its sets share ids"
