"""Folders of semantic ids: fitted, extended and read. A folder is written once; `append` writes another.

ids/ids.json            sizes, counts and checksums
    items.parquet       key, codes (one for each level), number (of the item among those of equal codes)
    codebook-1.npy ...  centroids of each level
    prefix-1.tsv ...    key and number of its first codes, for the transform `map_id`
"""

import hashlib
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import parquet as pq

from rowwise.base.errors import DataError, SpecError
from rowwise.base.textfile import decode_json, read_bytes
from rowwise.checkpoint.atomic import atomic_output
from rowwise.ingest.bags import combine_chunks, flatten_values
from rowwise.ingest.kinds import is_list
from rowwise.serve.sides import SideTable, read_users_parquet
from rowwise.tables.ids import semantic
from rowwise.tables.ids.native import Floats, Ints
from rowwise.tables.spec import Value

FACTS, ITEMS = "ids.json", "items.parquet"
CODES, NUMBER = "codes", "number"
MAX_DIM = 1 << 14


class ItemVectors(NamedTuple):
    """Items in the order of their keys, each with a vector."""

    keys: pa.Array
    vectors_ND: Floats


class SemanticFacts(Value, frozen=True, kw_only=True):
    """The content of ids.json."""

    key: str
    vectors: str  # the source of the vectors, for people
    dim: Annotated[int, msgspec.Meta(ge=1, le=MAX_DIM)]
    sizes: tuple[int, ...]  # codes of each level
    seed: int
    balance: float | None
    unit: bool
    fitted: int  # items of the fit; later ones were appended
    items: int
    error: float  # mean square of what codes leave of the fit's vectors, over that of the vectors
    drift: float | None = None  # the same of the newest appended items, over that of the fit
    sha256: dict[str, str]

    @property
    def digest(self) -> str:
        """Of all files."""
        return hashlib.sha256(msgspec.json.encode(self.sha256, order="sorted")).hexdigest()


class IdsFolder(NamedTuple):
    """The semantic ids of a folder."""

    facts: SemanticFacts
    keys: pa.Array
    codes_NL: Ints
    number_N: Ints
    codebooks: tuple[Floats, ...]


def read_vectors(file: str, key: str, column: str) -> ItemVectors:
    """Vectors of a Parquet file: of a column of lists, or of columns of numbers between commas."""
    source = f"{file}"
    table = read_users_parquet(source, file)
    names = column.split(",")
    missing = [name for name in (key, *names) if name not in table.column_names]
    if missing:
        raise DataError(f"{source}: no column {missing[0]!r}; there are {', '.join(table.column_names)}")
    if not len(table):
        raise DataError(f"{source} has no rows", "at least one item")
    keys = table[key].combine_chunks()
    SideTable(key, pa.table({key: keys}))  # each key once, and none missing
    table = table.take(pc.call_function("sort_indices", [keys]))
    keys = table[key].combine_chunks()
    if len(names) == 1 and is_list(table[column].type):
        return sorted_items(keys, _from_lists(source, keys, table[column], column), source)
    columns = list[Floats]()
    for name in names:
        try:
            columns.append(table[name].cast(pa.float32(), safe=False).to_numpy())
        except pa.ArrowException:
            raise DataError(
                f"{source}: column {name!r} holds {table[name].type}", "numbers, or lists of them"
            ) from None
        _refuse(source, keys, table[name].is_null().to_numpy(), f"no number in column {name!r}")
    return sorted_items(keys, np.stack(columns, 1), source)


def _from_lists(source: str, keys: pa.Array, column: pa.ChunkedArray, name: str) -> Floats:
    lists = combine_chunks(column)
    _refuse(source, keys, lists.is_null().to_numpy(zero_copy_only=False), f"no vector in column {name!r}")
    values, offsets_N1 = flatten_values(lists)
    assert offsets_N1 is not None
    lengths_N = np.diff(offsets_N1)
    if values.null_count:
        null = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        item = keys[int(np.searchsorted(offsets_N1, null, "right")) - 1]
        raise DataError(f"{source}: the vector of item {item} has a null", "numbers")
    if not lengths_N[0]:
        raise DataError(f"{source}: item {keys[0]} has a vector of no numbers", "vectors of one length")
    _refuse(source, keys, lengths_N != lengths_N[0], f"a vector of another length than item {keys[0]}")
    try:
        return values.cast(pa.float32(), safe=False).to_numpy().reshape(len(keys), -1)
    except pa.ArrowException:
        raise DataError(f"{source}: column {name!r} holds {column.type}", "lists of numbers") from None


def sorted_items(keys: pa.Array, vectors_ND: Floats, source: str = "") -> ItemVectors:
    """Items in the order of their keys; raises for a vector that is not finite."""
    _refuse(source, keys, ~np.asarray(np.isfinite(vectors_ND).all(1)), "a number that is not finite")
    order_N = pc.call_function("sort_indices", [keys])
    return ItemVectors(keys.take(order_N), np.ascontiguousarray(vectors_ND[order_N.to_numpy()], np.float32))


def _refuse(source: str, keys: pa.Array, bad_N: np.ndarray, problem: str) -> None:
    if bad_N.any():
        item, more = keys[int(np.flatnonzero(bad_N)[0])], int(bad_N.sum()) - 1
        rest = f" (and {more:,} more)" if more else ""
        lead = f"{source}: " if source else ""
        raise DataError(f"{lead}item {item}{rest} has {problem}", "a vector of numbers for each item")


class FitOptions(Value, frozen=True, kw_only=True):
    """Codes of each level, and how they are fitted."""

    sizes: tuple[int, ...]
    seed: int = 0
    balance: float | None = None  # most items of a code, in means of the level
    unit: bool = False  # scale vectors to length 1 first, for cosine similarity


def fit_ids(items: ItemVectors, out: Path, key: str, vectors: str, options: FitOptions) -> IdsFolder:
    """Fit semantic ids of items with these keys and vectors, and write their folder."""
    narrow_ND = _prepare(items.vectors_ND, unit=options.unit)
    made = semantic.fit(narrow_ND, options.sizes, seed=options.seed, balance=options.balance)
    left = semantic.left_over(narrow_ND, made.codes_NL, made.codebooks)
    count = len(items.keys)
    facts = SemanticFacts(
        key=key,
        vectors=vectors,
        dim=items.vectors_ND.shape[1],
        sizes=options.sizes,
        seed=options.seed,
        balance=options.balance,
        unit=options.unit,
        fitted=count,
        items=count,
        error=_relative_error(left, narrow_ND),
        sha256={},
    )
    folder = IdsFolder(facts, items.keys, made.codes_NL, semantic.number_alike(made.codes_NL), made.codebooks)
    return _write(folder, out)


def append_ids(before: IdsFolder, items: ItemVectors, out: Path) -> IdsFolder:
    """Write a folder with the items of `before`, unchanged, and the new ones of `items` behind them."""
    facts = before.facts
    if items.vectors_ND.shape[1] != facts.dim:
        raise DataError(f"vectors of {items.vectors_ND.shape[1]} numbers", f"{facts.dim}, as in the fit")
    if items.keys.type != before.keys.type:
        raise DataError(f"keys of {items.keys.type}", f"{before.keys.type}, as in the fit")
    known = pc.call_function("is_in", [items.keys], pc.SetLookupOptions(before.keys))
    fresh_M = np.flatnonzero(~known.to_numpy(zero_copy_only=False))
    narrow_MD = _prepare(items.vectors_ND[fresh_M], unit=facts.unit)
    codes_ML, left_MD = semantic.encode(narrow_MD, before.codebooks)
    number_M = semantic.number_alike(codes_ML, before.codes_NL)
    drift = facts.drift
    if len(fresh_M):
        drift = _relative_error(left_MD, narrow_MD) / max(facts.error, np.finfo(np.float32).tiny)
    folder = IdsFolder(
        msgspec.structs.replace(facts, items=facts.items + len(fresh_M), drift=drift),
        pa.concat_arrays([before.keys, items.keys.take(pa.array(fresh_M))]),
        np.concatenate((before.codes_NL, codes_ML)),
        np.concatenate((before.number_N, number_M)),
        before.codebooks,
    )
    return _write(folder, out)


def _prepare(vectors_ND: Floats, *, unit: bool) -> Floats:
    narrow_ND = semantic.narrow(vectors_ND)
    return semantic.to_unit(narrow_ND) if unit else narrow_ND


def _relative_error(left_ND: Floats, vectors_ND: Floats) -> float:
    spread = vectors_ND - vectors_ND.mean(0)
    return float(np.square(left_ND, dtype=np.float64).sum() / max(np.square(spread, dtype=np.float64).sum(), 1e-300))


def _write(ids: IdsFolder, out: Path) -> IdsFolder:
    facts = ids.facts
    if out.exists():
        raise SpecError(f"--out {out}: it exists", "the name of a new folder: ids are written once")
    with atomic_output(out) as folder:
        folder.mkdir()
        codes = pa.FixedSizeListArray.from_arrays(pa.array(ids.codes_NL.astype(np.int32).ravel()), len(facts.sizes))
        pq.write_table(pa.table({facts.key: ids.keys, CODES: codes, NUMBER: ids.number_N}), folder / ITEMS)
        keys = [str(key) for key in ids.keys.to_pylist()]
        bad = next((key for key in keys if set(key) & {"\t", "\n", "\r"}), None)
        if bad is not None:
            raise DataError(f"key {bad!r} has a tab or a line feed", "keys of one line without tabs")
        for level, centroids_KD in enumerate(ids.codebooks, 1):
            np.save(folder / f"codebook-{level}.npy", centroids_KD, allow_pickle=False)
            number_N = semantic.prefixes(ids.codes_NL, level, facts.sizes).tolist()
            lines = (f"{key}\t{number}\n" for key, number in zip(keys, number_N, strict=True))
            (folder / f"prefix-{level}.tsv").write_text("".join(lines))
        sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
        facts = msgspec.structs.replace(facts, sha256=sums)
        (folder / FACTS).write_bytes(msgspec.json.format(msgspec.json.encode(facts)))
    return ids._replace(facts=facts)


def open_ids(folder: Path) -> IdsFolder:
    """Read a folder; raises for one that is damaged."""
    try:
        facts = decode_json(read_bytes(folder / FACTS), SemanticFacts)
        for name, expected in facts.sha256.items():
            if "/" in name or hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
                raise DataError(f"{folder / name} does not match its checksum", "the file as it was written")
        table = pq.read_table(folder / ITEMS)
        levels = range(1, len(facts.sizes) + 1)
        codebooks = tuple(np.load(folder / f"codebook-{level}.npy", allow_pickle=False) for level in levels)
    except (OSError, ValueError, msgspec.MsgspecError, pa.ArrowException) as error:
        raise DataError(f"{folder}: {str(error)[:200]}", "a folder of rowwise sid fit") from None
    codes = table[CODES].combine_chunks().values.to_numpy().reshape(-1, len(facts.sizes)).astype(np.int64)
    return IdsFolder(facts, table[facts.key].combine_chunks(), codes, table[NUMBER].to_numpy(), codebooks)


class IdsReport(Value, frozen=True, kw_only=True):
    """How good the ids of a folder are."""

    items: int
    levels: tuple[semantic.LevelUse, ...]
    unique: float  # share of the items whose codes no other item has
    largest_group: int  # items of equal codes
    error: float
    drift: float | None
    agreement: (
        float | None
    )  # share of items with the first code of their nearest item, of a sample; where vectors are known
    chance: float | None  # the same of random pairs
    digest: str


def describe_ids(ids: IdsFolder, vectors: ItemVectors | None = None) -> IdsReport:
    """Use of the codes, collisions and, with the vectors of all items, what neighbours share."""
    agreement, chance = (None, None) if vectors is None else semantic.agreement(vectors.vectors_ND, ids.codes_NL)
    return IdsReport(
        items=len(ids.keys),
        levels=tuple(semantic.use_of(ids.codes_NL, ids.facts.sizes)),
        unique=semantic.unique_share(ids.codes_NL),
        largest_group=int(ids.number_N.max()) + 1,
        error=ids.facts.error,
        drift=ids.facts.drift,
        agreement=agreement,
        chance=chance,
        digest=ids.facts.digest,
    )
