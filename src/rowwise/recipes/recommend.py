"""The best items of every user, in one file: `rowwise recommend`.

Models with vectors of users and items (two towers, graphs, sequence models) are searched exhaustively; the items, their
order and the bits of their scores are those of the server's exact search. A ranker scores each user with each item of a
list. Users are read, searched and written in blocks.

What a user has seen are the items of the user's rows in the recipe's data, whatever their labels; of a sequence model
the items of the list.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, final

import msgspec
import numpy as np
import pyarrow as pa
import torch
from msgspec import structs
from pyarrow import compute as pc
from pyarrow import types
from torch import Tensor, nn

from rowwise.base.errors import DataError, SpecError
from rowwise.base.records import Recommended
from rowwise.ingest.bags import combine_chunks, flatten_lists
from rowwise.ingest.block import Ints
from rowwise.ingest.bound import REQUEST
from rowwise.ingest.reader import check_columns
from rowwise.ingest.where import parse
from rowwise.models.best_items import BestItems, SeenItems, best_items
from rowwise.models.inference import inference_mode
from rowwise.recipes.compose import build_model
from rowwise.recipes.export_graph import mixed_towers
from rowwise.recipes.export_items import cast_items, choose_items, finite_vectors
from rowwise.recipes.held_out import selected_rows
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.predict import ITEMS, SCORES, Predictor, as_csv, check_out, line_writer, logits_on
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.rows import RowSelection, open_reader
from rowwise.recipes.towers import TowerInput, item_tower, user_vectors
from rowwise.recipes.trained import Warn, choose_rows, ignore_warning, load_trained, resolve_saved
from rowwise.serve.forward import Forward, arrays_of
from rowwise.serve.retrieval import MAX_ITEMS
from rowwise.serve.sides import cast_keyed, read_users_parquet
from rowwise.tables.spec import Value
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import CheckpointFolder
from rowwise.train.snapshot import restore_model

Seen = Literal["all", "train", "none"]
USERS = 4096  # read, searched and written at once
ROWS = 65_536  # user-item pairs that a ranker scores at once
ROW = "row"  # column of the users' numbers, where they have no key
RECOMMENDED = "recommended.json"  # in the folder of a run
POPULAR = 0.01  # share of the items that count as popular


class RecommendOptions(Value, frozen=True, kw_only=True):
    """Whom to recommend which items.

    Args:
        k: items of a user, at most.
        users: a file of users; None: the users of the recipe's rows, or the lists of its test rows.
        items: a Parquet file of items; None: the items of the training rows.
        where: conditions on the items' columns.
        user: column of the users' keys.
        item: column of the items' keys, for a ranker.
        seen: rows whose items are left out.
    """

    k: int = 100
    users: str | None = None
    items: str | None = None
    where: tuple[str, ...] = ()
    user: str | None = None
    item: str | None = None
    seen: Seen = "all"

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_ITEMS:
            raise SpecError(f"--k {self.k}", f"1 to {MAX_ITEMS} items")


def recommend(
    run: Path,
    out: Path,
    options: RecommendOptions,
    *,
    which: str = "best",
    tell: Callable[[int, int], None] | None = None,
    warn: Warn = ignore_warning,
) -> Recommended:
    """Write a line for each user: the key, the best items, and their scores, best first.

    Args:
        run: folder of a run.
        out: the file, .parquet or .csv.
        options: users, items and what to leave out.
        which: the checkpoint: best, last or step-<number>.
        tell: called with the number of completed users, and the total.
        warn: called with a line on settings that were replaced.
    """
    check_out(out)
    with ExitStack() as stack:
        resolved, model = _open(run, which, warn, stack)
        train = resolved.recipe.train
        stack.enter_context(inference_mode(model, train.device, train.precision))
        predictor = Predictor.of_run(resolved, model)
        retrieves = family_of(resolved.recipe.model).retrieves
        search = (_ranker if retrieves is None else _vectors)(predictor, resolved, options)
        if retrieves == "lists":
            users, history = _lists(run, resolved, search, options), _history_of_lists(search, resolved, options)
        else:
            users = _users(resolved, search, options)
            history = _history(search, resolved, users.key, options)
        result = _write(out, search, users, history, options, tell)
    RunFolder.open(run).write_json(RECOMMENDED, msgspec.to_builtins(result))
    return result


def _open(run: Path, which: str, warn: Warn, stack: ExitStack) -> tuple[ResolvedRecipe, nn.Module]:
    """The run with its weights; a graph as two towers of its vectors."""
    RunFolder.open(run)
    resolved = resolve_saved(run)
    if not family_of(resolved.recipe.model).mixes_a_graph:
        return load_trained(run, which, warn)
    checkpoint = CheckpointFolder(run / "ckpt").open(which)
    mixed, checkpoint = stack.enter_context(mixed_towers(run, resolved, checkpoint))
    names = {table.name for table in mixed.tables}
    sparse = tuple(column for column in mixed.columns.sparse if column.table_name in names)
    columns = structs.replace(mixed.columns, sparse=sparse)
    mixed = replace(mixed, recipe=structs.replace(mixed.recipe, columns=columns))
    model = build_model(mixed.parts)
    restore_model(checkpoint, model)
    return mixed, model


class _ItemRanker(Protocol):
    """Candidates, and the search for the best of them."""

    @property
    def keys(self) -> pa.Array: ...

    @property
    def item(self) -> str:
        """Raw column of the items' keys in the data."""
        ...

    @property
    def user_columns(self) -> tuple[str, ...]: ...

    @property
    def key(self) -> str | None:
        """Raw column of the users' keys, if the model names one."""
        ...

    def best(self, users: pa.Table, seen: SeenItems | None) -> BestItems: ...


@final
class _VectorSearch:
    """Searches vectors of items."""

    def __init__(self, users: Forward, keys: pa.Array, item: str, items_ID: Tensor, options: RecommendOptions) -> None:
        self.keys, self.item, self.user_columns = keys, item, tuple(users.preparation.names)
        self._users, self.items_ID, self._k = users, items_ID, options.k
        first = next((sparse.column for sparse in users.preparation.columns.sparse), None)
        self.key = first if first in self.user_columns else None

    def best(self, users: pa.Table, seen: SeenItems | None) -> BestItems:
        users_UD = self._users(arrays_of(users), len(users), len(users))
        bad_U = ~torch.isfinite(users_UD).all(1)
        if bool(bad_U.any()):
            raise DataError(
                f"the vector of a user is not finite: {users.slice(int(bad_U.nonzero()[0]), 1).to_pylist()[0]}",
                "a run that did not diverge",
            )
        return best_items(users_UD, self.items_ID, self._k, seen)


@final
class _RowSearch:
    """Scores each user with each item by a model of rows; ties in item order."""

    def __init__(
        self, forward: Forward, items: pa.Table, item: str, user_columns: tuple[str, ...], options: RecommendOptions
    ) -> None:
        self.keys, self.item, self.user_columns, self.key = items[item].combine_chunks(), item, user_columns, None
        self._forward, self._k = forward, min(options.k, len(items))
        self._items = arrays_of(
            items.select([name for name in forward.preparation.names if name in items.schema.names])
        )

    def best(self, users: pa.Table, seen: SeenItems | None) -> BestItems:
        count, step = len(self.keys), max(1, ROWS // len(self.keys))
        parts = []
        for begin in range(0, len(users), step):
            end = min(begin + step, len(users))
            user_N, item_N = np.repeat(np.arange(begin, end), count), np.tile(np.arange(count), end - begin)
            arrays = {name: array.take(pa.array(item_N)) for name, array in self._items.items()}
            arrays |= {name: array.take(pa.array(user_N)) for name, array in arrays_of(users).items()}
            scores_UI = self._forward(arrays, len(user_N), ROWS)[:, 0].view(end - begin, count).clone()
            if seen is not None:
                own = seen.of_users(begin, end)
                rows_N = torch.arange(end - begin).repeat_interleave(own.starts_U1.diff())
                scores_UI[rows_N, own.items_N] = -torch.inf
            order_UK = scores_UI.argsort(dim=1, descending=True, stable=True)[:, : self._k]
            scores_UK = scores_UI.gather(1, order_UK)
            parts.append((order_UK.masked_fill(scores_UK == -torch.inf, -1), scores_UK))
        return BestItems(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def item_vectors(run: Path, which: str = "best", warn: Warn = ignore_warning) -> tuple[str, pa.Array, Tensor]:
    """The key column, keys and vectors of the items of a run."""
    with ExitStack() as stack:
        resolved, model = _open(run, which, warn, stack)
        if family_of(resolved.recipe.model).retrieves is None:
            raise SpecError(f"{run}: the model has no item vectors", "model.kind=two_tower, graph, sasrec or hstu")
        train = resolved.recipe.train
        stack.enter_context(inference_mode(model, train.device, train.precision))
        search = _vectors(Predictor.of_run(resolved, model), resolved, RecommendOptions())
        return search.item, search.keys, search.items_ID


def _vectors(predictor: Predictor, resolved: ResolvedRecipe, options: RecommendOptions) -> _VectorSearch:
    if options.item is not None:
        raise SpecError(f"--item {options.item}: the recipe names the items", hint="leave it out")
    schema, parts = resolved.rows.train.reader.schema, resolved.parts
    inputs = TowerInput(parts, predictor.transforms, schema, predictor.precision, predictor.blocks)
    model = predictor.model
    tower = item_tower(model, inputs)
    if options.items is None:
        items = _filter(choose_items(resolved, tower), options, "the items of the training rows")
    else:
        source = f"--items {options.items}"
        items = cast_items(source, _filter(read_users_parquet(source, options.items), options, source), tower)
    vectors_ID = torch.cat(list(finite_vectors(tower, items)))
    return _VectorSearch(user_vectors(model, inputs), items[tower.key].combine_chunks(), tower.key, vectors_ID, options)


def _ranker(predictor: Predictor, resolved: ResolvedRecipe, options: RecommendOptions) -> _ItemRanker:
    for option, value in (("--items", options.items), ("--item", options.item), ("--user", options.user)):
        if value is None:
            expected = "FILE.parquet with the items' columns, --item and --user with the columns of the keys"
            raise SpecError(f"{option} is missing: the model scores rows, not vectors", f"--items {expected}")
    assert options.items is not None
    assert options.item is not None
    schema, source = resolved.rows.train.reader.schema, f"--items {options.items}"
    forward = Forward(
        resolved.parts.bind(schema, predictor.transforms, None, REQUEST),
        logits_on(predictor.model, resolved.recipe.train.device),
        predictor.blocks,
    )
    items = _filter(read_users_parquet(source, options.items), options, source)
    check_columns((options.item,), items.schema, source)
    read = (*forward.preparation.names, options.item)
    names = [name for name in items.column_names if name in read and name != options.user]
    kinds = pa.schema([(name, _trained_kind(name, items.schema.field(name).type, schema)) for name in names])
    items = cast_keyed(source, items, options.item, kinds).combine_chunks()
    users = tuple(name for name in forward.preparation.names if name not in names)
    return _RowSearch(forward, items, options.item, users, options)


def _filter(items: pa.Table, options: RecommendOptions, source: str) -> pa.Table:
    condition = parse(options.where, "--where")
    condition.check(items.schema, source, "--where")
    items = items.filter(pa.array(condition.mask(items)))
    if not len(items):
        raise DataError(f"{source}: no item passes --where" if options.where else f"{source}: no rows", "an item")
    return items


def _trained_kind(name: str, kind: pa.DataType, schema: pa.Schema) -> pa.DataType:
    """The type of a column of the training data, else its own; of a dictionary that of its values."""
    kind = schema.field(name).type if name in schema.names else kind
    return kind.value_type if types.is_dictionary(kind) else kind


def _as_trained(table: pa.Table, resolved: ResolvedRecipe, source: str) -> pa.Table:
    """Rows of a file in the types of the training data."""
    schema, arrays = resolved.rows.train.reader.schema, dict[str, pa.Array]()
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = _trained_kind(name, column.type, schema)
        try:
            arrays[name] = column.cast(kind)
        except pa.ArrowException as error:
            problem = f"{source}: column {name!r} holds {column.type}: {str(error)[:200]}"
            raise DataError(problem, f"{kind}, as in the training data") from None
    return pa.table(arrays).combine_chunks()


class _Users(NamedTuple):
    """Tables of users, with their keys."""

    key: str
    count: int
    tables: Iterator[pa.Table]


def _users(resolved: ResolvedRecipe, search: _ItemRanker, options: RecommendOptions) -> _Users:
    """The users of a file; else of the recipe's rows, each as in the newest of them in stored order."""
    key = options.user or search.key
    if key is None:
        raise SpecError("the first feature of the users is made by a transform", "--user with the column of their keys")
    names = tuple(dict.fromkeys((key, *search.user_columns)))
    if options.users is not None:
        rows = RowSelection(open_reader(options.users, text=resolved.recipe.data.text))
        check_columns(names, rows.reader.schema, f"--users {options.users}")
        return _Users(key, _count(rows), _read_all(resolved, rows, names))
    check_columns(names, resolved.rows.train.reader.schema, "the training rows")
    known: pa.Table | None = None
    for rows in _selections(resolved, "all"):
        for fresh in _read_selected(resolved, rows, names):
            codes_R = pc.call_function("dictionary_encode", [fresh[key].combine_chunks()]).indices
            codes_R = codes_R.fill_null(-1).to_numpy()
            last_U = len(codes_R) - 1 - np.unique(codes_R[::-1], return_index=True)[1]
            fresh = fresh.take(pa.array(np.sort(last_U[codes_R[last_U] >= 0])))
            if known is not None:
                again = pc.call_function("is_in", [known[key]], pc.SetLookupOptions(fresh[key].combine_chunks()))
                fresh = pa.concat_tables([known.filter(pc.call_function("invert", [again])), fresh])
            known = fresh.combine_chunks()
    assert known is not None
    known = known.sort_by(key)
    return _Users(key, len(known), iter([known]))


def _lists(run: Path, resolved: ResolvedRecipe, search: _ItemRanker, options: RecommendOptions) -> _Users:
    """The lists of a file, else of the test rows."""
    rows = choose_rows(run, resolved, options.users)
    key = options.user or resolved.columns.key
    if options.user is None and key not in rows.reader.schema.names:
        key = None
    names = tuple(dict.fromkeys((*([] if key is None else [key]), *search.user_columns)))
    check_columns(names, rows.reader.schema, f"--users {options.users}" if options.users else "the test rows")
    read = _read_selected if options.users is None else _read_all
    tables = read(resolved, rows, names)
    return _Users(key or ROW, _count(rows), tables if key is not None else _numbered(tables))


def _count(rows: RowSelection) -> int:
    return sum(split.rows or 0 for split in rows.reader.splits())


def _read_all(resolved: ResolvedRecipe, rows: RowSelection, names: tuple[str, ...]) -> Iterator[pa.Table]:
    """Columns of all rows of a file, by split."""
    for split in rows.reader.splits():
        yield _as_trained(rows.reader.read(split, names), resolved, f"--users {split.source}")


def _read_selected(resolved: ResolvedRecipe, rows: RowSelection, names: tuple[str, ...]) -> Iterator[pa.Table]:
    """Columns of the good rows of a selection, by split."""
    for selected in selected_rows(resolved, rows):
        yield _as_trained(selected._replace(names=names).read(), resolved, selected.split.source)


def _numbered(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    first = 0
    for table in tables:
        yield table.append_column(ROW, pa.array(np.arange(first, first + len(table))))
        first += len(table)


def _selections(resolved: ResolvedRecipe, seen: Seen) -> list[RowSelection]:
    rows = resolved.rows
    chosen = [rows.train, rows.valid] if seen == "train" else [rows.train, rows.valid, rows.test]
    return [selection for selection in chosen if selection is not None]


class _Pairs(NamedTuple):
    """The items of each user in the data."""

    users: pa.Array  # distinct keys
    starts_U1: Ints  # of each user in items_N, and the end
    items_N: Ints  # ascending for each user

    @classmethod
    def of(cls, keys: list[pa.Array], items: list[Ints], count: int) -> "_Pairs":
        """The pairs of the rows' keys and the places of their items, of `count` items; each part has a row."""
        chunks = pa.chunked_array(keys).dictionary_encode().unify_dictionaries().chunks
        parts = zip(chunks, items, strict=True)
        pairs_N = np.concatenate([c.indices.to_numpy().astype(np.int64) * count + i for c, i in parts])
        pairs_N.sort()  # np.unique takes twice the memory
        pairs_N = pairs_N[np.append(True, pairs_N[1:] != pairs_N[:-1])]
        users = chunks[0].dictionary
        starts_U1 = np.searchsorted(pairs_N, np.arange(len(users) + 1) * count)
        pairs_N %= count
        return cls(users, starts_U1, pairs_N)

    def of_users(self, keys: pa.Array) -> SeenItems:
        code_U = _index_in(keys, self.users)
        begin_U, end_U = self.starts_U1[code_U], self.starts_U1[np.where(code_U < 0, code_U, code_U + 1)]
        parts = [self.items_N[a:b] for a, b in zip(begin_U.tolist(), end_U.tolist(), strict=True)]
        starts_U1 = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        return SeenItems(torch.from_numpy(starts_U1), torch.from_numpy(np.concatenate([*parts, self.items_N[:0]])))


class _History(NamedTuple):
    """How often each candidate occurs in the data, and what each user has seen."""

    counts_I: Ints
    seen: Callable[[pa.Table], SeenItems] | None  # of a table of users; None: nothing is left out


def _history(search: _ItemRanker, resolved: ResolvedRecipe, key: str, options: RecommendOptions) -> _History:
    """Of users with rows."""
    counts_I, keys, items = np.zeros(len(search.keys), np.int64), list[pa.Array](), list[Ints]()
    names = tuple(dict.fromkeys((key, search.item)))
    for rows in _selections(resolved, options.seen):
        missing = [name for name in names if name not in rows.reader.schema.names]
        if missing and options.seen != "none":
            raise SpecError(f"the data has no column {missing[0]!r}, so seen items are unknown", "--seen none")
        for table in _read_selected(resolved, rows, names) if not missing else ():
            item_N = _index_in(table[search.item], search.keys)
            known_N = (item_N >= 0) & table[key].is_valid().to_numpy()
            counts_I += np.bincount(item_N[item_N >= 0], minlength=len(counts_I))
            if known_N.any():
                keys.append(table[key].combine_chunks().filter(pa.array(known_N)))
                items.append(item_N[known_N])
    if options.seen == "none" or not keys:
        return _History(counts_I, None)
    pairs = _Pairs.of(keys, items, len(counts_I))

    def seen(users: pa.Table) -> SeenItems:
        return pairs.of_users(users[key])

    return _History(counts_I, seen)


def _history_of_lists(search: _ItemRanker, resolved: ResolvedRecipe, options: RecommendOptions) -> _History:
    """Of users who are lists of items."""
    counts_I = np.zeros(len(search.keys), np.int64)
    (column,) = search.user_columns
    for rows in _selections(resolved, "train"):
        for table in _read_selected(resolved, rows, (column,)):
            item_N = _index_in(flatten_lists(combine_chunks(table[column]))[0], search.keys)
            counts_I += np.bincount(item_N[item_N >= 0], minlength=len(counts_I))

    def seen(users: pa.Table) -> SeenItems:
        flat, offsets_U1 = flatten_lists(combine_chunks(users[column]))
        assert offsets_U1 is not None
        item_N, user_N = _index_in(flat, search.keys), np.repeat(np.arange(len(users)), np.diff(offsets_U1))
        pairs_N = np.unique((user_N * len(counts_I) + item_N)[item_N >= 0])
        starts_U1 = np.searchsorted(pairs_N, np.arange(len(users) + 1) * len(counts_I))
        return SeenItems(torch.from_numpy(starts_U1), torch.from_numpy(pairs_N % len(counts_I)))

    return _History(counts_I, None if options.seen == "none" else seen)


def _index_in(values: pa.Array | pa.ChunkedArray, keys: pa.Array) -> Ints:
    """The place of each value among keys; -1: none."""
    places = pc.call_function("index_in", [values.cast(keys.type)], pc.SetLookupOptions(keys))
    places = places.combine_chunks() if isinstance(places, pa.ChunkedArray) else places
    return places.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _write(
    out: Path,
    search: _ItemRanker,
    users: _Users,
    history: _History,
    options: RecommendOptions,
    tell: Callable[[int, int], None] | None,
) -> Recommended:
    done, short, given_I = 0, 0, np.zeros(len(search.keys), np.int64)
    with line_writer(out) as write:
        for table in users.tables:
            for begin in range(0, len(table), USERS):
                block = table.slice(begin, USERS).combine_chunks()
                columns = block.select(list(search.user_columns))
                places_UK, scores_UK = search.best(columns, None if history.seen is None else history.seen(block))
                lines = _lines(block[users.key], search.keys, places_UK, scores_UK, users.key)
                if out.suffix == ".csv":
                    lines = pa.table({name: as_csv(lines[name]) for name in lines.column_names})
                write(lines)
                chosen_UK = places_UK >= 0
                given_I += np.bincount(places_UK[chosen_UK].numpy(), minlength=len(given_I))
                short += int((chosen_UK.sum(1) < options.k).sum())
                done += len(block)
                if tell is not None:
                    tell(done, max(users.count, done))
        if not done:
            raise DataError("no users", "a file or data with at least one user")
    return _summary(given_I, history.counts_I, done, short, options)


def _lines(users: pa.Array, keys: pa.Array, places_UK: Tensor, scores_UK: Tensor, key: str) -> pa.Table:
    chosen_UK = places_UK >= 0
    offsets = pa.array(np.concatenate([[0], chosen_UK.sum(1).cumsum(0).numpy()]), pa.int32())
    items = keys.take(pa.array(places_UK[chosen_UK].numpy()))
    flat = {ITEMS: items, SCORES: pa.array(scores_UK[chosen_UK].numpy(), pa.float32())}
    lists = {name: pa.ListArray.from_arrays(offsets, values) for name, values in flat.items()}
    return pa.table({key: users} | lists)


def _summary(given_I: Ints, counts_I: Ints, users: int, short: int, options: RecommendOptions) -> Recommended:
    total, rows = max(1, int(given_I.sum())), max(1, int(counts_I.sum()))
    popular = np.argsort(-counts_I, kind="stable")[: max(1, round(POPULAR * len(counts_I)))]
    bits_I = -np.log2(np.maximum(counts_I, 1) / rows)  # an item without rows counts as one of a single row
    return Recommended(
        users=users,
        items=len(counts_I),
        k=options.k,
        short=short,
        coverage=float((given_I > 0).mean()),
        popular=float(given_I[popular].sum() / total),
        popular_rows=float(counts_I[popular].sum() / rows),
        novelty=float((given_I * bits_I).sum() / total),
    )
