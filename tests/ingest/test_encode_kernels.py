"""The kernels beside their definitions, on every instruction set that this processor has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingest.transform_reference import sigrid

from rowwise import DataError, SpecError
from rowwise.ingest import mix, native
from rowwise.ingest.native import Bitmap, Lists, PickedIds, RowMapping, library

WORD = (1 << 64) - 1
WHOLE = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 3)
ROWS = (
    st.integers(1, 100)
    | st.integers(1, (1 << 63) - 1)
    | st.integers(0, 62).map(lambda k: 1 << k)
    | st.integers(2, 62).map(lambda k: (1 << k) - 1)
    | st.integers(1, 62).map(lambda k: (1 << k) + 1)
)


@pytest.fixture(autouse=True, scope="module", params=[b"base", b"avx2", b"avx512"], ids=bytes.decode)
def instructions(request):
    widest = library.rw_ingest_isa()
    if not library.rw_ingest_limit(request.param):
        pytest.skip(f"this processor has no {request.param}")
    assert library.rw_ingest_isa() == request.param
    yield
    library.rw_ingest_limit(widest)


@given(st.lists(WHOLE, max_size=70), ROWS)
def test_hash_rows(ids, rows):
    ids_N = np.array(ids, np.int64)
    expected = mix.remainder(mix.mix(ids_N.view(np.uint64)), rows).tolist()
    assert native.map_ids(ids_N, RowMapping(native.HASH, rows)).tolist() == expected
    assert [int(w) % rows for w in mix.mix(ids_N.view(np.uint64))] == expected
    assert native.map_ids(ids_N, RowMapping(native.HASH, rows), out=ids_N) is ids_N
    assert ids_N.tolist() == expected


@given(st.lists(WHOLE, max_size=70), WHOLE, ROWS)
def test_sigrid_hash(ids, salt, rows):
    ids_N = np.array(ids, np.int64)
    expected = [sigrid(i, salt, rows) for i in ids]
    assert native.map_ids(ids_N, RowMapping(native.SIGRID, rows, salt)).tolist() == expected
    assert native.map_ids(ids_N.view(np.uint64), RowMapping(native.SIGRID, rows, salt), out=ids_N).tolist() == expected


@given(WHOLE, ROWS)
def test_remainders_next_to_multiples_are_exact(word, rows):
    near = word & WORD
    near -= near % rows
    words = np.array([w & WORD for w in (near - 1, near, near + 1, near + rows - 1)], np.uint64)
    found_N, _ = PickedIds(Lists(words.view(np.int64))).mapped(RowMapping(native.REMAINDER, rows))
    assert found_N.tolist() == [int(w) % rows for w in words]


BAGS = st.lists(st.lists(WHOLE, max_size=25), max_size=40)


def jagged(bags):
    offsets = np.concatenate([[0], np.cumsum([len(bag) for bag in bags], dtype=np.int64)]).astype(np.int64)
    return np.array([i for bag in bags for i in bag], np.int64), offsets


@given(BAGS, st.integers(1, 30), WHOLE, ROWS)
def test_first(bags, count, salt, rows):
    values_N, offsets_R1 = jagged(bags)
    expected_N, expected_R1 = jagged([bag[:count] for bag in bags])
    got_N, got_R1 = PickedIds(Lists(values_N, offsets_R1), first=count).mapped(RowMapping())
    assert (got_N.tolist(), got_R1.tolist()) == (expected_N.tolist(), expected_R1.tolist())
    got_N, got_R1 = PickedIds(Lists(values_N, offsets_R1), first=count).mapped(RowMapping(native.SIGRID, rows, salt))
    assert got_R1.tolist() == expected_R1.tolist()
    assert got_N.tolist() == [sigrid(i, salt, rows) for i in expected_N.tolist()]
    # Of a slice.
    got_N, got_R1 = PickedIds(Lists(values_N, offsets_R1[len(bags) // 2 :]), first=count).mapped(RowMapping())
    expected_N, expected_R1 = jagged([bag[:count] for bag in bags[len(bags) // 2 :]])
    assert (got_N.tolist(), got_R1.tolist()) == (expected_N.tolist(), expected_R1.tolist())


@given(
    bags=st.lists(st.none() | st.lists(st.none() | st.integers(0, 100), max_size=12), max_size=30),
    kind=st.sampled_from(["i1", "i2", "i4", "i8", "u1", "u2", "u4"]),
    wide=st.booleans(),
    first=st.none() | st.integers(1, 9),
    shifts=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)),
    data=st.data(),
)
def test_picked(bags, kind, wide, first, shifts, data):
    """Rows in any order or all, what is missing left out, whatever it holds, at any bit."""
    row_bit, id_bit, base = shifts
    hidden = [[1, 2, 3] if bag is None else bag for bag in bags]
    flat = [i for bag in hidden for i in bag]
    offsets = base + np.concatenate([[0], np.cumsum([len(bag) for bag in hidden], dtype=np.int64)])
    lists = Lists(
        values=np.array([7 if i is None else i for i in flat], kind),
        offsets=offsets.astype(np.int64 if wide else np.int32),
        base=base,
        row_valid=there(bags, row_bit) if None in bags or data.draw(st.booleans()) else None,
        id_valid=there(flat, id_bit) if None in flat or data.draw(st.booleans()) else None,
    )
    order = data.draw(st.none() | st.lists(st.integers(0, max(0, len(bags) - 1)), max_size=2 * len(bags)))
    picked = PickedIds(lists, None if order is None else np.array(order, np.int64), first)
    rows = bags if order is None else [bags[r] for r in order]
    expected_N, expected_R1 = jagged([[i for i in bag or [] if i is not None][:first] for bag in rows])
    assert picked.total == len(expected_N)
    out_N = np.full(picked.total + data.draw(st.integers(0, 9)), -1)
    out_R1 = np.empty(picked.rows + 1, np.int64)
    limit = data.draw(st.integers(1, 101))
    assert picked.write(RowMapping(native.CHECK, limit), out_N, out_R1) == bool((expected_N >= limit).any())
    assert (out_N[: picked.total].tolist(), out_R1.tolist()) == (expected_N.tolist(), expected_R1.tolist())
    picked.write(RowMapping(native.HASH, 97), out_N, None)
    assert out_N[: picked.total].tolist() == native.map_ids(expected_N, RowMapping(native.HASH, 97)).tolist()


def there(things, first):
    bits = np.array([False] * first + [thing is not None for thing in things], np.bool_)
    return Bitmap(np.packbits(bits, bitorder="little"), first)


@given(
    rows=st.lists(st.none() | st.integers(-100, 100), max_size=30),
    kind=st.sampled_from(["i1", "i4", "i8"]),
    data=st.data(),
)
def test_picked_single_values(rows, kind, data):
    values = np.array([9 if i is None else i for i in rows], kind)
    lists = Lists(values, row_valid=there(rows, 3) if None in rows else None)
    order = data.draw(st.none() | st.lists(st.integers(0, max(0, len(rows) - 1)), max_size=len(rows)))
    picked = PickedIds(lists, None if order is None else np.array(order, np.int64))
    taken = rows if order is None else [rows[r] for r in order]
    expected_N, expected_R1 = jagged([[] if i is None else [i] for i in taken])
    out_N, out_R1 = np.empty(picked.total, np.int64), np.empty(picked.rows + 1, np.int64)
    assert picked.write(RowMapping(native.CHECK, 101), out_N, out_R1) == bool((expected_N < 0).any())
    assert (out_N.tolist(), out_R1.tolist()) == (expected_N.tolist(), expected_R1.tolist())


def test_many_rows_in_another_order():
    """More than go through at once."""
    rng = np.random.default_rng(0)
    bags = [rng.integers(0, 1 << 40, n).tolist() for n in rng.integers(0, 40, 3000)]
    values_N, offsets_R1 = jagged(bags)
    order = rng.permutation(3000)
    for picked, moved in ((None, bags), (order, [bags[r] for r in order])):
        mapping = RowMapping(native.HASH, 1009)
        out_N, _ = PickedIds(Lists(values_N, offsets_R1), picked, 15).mapped(mapping)
        assert out_N.tolist() == native.map_ids(jagged([bag[:15] for bag in moved])[0], mapping).tolist()
    out_N, _ = PickedIds(Lists(values_N), np.argsort(values_N)).mapped(RowMapping())
    assert out_N.tolist() == sorted(values_N.tolist())


@pytest.mark.parametrize("offsets", [[0, 2, 1], [0, 9], [-1, 2], [1, 0]])
def test_offsets_outside_are_refused(offsets):
    with pytest.raises(DataError, match="outside the 3 values"):
        PickedIds(Lists(np.arange(3), np.array(offsets)), first=2)
    with pytest.raises(DataError, match="outside the 3 bytes"):
        native.mix_bytes(np.zeros(3, np.uint8), np.array(offsets))


def test_what_cannot_be_is_refused():
    with pytest.raises(SpecError, match=r"1 to 2\*\*63 -"):
        native.map_ids(np.arange(3), RowMapping(native.HASH, 0))
    with pytest.raises(SpecError, match=r"out is int64\[2\]"):
        native.map_ids(np.arange(3), RowMapping(native.HASH, 5), out=np.arange(2))
    for borders in ([1.0, 0.0], [0.0, np.nan]):
        with pytest.raises(SpecError, match="are not ascending"):
            native.bucketize(np.zeros(3), np.array(borders))
    assert not library.rw_ingest_limit(b"mmx")


FLOATS = st.floats(width=32) | st.sampled_from([-1.0, 0.0, 1.0, 0.1])


@given(
    x=st.lists(FLOATS | st.floats(), max_size=70),
    borders=st.lists(FLOATS.filter(lambda x: x == x) | st.floats(allow_nan=False), max_size=70),
    kinds=st.tuples(st.sampled_from(["f4", "f8"]), st.sampled_from(["f4", "f8"])),
)
def test_bucketize(x, borders, kinds):
    with np.errstate(over="ignore"):
        x_N, borders_K = np.array(x).astype(kinds[0]), np.sort(np.array(borders).astype(kinds[1]))
    assert native.bucketize(x_N, borders_K).tolist() == np.searchsorted(borders_K, x_N, "right").tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9, 1023, 1024, 1025])
def test_bucketize_into_many(count):
    borders_K = np.arange(count) * 2.0
    for kind in ("f4", "f8"):
        x_N = np.arange(-1, 2 * count + 2).astype(kind)
        assert native.bucketize(x_N, borders_K).tolist() == np.searchsorted(borders_K, x_N, "right").tolist()


@given(st.lists(st.binary(max_size=30), max_size=30), st.integers(0, 5))
def test_mix_bytes(texts, skip):
    data = np.frombuffer(b"-" * skip + b"".join(texts), np.uint8)
    offsets = skip + np.concatenate([[0], np.cumsum([len(t) for t in texts], dtype=np.int64)])
    expected = mix.mix_bytes(data[skip:], offsets - skip)
    assert native.mix_bytes(data, offsets.astype(np.int64)).tolist() == expected.tolist()
