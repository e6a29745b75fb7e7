"""A version of a model as a value: written by `export`, opened by `rowwise serve` and `rowwise predict`.

The workers of a server share the rows of versions: `load_rows` writes them into a file in memory, and each worker maps
it (`open_version`); see `serve/shared_rows.py`.

Opening a version reads no training data. It runs the user's transforms and models in it: open only versions that you
trust, or pass the digest that you expect.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import torch
from msgspec import structs
from torch import Tensor, nn

from rowwise.base.errors import CheckpointError, DataError, SpecError
from rowwise.base.inside import fault_of_name
from rowwise.base.textfile import decode_json, read_bytes
from rowwise.base.value import MAX_BATCH
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.tables import table_modules
from rowwise.ingest.bound import BoundPreparation
from rowwise.ingest.dialect import Dialect
from rowwise.ingest.transform import AnyKind, LoadedTransforms, UserFunction, load
from rowwise.ingest.unpacked import check_types
from rowwise.models.inference import RowBlocks, RowSpan, autocast, pack
from rowwise.recipes.bounded_build import build_checked
from rowwise.recipes.code import module_of
from rowwise.recipes.compose import build_model
from rowwise.recipes.device_tables import serve_from_device
from rowwise.recipes.id_maps import move_map
from rowwise.recipes.model_configs import map_files
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.predict import Predictor, RankedItems, logits_on
from rowwise.recipes.resolved import ModelParts
from rowwise.recipes.towers import TowerInput, user_vectors
from rowwise.serve.answer import prediction_names
from rowwise.serve.cached_rows import CachedRows, warm_up
from rowwise.serve.contents import digest_of, read_files, reading_export
from rowwise.serve.forward import Forward, Logits, arrays_of, choose_blocks_of
from rowwise.serve.hot_rows import read_hot_rows
from rowwise.serve.items import open_items, read_facts
from rowwise.serve.package import (
    GOLDEN,
    LOGIT,
    MAX_BYTES,
    MODEL,
    GoldenRows,
    VersionFolder,
    find_version,
    read_golden,
    read_stats,
)
from rowwise.serve.retrieval import Retriever
from rowwise.serve.row_tiers import IN_MEMORY, RowTiers
from rowwise.serve.shared_rows import (
    SharedRows,
    added_chunks,
    map_rows,
    newer_chunks,
    reserve_rows,
    use_newer,
    write_newer,
)
from rowwise.serve.sides import SideTable, read_sides
from rowwise.serve.version import Identity, ServedVersion
from rowwise.tables.batch import Batch
from rowwise.tables.embedding import Embeddings
from rowwise.tables.ops.host_rows import host_rows
from rowwise.tables.spec import Value, check_tables
from rowwise.train.settings import Precision
from rowwise.train.snapshot import restore_model

CLOSE = 1e-5  # see `tolerance_of`
FORMAT = 1


class ServedModel(Value, frozen=True, kw_only=True):
    """The content of model.json."""

    format: int = FORMAT
    name: str
    parts: ModelParts  # with the row types of the version; paths are relative to its folder
    transforms: tuple[AnyKind, ...]  # with the contents of their files
    precision: Precision
    batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]  # maximum batch of `rowwise predict`
    blocks: RowBlocks = RowBlocks()
    text: Dialect | None = None  # dialect of the training files, and of files to predict for

    @property
    def code(self) -> tuple[str, ...]:
        """Names of the user code that opening the version runs."""
        module = module_of(self.parts.model)
        return (
            *([] if module is None else [module]),
            *(t.function for t in self.transforms if isinstance(t, UserFunction)),
        )


def read_model(version: Path) -> ServedModel:
    """Decode model.json, without running any of its code."""
    path = version / MODEL
    with reading_export(path):
        served = decode_json(read_bytes(path, MAX_BYTES, links=False), ServedModel)
        if served.format != FORMAT:
            raise CheckpointError(f"{path} has format {served.format}; this rowwise reads format {FORMAT}")
        _check_parts(served.parts)
        return structs.replace(served, parts=_locate(served.parts, version))


def _check_parts(parts: ModelParts) -> None:
    """Raise for inconsistent parts, which no export writes."""
    check_tables(parts.tables)
    table_names = {table.name for table in parts.tables}  # an exported graph keeps columns of dropped tables
    sparse = tuple(column for column in parts.columns.sparse if column.table_name in table_names)
    structs.replace(parts.columns, sparse=sparse).check_tables(parts.tables)
    if not parts.tasks or len(set(parts.tasks)) < len(parts.tasks):
        raise SpecError(f"parts.tasks={list(parts.tasks)}", "at least one task, each task once")
    if parts.link is not None:
        parts.link.check(len(parts.tasks))
    if not 0 <= parts.seed < 1 << 63:
        raise SpecError(f"parts.seed={parts.seed}", "at least 0, and less than 2**63")
    if parts.device != "cpu":
        raise SpecError(f"parts.device={parts.device!r}", "'cpu'")


def load_model(version: Path, served: ServedModel, tiers: RowTiers = IN_MEMORY) -> nn.Module:
    """The model with the weights of a version, verified by checksum; `tiers`: memory tiers of its rows."""
    if tiers.memory_bytes is not None:
        return _map_model_here(version, served, tiers)[0]
    checkpoint = Checkpoint.open(version)
    build_checked(checkpoint, served.parts)  # before memory is taken for its tables
    model = build_model(served.parts)
    restore_model(checkpoint, model)
    return model


def _map_model_here(version: Path, served: ServedModel, tiers: RowTiers) -> tuple[nn.Module, tuple[CachedRows, ...]]:
    """The model with its rows in a private memory file."""
    file = os.memfd_create("rowwise-rows")
    try:
        rows = _load_rows(version, served, tiers, 0, file, None).rows
        model, cached = _map_model(version, served, rows, tiers)
        warm_up(cached, read_hot_rows(version))
        return model, cached
    finally:
        os.close(file)  # mappings stay valid


def _map_model(
    version: Path, served: ServedModel, rows: SharedRows, tiers: RowTiers, pause: Callable[[], object] = lambda: None
) -> tuple[nn.Module, tuple[CachedRows, ...]]:
    """The model over the mapped rows of a file, and its cached tables."""
    model = build_model(served.parts, on_meta=True)
    pause()
    checkpoint, places = Checkpoint.open(version), reserve_rows(model)
    newer = newer_chunks(rows, checkpoint.manifest)
    if newer is None or places != rows.places:
        raise CheckpointError(f"{version} has changed since its rows were loaded", "versions that do not change")
    pause()
    memory = tiers.divide(checkpoint.manifest, version)
    private = bool(memory.caches)
    map_rows(model, rows.file, version, fresh=False, cached=memory.cached, private=private)
    pause()
    restore_model(checkpoint, model, without=rows.tables.keys())
    pause()
    use_newer(model, checkpoint, newer, pause)
    cached = tiers.attach(model, served.name, checkpoint, rows, newer, memory)
    if tiers.device is not None:
        pause()
        serve_from_device(model, tiers.device, {name: sum(c.count for c in chunks) for name, chunks in newer.items()})
        use_newer(model, checkpoint, newer, pause)  # at their places on the device
    return model, cached


def load_rows(
    path: Path, tiers: RowTiers, number: int, file: int, like: int | None, shared: SharedRows | None
) -> SharedRows:
    """Write the rows of a version into a file in memory, and check its golden rows.

    Args:
        path: a folder that `rowwise export` wrote, or a version in it.
        tiers: rows of tables over the memory budget are verified, and hot ones are cached.
        number: the version.
        file: a descriptor of an empty file.
        like: a version with the columns and tasks that this one must have.
        shared: rows of earlier versions; an increment of them appends its newer rows there.

    Returns:
        `file` with all rows, or `shared` with the newer ones.
    """
    with find_version(path, number).checked(None) as folder:
        served = read_model(folder.path)
        if like is not None:
            _check_alike(folder, find_version(path, like))
        loaded = _load_rows(folder.path, served, tiers, number, file, shared)
        _serve(folder, served, loaded.model, loaded.cached)
        if loaded.fresh:
            warm_up(loaded.cached, read_hot_rows(folder.path))
        return loaded.rows


class _OpenedRows(NamedTuple):
    """Rows in a file, and the model that checks them."""

    rows: SharedRows
    model: nn.Module
    cached: tuple[CachedRows, ...]
    fresh: bool  # the file has the rows of this version only


def _load_rows(
    path: Path, served: ServedModel, tiers: RowTiers, number: int, file: int, shared: SharedRows | None
) -> _OpenedRows:
    """Write the rows of a version into a file in memory, verified by checksum; see `load_rows`."""
    version = Checkpoint.open(path)
    model = build_checked(version, served.parts)
    places = reserve_rows(model)
    memory = tiers.divide(version.manifest, path)
    added = None if shared is None else added_chunks(shared, version.manifest, places)
    if shared is None or added is None:
        rows = SharedRows.of(file, number, version.manifest, places, memory.cached)._replace(tag=tiers.next_tag())
        newer, checked = rows.newer, dict.fromkeys(rows.newer, 0)
        map_rows(model, file, path, fresh=True, cached=memory.cached)
        restore_model(version, model, without=memory.cached)
    else:
        rows = shared._replace(newest=number, newer=added.newer) if added.grows else shared
        newer = added.newer
        checked = {name: len(rows.tables[name].chunks) + count for name, count in added.written.items()}
        map_rows(model, shared.file, path, fresh=False, cached=memory.cached)
        write_newer(model, shared.file, version, added, memory.cached)
        restore_model(version, model, without=rows.tables.keys())
    for name in memory.cached:
        for chunk in version.entry(name).chunks[checked[name] :]:
            version.check_rows(name, chunk)
    use_newer(model, version, newer)
    fresh = added is None
    # An increment is checked under a new tag: if it is refused, no later increment may hit its rows in the cache.
    checking = rows if fresh else rows._replace(tag=tiers.next_tag())
    cached = tiers.attach(model, served.name, version, checking, newer, memory)
    return _OpenedRows(rows, model, cached, fresh)


def open_version(
    path: Path,
    expect: str | None = None,
    number: int | None = None,
    rows: SharedRows | None = None,
    pause: Callable[[], object] = lambda: None,
    tiers: RowTiers = IN_MEMORY,
) -> ServedVersion:
    """Open a version for inference, and check its golden rows.

    Args:
        path: a folder that `rowwise export` wrote, or a version in it.
        expect: the only digest that is accepted.
        number: the version; None: the current one.
        rows: the rows that `load_rows` wrote; None: load them for this process alone.
        pause: called between parts of the work, every few milliseconds.
        tiers: memory tiers of its rows.
    """
    with find_version(path, number).checked(expect) as folder:
        served = read_model(folder.path)
        pause()
        if rows is None and tiers.memory_bytes is None and tiers.device is None:
            return _serve(folder, served, load_model(folder.path, served))
        if rows is None:
            model, cached = _map_model_here(folder.path, served, tiers)
        else:
            model, cached = _map_model(folder.path, served, rows, tiers, pause)
        if tiers.device is not None:
            served = _on_device(folder, served, tiers.device.device)
        return _serve(folder, served, model, cached, pause, check_items=False)


def _on_device(folder: VersionFolder, served: ServedModel, device: str) -> ServedModel:
    """The description of the model on a device; raises for models that run on CPUs only."""
    if family_of(served.parts.model).mixes_a_graph or read_facts(folder.path) is not None:
        problem = f"{folder.path} answers with items" if read_facts(folder.path) else f"{folder.path} is a graph's"
        raise SpecError(f"{problem}, which are computed on the CPU", "--device cpu")
    return structs.replace(served, parts=structs.replace(served.parts, device=device))


def _serve(
    folder: VersionFolder,
    served: ServedModel,
    model: nn.Module,
    cached: tuple[CachedRows, ...] = (),
    pause: Callable[[], object] = lambda: None,
    *,
    check_items: bool = True,
) -> ServedVersion:
    golden, files = read_golden(folder.path), read_files(folder.path)
    model.eval()
    with autocast(served.parts.device, served.precision):
        pack(model)
    pause()
    transforms = load(served.transforms)
    preparation = _bind_golden(folder, served, golden, transforms)
    golden = golden._replace(logits=golden.logits.select(served.parts.tasks))
    pause()
    blocks, logits_of = served.blocks, _without_gradients(model, served)
    if torch.device(served.parts.device).type == "cuda":  # the exported blocks were chosen on a CPU
        blocks = choose_blocks_of(preparation, logits_of, golden.rows)
    forward = Forward(preparation, logits_of, blocks)
    sides = read_sides(folder.path)
    tower_input = TowerInput(served.parts, transforms, golden.rows.schema, served.precision, served.blocks)
    retriever = _open_retriever(folder.path, model, tower_input, sides, cached, check=check_items)
    pause()
    return ServedVersion(
        name=served.name,
        number=folder.number,
        digest=None if files is None else digest_of(files),
        forward=forward,
        schema=pa.schema([golden.rows.schema.field(name) for name in preparation.names]),
        tasks=served.parts.tasks,
        link=served.parts.link,
        stats=read_stats(folder.path),
        sides=sides,
        retriever=retriever,
        cached=cached,
        device_caches=tuple(
            cache
            for _, module in table_modules(model)
            if isinstance(module, Embeddings) and (cache := host_rows(module.arena)) is not None
        ),
        identity=_check_golden(folder, forward, golden, cached, pause),
    )


def _bind_golden(
    folder: VersionFolder, served: ServedModel, golden: GoldenRows, transforms: LoadedTransforms
) -> BoundPreparation:
    """Bind the columns of the golden rows; raises unless they match the model, with a logit for each task."""
    path, logits, tasks = folder.path / GOLDEN, golden.logits.column_names, served.parts.tasks
    for task in (*tasks, *logits):
        if task not in logits or task not in tasks:
            problem = "has no column" if task in tasks else "has an unexpected column"
            raise CheckpointError(f"{path} {problem} {LOGIT + task[:80]!r}", hint="export the version again")
    try:
        check_types(golden.logits, pa.schema(dict.fromkeys(tasks, pa.float32())))
        return served.parts.bind(golden.rows.schema, transforms)
    except (pa.ArrowException, DataError, SpecError) as error:
        raise CheckpointError(f"{path} does not match the model: {error}", hint="export the version again") from None


def _open_retriever(
    version: Path,
    model: nn.Module,
    tower_input: TowerInput,
    sides: tuple[SideTable, ...],
    cached: tuple[CachedRows, ...],
    *,
    check: bool,
) -> Retriever | None:
    """The retriever over the items of the version; None without items."""
    facts = read_facts(version)
    if facts is None:
        return None
    items = open_items(version, facts, check=check)
    return Retriever(user_vectors(model, tower_input), tower_input.schema, items, sides, cached)


def _without_gradients(model: nn.Module, served: ServedModel) -> Logits:
    """The logits of a model, in inference mode in any thread."""
    device, precision = served.parts.device, served.precision
    logits_of = logits_on(model, device)

    def logits(batch: Batch) -> Tensor:
        with torch.inference_mode(), autocast(device, precision):
            return logits_of(batch)

    return logits


def _check_alike(folder: VersionFolder, other: VersionFolder) -> None:
    """Raise unless both versions have the same interface for clients."""

    def interface(version: VersionFolder) -> dict[str, object]:
        served, rows = read_model(version.path), read_golden(version.path).rows
        columns = {field.name: str(field.type) for field in rows.schema}
        sides, items = [side.key for side in read_sides(version.path)], read_facts(version.path)
        key = None if items is None else items.key
        scores = prediction_names(served.parts.tasks, served.parts.link)
        parts = {
            "tasks": served.parts.tasks,
            "predictions": scores,
            "columns": columns,
            "side tables": sides,
            "keys of items": key,
        }
        return {"name": served.name, **parts}

    new, current = interface(folder), interface(other)
    for name, expected in current.items():
        if new[name] != expected:
            problem = f"{folder.path} differs in {name} from version {other.number}, which is served"
            problem += f": {new[name]}, not {expected}"
            raise CheckpointError(problem, hint="export it to a folder of its own, for another server")


def open_predictor(
    path: Path, number: int | None = None, expect: str | None = None, tiers: RowTiers = IN_MEMORY
) -> Predictor:
    """The model of a version, for `rowwise predict`; `tiers`: memory tiers of its rows."""
    with find_version(path, number).checked(expect) as folder:
        served = read_model(folder.path)
        return Predictor(
            model=load_model(folder.path, served, tiers),
            parts=served.parts,
            transforms=load(served.transforms),
            precision=served.precision,
            batch=served.batch,
            blocks=served.blocks,
            items=_ranked_items(folder.path) if family_of(served.parts.model).retrieves == "lists" else None,
        )


def _ranked_items(version: Path) -> RankedItems:
    """The items of a version that a sequence model ranks."""
    facts = read_facts(version)
    if facts is None:
        raise SpecError(f"{version} has no items to rank", "a version whose lists hold whole numbers or text")
    items = open_items(version, facts)
    return RankedItems(items.keys, items.vectors_ID)


def golden_logits(forward: Forward, rows: pa.Table, batch: int) -> Tensor:
    return forward(arrays_of(rows), rows.num_rows, batch)


def _check_golden(
    folder: VersionFolder,
    forward: Forward,
    golden: GoldenRows,
    cached: tuple[CachedRows, ...],
    pause: Callable[[], object],
) -> Identity:
    """Compute the golden rows block by block, also as a warm-up; raises if logits differ by more than rounding."""
    for rows in cached:
        rows.exact = True

    def pause_after(_: RowSpan) -> None:
        pause()

    logits_RK = forward(arrays_of(golden.rows), golden.rows.num_rows, forward.blocks.rows, pause_after).numpy()
    expected_RK = np.stack([golden.logits[name].to_numpy() for name in golden.logits.column_names], 1)
    if logits_RK.tobytes() == expected_RK.astype(np.float32).tobytes():
        return "exact"
    worst, tolerance = float(np.abs(logits_RK - expected_RK).max()), tolerance_of(expected_RK)
    if worst > tolerance or np.isnan(worst):
        raise CheckpointError(
            f"{folder.path}: logits of its golden rows differ by {worst:.1e} from those of the export",
            f"at most {tolerance:.1e}",
            hint="export the version again",
        )
    return "close"


def tolerance_of(logits_RK: np.ndarray) -> float:
    """How far logits of another processor, or of an earlier rowwise, may be from these: more if they are large."""
    return CLOSE * max(1.0, float(np.abs(logits_RK).max(initial=0.0)))


def _locate(parts: ModelParts, version: Path) -> ModelParts:
    """Parts with absolute paths of files; raises for a path outside of the version's folder."""

    def locate(inside: str) -> str:
        if any(map(fault_of_name, inside.split("/"))):
            raise CheckpointError(
                f"{version / MODEL} names {inside[:80]!r}, which is outside of the version",
                hint="export the version again",
            )
        return str(version.absolute() / inside)

    tables = tuple(move_map(table, locate) for table in parts.tables)
    return structs.replace(parts, model=map_files(parts.model, locate, locate), tables=tables)
