"""The items of a version: their keys and vectors, and an index that proposes some of them to a query.

    retrieval/retrieval.json   facts and checksums of the other files, and the recall of the index
              items.parquet    the raw columns of the items, one row each
              items.vectors    their vectors: [items, dim] in 32 bits
              items.faiss      the index, for many items

All are in the digest of the version. Without --expect they are checked against retrieval.json.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, final

import msgspec
import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet as pq
from torch import Tensor

from rowwise.base.errors import CheckpointError
from rowwise.base.textfile import decode_json, read_bytes
from rowwise.base.value import MAX_DIM, MAX_STEPS
from rowwise.checkpoint.read import DamagedChunk
from rowwise.ingest.unpacked import read_parquet
from rowwise.models.retrieval import nearest_items
from rowwise.serve.contents import LIST, StoredFile, find_changes, read_files, reading_export
from rowwise.serve.item_index import ItemIndex
from rowwise.serve.item_scan import ItemFilter, ItemScan, NearItems
from rowwise.serve.sides import SideTable
from rowwise.tables.spec import Value

RETRIEVAL, FACTS, ITEMS, VECTORS, INDEX = (
    "retrieval", "retrieval.json", "items.parquet", "items.vectors", "items.faiss",
)  # fmt: skip
POSITION = "place"
CHECK_rows = 1 << 16  # vectors per block of the check for finite values
OVERSAMPLING = 2  # candidates from the index per requested item


class MeasuredRecall(Value, frozen=True):
    """Recall of an index on held-out queries."""

    k: int
    probes: int  # number of probed lists
    recall: float  # share of the k best items among the candidates
    compared: float  # mean number of items in the probed lists


class ChosenProbes(Value, frozen=True):
    """Number of lists to probe for up to k items."""

    k: int
    probes: int


class IndexFacts(Value, frozen=True, kw_only=True):
    """Search parameters of an index, and its measured recall."""

    lists: int
    recall: float  # target
    queries: int
    chosen: tuple[ChosenProbes, ...]  # in ascending order of k
    measured: tuple[MeasuredRecall, ...]

    def probes_for(self, k: int) -> int | None:
        """Lists to probe for k items; None if k was not measured, or missed the target recall."""
        return next((entry.probes for entry in self.chosen if entry.k >= k), None)


class RetrievalFacts(Value, frozen=True, kw_only=True):
    """The content of retrieval.json."""

    key: str  # key column of items.parquet
    items: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)]
    dim: Annotated[int, msgspec.Meta(ge=1, le=MAX_DIM)]
    index: IndexFacts | None  # None for exhaustive search
    sha256: dict[str, str]  # of each file

    @property
    def vector_bytes(self) -> int:
        return 4 * self.items * self.dim


@final
class ServedItems:
    """Keys and vectors of the items of a version.

    Args:
        facts: the content of retrieval.json.
        keys: unique keys of the items.
        vectors_ID: vectors of the items.
        index: None for exhaustive search.
    """

    def __init__(self, facts: RetrievalFacts, keys: pa.Array, vectors_ID: Tensor, index: ItemIndex | None) -> None:
        self.facts, self.keys, self.vectors_ID, self._index = facts, keys, vectors_ID, index
        self._places = SideTable(facts.key, pa.table({facts.key: keys, POSITION: np.arange(len(keys))}))

    def places_of(self, keys: pa.Array) -> tuple[Tensor, int]:
        """Sorted unique row numbers of keys, and the number of unknown keys."""
        positions = self._places.join(keys, [POSITION]).arrays[POSITION]
        places_N = positions.drop_null().to_numpy()
        return torch.from_numpy(np.unique(places_N)), positions.null_count

    def find(self, query_D: Tensor, k: int, allowed: ItemFilter, *, exact: bool = False) -> NearItems:
        """Up to k allowed items with the largest dot products with a query."""
        search = self.begin(query_D, k, allowed, exact=exact)
        if isinstance(search, NearItems):
            return search
        while not search.step():
            pass
        return search.result()

    def begin(self, query_D: Tensor, k: int, allowed: ItemFilter, *, exact: bool = False) -> NearItems | ItemScan:
        """The answer by the index, or an exhaustive search to be stepped.

        Candidates of the index are ranked by their exact dot products. The search is exhaustive if `exact` is set,
        without an index, if the recall for k was not measured, or if the index has too few candidates.
        """
        if allowed.among_A is None and not exact:
            proposed = self._propose(query_D, k + allowed.excluded, allowed)
            if proposed is not None and len(proposed) >= k:
                dots_K, places_K = nearest_items(query_D, self.vectors_ID, k, proposed)
                return NearItems(places_K, dots_K, exact=False)
        return ItemScan(query_D, self.vectors_ID, k, allowed)

    def _propose(self, query_D: Tensor, count: int, allowed: ItemFilter) -> Tensor | None:
        probes = None if self.facts.index is None else self.facts.index.probes_for(count)
        if self._index is None or probes is None:
            return None
        places = np.sort(self._index.propose(query_D, OVERSAMPLING * count, probes))
        if allowed.without_W is not None:
            places = np.setdiff1d(places, allowed.without_W.numpy(), assume_unique=True)
        return torch.from_numpy(places)


def write_vectors(version: Path, batches: Iterable[Tensor]) -> Tensor:
    """Write the vectors of items batch by batch; returns all of them, memory-mapped."""
    folder, rows, dim = version / RETRIEVAL, 0, 0
    folder.mkdir()
    with (folder / VECTORS).open("wb") as file:
        for vectors_BD in batches:
            file.write(vectors_BD.contiguous().numpy().data)
            rows, dim = rows + len(vectors_BD), vectors_BD.shape[1]
    return _map_vectors(folder, rows, dim)


def _map_vectors(folder: Path, rows: int, dim: int) -> Tensor:
    return torch.from_file(str(folder / VECTORS), size=rows * dim, dtype=torch.float32).view(rows, dim)


def write_items(
    version: Path, key: str, items: pa.Table, vectors_ID: Tensor, index: tuple[ItemIndex, IndexFacts] | None
) -> RetrievalFacts:
    """Write the items of an unpublished version, after `write_vectors`."""
    folder = version / RETRIEVAL
    pq.write_table(items, folder / ITEMS)
    if index is not None:
        index[0].write(folder / INDEX)
    facts = RetrievalFacts(
        key=key,
        items=len(vectors_ID),
        dim=vectors_ID.shape[1],
        index=None if index is None else index[1],
        sha256={file.name: StoredFile.of(file).sha256 for file in sorted(folder.iterdir())},
    )
    (folder / FACTS).write_bytes(msgspec.json.format(msgspec.json.encode(facts)))
    return facts


def read_facts(version: Path) -> RetrievalFacts | None:
    """Facts of the items of a version, or None without items."""
    path = version / RETRIEVAL / FACTS
    if not path.parent.is_dir():
        return None
    with reading_export(path, OSError):
        return decode_json(read_bytes(path, links=False), RetrievalFacts)


def read_item_table(version: Path, names: Sequence[str] | None = None) -> pa.Table:
    """Raw columns of the items; all if `names` is None."""
    path = version / RETRIEVAL / ITEMS
    with reading_export(path, OSError):
        return read_parquet(path, names)


def open_items(version: Path, facts: RetrievalFacts, *, check: bool = True) -> ServedItems:
    """Map the vectors and the index of a version; `check`: verify the checksum of each file."""
    folder = version / RETRIEVAL
    for _, problem in _find_damage(folder, facts) if check else ():
        raise CheckpointError(f"{problem}; export the version again")
    keys = read_item_table(version, [facts.key])[facts.key].combine_chunks()
    if len(keys) != facts.items or (folder / VECTORS).stat().st_size != facts.vector_bytes:
        raise CheckpointError(f"{folder} has not {facts.items} items of {facts.dim} numbers: export the version again")
    vectors_ID = _map_vectors(folder, facts.items, facts.dim)
    if check and not all(bool(part.isfinite().all()) for part in vectors_ID.split(CHECK_rows)):
        raise CheckpointError(f"{folder / VECTORS} has numbers that are not finite: export the version again")
    index = None if facts.index is None else ItemIndex.open(folder / INDEX)
    if index is not None and index.items != facts.items:
        raise CheckpointError(f"{folder / INDEX} has {index.items} items, not {facts.items}: export the version again")
    return ServedItems(facts, keys, vectors_ID, index)


def damaged_files(version: Path) -> list[DamagedChunk]:
    """Damaged files of a version; for a version of an earlier rowwise, only files of its items are checked."""
    name = LIST
    try:
        listed = read_files(version)
        if listed is not None:
            damage = list(find_changes(version, listed))
        else:
            name = f"{RETRIEVAL}/{FACTS}"
            facts, folder = read_facts(version), version / RETRIEVAL
            damage = [
                (f"{RETRIEVAL}/{file}", problem) for file, problem in (_find_damage(folder, facts) if facts else ())
            ]
    except (CheckpointError, OSError) as error:
        damage = [(name, str(error))]
    return [DamagedChunk(tensor="", place="", file=file, why=problem) for file, problem in damage]


def _find_damage(folder: Path, facts: RetrievalFacts) -> Iterator[tuple[str, str]]:
    """Damaged files, with the problem of each."""
    for name in (ITEMS, VECTORS) if facts.index is None else (ITEMS, VECTORS, INDEX):
        try:
            size = (folder / name).stat().st_size
            if name == VECTORS and size != facts.vector_bytes:  # before it is hashed
                yield name, f"{folder / name} has {size:,} bytes, not {facts.vector_bytes:,}"
                continue
            checksum = StoredFile.of(folder / name).sha256
        except OSError as error:
            yield name, f"{folder / name}: {error.strerror}"
            continue
        if checksum != facts.sha256.get(name):
            yield name, f"{folder / name} does not match its checksum"
