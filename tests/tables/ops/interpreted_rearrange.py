"""The kernels that rearrange batches, in Triton's interpreter: the reference's bits, bad input, nothing shared.

`test_triton.py` runs this file with `interpreted_kernels.py`, in a process where kernels are made for the interpreter.
"""

import contextlib

import numpy as np
import pytest
import torch
from conformance_idmap import arguments, every_case, some_ids
from hypothesis import given
from interpreted_kernels import FEW, check_clean, same, watch
from rearranged import INT32, INT64, calls_on, deduplications, ids_of, newer

from rowwise.base.errors import DeviceError, IdError
from rowwise.tables.ids import arrays, rules
from rowwise.tables.ids.idmap import KINDS
from rowwise.tables.ops import reference
from rowwise.tables.ops._triton import jagged

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # by numpy, whose words wrap around


def agree(name: str, *args) -> None:
    """The launches have the reference's results, and share nothing."""
    with watch(shuffle=1) as seen:
        got = jagged.LAUNCHES[name](*args)
    check_clean(seen)
    want = getattr(reference, name)(*args)
    if not isinstance(got, tuple):
        got, want = [torch.as_tensor(got)], [torch.as_tensor(want)]
    assert all(same(*both) for both in zip(got, want, strict=True)), (name, args)


BATCHES = {
    "narrow": [ids_of(40, 4, 0, (INT32, INT32))],
    "two types": [ids_of(3, 3, 1, (INT32, INT64)), ids_of(130, 2, 2, (INT64, INT32))],
    "one id a bag": [ids_of(300, 1, 3)],
    "empty": [ids_of(0, 0, 4), ids_of(2, 0, 5)],
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", BATCHES)
def test_batches_are_rearranged(kind):
    for name, args in calls_on(BATCHES[kind]):
        agree(name, *args)


def test_ids_are_deduplicated():
    for name, args in deduplications():
        agree(name, *args)


def test_ids_of_64_bits_are_packed():
    wide, slices = torch.tensor([1 << 40, 3, (1 << 62) + 5]), torch.tensor([[0, (1 << 63) - 1]])
    agree("pack_ids", wide, torch.tensor([2, 1]), None, slices, torch.tensor([[1, 1, 0]]), 2)


@FEW
@given(case=every_case)
def test_ids_are_mapped(case):
    for kind in (torch.int64, torch.int32):
        ids_N = torch.from_numpy(some_ids(case.id_map, count=30))[:200]
        strange = torch.tensor([-1, case.id_map.shape.ids, -(1 << 63), (1 << 63) - 1])
        agree("map_ids", torch.cat([ids_N, strange]).to(kind), *arguments(case.id_map))


@pytest.mark.slow
def test_ids_are_mapped_by_every_kind_of_section():
    """Sets whose marks are in many words, entries that cross words, walks of several rounds."""
    dense = np.concatenate([np.arange(50, 9000), np.arange(12_000, 12_300)])
    rows_N = np.where(np.arange(1 << 14) % 3, -1, np.arange(1 << 14) % 700)
    maps = (
        arrays.ranked_map(1 << 14, [dense], 0),
        arrays.ranked_map(1 << 14, [dense[::7]], "own"),
        arrays.entry_map(1 << 14, rows_N, 700),
        arrays.entry_map(1 << 14, np.arange(1 << 14) % 700, 700),
        rules.double_hash_map(1 << 14, 1000),
        rules.quotient_remainder_map(1 << 14, 1000),
    )
    kinds = {section.kind for one in maps for section in one.shape.sections}
    assert kinds == set(KINDS)
    for one in maps:
        agree("map_ids", torch.arange(0, 1 << 14, 61), *arguments(one))


@pytest.mark.few(1)
@pytest.mark.parametrize("word", [0, -1, 1 << 40, -(1 << 62)])
def test_no_word_outside_a_damaged_map_is_read(word):
    random = np.random.default_rng(1)
    sets = arrays.ranked_map(3000, [np.unique(random.integers(0, 3000, 900))], 100)
    id_map = arrays.add_maps(sets, arrays.entry_map(3000, np.where(random.random(3000) < 0.3, 5, -1), 700))
    sections_SC, words, known, columns = arguments(id_map)
    words = words.clone()
    words[torch.rand(len(words)) < 0.5] = word
    with watch() as seen:
        found = jagged.map_ids(torch.arange(0, 3000, 7), sections_SC, words, known, columns)
    check_clean(seen)
    assert -1 <= int(found.min()) <= int(found.max()) < int((sections_SC[:, 1] + sections_SC[:, 2]).max())


def test_ids_outside_their_table_have_no_newer_row():
    one = BATCHES["narrow"][0]
    with pytest.raises(DeviceError, match="outside its table"):
        jagged.find_newer(*newer(one, rows=(10, 300)))
    out, fault = one.values.long().clone(), torch.zeros(3, dtype=INT32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jagged, "begin", lambda _: fault)
        patch.setattr(jagged, "end", lambda _: None)
        found = jagged.find_newer(*newer(one, rows=(10, 300)))
    n = int(one.lengths[:40].sum())
    assert torch.equal(found[:n], torch.where(out[:n] < 10, out[:n], -1))
    assert fault.tolist() == [1, 0, 0]


@pytest.mark.parametrize("bad", [-1, 10, 1 << 40])
def test_an_id_outside_its_rows_stays_outside(bad):
    """Bucketized ids are -1, which packing refuses."""
    values, lengths, rows = torch.tensor([3, bad, 9]), torch.tensor([1, 2]), torch.tensor([[0, 10]])
    with watch() as seen:
        found = jagged.bucketize(values, lengths, None, torch.tensor([[0, 5, 10]]))
    check_clean(seen)
    assert found[0].tolist() == [3, -1, 4]
    assert found[1].tolist() == [1, 1, 0, 1]
    packed = torch.tensor([[1, 0, 0]])
    for ids in (values, found[0]):
        with pytest.raises(IdError, match="id is outside"):
            jagged.pack_ids(ids, lengths, None, rows, packed, 2)
    assert not jagged.in_range(values, lengths, rows, 2)


ONE = torch.tensor([[0, 0, 1]])
WRONG_LENGTHS = ([1, 2], [5, -1], [1 << 62, 1 << 62], [1 << 62] * 4)


@pytest.mark.parametrize("lengths", WRONG_LENGTHS)
def test_wrong_lengths_are_refused_before_anything_is_read(lengths):
    ids, bags = torch.arange(4), torch.tensor(lengths)
    slices, bounds = torch.tensor([[0, 10]]), torch.tensor([[0, 5, 10]])
    calls = {
        "take": ([ids], [bags], [], ONE),
        "expand": ([ids], [bags], [], [torch.tensor([1])], torch.tensor([[0, 0]]), False),
        "pack_ids": (ids, bags, None, slices, torch.tensor([[1, 0, 0]]), 1),
        "in_range": (ids, bags, slices, 1),
        "bucketize": (ids, bags, None, bounds),
    }
    for name, args in calls.items():
        waits = contextlib.nullcontext() if name == "bucketize" else pytest.raises(RuntimeError, match="add up to 4")
        with watch() as seen, waits:
            jagged.LAUNCHES[name](*args)
        assert not [one for one in seen.launches if one.outside]


IDS, BAGS = torch.arange(4), torch.tensor([1, 3])


@pytest.mark.parametrize(
    ("field", "number", "message"),
    [(0, 7, "of kind 7"), (3, 1, "in column 1 of 1"), (1, 0, "0 rows"), (5, 0, "divisor 0"), (7, 101, "101 of 100 ids"),
     (8, 49, "49 and 0 bits"), (6, 1, "reaches past its 0 words"), (6, -1, "reaches past its 0 words")],
)  # fmt: skip
def test_sections_that_make_no_sense_are_refused(field, number, message):
    sections_SC, *more = arguments(rules.hash_map(100, 10))
    sections_SC[0, field] = number
    with pytest.raises(RuntimeError, match=f"section 0 of an id map.*{message}"):
        jagged.map_ids(torch.arange(3), sections_SC, *more)
    for known, columns in ((0, 1), (1 << 41, 1), (100, 0)):
        with pytest.raises(RuntimeError, match="an id map of"):
            jagged.map_ids(torch.arange(3), sections_SC, more[0], known, columns)
    with pytest.raises(RuntimeError, match="map_ids wants"):
        jagged.map_ids(torch.rand(3), sections_SC, *more)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("take", ([IDS], [BAGS], [], torch.tensor([[1, 0, 1]])), "no batch 1"),
        ("take", ([IDS], [BAGS], [], torch.tensor([[0, 1, 2]])), "segment 0 reaches past the 2 bags"),
        ("take", ([IDS], [BAGS], [torch.rand(3)], ONE), "3 weights for 4 values"),
        ("take", ([IDS], [], [], ONE), "1 batches of ids, 0 of bags"),
        ("expand", ([IDS], [BAGS], [], [IDS[:1] + 2], torch.tensor([[0, 0]]), False), "outside the distinct ones"),
        ("expand", ([IDS], [BAGS], [], [IDS[:1] - 1], torch.tensor([[0, 0]]), False), "outside the distinct ones"),
        ("expand", ([IDS], [BAGS], [], [IDS[:1]], torch.tensor([[0, 3]]), False), "no bags"),
        ("expand", ([IDS, IDS], [BAGS, BAGS], [], [IDS[:1], IDS[:0]], torch.tensor([[0, 0]]), False), "0 samples"),
        ("bucketize", (IDS, BAGS, None, torch.tensor([[1, 5]])), "ascend from 0"),
        ("bucketize", (IDS, BAGS, None, torch.tensor([[0, 5]] * 3)), "do not divide among 3 features"),
        ("deduplicate", (IDS, torch.tensor([0, 3])), "do not ascend from 0 to 4"),
        ("pack_ids", (IDS, BAGS, None, torch.tensor([[1, 9]]), torch.tensor([[1, 0, 0]]), 2), "slice 0 reaches past"),
        ("pack_ids", (IDS, BAGS, None, torch.tensor([[0, 9]]), torch.tensor([[2, 0, 0]]), 2), "other than 1 slices"),
        ("pack_ids", (IDS, BAGS, None, torch.tensor([[0, 9]]), torch.tensor([[1, 0, 1]]), 2), "there are none"),
        ("in_range", (IDS, BAGS, torch.tensor([[2, 9]]), 1), "no feature 2"),
        ("find_newer", (IDS, IDS, torch.tensor([[9, 9, 0, 0]]), IDS, IDS, 1), "no feature 9"),
        ("find_newer", (IDS, IDS, torch.tensor([[0, 9, 0, 5]]), IDS, IDS, 1), "no ids of feature 0"),
    ],
)
def test_wrong_arguments_are_refused(name, args, message):
    with pytest.raises(RuntimeError, match=message):
        jagged.LAUNCHES[name](*args)
