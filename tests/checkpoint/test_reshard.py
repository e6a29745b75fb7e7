"""The pure parts, against a plain dense tensor: who writes what, what is copied where, and which covers are whole."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import RowType
from rowwise.checkpoint.assign import MIN_CHUNK_bytes, assign_rows
from rowwise.checkpoint.manifest import TensorChunk, TensorEntry, find_coverage_fault
from rowwise.checkpoint.reshard import copy_regions, stored_spans
from rowwise.tables.ops.rowtype import pack, unpack
from rowwise.tables.spec import row_bytes


def piece(rows, cols):
    return TensorChunk(rows=rows, cols=cols, file="f", key="k", crc32=0)


@st.composite
def covers(draw, unit=1):
    """A tensor's shape, and rectangles that cover it: cut in two again and again."""
    rows, blocks = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    found, left = [], [((0, rows), (0, blocks))]
    while left:
        (top, bottom), (first, last) = left.pop()
        way = draw(st.sampled_from(["rows", "columns", "stay", "stay"]))
        if way == "rows" and bottom - top > 1:
            cut = draw(st.integers(top + 1, bottom - 1))
            left += [((top, cut), (first, last)), ((cut, bottom), (first, last))]
        elif way == "columns" and last - first > 1:
            cut = draw(st.integers(first + 1, last - 1))
            left += [((top, bottom), (first, cut)), ((top, bottom), (cut, last))]
        else:
            found.append(((top, bottom), (first * unit, last * unit)))
    return (rows, blocks * unit), found


def entry_of(shape, rectangles, **kind):
    pieces = tuple(piece(rows, None if cols == (0, shape[1]) else cols) for rows, cols in rectangles)
    return TensorEntry(dtype="uint8", shape=shape, chunks=pieces, **kind)


@st.composite
def spans(draw, size, unit=1):
    begin = draw(st.integers(0, size // unit))
    return begin * unit, draw(st.integers(begin, size // unit)) * unit


@given(covers(), st.data())
def test_what_is_copied_is_what_was_asked_for(cover, data):
    shape, rectangles = cover
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    rows, cols = data.draw(spans(shape[0])), data.draw(spans(shape[1]))
    out = torch.full((rows[1] - rows[0], cols[1] - cols[0]), -1)
    for copy in copy_regions(entry_of(shape, rectangles), rows, cols):
        theirs = copy.chunk.cols or (0, shape[1])
        held = whole[slice(*copy.chunk.rows), slice(*theirs)]
        target = out[slice(*copy.rows_to), slice(*copy.cols_to)]
        assert (target == -1).all(), "each place once"
        target.copy_(held[slice(*copy.rows_from), slice(*copy.cols_from)])
    assert torch.equal(out, whole[slice(*rows), slice(*cols)])


@given(st.integers(1, 5), st.sampled_from([16, 32]), st.integers(0, 15), st.data())
def test_columns_of_int8_rows_are_their_scales_and_codes(groups, group, short, data):
    dim = groups * group - short
    weights = torch.randn(3, dim)
    packed = pack(weights, RowType.INT8, group)
    first = data.draw(st.integers(0, groups - 1))
    last = data.draw(st.integers(first + 1, groups))
    cols = first * group, min(dim, last * group)
    entry = TensorEntry(dtype="uint8", shape=(3, dim), row_type=RowType.INT8, column_group=group)
    width = cols[1] - cols[0]
    out = torch.zeros(3, row_bytes(RowType.INT8, width, group), dtype=torch.uint8)
    for source, target in zip(stored_spans(entry, dim, cols), stored_spans(entry, width, (0, width)), strict=True):
        out[:, slice(*target)] = packed[:, slice(*source)]
    want = unpack(packed, dim, RowType.INT8, group)[:, slice(*cols)]
    assert torch.equal(unpack(out, width, RowType.INT8, group), want)


@given(covers(), st.randoms())
def test_a_cover_is_whole_in_any_order(cover, chance):
    shape, rectangles = cover
    chance.shuffle(rectangles)
    entry = entry_of(shape, rectangles)
    assert find_coverage_fault(entry, entry.chunks) is None


@given(covers(), st.data())
def test_a_hole_and_an_overlap_are_found_and_named(cover, data):
    shape, rectangles = cover
    k = data.draw(st.integers(0, len(rectangles) - 1))
    entry = entry_of(shape, rectangles[:k] + rectangles[k + 1 :])
    assert "no chunk" in find_coverage_fault(entry, entry.chunks)
    entry = entry_of(shape, [*rectangles, rectangles[k]])
    assert "two chunks" in find_coverage_fault(entry, entry.chunks)
    (top, bottom), cols = rectangles[k]
    entry = entry_of(shape, [*rectangles[:k], ((top, bottom + 1), cols), *rectangles[k + 1 :]])
    assert find_coverage_fault(entry, entry.chunks)


@pytest.mark.parametrize(
    ("rectangles", "want"),
    [
        ([((0, 4), (0, 3)), ((4, 6), (0, 6))], "rows 0 to 3, columns 3 to 5 are in no chunk"),
        ([((0, 4), (0, 6)), ((3, 6), (2, 6))], "rows 3 to 3, columns 2 to 5 are in two chunks"),
        ([((1, 6), (0, 6))], "rows 0 to 0 are in no chunk"),
        ([((0, 5), (0, 6))], "rows 5 to 5 are in no chunk"),
        ([((0, 7), (0, 6))], "rows 6 to 6 are outside of its shape"),
        ([((0, 6), (0, 7))], "rows 0 to 5, columns 6 to 6 are outside of its shape"),
    ],
)
def test_a_wrong_cover_in_words(rectangles, want):
    entry = entry_of((6, 6), rectangles)
    assert want in find_coverage_fault(entry, entry.chunks)


def run_of(most):
    return st.tuples(st.integers(0, most), st.integers(0, most)).map(sorted).map(tuple)


@given(st.integers(0, 4), st.integers(1, 4), st.lists(st.tuples(run_of(5), run_of(5)), max_size=5))
def test_a_cover_is_whole_if_each_place_is_in_one_piece(rows, columns, rectangles):
    entry = entry_of((rows, columns), rectangles)
    times, wanted = np.zeros((6, 6), int), np.zeros((6, 6), int)
    wanted[:rows, :columns] = 1
    for begin, end in rectangles:
        times[slice(*begin), slice(*end)] += 1
    said = find_coverage_fault(entry, entry.chunks)
    assert (said is None) == np.array_equal(times, wanted)
    if said is not None:
        row, col = np.argwhere(times != wanted)[0].tolist()
        more = times[row, col] > 1
        want = "outside of its shape" if not wanted[row, col] else "two chunks" if more else "no chunk"
        assert said.startswith(f"rows {row} to ")
        assert f"columns {col} to " in said or "columns" not in said
        assert want in said


@pytest.mark.slow
def test_odd_pieces_take_the_time_of_sorting():
    """As it was: each cut of rows looked at each of the columns, for hours."""
    size = 50_000
    columns = [((0, size), (col, col + 1)) for col in range(1, size)]
    entry = entry_of((size, size), [*columns, *(((row, row + 1), (0, 1)) for row in range(size))])
    begin_s = time.process_time()
    assert find_coverage_fault(entry, entry.chunks) is None
    assert "two chunks" in find_coverage_fault(entry, [*entry.chunks, entry.chunks[7]])
    assert time.process_time() - begin_s < 60  # a second on a quiet machine


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([0, 4, 256, 4096])), max_size=8),
    st.lists(st.integers(0, 30 << 20), min_size=1, max_size=6),
)
def test_shares_are_whole_and_even(sizes, loads_W):
    dealt = assign_rows(sizes, loads_W)
    assert dealt == assign_rows(sizes, loads_W)
    total_W = list(loads_W)
    for (rows, each), cuts in zip(sizes, dealt, strict=True):
        assert [begin for _, begin, _ in cuts] == [0, *(end for _, _, end in cuts[:-1])]
        assert cuts[-1][2] == rows
        assert all((end - begin) * each >= MIN_CHUNK_bytes for _, begin, end in cuts) or len(cuts) == 1
        for rank, begin, end in cuts:
            total_W[rank] += (end - begin) * each
    # As even as the loads allow, but for what is too short to be cut.
    level = max([max(loads_W), -(-sum(total_W) // len(total_W))])
    assert max(total_W) <= level + MIN_CHUNK_bytes * 2 + 4096
