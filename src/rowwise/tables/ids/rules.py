"""Id maps that are defined by a rule, and store nothing per id. Maps in `arrays` are made from data."""

from math import isqrt
from typing import Literal

from rowwise.base.errors import SpecError
from rowwise.tables.ids.idmap import IdMap, MapPart, MapSection, MapShape

SEED_STEP = 1 << 32  # between the seeds of a map's hashes; seeds in recipes are smaller, so no two maps share a hash


def hash_map(ids: int, rows: int, seed: int = 0) -> IdMap:
    """Each id has one row, chosen by a hash."""
    _check_sizes(ids, rows, seed)
    return _make_map(ids, rows, (MapSection(kind="hash", rows=rows, seed=seed),), {"method": "hash", "seed": seed})


def double_hash_map(ids: int, rows: int, seed: int = 0, hashes: int = 2) -> IdMap:
    """Each id is the sum of several rows, each chosen by another hash among the same rows."""
    _check_sizes(ids, rows, seed)
    if not 1 < hashes <= 8:
        raise SpecError(f"{hashes} hashes of each id", "2 to 8", hint="`hash_map` has one")
    sections = (MapSection(kind="hash", rows=rows, column=c, seed=seed + c * SEED_STEP) for c in range(hashes))
    return _make_map(ids, rows, tuple(sections), {"method": "double_hash", "seed": seed, "hashes": hashes})


def quotient_remainder_map(ids: int, rows: int, seed: int = 0, combine: Literal["sum", "product"] = "sum") -> IdMap:
    """Each id has a row for its quotient and one for its remainder; no two ids have the same pair (Shi et al. 2020).

    The divisor is the largest whose quotients and remainders together fit `rows`, so that few ids share a remainder.
    Rows of quotients precede those of remainders; rows that are multiplied are two parts.
    """
    _check_sizes(ids, rows, seed)
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
    low = isqrt(ids - 1) + 1  # the sum is least at ceil(sqrt(ids)) and does not fall above it, so bisection works
    min_rows = low - (-ids // low)
    if rows < min_rows:
        raise SpecError(
            f"{rows} rows for the quotients and remainders of {ids} ids",
            f"at least {min_rows}, about twice the square root of the ids, or another kind of map",
        )
    high = min(rows, ids)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle - (-ids // middle) <= rows else (low, middle - 1)
    return low


def _make_map(ids: int, rows: int, sections: tuple[MapSection, ...], about: dict[str, int | str]) -> IdMap:
    return IdMap(shape=MapShape(ids=ids, parts=(MapPart(rows=rows),), sections=sections), about=dict(about))


def _check_sizes(ids: int, rows: int, seed: int) -> None:
    if ids < 1 or rows < 1 or seed < 0:
        raise SpecError(f"{ids} ids in {rows} rows with seed {seed}", "at least 1 id, 1 row and seed 0")
