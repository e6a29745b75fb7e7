"""What every id map has to be, whoever made it: shapes to draw, and one check of all that is promised."""

from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st
from tables.ids.maps import direct

from rowwise.tables.ids import arrays, rules
from rowwise.tables.ids.check import find_fault
from rowwise.tables.ids.idmap import KINDS, IdMap
from rowwise.tables.ids.rows import look_up_rows
from rowwise.tables.ids.words import words_needed
from rowwise.tables.ops import reference
from rowwise.tables.ops.idmap import map_ids

FEW = (1, 2, 3, 5, 64, 65, 255, 256, 257, 1000, 3001)
MANY = (1 << 20, (1 << 31) + 5, (1 << 40) - 1)


class Case(NamedTuple):
    """A map, and whether each id has a row of it in every column."""

    id_map: IdMap
    all_ids: bool = True


def drawn_set(random: np.random.Generator, ids: int, most: int, shape: str) -> Any:
    """Ids spread over all, the first ones, the last ones or in runs."""
    count = int(random.integers(0, min(ids, most) + 1))
    if shape == "first":
        return np.arange(count)
    if shape == "last":
        return np.arange(ids - count, ids)
    if shape == "runs":
        starts = random.integers(0, ids, 1 + count // 300)
        runs = np.unique((starts[:, None] + np.arange(300)).ravel())
        return runs[runs < ids][:most]
    return np.unique(random.integers(0, ids, count))


SHAPES = ("spread", "first", "last", "runs")


@st.composite
def rule_cases(draw):
    ids, seed = draw(st.sampled_from(FEW + MANY)), draw(st.integers(0, (1 << 32) - 1))
    rows = draw(st.integers(1, 5000))
    match draw(st.sampled_from(("direct", "hashed", "double", "quotient"))):
        case "direct":
            return Case(direct(ids))
        case "hashed":
            return Case(rules.hash_map(ids, rows, seed))
        case "double":
            return Case(rules.double_hash_map(ids, rows, seed, draw(st.integers(2, 8))))
    rows += 2 * int(ids**0.5) + 2
    return Case(rules.quotient_remainder_map(ids, rows, seed, draw(st.sampled_from(("sum", "product")))))


@st.composite
def ranked_cases(draw):
    ids, shape = draw(st.sampled_from(FEW + MANY)), draw(st.sampled_from(SHAPES))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    all_C = drawn_set(random, ids, 20000, shape)
    home_C = random.integers(0, draw(st.integers(1, 3)), len(all_C))
    sets = [all_C[home_C == k] for k in range(3)]
    rest = draw(st.sampled_from((1, 7, 1000, "own", 0) if len(all_C) else (1, 7, 1000, "own")))
    dims = draw(st.sampled_from((None, (4, None, 2, 8)))) if rest else None
    return Case(arrays.ranked_map(ids, sets, rest, dims=dims, seed=draw(st.integers(0, 99))), bool(rest))


@st.composite
def entry_cases(draw):
    ids, rows = draw(st.sampled_from((*FEW, 70000))), draw(st.sampled_from((1, 2, 3, 64, 1000, 1 << 30)))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    rows_N = random.integers(0, rows, ids)
    rows_N[random.random(ids) < draw(st.sampled_from((0, 0.02, 0.5, 0.95, 1)))] = -1
    unseen = draw(st.sampled_from((1, 10) if (rows_N < 0).all() else (0, 1, 10)))
    dtype = draw(st.sampled_from((np.int64, np.int32)))
    return Case(arrays.entry_map(ids, rows_N.astype(dtype), rows, unseen_rows=unseen), unseen > 0 or rows_N.min() >= 0)


one_case = st.one_of(rule_cases(), ranked_cases(), entry_cases())


@st.composite
def added_cases(draw):
    cases = [draw(one_case)]
    ids = cases[0].id_map.shape.ids
    cases += [Case(rules.hash_map(ids, 11, 3)), Case(arrays.ranked_map(ids, [np.arange(min(ids, 9))], "own"))]
    cases = [case for case in cases if case.id_map.shape.combine == "sum"]
    return Case(arrays.add_maps(*(case.id_map for case in cases)), all(case.all_ids for case in cases))


every_case = st.one_of(one_case, added_cases())


def arguments(id_map: IdMap) -> tuple[Any, ...]:
    """What the operator takes after the ids."""
    rows = [[KINDS.index(s.kind), *msgspec.structs.astuple(s)[1:]] for s in id_map.shape.sections]
    sections_SC = torch.tensor(rows, dtype=torch.int64)
    return sections_SC, torch.from_numpy(id_map.words), id_map.shape.ids, id_map.shape.columns


def some_ids(id_map: IdMap, seed: int = 0, count: int = 500) -> np.ndarray:
    """Ids anywhere, and the first and last ones."""
    ids = id_map.shape.ids
    edges = np.arange(min(ids, 300))
    spread = np.random.default_rng(seed).integers(0, ids, count)
    return np.concatenate([spread, edges, ids - 1 - edges])


def check_map(case: Case, seed: int = 0) -> None:
    """All that is promised of it."""
    id_map, shape = case.id_map, case.id_map.shape
    assert find_fault(id_map) is None
    assert id_map.map_bytes == 8 * len(id_map.words) == 8 * sum(words_needed(s, shape.ids) for s in shape.sections)
    ids_N = some_ids(id_map, seed)
    more = arguments(id_map)
    rows_NC = map_ids(torch.from_numpy(ids_N), *more)
    _check_rows(case, rows_NC)
    assert torch.equal(rows_NC, reference.map_ids(torch.from_numpy(ids_N), *more))
    assert np.array_equal(rows_NC.numpy(), look_up_rows(id_map, ids_N))
    if shape.ids <= 1 << 31:
        assert torch.equal(rows_NC, map_ids(torch.from_numpy(ids_N.astype(np.int32)), *more))
    order_N = np.random.default_rng(seed).permutation(len(ids_N))
    assert torch.equal(rows_NC[order_N], map_ids(torch.from_numpy(ids_N[order_N]), *more))
    strange = torch.tensor([-1, shape.ids, -(1 << 63), (1 << 63) - 1, 0])
    found = map_ids(strange, *more)
    assert bool((found[:4] == -1).all())
    assert torch.equal(found[4:], map_ids(strange[4:], *more))
    assert torch.equal(found, reference.map_ids(strange, *more))
    assert np.array_equal(found.numpy(), look_up_rows(id_map, strange.numpy()))


def _check_rows(case: Case, rows_NC: torch.Tensor) -> None:
    """Each is one of a section of its column, which is in one part; none is missing that is promised."""
    shape = case.id_map.shape
    for column in range(shape.columns):
        allowed_N = rows_NC[:, column] == -1
        assert not (case.all_ids and bool(allowed_N.any()))
        for section in shape.sections:
            if section.column == column:
                number_N = rows_NC[:, column] - section.base
                allowed_N |= (number_N >= 0) & (number_N < section.rows)
        assert bool(allowed_N.all())
    assert int(rows_NC.max()) < shape.rows
