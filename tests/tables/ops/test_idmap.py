"""The operator of id maps equals its reference, for any threads, and reads nothing outside the words it is given."""

import msgspec
import numpy as np
import pytest
import torch
from conformance_idmap import arguments, check_map, every_case, some_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from rowwise.tables.ids import arrays, rules
from rowwise.tables.ids.check import find_fault
from rowwise.tables.ids.idmap import KINDS, IdMap, MapSection
from rowwise.tables.ops import reference
from rowwise.tables.ops.idmap import map_ids
from rowwise.tables.ops.reference import idmap as reference_idmap

seeds = st.integers(0, 1000)


@given(case=every_case, seed=seeds)
def test_a_map_is_what_it_promises(isa, case, seed):
    check_map(case, seed)


def test_sections_mean_the_same_to_the_reference():
    assert tuple(kind.name.lower() for kind in reference_idmap.SectionKind) == KINDS
    assert reference_idmap.SectionRow._fields == tuple(field.name for field in msgspec.structs.fields(MapSection))


def big_map() -> IdMap:
    random = np.random.default_rng(0)
    head = np.unique(random.integers(0, 100_000, 5000))
    rows_N = np.where(random.random(100_000) < 0.3, random.integers(0, 700, 100_000), -1)
    more = rules.double_hash_map(100_000, 1000), arrays.ranked_map(100_000, [np.arange(9000)], "own")
    return arrays.add_maps(arrays.ranked_map(100_000, [head], 100), arrays.entry_map(100_000, rows_N, 700), *more)


def test_rows_do_not_depend_on_threads(threads):
    id_map = big_map()
    ids_N, more = torch.from_numpy(some_ids(id_map, count=50_000)), arguments(id_map)
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(map_ids(ids_N, *more))
    assert all(torch.equal(found[0], other) for other in found)
    assert torch.equal(found[0], reference.map_ids(ids_N, *more))
    assert map_ids(ids_N[:0], *more).shape == (0, 5)


@pytest.mark.slow
def test_compilers_know_its_shape():
    id_map = big_map()
    ids_N = torch.from_numpy(some_ids(id_map))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.rowwise.map_ids.default, (ids_N, *arguments(id_map)), test_utils=checks)


def garbled(words: np.ndarray, way: str, random: np.random.Generator) -> np.ndarray:
    words = words.copy()
    if not len(words):
        return words
    at = random.integers(0, len(words), 1 + len(words) // 20)
    match way:
        case "bits":
            words[at] ^= np.left_shift(1, random.integers(0, 64, len(at)))
        case "some":
            words[at] = random.integers(-(1 << 63), 1 << 63, len(at))
        case "all":
            words[:] = random.integers(-(1 << 63), 1 << 63, len(words))
        case "ones":
            words[:] = -1
        case "zeros":
            words[:] = 0
    return words


ways = st.sampled_from(("bits", "some", "all", "ones", "zeros"))


@given(case=every_case, way=ways, seed=seeds)
@settings(max_examples=100)
def test_words_that_hold_anything_give_rows_of_the_map(isa, case, way, seed):
    id_map, shape = case.id_map, case.id_map.shape
    words = garbled(id_map.words, way, np.random.default_rng(seed))
    sections_SC, _, *more = arguments(id_map)
    ids_N = torch.from_numpy(some_ids(id_map, seed))
    found = map_ids(ids_N, sections_SC, torch.from_numpy(words), *more)
    assert -1 <= int(found.min()) <= int(found.max()) < shape.rows
    if find_fault(IdMap(shape=shape, words=words)) is None:  # no worse than before, such as other entries
        assert torch.equal(found, reference.map_ids(ids_N, sections_SC, torch.from_numpy(words), *more))


numbers = st.one_of(st.integers(-2, 70), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 2000))


@given(
    case=every_case,
    changes=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9), numbers), min_size=1, max_size=3),
    known=st.sampled_from((None, 0, -1, 1, 100, 1 << 40, (1 << 40) + 1)),
    cut=st.integers(0, 3),
)
@settings(max_examples=200)
def test_sections_that_reach_past_the_words_raise(case, changes, known, cut):
    sections_SC, words, ids, columns = arguments(case.id_map)
    for row, field, number in changes:
        sections_SC[row % len(sections_SC), field] = number
    words = words[: max(0, len(words) - cut)]
    ids_N = torch.from_numpy(some_ids(case.id_map))
    try:
        found = map_ids(ids_N, sections_SC, words, ids if known is None else known, columns)
    except RuntimeError as error:
        assert "id map" in str(error)  # noqa: PT017 - it may also give rows
        return
    last = int((sections_SC[:, 1] + sections_SC[:, 2]).max())
    assert -1 <= int(found.min()) <= int(found.max()) < last


@pytest.mark.parametrize("bad", ["ids", "sections", "words", "columns"])
def test_tensors_of_other_kinds_raise(bad):
    sections_SC, words, known, columns = arguments(rules.hash_map(100, 10))
    given_ = {"ids": torch.arange(10), "sections": sections_SC, "words": words, "columns": columns}
    wrong = {"ids": torch.zeros(10), "sections": sections_SC[:, :9], "words": words.float(), "columns": 0}
    given_[bad] = wrong[bad]
    with pytest.raises(RuntimeError, match="rowwise: "):
        map_ids(given_["ids"], given_["sections"], given_["words"], known, given_["columns"])


@pytest.mark.slow
def test_a_section_of_many_close_ids_is_found_by_counts():
    ids = 1 << 24
    set_C = np.concatenate([np.arange(5000, 60000), np.arange(ids - 40000, ids)])
    id_map = arrays.ranked_map(ids, [set_C], 0)
    found = map_ids(torch.arange(ids), *arguments(id_map)).view(-1)
    wanted = torch.full((ids,), -1)
    wanted[set_C] = torch.arange(len(set_C))
    assert torch.equal(found, wanted)
