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
from pyarrow import types

from rowwise.base.errors import DataError, RowwiseError, SpecError
from rowwise.base.textfile import decode_json, read_bytes
from rowwise.checkpoint.atomic import atomic_output
from rowwise.ingest.bags import combine_chunks, flatten_values
from rowwise.ingest.kinds import is_list
from rowwise.serve.sides import cast_keyed, read_users_parquet
from rowwise.tables.ids import semantic
from rowwise.tables.ids.native import Floats, Ints
from rowwise.tables.spec import Value

FACTS, ITEMS = "ids.json", "items.parquet"
CODES, NUMBER = "codes", "number"
MAX_DIM = 1 << 14
TINY = 1e-30
LARGEST = 1e15  # of a vector; squares of larger numbers leave no room in 32 bits


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
    spread: float  # mean square of the fit's vectors about their mean
    error: float  # mean square of what codes leave of the fit's vectors, over `spread`
    drift: float | None = None  # mean square of what codes leave of the newest appended items, over that of the fit
    sha256: dict[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of the checksums of all files."""
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
    source = file
    table = read_users_parquet(source, file)
    names = column.split(",")
    missing = [name for name in (key, *names) if name not in table.column_names]
    if missing:
        raise DataError(f"{source}: no column {missing[0]!r}; there are {', '.join(table.column_names)}")
    if not len(table):
        raise DataError(f"{source} has no rows", "at least one item")
    kind = table.schema.field(key).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    keys = cast_keyed(source, table, key, pa.schema([(key, kind)]))[key].combine_chunks()
    order_N = pc.call_function("sort_indices", [keys])
    table, keys = table.take(order_N), keys.take(order_N)
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
    """Items in the order of their keys; raises for vectors that cannot be clustered."""
    lead = f"{source}: " if source else ""
    if vectors_ND.shape[1] > MAX_DIM:
        raise DataError(f"{lead}vectors of {vectors_ND.shape[1]:,} numbers", f"at most {MAX_DIM:,}")
    bad = next((key for key in keys.to_pylist() if set(str(key)) & {"\t", "\n", "\r"}), None)
    if bad is not None:
        raise DataError(f"{lead}key {bad!r} has a tab or a line feed", "keys of one line without tabs")
    small_N = np.asarray((np.abs(vectors_ND) <= LARGEST).all(1))
    _refuse(source, keys, ~small_N, f"a number that is not finite, or beyond {LARGEST:.0e}")
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
    _check_new(out)
    narrow_ND = _prepare(items.vectors_ND, unit=options.unit)
    made = semantic.fit(narrow_ND, options.sizes, seed=options.seed, balance=options.balance)
    left = semantic.left_over(narrow_ND, made.codes_NL, made.codebooks)
    count, spread = len(items.keys), _mean_square(narrow_ND - narrow_ND.mean(0))
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
        spread=spread,
        error=_mean_square(left) / max(spread, TINY),
        sha256={},
    )
    folder = IdsFolder(facts, items.keys, made.codes_NL, semantic.number_alike(made.codes_NL), made.codebooks)
    return _write(folder, out)


def append_ids(before: IdsFolder, items: ItemVectors, out: Path) -> IdsFolder:
    """Write a folder with the items of `before`, unchanged, and the new ones of `items` behind them."""
    _check_new(out)
    facts, kind = before.facts, before.keys.type
    if items.vectors_ND.shape[1] != facts.dim:
        raise DataError(f"vectors of {items.vectors_ND.shape[1]} numbers", f"{facts.dim}, as in the fit")
    if types.is_integer(items.keys.type) != types.is_integer(kind):
        raise DataError(f"keys of {items.keys.type}", f"{kind}, as in the fit")
    try:
        keys = items.keys.cast(kind)
    except pa.ArrowInvalid as error:
        raise DataError(f"keys of {items.keys.type}: {error}", f"{kind}, as in the fit") from None
    known = pc.call_function("is_in", [keys], pc.SetLookupOptions(before.keys))
    fresh_M = np.flatnonzero(~known.to_numpy(zero_copy_only=False))
    narrow_MD = _prepare(items.vectors_ND[fresh_M], unit=facts.unit)
    codes_ML, left_MD = semantic.encode(narrow_MD, before.codebooks)
    number_M = semantic.number_alike(codes_ML, before.codes_NL)
    drift = facts.drift
    if len(fresh_M):
        drift = _mean_square(left_MD) / max(facts.error * facts.spread, TINY)
    folder = IdsFolder(
        msgspec.structs.replace(facts, items=facts.items + len(fresh_M), drift=drift),
        pa.concat_arrays([before.keys, keys.take(pa.array(fresh_M))]),
        np.concatenate((before.codes_NL, codes_ML)),
        np.concatenate((before.number_N, number_M)),
        before.codebooks,
    )
    return _write(folder, out)


def _prepare(vectors_ND: Floats, *, unit: bool) -> Floats:
    narrow_ND = semantic.narrow(vectors_ND)
    return semantic.to_unit(narrow_ND) if unit else narrow_ND


def _mean_square(vectors_ND: Floats) -> float:
    return float(np.square(vectors_ND, dtype=np.float64).mean())


def _check_new(out: Path) -> None:
    if out.exists():
        raise SpecError(f"--out {out}: it exists", "the name of a new folder: ids are written once")


def _write(ids: IdsFolder, out: Path) -> IdsFolder:
    facts = ids.facts
    with atomic_output(out) as folder:
        folder.mkdir()
        codes = pa.FixedSizeListArray.from_arrays(pa.array(ids.codes_NL.astype(np.int32).ravel()), len(facts.sizes))
        pq.write_table(pa.table({facts.key: ids.keys, CODES: codes, NUMBER: ids.number_N}), folder / ITEMS)
        keys = ids.keys.to_pylist()
        for level, centroids_KD in enumerate(ids.codebooks, 1):
            np.save(folder / f"codebook-{level}.npy", centroids_KD, allow_pickle=False)
            number_N = semantic.prefixes(ids.codes_NL, level, facts.sizes).tolist()
            lines = (f"{key}\t{number}\n" for key, number in zip(keys, number_N, strict=True))
            (folder / f"prefix-{level}.tsv").write_text("".join(lines), "utf-8", newline="\n")
        sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
        facts = msgspec.structs.replace(facts, sha256=sums)
        (folder / FACTS).write_bytes(msgspec.json.format(msgspec.json.encode(facts)))
    return ids._replace(facts=facts)


def open_ids(folder: Path) -> IdsFolder:
    """Read a folder; raises for one that is damaged."""
    expected = "a folder of rowwise sid fit"
    if not (folder / FACTS).is_file():
        raise DataError(f"{folder}: no {FACTS} in it", expected)
    try:
        facts = decode_json(read_bytes(folder / FACTS), SemanticFacts)
        levels = range(1, len(facts.sizes) + 1)
        names = {ITEMS} | {name for level in levels for name in (f"codebook-{level}.npy", f"prefix-{level}.tsv")}
        if set(facts.sha256) != names or not levels:
            raise DataError(f"{folder / FACTS} is damaged", "a checksum of each file")
        for name, checksum in facts.sha256.items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != checksum:
                raise DataError(f"{folder / name} does not match its checksum", "the file as it was written")
        codebooks = tuple(np.load(folder / f"codebook-{level}.npy", allow_pickle=False) for level in levels)
        table = pq.read_table(folder / ITEMS)
        keys, codes = table[facts.key].combine_chunks(), table[CODES].combine_chunks()
        if tuple(map(len, codebooks)) != facts.sizes or facts.items != len(table):
            raise DataError(f"{folder / FACTS} is damaged", "the sizes of its files")
    except RowwiseError:
        raise
    except (OSError, ValueError, KeyError, msgspec.MsgspecError, pa.ArrowException) as error:
        raise DataError(f"{folder}: {str(error)[:200]}", expected) from None
    codes_NL = codes.values.to_numpy().reshape(-1, len(facts.sizes)).astype(np.int64)
    return IdsFolder(facts, keys, codes_NL, table[NUMBER].to_numpy(), codebooks)


class IdsReport(Value, frozen=True, kw_only=True):
    """How good the ids of a folder are."""

    items: int
    levels: tuple[semantic.LevelUse, ...]
    unique: float  # share of the items whose codes no other item has
    largest_group: int  # items of equal codes
    error: float
    drift: float | None
    agreement: float | None  # share of a sample with the first code of their nearest item; None: no vectors
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
