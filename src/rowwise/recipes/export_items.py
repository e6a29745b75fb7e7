"""The items of a retrieval model's version: their vectors, an index, and its recall on held-out users.

Users may be lists of items; then the items of the training rows are the items of all lists.
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyarrow import compute as pc
from torch import Tensor, nn

from rowwise.base.errors import DataError, SpecError
from rowwise.ingest.bags import combine_chunks, flatten_lists
from rowwise.ingest.transform import serving
from rowwise.models.inference import RowBlocks, inference_mode
from rowwise.models.retrieval import nearest_items
from rowwise.recipes.held_out import held_out_of, selected_rows
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.predict import RankedItems
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.towers import ItemTower, TowerInput, item_tower, user_vectors
from rowwise.serve.forward import Forward, arrays_of
from rowwise.serve.item_index import ItemIndex, choose_lists, require_faiss
from rowwise.serve.items import (
    OVERSAMPLING,
    ChosenProbes,
    IndexFacts,
    MeasuredRecall,
    RetrievalFacts,
    read_facts,
    read_item_table,
    write_items,
    write_vectors,
)
from rowwise.serve.sides import cast_keyed, read_users_parquet
from rowwise.tables.spec import Value

INDEXED_items = 20_000  # below, an exact search is faster than an index
ERRORS = 2  # margin of the measured recall, in standard errors
MEASURED = (10, 100, 1000)  # the k whose recall is measured
QUERIES = 256  # users for measuring an index
ROWS = 8192  # held-out rows to take users from, at most
BATCH = 4096  # items per forward


class ItemOptions(Value, frozen=True):
    """The items of a version, and the recall of its index."""

    file: str | None = None  # a Parquet file with the items' columns; None: the items of the training rows
    recall: float = 0.99  # target share of the best items among the index's candidates

    def __post_init__(self) -> None:
        if not 0 < self.recall <= 1:
            raise SpecError(f"--recall {self.recall}", "more than 0, and at most 1")


ALL_ITEMS = ItemOptions()


def check_options(resolved: ResolvedRecipe, options: ItemOptions) -> None:
    """Raise for item options of a model without item vectors, before anything is written."""
    if family_of(resolved.recipe.model).retrieves is None and options != ALL_ITEMS:
        option = f"--items {options.file}" if options.file is not None else f"--recall {options.recall}"
        raise SpecError(
            f"{option}: the model of the run has no item vectors",
            "a run with model.kind=two_tower, graph, sasrec, hstu",
        )


def export_items(  # noqa: PLR0913 - used once
    version: Path,
    resolved: ResolvedRecipe,
    model: nn.Module,
    tower_input: TowerInput,
    options: ItemOptions,
    like: Path | None,
    warn: Callable[[str], None],
) -> RetrievalFacts | None:
    """Write the items of a version; None: its model has no item vectors, or no column has their keys.

    Args:
        version: the folder, which is not complete yet.
        resolved: the run.
        model: with the weights of the version, in evaluation mode.
        tower_input: columns and settings of its towers.
        options: of `rowwise export`.
        like: an earlier version of the run, whose items are reused unless `options` name a file.
        warn: called with a line if items or their index are left out.
    """
    if family_of(tower_input.parts.model).retrieves is None:
        return None
    try:
        tower = item_tower(model, tower_input)
    except SpecError as error:
        warn(f"the version cannot retrieve items: {error}")
        return None
    items = choose_items(resolved, tower, options, like)
    if len(items) >= INDEXED_items:
        require_faiss(f"{len(items):,} items need an index")
    vectors_ID = write_vectors(version, finite_vectors(tower, items))
    index = None
    if len(items) >= INDEXED_items:
        queries_QD = _queries(resolved, user_vectors(model, tower_input))
        built = ItemIndex.build(vectors_ID, choose_lists(len(items)))
        facts = measure(built, vectors_ID, queries_QD, choose_lists(len(items)), options.recall)
        if facts.chosen:
            index = built, facts
        else:
            problem = f"the index reaches a recall of {options.recall} only by searching most items"
            warn(f"{problem}, so the search is exact; give a smaller --recall")
    return write_items(version, tower.key, items, vectors_ID, index)


def finite_vectors(tower: ItemTower, items: pa.Table) -> Iterator[Tensor]:
    """The vectors of items, batch by batch."""
    for span, vectors_BD in tower.forward.batches(tower.arrays(items), len(items), BATCH):
        bad_B = ~torch.isfinite(vectors_BD).all(1)
        if bool(bad_B.any()):
            item = items[tower.key][span.begin + int(bad_B.nonzero()[0])]
            raise DataError(f"the vector of item {item} is not finite", "a run that did not diverge")
        yield vectors_BD


def measure(index: ItemIndex, items_ID: Tensor, queries_QD: Tensor, lists: int, recall: float) -> IndexFacts:
    """Measure an index on queries, and choose the number of probed lists for a recall.

    The measured recall has a margin of `ERRORS` standard errors over the target, as other users differ.
    """
    ks = [k for k in MEASURED if k <= len(items_ID)]
    best = [nearest_items(query_D, items_ID, max(ks))[1].numpy() for query_D in queries_QD]
    measured: list[MeasuredRecall] = []
    chosen: dict[int, int] = {}
    for probes in (1 << n for n in range((lists // 2).bit_length())):  # with more probes, an exact search is as fast
        proposed = [index.propose(query_D, OVERSAMPLING * max(ks), probes) for query_D in queries_QD]
        compared = float(np.mean([index.items_compared(query_D, probes) for query_D in queries_QD]))
        for k in ks:
            pairs = zip(best, proposed, strict=True)
            share_Q = [len(np.intersect1d(b[:k], p[: OVERSAMPLING * k], assume_unique=True)) / k for b, p in pairs]
            share = float(np.mean(share_Q))
            measured.append(MeasuredRecall(k, probes, share, compared))
            if share - ERRORS * float(np.std(share_Q)) / len(share_Q) ** 0.5 >= recall:
                chosen.setdefault(k, probes)
        if len(chosen) == len(ks):
            break
    reached = [k for number, k in enumerate(ks) if all(smaller in chosen for smaller in ks[: number + 1])]
    probes_of = [max(chosen[smaller] for smaller in reached if smaller <= k) for k in reached]
    return IndexFacts(
        lists=lists,
        recall=recall,
        queries=len(queries_QD),
        chosen=tuple(ChosenProbes(k, probes) for k, probes in zip(reached, probes_of, strict=True)),
        measured=tuple(measured),
    )


def ranked_items(resolved: ResolvedRecipe, model: nn.Module) -> RankedItems:
    """The items of the training rows of a run, the candidates of `rowwise predict`."""
    train, rows = resolved.recipe.train, resolved.rows.train
    tower_input = TowerInput(
        resolved.parts, serving(resolved.transforms), rows.reader.schema, train.precision, RowBlocks()
    )
    with inference_mode(model, train.device, train.precision):
        tower = item_tower(model, tower_input)
        items = choose_items(resolved, tower)
        return RankedItems(items[tower.key].combine_chunks(), torch.cat(list(finite_vectors(tower, items))))


def describe_items(facts: RetrievalFacts) -> list[str]:
    """Lines on the items of a version."""
    lead = f"{facts.items:,} items, vectors of {facts.dim} numbers"
    if facts.index is None:
        return [f"{lead}: all are searched"]
    index = facts.index
    lines = [f"{lead}, in {index.lists} lists; recall on {index.queries} users that were held out:"]
    for probes, group in groupby(index.measured, lambda recall: recall.probes):
        measured = list(group)
        marks = [" (chosen)" if index.probes_for(recall.k) == probes else "" for recall in measured]
        recalls = [f"recall@{r.k} {r.recall:.4f}{mark}" for r, mark in zip(measured, marks, strict=True)]
        lines.append(f"  {probes} lists, {measured[0].compared:,.0f} items: {', '.join(recalls)}")
    return lines


def choose_items(
    resolved: ResolvedRecipe, tower: ItemTower, options: ItemOptions = ALL_ITEMS, like: Path | None = None
) -> pa.Table:
    """The raw columns of all distinct items: of a file, an earlier version, or the training rows."""
    if options.file is not None:
        source = f"--items {options.file}"
        return cast_items(source, read_users_parquet(source, options.file), tower)
    if like is not None and read_facts(like) is not None:
        return read_item_table(like)
    items = _items_of_rows(resolved, tower)
    if not len(items):
        raise DataError(f"column {tower.key!r} has no value in the training rows", "--items with a table of the items")
    return items


def _items_of_rows(resolved: ResolvedRecipe, tower: ItemTower) -> pa.Table:
    """Distinct items of the training rows, with the columns of the first row of each, in row order."""
    parts: list[pa.Table] = []
    known_keys: pa.Array | None = None
    key = tower.key
    for selected in selected_rows(resolved, resolved.rows.train):
        rows = selected._replace(names=tuple(tower.schema.names)).read()
        if tower.is_sequence:
            rows = pa.table({key: flatten_lists(combine_chunks(rows[key]))[0]}, tower.schema)
        keys = rows[key].combine_chunks()
        codes_R = pc.call_function("dictionary_encode", [keys]).indices.drop_null().to_numpy()
        valid_R = np.flatnonzero(np.asarray(pc.call_function("is_valid", [keys])))
        first = pa.array(np.sort(valid_R[np.unique(codes_R, return_index=True)[1]]))
        fresh = rows.take(first)
        if known_keys is not None:
            is_known = pc.call_function("is_in", [fresh[key]], pc.SetLookupOptions(known_keys))
            fresh = fresh.filter(pc.call_function("invert", [is_known]))
        parts.append(fresh)
        known_keys = pa.concat_tables([part.select([key]) for part in parts])[key].combine_chunks()
    items = pa.concat_tables(parts).combine_chunks()
    return items.filter(pa.array(tower.has_row(items)))


def cast_items(source: str, table: pa.Table, tower: ItemTower) -> pa.Table:
    """The columns that the tower reads of a table of the user; `source`: its name in errors."""
    missing = [name for name in tower.schema.names if name not in table.column_names]
    if missing:
        names = ", ".join(table.column_names)
        raise DataError(f"{source}: no column {missing[0]!r}, which the items' tower reads; there are {names}")
    if not len(table):
        raise DataError(f"{source} has no rows", "at least one item")
    items = cast_keyed(source, table, tower.key, tower.schema).combine_chunks()
    absent = np.flatnonzero(~tower.has_row(items))
    if len(absent):
        raise DataError(f"{source}: a transform leaves item {items[tower.key][absent[0]]} out", "known items")
    return items


def _queries(resolved: ResolvedRecipe, users: Forward) -> Tensor:
    """Vectors of distinct users in held-out rows."""
    parts: list[Tensor] = []
    rows = 0
    for selected in selected_rows(resolved, held_out_of(resolved)):
        order_R = selected.order_R[: ROWS - rows]
        raw = selected._replace(names=tuple(users.preparation.names), order_R=order_R).read()
        parts.append(users(arrays_of(raw), len(raw), BATCH))
        rows += len(raw)
        if rows >= ROWS:
            break
    _, first_U = np.unique(torch.cat(parts).numpy(), axis=0, return_index=True)
    return torch.cat(parts)[torch.from_numpy(np.sort(first_U)[:QUERIES])]
