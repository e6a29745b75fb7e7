"""Id maps that follow from a rule alone: nothing is stored for an id.

Apart from `placed`, whose maps follow from data.
"""

from math import isqrt
from typing import Literal

from rowwise.errors import SpecError
from rowwise.hashing.idmap import IdMap, MapPart, MapSection, MapShape

HASH_seeds = 1 << 32  # between the hashes of one seed: recipes have smaller ones


def hashed(ids: int, rows: int, seed: int = 0) -> IdMap:
    """Each id has one row, chosen by a hash."""
    _check(ids, rows, seed)
    return _one_part(ids, rows, (MapSection(kind="hash", rows=rows, seed=seed),), {"method": "hash", "seed": seed})


def double_hashed(ids: int, rows: int, seed: int = 0, hashes: int = 2) -> IdMap:
    """Each id is the sum of rows that several hashes choose of the same ones."""
    _check(ids, rows, seed)
    if not 1 < hashes <= 8:
        raise SpecError(f"{hashes} hashes of each id: want 2 to 8; `hashed` has one")
    sections = (MapSection(kind="hash", rows=rows, column=c, seed=seed + c * HASH_seeds) for c in range(hashes))
    return _one_part(ids, rows, tuple(sections), {"method": "double_hash", "seed": seed, "hashes": hashes})


def quotient_remainder(ids: int, rows: int, seed: int = 0, combine: Literal["sum", "product"] = "sum") -> IdMap:
    """Each id has a row for its quotient and one for its remainder; no two ids have the same two.

    The divisor is the largest whose quotients and remainders fit `rows` together: ids share remainders first. Source:
    Shi et al. 2020. Quotients come first, and are a part of their own where rows are multiplied.
    """
    _check(ids, rows, seed)
    divisor = _largest_divisor(ids, rows)
    quotients = -(-ids // divisor)
    sections = (
        MapSection(kind="quotient", rows=quotients, seed=seed, divisor=divisor),
        MapSection(kind="remainder", rows=divisor, base=quotients, column=1, seed=seed, divisor=divisor),
    )
    counts = (quotients + divisor,) if combine == "sum" else (quotients, divisor)
    parts = tuple(MapPart(rows=count) for count in counts)
    about = {"method": "quotient_remainder", "seed": seed, "combine": combine}
    return IdMap(shape=MapShape(ids=ids, parts=parts, sections=sections, combine=combine), about=about)


def _largest_divisor(ids: int, rows: int) -> int:
    """The largest d with d + ceil(ids / d) <= rows."""
    low = isqrt(ids - 1) + 1  # the sum is least here, and never falls from here on
    least = low - (-ids // low)
    if rows < least:
        want = f"want at least {least}, about twice the square root of the ids, or another kind of map"
        raise SpecError(f"{rows} rows for the quotients and remainders of {ids} ids: {want}")
    high = min(rows, ids)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle - (-ids // middle) <= rows else (low, middle - 1)
    return low


def _one_part(ids: int, rows: int, sections: tuple[MapSection, ...], about: dict[str, int | str]) -> IdMap:
    return IdMap(shape=MapShape(ids=ids, parts=(MapPart(rows=rows),), sections=sections), about=dict(about))


def _check(ids: int, rows: int, seed: int) -> None:
    if ids < 1 or rows < 1 or seed < 0:
        raise SpecError(f"{ids} ids in {rows} rows by seed {seed}: want at least one of each, and no negative seed")
