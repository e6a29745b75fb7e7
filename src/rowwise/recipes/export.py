"""Exports a run as a version of a model to serve: weights, transforms, golden rows, statistics of its columns.

See `serve/package.py` for the folder. A version is complete before it appears, and it needs nothing of the run.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
from msgspec import structs
from torch import nn

from rowwise.checkpoint.atomic import atomic_output
from rowwise.checkpoint.changes import UnusableBaseError, changes_since, open_base
from rowwise.checkpoint.delta import stored_bytes
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.named import tables_of
from rowwise.checkpoint.policy import is_full_due
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.rewrite import retype_tables, rewrite
from rowwise.checkpoint.tables import full_name, is_needed_for_lookups, table_modules
from rowwise.checkpoint.windows import Tell
from rowwise.checkpoint.write import write
from rowwise.errors import CheckpointError, SpecError
from rowwise.idmaps import StoredIds
from rowwise.ingest.transform import decode, load, serving, to_json
from rowwise.models.inference import RowBlocks, inference_mode
from rowwise.planner import simple_plan
from rowwise.recipes.compose import ModelParts, ResolvedRecipe, build_model, make_evaluator
from rowwise.recipes.held_out import held_out_rows
from rowwise.recipes.model_configs import SequenceModel, UserModel, kind_of
from rowwise.recipes.predict import logits_on
from rowwise.recipes.rows import RowSelection
from rowwise.recipes.runs import load_trained, resolve_saved
from rowwise.recipes.served import ServedModel, golden_logits, load_model, read_model
from rowwise.recipes.user_model_name import split_name
from rowwise.serve.forward import Forward, choose_blocks_of
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
from rowwise.serve.shared_rows import room_of
from rowwise.serve.sides import load_side
from rowwise.serve.traffic import Traffic
from rowwise.spec import RowType, Table, Topology
from rowwise.train.evaluate import Values
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import CheckpointFolder

STATS_ROWS = 1 << 16  # training rows that statistics of columns are of, at most
FOLLOW_s = 1.0  # between two looks at a run


class ExportedVersion(NamedTuple):
    """A version that was written."""

    folder: VersionFolder
    digest: str
    served: ServedModel
    step: int
    size_bytes: int  # without files that it shares with its base
    base: int | None  # the version whose rows it has, but for changed ones; None: it has all rows itself


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
    like: VersionFolder | None = None,
    full: bool = False,
    tell: Tell | None = None,
    warn: Callable[[str], None] = print,
) -> ExportedVersion:
    """Write a checkpoint of a run as the next version in a folder, and make it the current one.

    Args:
        run: the folder of the run.
        folder: the folder to serve; made if it does not exist.
        which: the checkpoint: best, last or step-<number>.
        rows: row type of the tables, where it makes their rows smaller; None: as trained.
        sides: tables of columns that requests leave out, each as FILE:KEY.
        like: an earlier version of the run, whose golden rows, blocks of rows and statistics are taken over.
        full: write all rows; else those that the newest version in the folder lacks, if these are few.
        tell: called with the bytes done, and the total.
        warn: called with a line on blocks of rows that cost time.
    """
    resolved = resolve_saved(RunFolder.open(run).path)
    if isinstance(resolved.recipe.model, SequenceModel):
        got = f"model.kind={kind_of(resolved.recipe.model)} ranks all items for a list, and has no logit of a row"
        raise SpecError(f"{run}: {got}: want a model with a label")
    checkpoint = CheckpointFolder(run / "ckpt").open(which)
    sample = held_out_rows(resolved) if like is None else read_golden(like.path).rows
    loaded = [load_side(side, sample.schema) for side in sides]
    known = list_versions(folder)
    base = version_folder(folder, known[-1]) if known and not full else None
    version = version_folder(folder, next_version(folder))
    with atomic_output(version.path) as unfinished:
        served, extends = _write_weights(resolved, checkpoint, unfinished, rows, base=base, tell=tell, warn=warn)
        _write_model(unfinished, served)
        blocks = None if like is None else read_model(like.path).blocks
        served = _write_golden(unfinished, sample, blocks)
        for side in loaded:
            side.write(unfinished)
        if served.blocks.kind != "padded" and like is None:
            warn(served.blocks.describe())
        if like is None:
            stats = _column_stats(resolved.rows.train, sample.column_names)
            (unfinished / STATS).write_bytes(msgspec.json.format(msgspec.json.encode(stats)))
        else:
            shutil.copyfile(like.path / STATS, unfinished / STATS)
    write_traffic(folder, Traffic(current=version.number))
    kept = set() if base is None else {file.stat().st_ino for file in base.path.iterdir()}  # hard links
    sizes = {file.stat().st_ino: file.stat().st_size for file in version.path.rglob("*") if file.is_file()}
    size_bytes = sum(size for file, size in sizes.items() if file not in kept)
    step = checkpoint.manifest.data.get("progress", {}).get("step", 0)
    base_number = base.number if base is not None and extends else None
    return ExportedVersion(version, version.digest, served, step, size_bytes, base_number)


def follow(  # noqa: PLR0913 - those of `export`
    run: Path,
    folder: Path,
    *,
    rows: RowType | None = None,
    sides: Sequence[str] = (),
    full: bool = False,
    tell: Tell | None = None,
    warn: Callable[[str], None] = print,
) -> Iterator[ExportedVersion]:
    """Export the newest checkpoint of a run, then each that is saved, until the run has finished."""
    checkpoints, last = CheckpointFolder(run / "ckpt"), None
    while True:
        step = max(checkpoints.steps(), default=None)
        if step is not None and (last is None or step != last.step):
            like = None if last is None else last.folder
            try:
                last = export(
                    run,
                    folder,
                    which=f"step-{step}",
                    rows=rows,
                    sides=sides,
                    like=like,
                    full=full,
                    tell=tell,
                    warn=warn,
                )
            except (CheckpointError, FileNotFoundError):
                if step in checkpoints.steps():
                    raise
                continue  # the run has removed it meanwhile, as it has newer ones
            yield last
        elif step is not None and checkpoints.open("last").manifest.data.get("progress", {}).get("finished"):
            return
        else:
            time.sleep(FOLLOW_s)


def row_type_cost(run: Path, version: VersionFolder, which: str = "best") -> list[RowTypeCost]:
    """What the row types of a version cost on the test rows of its run."""
    resolved, trained = load_trained(run, which)
    rows = resolved.rows.test
    if rows is None:
        raise SpecError(f"{run}: its recipe has no test rows, by which to measure what row types cost")
    of_run = make_evaluator(resolved, trained, rows)().tasks
    del trained
    of_version = make_evaluator(resolved, load_model(version.path, read_model(version.path)), rows)().tasks
    return [RowTypeCost(task, of_run[task], of_version[task]) for task in of_run]


def _write_weights(  # noqa: PLR0913 - used once
    resolved: ResolvedRecipe,
    checkpoint: Checkpoint,
    folder: Path,
    rows: RowType | None,
    *,
    base: VersionFolder | None,
    tell: Tell | None,
    warn: Callable[[str], None],
) -> tuple[ServedModel, bool]:
    """Write tensors, id maps and the user's model; returns the model's description, and whether it extends the base."""
    parts = structs.replace(
        resolved.parts, tables=tuple(_retype(table, rows) for table in resolved.tables), device="cpu"
    )
    kinds = _stored_types(build_model(parts, on_meta=True))
    by_tensor = {saved.name: name for name, saved in tables_of(checkpoint.manifest).items()}
    new_types = {by_tensor[tensor]: kind for tensor, kind in kinds.items()}
    tables = retype_tables(checkpoint, None, new_types)
    small = {key: checkpoint.manifest.data["progress"][key] for key in ("step", "samples")}
    slim = Checkpoint(folder=checkpoint.folder, manifest=structs.replace(checkpoint.manifest, data={"progress": small}))
    extends = base is not None and _write_changes(slim, folder, base, tables, tell, warn)
    if not extends:
        rewrite(slim, folder, simple_plan(list(tables.values()), Topology(devices=1)), tables, state=False, tell=tell)
    train = resolved.recipe.train
    served = ServedModel(
        name=resolved.recipe.name,
        parts=_copy_files(parts, folder),
        transforms=decode(to_json(serving(resolved.transforms))),
        precision=train.precision,
        batch=resolved.recipe.evaluate.batch,
    )
    return served, extends


def _write_changes(
    checkpoint: Checkpoint,
    folder: Path,
    base: VersionFolder,
    tables: Mapping[str, Table],
    tell: Tell | None,
    warn: Callable[[str], None],
) -> bool:
    """Write the rows that the base lacks, and all other weights; false: these are too many, so nothing was written."""
    try:
        opened = open_base(base.path)
        changed = changes_since(opened, checkpoint, tables, room_of, tell)
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
    whole = [LocalShard.whole(name, checkpoint.load(name)) for name in names]
    write(folder, [*changed, *whole], checkpoint.manifest.data, base=opened)
    return True


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
    """Copy files that the model is built from; their paths become those inside of the folder."""

    def copied(source: Path, inside: str) -> str:
        (folder / inside).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, folder / inside)
        return inside

    tables = []
    for table in parts.tables:
        stored = table.id_map
        if isinstance(stored, StoredIds):
            file = copied(Path(stored.file), f"maps/{table.name}{Path(stored.file).suffix}")
            table = structs.replace(table, id_map=structs.replace(stored, file=file))
        tables.append(table)
    model = parts.model
    if isinstance(model, UserModel):
        path, class_name = split_name(model.module)
        model = structs.replace(model, module=f"{copied(path, f'code/{path.name}')}:{class_name}")
    return structs.replace(parts, model=model, tables=tuple(tables))


def _write_model(folder: Path, served: ServedModel) -> None:
    (folder / MODEL).write_bytes(msgspec.json.format(msgspec.json.encode(served)))


def _write_golden(folder: Path, sample: pa.Table, blocks: RowBlocks | None) -> ServedModel:
    """Compute the golden rows by the version as it will be opened; without blocks of rows, choose them by a test."""
    served = read_model(folder)
    model, preparation = load_model(folder, served), served.bind(sample.schema, load(served.transforms))
    with inference_mode(model, served.parts.device, served.precision):
        logits_of = logits_on(model, served.parts.device)
        blocks = blocks or choose_blocks_of(preparation, logits_of, sample)
        logits_RK = golden_logits(Forward(preparation, logits_of, blocks), sample, sample.num_rows)
    stored = msgspec.json.decode((folder / MODEL).read_bytes(), type=ServedModel)
    served = structs.replace(stored, blocks=blocks)
    _write_model(folder, served)
    logits = {task: pa.array(logits_RK[:, k].numpy()) for k, task in enumerate(served.parts.tasks)}
    write_golden(folder, GoldenRows(sample, pa.table(logits)))
    return served


def _column_stats(rows: RowSelection, names: Sequence[str]) -> dict[str, ColumnStats]:
    """Statistics of raw columns over the first training rows."""
    parts: list[pa.Table] = []
    count = 0
    for split in rows.reader.splits():
        part = rows.reader.read(split, names)
        parts.append(part)
        count += part.num_rows
        if count >= STATS_ROWS:
            break
    table = pa.concat_tables(parts).slice(0, STATS_ROWS)
    return {name: ColumnStats.of(table[name]) for name in names}
