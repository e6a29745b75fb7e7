"""Exports a run as a version of a model to serve: weights, transforms, golden rows, statistics of its columns.

See `serve/package.py` for the folder. A version appears when it is complete, and does not depend on the run.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
from msgspec import structs
from torch import nn

from rowwise.base.errors import CheckpointError, RowwiseError, SpecError
from rowwise.checkpoint.atomic import atomic_output
from rowwise.checkpoint.changes import UnusableBaseError, changes_since, open_base
from rowwise.checkpoint.delta import stored_bytes
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import CheckpointManifest
from rowwise.checkpoint.named import tables_of
from rowwise.checkpoint.policy import is_full_due
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.rewrite import retype_tables, rewrite
from rowwise.checkpoint.tables import full_name, is_needed_for_lookups, table_modules
from rowwise.checkpoint.windows import Tell
from rowwise.checkpoint.write import write
from rowwise.ingest.dialect import style_of
from rowwise.ingest.pictures import FILES, INDEX
from rowwise.ingest.transform import decode, load, serving, to_json
from rowwise.models.inference import RowBlocks, inference_mode
from rowwise.models.second_copy import NAME as SECOND_COPY
from rowwise.parallel.comm.solo import solo
from rowwise.planning.planner import simple_plan
from rowwise.recipes.code import modules_of_model, split_name
from rowwise.recipes.compose import build_model, make_evaluator
from rowwise.recipes.export_graph import mixed_towers
from rowwise.recipes.export_items import ALL_ITEMS, ItemOptions, check_options, export_items
from rowwise.recipes.held_out import held_out_rows
from rowwise.recipes.id_maps import move_map
from rowwise.recipes.model_configs import map_files
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.predict import choose_blocks_for, logits_on
from rowwise.recipes.resolved import ModelParts, ResolvedRecipe
from rowwise.recipes.rows import RowSelection
from rowwise.recipes.served import ServedModel, golden_logits, load_model, read_model
from rowwise.recipes.table_memory import measure_memory
from rowwise.recipes.towers import TowerInput
from rowwise.recipes.trained import load_trained, resolve_saved
from rowwise.serve.contents import hash_files, write_files
from rowwise.serve.default_rows import mean_rows, write_mean_rows
from rowwise.serve.forward import Forward, arrays_of
from rowwise.serve.hot_rows import HOT, RowCounter, read_hot_rows, write_hot_rows
from rowwise.serve.items import RetrievalFacts
from rowwise.serve.package import (
    MODEL,
    STATS,
    ColumnStats,
    GoldenRows,
    VersionFolder,
    list_versions,
    next_version,
    read_golden,
    version_folder,
    write_golden,
    write_traffic,
)
from rowwise.serve.row_memory import StoredTable, divide_memory
from rowwise.serve.row_tiers import make_tiers
from rowwise.serve.shared_rows import memory_of_tables, spare_rows
from rowwise.serve.sides import load_side
from rowwise.serve.traffic import Traffic
from rowwise.tables.spec import RowType, Table, Topology
from rowwise.tables.store.policy import Ints
from rowwise.train.evaluate import Values
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import CheckpointFolder

PICTURES = "pictures"  # the folder in a version
STATS_ROWS = 1 << 16  # training rows for column statistics, at most
COUNTED_ROWS, MIN_COUNTED = 4096, 16  # batch that counts rows of tables; smallest half that is retried
MIN_MEMORY_bytes = 64 << 20  # least budget for rows: caches of a run take more than the recipe's
FOLLOW_s = 1.0  # poll interval of a run


class ExportedVersion(NamedTuple):
    """A version that was written."""

    folder: VersionFolder
    digest: str
    served: ServedModel
    step: int
    size_bytes: int  # without hard links to files of its base
    base: int | None  # version that an increment extends; None: a full version
    items: RetrievalFacts | None = None  # of a retrieval model


class RowTypeCost(NamedTuple):
    """Test metrics of a task: of the run, and of the version."""

    task: str
    run: Values
    version: Values


def export(  # noqa: PLR0913 - all but the first two have defaults
    run: Path,
    folder: Path,
    *,
    which: str = "best",
    rows: RowType | None = None,
    sides: Sequence[str] = (),
    items: ItemOptions = ALL_ITEMS,
    like: VersionFolder | None = None,
    full: bool = False,
    after: int = 0,
    memory_bytes: int | None = None,
    tell: Tell | None = None,
    warn: Callable[[str], None] = print,
) -> ExportedVersion:
    """Write a checkpoint of a run as the next version in a folder, and make it the current one.

    Args:
        run: the folder of the run.
        folder: the folder to serve; made if it does not exist.
        which: the checkpoint: best, last or step-<number>.
        rows: row type of the tables, where it makes their rows smaller; None: as trained.
        sides: side tables, whose columns requests omit, each as FILE:KEY.
        items: items of a retrieval model; each version has new vectors of them.
        like: an earlier version of the run, whose golden rows, items, blocks of rows and statistics are reused.
        full: write all rows; else an increment to the newest version in the folder, if few rows have changed.
        after: number the new version above this one, which another place uses already.
        memory_bytes: budget for rows during the export; None: free memory, or the budget of the recipe.
        tell: called with the bytes done, and the total.
        warn: called with a line on blocks of rows that cost time.
    """
    resolved = resolve_saved(RunFolder.open(run).path)
    check_options(resolved, items)
    checkpoint = CheckpointFolder(run / "ckpt").open(which)
    sample = held_out_rows(resolved) if like is None else read_golden(like.path).rows
    side_tables = [load_side(side, sample.schema) for side in sides]
    memory_bytes = memory_for_rows(resolved, run) if memory_bytes is None else memory_bytes
    stored = [StoredTable(table.name, table.rows, _retype(table, rows).row_bytes) for table in resolved.tables]
    divide_memory(stored, memory_bytes)  # raises before anything is written
    newest = _newest_version(folder, resolved.recipe.name, run)
    base = None if full else newest
    version = version_folder(folder, next_version(folder, after))
    with ExitStack() as stack:
        unfinished = stack.enter_context(atomic_output(version.path))
        if family_of(resolved.recipe.model).mixes_a_graph:
            resolved, checkpoint = stack.enter_context(mixed_towers(run, resolved, checkpoint))
        served, extends = _write_weights(
            resolved, checkpoint, unfinished, rows, base=base, memory_bytes=memory_bytes, tell=tell, warn=warn
        )
        _write_model(unfinished, served)
        blocks = None if like is None else read_model(like.path).blocks
        train = None if like is not None else _training_rows(resolved.rows.train, sample.column_names)
        model = _load(unfinished, memory_bytes)
        served, facts = _write_computed(unfinished, model, resolved, sample, blocks, items, like, train, warn)
        for side in side_tables:
            side.write(unfinished)
        if served.blocks.kind != "padded" and like is None:
            warn(served.blocks.describe())
        if train is not None:
            stats = {name: ColumnStats.of(train[name]) for name in sample.column_names}
            (unfinished / STATS).write_bytes(msgspec.json.format(msgspec.json.encode(stats)))
        elif like is not None:
            for name in (STATS, HOT):
                shutil.copyfile(like.path / name, unfinished / name)
        write_mean_rows(unfinished, mean_rows(Checkpoint.open(unfinished), read_hot_rows(unfinished)))
        write_files(unfinished, hash_files(unfinished, base=None if base is None else base.path))
    write_traffic(folder, Traffic(current=version.number))
    step = checkpoint.manifest.data.get("progress", {}).get("step", 0)
    base_number = base.number if base is not None and extends else None
    return ExportedVersion(version, version.digest, served, step, _own_bytes(version, base), base_number, facts)


def _own_bytes(version: VersionFolder, base: VersionFolder | None) -> int:
    """The bytes of a version without hard links to files of its base."""
    shared = set() if base is None else {file.stat().st_ino for file in base.path.iterdir()}
    sizes = {file.stat().st_ino: file.stat().st_size for file in version.path.rglob("*") if file.is_file()}
    return sum(size for inode, size in sizes.items() if inode not in shared)


def follow(run: Path, write: Callable[..., ExportedVersion]) -> Iterator[ExportedVersion]:
    """Export the newest checkpoint of a run, then each that is saved, until the run has finished.

    `write`: `export` with all its arguments but `which` and `like`.
    """
    checkpoints, last = CheckpointFolder(run / "ckpt"), None
    while True:
        step = max(checkpoints.steps(), default=None)
        if step is not None and (last is None or step != last.step):
            like = None if last is None else last.folder
            try:
                last = write(which=f"step-{step}", like=like)
            except (CheckpointError, FileNotFoundError):
                if step in checkpoints.steps():
                    raise
                continue  # the run has removed it, as newer ones exist
            yield last
        elif step is not None and checkpoints.open("last").manifest.data.get("progress", {}).get("finished"):
            return
        else:
            time.sleep(FOLLOW_s)


def row_type_cost(
    run: Path, version: VersionFolder, which: str = "best", memory_bytes: int | None = None
) -> list[RowTypeCost]:
    """The loss in quality by the row types of a version, on the test rows of its run."""
    resolved, trained = load_trained(run, which)
    rows = resolved.rows.test
    if rows is None:
        raise SpecError(f"{run}: its recipe has no test rows to measure the cost of row types on")
    run_scores = make_evaluator(resolved, trained, rows)().tasks
    del trained
    memory_bytes = memory_for_rows(resolved, run) if memory_bytes is None else memory_bytes
    version_scores = make_evaluator(resolved, _load(version.path, memory_bytes), rows)().tasks
    return [RowTypeCost(task, run_scores[task], version_scores[task]) for task in run_scores]


def memory_for_rows(resolved: ResolvedRecipe, run: Path) -> int | None:
    """The memory budget for rows; None: all rows fit."""
    memory = measure_memory(resolved, solo(), "use", run)
    return max(MIN_MEMORY_bytes, memory.rank_budget_bytes) if memory.is_short else None


def _load(version: Path, memory_bytes: int | None) -> nn.Module:
    """The model of a version, with large tables behind a cache if memory is short."""
    return load_model(version, read_model(version), make_tiers(CheckpointManifest.read(version), memory_bytes))


def _write_weights(  # noqa: PLR0913 - used once
    resolved: ResolvedRecipe,
    checkpoint: Checkpoint,
    folder: Path,
    rows: RowType | None,
    *,
    base: VersionFolder | None,
    memory_bytes: int | None,
    tell: Tell | None,
    warn: Callable[[str], None],
) -> tuple[ServedModel, bool]:
    """Write tensors, id maps and the user's model; returns the model's description, and whether it is an increment."""
    parts = structs.replace(
        resolved.parts, tables=tuple(_retype(table, rows) for table in resolved.tables), device="cpu"
    )
    has_frequency = family_of(parts.model).retrieves == "towers"  # of items, for the loss
    if has_frequency:
        parts = structs.replace(parts, model=structs.replace(parts.model, correct=False))
    row_types = _stored_types(build_model(parts, on_meta=True))
    by_tensor = {saved.name: name for name, saved in tables_of(checkpoint.manifest).items()}
    new_types = {by_tensor[tensor]: row_type for tensor, row_type in row_types.items()}
    tables = retype_tables(checkpoint, None, new_types)
    progress = {key: checkpoint.manifest.data["progress"][key] for key in ("step", "samples")}
    manifest = structs.replace(checkpoint.manifest, data={"progress": progress})
    unused = [f"model/{SECOND_COPY}.", f"rows/{SECOND_COPY}."] if resolved.has_second_copy else []
    unused += ["model/frequency."] if has_frequency else []
    tensors = {name: entry for name, entry in manifest.tensors.items() if not name.startswith(tuple(unused))}
    manifest = structs.replace(manifest, tensors=tensors)
    weights = Checkpoint(folder=checkpoint.folder, manifest=manifest)
    extends = base is not None and _write_changes(weights, folder, base, tables, memory_bytes, tell, warn)
    if not extends:
        plan = simple_plan(list(tables.values()), Topology(devices=1))
        rewrite(weights, folder, plan, tables, state=False, tell=tell)
    train = resolved.recipe.train
    served = ServedModel(
        name=resolved.recipe.name,
        parts=_copy_files(parts, folder),
        transforms=decode(to_json(serving(resolved.transforms))),
        precision=train.precision,
        batch=resolved.recipe.evaluate.batch,
        text=None if resolved.recipe.data.text is None else style_of(resolved.recipe.data.text),
    )
    return served, extends


def _write_changes(  # noqa: PLR0913 - used once
    checkpoint: Checkpoint,
    folder: Path,
    base: VersionFolder,
    tables: Mapping[str, Table],
    memory_bytes: int | None,
    tell: Tell | None,
    warn: Callable[[str], None],
) -> bool:
    """Write an increment to the base; false: too many rows have changed, and nothing was written."""
    try:
        opened = open_base(base.path)
        changed = changes_since(opened, checkpoint, tables, partial(max_changed, len(tables), memory_bytes), tell)
    except UnusableBaseError as error:
        warn(f"version {base.number} cannot be extended, so all rows are written: {error}")
        return False
    bytes_of_rows = sum(table.rows * table.row_bytes for table in tables.values())
    if changed is None or is_full_due(opened.manifest.chain_bytes, bytes_of_rows, stored_bytes(changed, changed=False)):
        return False
    tables_written = {shard.name for shard in changed}
    names = [
        name
        for name in checkpoint.names()
        if name.startswith(("model/", "rows/")) and is_needed_for_lookups(name) and name not in tables_written
    ]
    others = [LocalShard.whole(name, checkpoint.load(name)) for name in names]
    write(folder, [*changed, *others], checkpoint.manifest.data, base=opened)
    return True


def max_changed(tables: int, memory_bytes: int | None, table: Table) -> int:
    """Most changed rows of a table in an increment; they are in memory, twice while they are merged."""
    limit = spare_rows(table.rows)
    return limit if memory_bytes is None else min(limit, memory_bytes // (2 * tables * table.row_bytes))


def _newest_version(folder: Path, name: str, run: Path) -> VersionFolder | None:
    """The newest version in a folder; raises if it is of a model of another name, as clients ask by name."""
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"{folder} is a file", "a folder for versions")
    numbers = list_versions(folder)
    if not numbers:
        return None
    newest = version_folder(folder, numbers[-1])
    try:
        served = read_model(newest.path).name
    except RowwiseError:  # a damaged version
        return newest
    if served != name:
        raise SpecError(
            f"{folder} has versions of {served!r}, and {run} trained {name!r}",
            f"another folder, or name: {served} in the recipe",
        )
    return newest


def _retype(table: Table, rows: RowType | None) -> Table:
    """The table with another row type, if that makes its rows smaller."""
    smaller = table if rows is None else structs.replace(table, row_type=rows, column_group=None)
    return smaller if smaller.row_bytes < table.row_bytes else table


def _stored_types(model: nn.Module) -> dict[str, RowType]:
    """The row type of each table of a model, by the name of its tensor."""
    return {
        f"model/{full_name(path, table)}": table.row_type
        for path, module in table_modules(model)
        for table in module.tables
    }


def _copy_files(parts: ModelParts, folder: Path) -> ModelParts:
    """Copy files that the model is built from; their paths become relative to the folder."""

    def copy_file(source: Path, inside: str) -> str:
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / inside)
        return inside

    def copy_map(table: Table) -> Table:
        return move_map(table, lambda file: copy_file(Path(file), f"maps/{table.name}{Path(file).suffix}"))

    def copy_code(module: str) -> str:
        path, class_name = split_name(module)
        for file in modules_of_model(path).values():
            copy_file(file, f"code/{file.relative_to(path.parent)}")
        return f"code/{path.name}:{class_name}"

    def copy_pictures(pictures: str) -> str:
        for name in (INDEX, FILES):
            copy_file(Path(pictures) / name, f"{PICTURES}/{name}")
        return PICTURES

    tables = tuple(map(copy_map, parts.tables))
    return structs.replace(parts, model=map_files(parts.model, copy_code, copy_pictures), tables=tables)


def _write_model(folder: Path, served: ServedModel) -> None:
    (folder / MODEL).write_bytes(msgspec.json.format(msgspec.json.encode(served)))


def _write_computed(  # noqa: PLR0913 - used once
    folder: Path,
    model: nn.Module,
    resolved: ResolvedRecipe,
    sample: pa.Table,
    blocks: RowBlocks | None,
    items: ItemOptions,
    like: VersionFolder | None,
    train: pa.Table | None,
    warn: Callable[[str], None],
) -> tuple[ServedModel, RetrievalFacts | None]:
    """Write the results of the version as it will be opened: golden rows, hot rows and item vectors."""
    opened = read_model(folder)
    served = _write_golden(folder, opened, model, sample, blocks, train)
    tower_input = TowerInput(opened.parts, load(served.transforms), sample.schema, served.precision, served.blocks)
    with inference_mode(model, opened.parts.device, served.precision):
        facts = export_items(folder, resolved, model, tower_input, items, None if like is None else like.path, warn)
    return served, facts


def _write_golden(
    folder: Path,
    served: ServedModel,
    model: nn.Module,
    sample: pa.Table,
    blocks: RowBlocks | None,
    train: pa.Table | None,
) -> ServedModel:
    """Compute the golden rows; None as `blocks` chooses them by a test.

    Also writes the hot rows, which training rows look up most often.
    """
    preparation = served.parts.bind(sample.schema, load(served.transforms))
    with inference_mode(model, served.parts.device, served.precision):
        logits_of = logits_on(model, served.parts.device)
        blocks = blocks or choose_blocks_for(model, served.parts.device, preparation, sample)
        forward = Forward(preparation, logits_of, blocks)
        logits_RK = golden_logits(forward, sample, sample.num_rows)
        if train is not None:
            counting = Forward(preparation, logits_of, RowBlocks())  # fastest, as bits do not matter
            write_hot_rows(folder, _count_rows(model, counting, train))
    stored = msgspec.json.decode((folder / MODEL).read_bytes(), type=ServedModel)
    served = structs.replace(stored, blocks=blocks)
    _write_model(folder, served)
    logits = {task: pa.array(logits_RK[:, k].numpy()) for k, task in enumerate(served.parts.tasks)}
    write_golden(folder, GoldenRows(sample, pa.table(logits)))
    return served


def _count_rows(model: nn.Module, forward: Forward, train: pa.Table) -> dict[str, tuple[Ints, Ints]]:
    """Rows of tables that training rows look up, with counts."""
    counted = [(arena, arena.places, RowCounter(tables, arena.places)) for arena, tables in memory_of_tables(model)]
    for arena, _, counter in counted:
        arena.places = counter
    parts = [train.slice(begin, COUNTED_ROWS) for begin in range(0, train.num_rows, COUNTED_ROWS)]
    while parts:
        part = parts.pop()
        try:
            forward(arrays_of(part), part.num_rows, COUNTED_ROWS)
        except RowwiseError:  # bad rows, which training drops: retry both halves
            half = part.num_rows // 2
            parts += [part.slice(0, half), part.slice(half)] if half >= MIN_COUNTED else []
    for arena, places, _ in counted:
        arena.places = places
    return {name: counts for _, _, counter in counted for name, counts in counter.counts().items()}


def _training_rows(rows: RowSelection, names: Sequence[str]) -> pa.Table:
    """The first training rows."""
    parts: list[pa.Table] = []
    count = 0
    for split in rows.reader.splits():
        part = rows.reader.read(split, names)
        parts.append(part)
        count += part.num_rows
        if count >= STATS_ROWS:
            break
    return pa.concat_tables(parts).slice(0, STATS_ROWS)
