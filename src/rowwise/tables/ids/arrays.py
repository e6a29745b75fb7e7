"""Id maps from arrays: sets of ids with rows of their own, or the row of each id; and maps composed of other maps.

`methods` chooses the ids. Maps in `rules` need no arrays.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.tables.ids.idmap import FoldAssignment, IdMap, MapPart, MapSection, MapShape, Words
from rowwise.tables.ids.rows import scramble
from rowwise.tables.ids.words import Ids, bits_for, low_bits_for, pack, set_words, words_for, write_set


def ranked_map(
    ids: int,
    sets: Sequence[Ids],
    rest_rows: int | Literal["own"],
    *,
    dims: Sequence[int | None] | None = None,
    seed: int = 0,
) -> IdMap:
    """A map in which the ids of some sets have rows of their own.

    Args:
        ids: the number of ids.
        sets: disjoint sets of ids, each ascending.
        rest_rows: rows that all other ids are hashed to; "own": each has its own row; 0: they have none.
        dims: a width for each set, and for the rest if it has rows; each is then a part. Empty sets have no part.
        seed: of the hash.
    """
    _check_sets(ids, sets)
    set_rows = sum(len(set_C) for set_C in sets)
    last = ids - set_rows if rest_rows == "own" else rest_rows
    counts = [*(len(set_C) for set_C in sets), last]
    if dims is not None and len(dims) != len(counts) - (rest_rows == 0):
        raise SpecError(
            f"{len(dims)} dims for {len(sets)} sets", "one for each set, and one for the other ids if they have rows"
        )
    sections: list[MapSection] = []
    words: list[Words] = []
    for index, set_C in enumerate(sets):
        if len(set_C):
            at, low_bits = sum(map(len, words)), low_bits_for(len(set_C), ids)
            base, count = sum(counts[:index]), len(set_C)
            sections.append(MapSection(kind="ranked", rows=count, base=base, at=at, count=count, low_bits=low_bits))
            words.append(write_set(set_C, ids))
    if last:
        kind = "rest" if rest_rows == "own" else "hash"
        sections.append(MapSection(kind=kind, rows=last, base=set_rows, seed=seed if kind == "hash" else 0))
    if not sections:
        raise SpecError(f"no rows for any of {ids} ids", "a set that is not empty, or rest_rows of at least 1")
    parts = (MapPart(rows=set_rows + last),)
    if dims is not None:
        parts = tuple(MapPart(rows=n, dim=dim) for n, dim in zip(counts, dims, strict=False) if n)
    return _build_map(
        MapShape(ids=ids, parts=parts, sections=tuple(sections)), words, {"method": "ranked", "seed": seed}
    )


def entry_map(ids: int, rows_N: NDArray[np.integer], rows: int, *, unseen_rows: int = 1, seed: int = 0) -> IdMap:
    """A map in which each id has its row of `rows_N`; ids with -1 are hashed to `unseen_rows` further rows.

    Without unseen ids there are no further rows; with unseen_rows=0 unseen ids have no row. The map has an entry for
    every id, or only for ids that are not -1, whichever takes fewer words; both give the same rows.
    """
    _check_entries(ids, rows_N, rows, unseen_rows)
    set_C = np.flatnonzero(rows_N >= 0)
    count, unseen = len(set_C), unseen_rows if len(set_C) < ids else 0
    about: dict[str, Any] = {"method": "entries", "seed": seed}
    parts = (MapPart(rows=rows + unseen),)
    every_bits, bits = bits_for(rows + unseen), bits_for(rows)
    all_have_rows = count == ids or unseen > 0  # an entry for every id cannot express "no row"
    if all_have_rows and count and words_for(ids, every_bits) <= set_words(count, ids, bits):
        full_N = rows_N
        if count < ids:
            full_N, unseen_C = rows_N.astype(np.int64), np.flatnonzero(rows_N < 0)
            full_N[unseen_C] = rows + (scramble(unseen_C, seed) % np.uint64(unseen)).view(np.int64)
        sections = (MapSection(kind="every", rows=rows + unseen, entry_bits=every_bits),)
        return _build_map(MapShape(ids=ids, parts=parts, sections=sections), [pack(full_N, every_bits)], about)
    listed = MapSection(
        kind="listed", rows=rows, count=count, low_bits=low_bits_for(max(1, count), ids), entry_bits=bits
    )
    rest = MapSection(kind="hash", rows=unseen, base=rows, seed=seed)
    sections = ((listed,) if count else ()) + ((rest,) if unseen else ())
    if not sections:
        raise SpecError(f"no rows for any of {ids} ids", "an id with a row, or unseen_rows of at least 1")
    words = [write_set(set_C, ids, rows_N[set_C], bits)] if count else []
    return _build_map(MapShape(ids=ids, parts=parts, sections=sections), words, about)


def add_maps(*maps: IdMap) -> IdMap:
    """A map in which each id is the sum of its rows in several maps, columns and parts one after another."""
    shapes = [id_map.shape for id_map in maps]
    if len({shape.ids for shape in shapes}) != 1 or any(shape.combine != "sum" for shape in shapes):
        got = ", ".join(f"{shape.combine} of {shape.ids} ids" for shape in shapes)
        raise SpecError(f"id maps to add up: {got or 'none'}", "sums over the same number of ids")
    offset = _Offsets(0, 0, 0)
    sections: list[MapSection] = []
    for id_map in maps:
        for section in id_map.shape.sections:
            has_words = section.kind in ("every", "ranked", "listed")
            shifted = {"base": section.base + offset.rows, "column": section.column + offset.columns}
            shifted |= {"at": section.at + offset.words} if has_words else {}
            sections.append(msgspec.structs.replace(section, **shifted))
        shape = id_map.shape
        offset = _Offsets(offset.rows + shape.rows, offset.columns + shape.columns, offset.words + len(id_map.words))
    parts = tuple(part for shape in shapes for part in shape.parts)
    shape = MapShape(ids=shapes[0].ids, parts=parts, sections=tuple(sections))
    total = _build_map(shape, [id_map.words for id_map in maps], {"method": "added", "maps": [m.about for m in maps]})
    foldings = [id_map.folding for id_map in maps if id_map.folding is not None]
    if not foldings:
        return total
    folding = foldings[0]
    if len({(f.features, f.seed, f.count) for f in foldings}) != 1:
        raise SpecError("id maps to add up: their folds of the samples differ", "the same features, seed and count")
    # A map without folds is the same in every fold.
    maps_of_folds = [fold_maps(id_map) or (id_map,) * folding.count for id_map in maps]
    fold_totals = [add_maps(*fold) for fold in zip(*maps_of_folds, strict=True)]
    return make_folds(total, fold_totals, folding.features, folding.seed)


def make_folds(id_map: IdMap, maps: Sequence[IdMap], features: Sequence[str], seed: int) -> IdMap:
    """The map with `maps`, one for each fold of the samples that trains its rows. See [Note: Folds]."""
    shape = id_map.shape
    for index, fold in enumerate(maps):
        layout = (fold.shape.ids, fold.shape.parts, fold.shape.columns, fold.shape.combine)
        if layout != (shape.ids, shape.parts, shape.columns, shape.combine):
            raise SpecError(
                f"fold {index}: {fold.shape.ids} ids in parts {fold.shape.parts}",
                f"{shape.ids} in parts {shape.parts}, as in the map",
            )
    folding = FoldAssignment(features=tuple(features), seed=seed, shapes=tuple(fold.shape for fold in maps))
    return replace(id_map, folding=folding, fold_words=tuple(fold.words for fold in maps))


def fold_maps(id_map: IdMap) -> tuple[IdMap, ...]:
    """The map of each fold; empty without folds."""
    if id_map.folding is None:
        return ()
    folds = zip(id_map.folding.shapes, id_map.fold_words, strict=True)
    return tuple(IdMap(shape=shape, words=words, about=id_map.about) for shape, words in folds)


class _Offsets(NamedTuple):
    """The rows, columns and words of the maps added so far."""

    rows: int
    columns: int
    words: int


def _build_map(shape: MapShape, words: Sequence[Words], about: dict[str, Any]) -> IdMap:
    return IdMap(shape=shape, words=np.concatenate([np.empty(0, np.int64), *words]), about=about)


def _check_sets(ids: int, sets: Sequence[Ids]) -> None:
    for index, set_C in enumerate(sets):
        ascends = set_C.dtype == np.int64 and bool((np.diff(set_C) > 0).all())
        if not ascends or (len(set_C) and not 0 <= set_C[0] <= set_C[-1] < ids):
            raise SpecError(f"set {index} of {len(sets)}", f"int64 ids of 0 to {ids - 1}, ascending, each once")
    all_C = np.sort(np.concatenate([np.empty(0, np.int64), *sets]))
    repeated_K = all_C[1:][all_C[1:] == all_C[:-1]]
    if len(repeated_K):
        raise SpecError(f"id {repeated_K[0]} is in two sets ({len(repeated_K)} such ids)", "disjoint sets")


def _check_entries(ids: int, rows_N: NDArray[np.integer], rows: int, unseen_rows: int) -> None:
    if len(rows_N) != ids or ids < 1:
        raise SpecError(f"rows_N has {len(rows_N)} entries for {ids} ids", "one for each, and at least one id")
    if rows < 1 or unseen_rows < 0:
        raise SpecError(f"rows={rows}, unseen_rows={unseen_rows}", "at least 1 row and 0 unseen rows")
    if rows_N.min() < -1 or rows_N.max() >= rows:
        bad = int(np.flatnonzero((rows_N < -1) | (rows_N >= rows))[0])
        raise SpecError(f"id {bad} has row {rows_N[bad]}", f"0 to {rows - 1}, or -1 for no row")
