"""Id maps from arrays: which ids have rows of their own, or which row each has; and maps made of other maps.

Apart from `rules`, whose maps hold nothing for single ids. How ids are chosen is `methods`' business.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rowwise.errors import SpecError
from rowwise.hashing.idmap import FoldAssignment, IdMap, MapPart, MapSection, MapShape, Words
from rowwise.hashing.rows import scramble
from rowwise.hashing.words import Ids, bits_for, low_bits_for, pack, set_words, words_for, write_set


def ranked_map(
    ids: int,
    sets: Sequence[Ids],
    rest_rows: int | Literal["own"],
    *,
    dims: Sequence[int | None] | None = None,
    seed: int = 0,
) -> IdMap:
    """The ids of each ascending set have rows of their own; the others are hashed to `rest_rows` rows after them.

    Or they have rows of their own too ("own"), or none (0). `dims`: one for each set and one for the rest, if that
    has rows: each is a part of that width then. Sets without ids have no part.
    """
    _check_sets(ids, sets)
    placed = sum(len(set_C) for set_C in sets)
    last = ids - placed if rest_rows == "own" else rest_rows
    counts = [*(len(set_C) for set_C in sets), last]
    if dims is not None and len(dims) != len(counts) - (rest_rows == 0):
        raise SpecError(f"{len(dims)} dims for {len(sets)} sets: want one for each, and one for a rest that has rows")
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
        sections.append(MapSection(kind=kind, rows=last, base=placed, seed=seed if kind == "hash" else 0))
    if not sections:
        raise SpecError(f"no rows for any of {ids} ids: want ids that have rows of their own, or rows for the rest")
    parts = (MapPart(rows=placed + last),)
    if dims is not None:
        parts = tuple(MapPart(rows=n, dim=dim) for n, dim in zip(counts, dims, strict=False) if n)
    return _build_map(
        MapShape(ids=ids, parts=parts, sections=tuple(sections)), words, {"method": "ranked", "seed": seed}
    )


def entry_map(ids: int, rows_N: NDArray[np.integer], rows: int, *, unseen_rows: int = 1, seed: int = 0) -> IdMap:
    """Each id has the row 0..rows-1 that is given for it; those with -1 are hashed to `unseen_rows` rows after these.

    Without such ids there are no such rows; without such rows they have none. Written for every id or for those that
    are given a row, whichever is smaller; the rows are the same.
    """
    _check_entries(ids, rows_N, rows, unseen_rows)
    set_C = np.flatnonzero(rows_N >= 0)
    count, unseen = len(set_C), unseen_rows if len(set_C) < ids else 0
    about: dict[str, Any] = {"method": "entries", "seed": seed}
    parts = (MapPart(rows=rows + unseen),)
    every_bits, bits = bits_for(rows + unseen), bits_for(rows)
    whole = count == ids or unseen > 0
    if whole and count and words_for(ids, every_bits) <= set_words(count, ids, bits):
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
        raise SpecError(f"no rows for any of {ids} ids: want ids that are given rows, or unseen_rows of at least 1")
    words = [write_set(set_C, ids, rows_N[set_C], bits)] if count else []
    return _build_map(MapShape(ids=ids, parts=parts, sections=sections), words, about)


def add_maps(*maps: IdMap) -> IdMap:
    """A map in which each id is the sum of its rows in several maps, columns and parts one after another."""
    shapes = [id_map.shape for id_map in maps]
    if len({shape.ids for shape in shapes}) != 1 or any(shape.combine != "sum" for shape in shapes):
        found = ", ".join(f"{shape.combine} of {shape.ids} ids" for shape in shapes)
        raise SpecError(f"id maps to add up: {found or 'none'}: want sums of as many ids each")
    before = _Before(0, 0, 0)
    sections: list[MapSection] = []
    for id_map in maps:
        for section in id_map.shape.sections:
            has_words = section.kind in ("every", "ranked", "listed")
            moved = {"base": section.base + before.rows, "column": section.column + before.columns}
            moved |= {"at": section.at + before.words} if has_words else {}
            sections.append(msgspec.structs.replace(section, **moved))
        shape = id_map.shape
        before = _Before(before.rows + shape.rows, before.columns + shape.columns, before.words + len(id_map.words))
    parts = tuple(part for shape in shapes for part in shape.parts)
    shape = MapShape(ids=shapes[0].ids, parts=parts, sections=tuple(sections))
    made = _build_map(shape, [id_map.words for id_map in maps], {"method": "added", "maps": [m.about for m in maps]})
    foldings = [id_map.folding for id_map in maps if id_map.folding is not None]
    if not foldings:
        return made
    if len({(one.features, one.seed, one.count) for one in foldings}) != 1:
        raise SpecError(
            "id maps to add up: they cut the samples into other folds each: want the same features and seed"
        )
    each = [fold_maps(id_map) or (id_map,) * foldings[0].count for id_map in maps]
    how = foldings[0]
    return make_folds(made, [add_maps(*some) for some in zip(*each, strict=True)], how.features, how.seed)


def make_folds(id_map: IdMap, maps: Sequence[IdMap], features: Sequence[str], seed: int) -> IdMap:
    """The map, and those that its rows are trained by, one for each fold of the samples. See [Note: Folds]."""
    shape = id_map.shape
    for index, one in enumerate(maps):
        like = (one.shape.ids, one.shape.parts, one.shape.columns, one.shape.combine)
        if like != (shape.ids, shape.parts, shape.columns, shape.combine):
            want = f"want {shape.ids} in parts {shape.parts}, as of the map"
            raise SpecError(f"fold {index}: {one.shape.ids} ids in parts {one.shape.parts}: {want}")
    folding = FoldAssignment(features=tuple(features), seed=seed, shapes=tuple(one.shape for one in maps))
    return replace(id_map, folding=folding, fold_words=tuple(one.words for one in maps))


def fold_maps(id_map: IdMap) -> tuple[IdMap, ...]:
    """The maps of folds, each as a map; none: there are no folds."""
    if id_map.folding is None:
        return ()
    both = zip(id_map.folding.shapes, id_map.fold_words, strict=True)
    return tuple(IdMap(shape=shape, words=words, about=id_map.about) for shape, words in both)


class _Before(NamedTuple):
    """Sizes of the map's sections so far."""

    rows: int
    columns: int
    words: int


def _build_map(shape: MapShape, words: Sequence[Words], about: dict[str, Any]) -> IdMap:
    return IdMap(shape=shape, words=np.concatenate([np.empty(0, np.int64), *words]), about=about)


def _check_sets(ids: int, sets: Sequence[Ids]) -> None:
    for index, set_C in enumerate(sets):
        ascends = set_C.dtype == np.int64 and bool((np.diff(set_C) > 0).all())
        if not ascends or (len(set_C) and not 0 <= set_C[0] <= set_C[-1] < ids):
            raise SpecError(f"set {index} of {len(sets)}: want int64 ids of 0 to {ids - 1}, ascending, each once")
    all_C = np.sort(np.concatenate([np.empty(0, np.int64), *sets]))
    twice_K = all_C[1:][all_C[1:] == all_C[:-1]]
    if len(twice_K):
        raise SpecError(f"id {twice_K[0]} is in two sets ({len(twice_K)} such ids): want sets that share none")


def _check_entries(ids: int, rows_N: NDArray[np.integer], rows: int, unseen_rows: int) -> None:
    if len(rows_N) != ids or ids < 1:
        raise SpecError(f"rows for {len(rows_N)} ids of {ids}: want one for each, and at least one id")
    if rows < 1 or unseen_rows < 0:
        raise SpecError(f"{rows} rows, and {unseen_rows} for ids without one: want at least 1, and at least 0")
    if rows_N.min() < -1 or rows_N.max() >= rows:
        bad = int(np.flatnonzero((rows_N < -1) | (rows_N >= rows))[0])
        raise SpecError(f"id {bad} is given row {rows_N[bad]}: want 0 to {rows - 1}, or -1 for none")
