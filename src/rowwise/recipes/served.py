"""A version of a model as a value: written by `export`, opened by `rowwise serve` and `rowwise predict`.

Opening one reads no training data. It runs the user's transforms and models that came with it: open only what you
trust, or compare its digest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import structs
from torch import Tensor, nn

from rowwise.checkpoint.read import Checkpoint
from rowwise.errors import CheckpointError, SpecError
from rowwise.idmaps import StoredIds
from rowwise.ingest.batcher import table_rows_for_ids
from rowwise.ingest.bound import BoundPreparation
from rowwise.ingest.transform import AnyKind, LoadedTransforms, UserFunction, load
from rowwise.models.inference import RowBlocks, inference_mode
from rowwise.recipes.compose import ModelParts, build_model
from rowwise.recipes.model_configs import UserModel
from rowwise.recipes.predict import Predictor, logits_on
from rowwise.serve.forward import Forward, arrays_of
from rowwise.serve.package import (
    MODEL,
    MOST_BYTES,
    STATS,
    ColumnStats,
    GoldenRows,
    VersionFolder,
    find_version,
    read_golden,
)
from rowwise.serve.version import Identity, ServedVersion
from rowwise.spec import Table, Value
from rowwise.textfile import decode_json, read_bytes
from rowwise.train.snapshot import restore_model

CLOSE = 1e-5  # most that a golden logit may differ on another processor
FORMAT = 1


class ServedModel(Value, frozen=True, kw_only=True):
    """The content of model.json."""

    format: int = FORMAT
    name: str
    parts: ModelParts  # tables have the row types of the version; paths are inside of its folder
    transforms: tuple[AnyKind, ...]  # with the contents of their files
    precision: str
    batch: int  # rows that `rowwise predict` computes together, at most
    blocks: RowBlocks = RowBlocks()

    @property
    def code(self) -> tuple[str, ...]:
        """The user's code that opening the version runs."""
        model = [self.parts.model.module] if isinstance(self.parts.model, UserModel) else []
        return (*model, *(one.function for one in self.transforms if isinstance(one, UserFunction)))

    def bind(self, schema: pa.Schema, transforms: LoadedTransforms) -> BoundPreparation:
        parts = self.parts
        return BoundPreparation(schema, transforms, parts.columns, table_rows_for_ids(parts.columns, parts.tables))


def read_model(version: Path) -> ServedModel:
    """Decode model.json, without running any of its code."""
    path = version / MODEL
    try:
        served = decode_json(read_bytes(path, MOST_BYTES, links=False), ServedModel)
    except (msgspec.MsgspecError, SpecError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; export the version again") from None
    if served.format != FORMAT:
        raise CheckpointError(f"{path} has format {served.format}; this rowwise reads format {FORMAT}")
    return structs.replace(served, parts=_locate(served.parts, version))


def load_model(version: Path, served: ServedModel) -> nn.Module:
    """The model with the weights of a version, each compared with its checksum."""
    model = build_model(served.parts)
    restore_model(Checkpoint.open(version), model)
    return model


@contextmanager
def open_version(path: Path, number: int | None = None, expect: str | None = None) -> Iterator[ServedVersion]:
    """A version that computes, in `inference_mode` until the context ends; its golden rows have come out right.

    Args:
        path: a folder that `rowwise export` wrote, or a version in it.
        number: the version; None: the current one.
        expect: the only digest that is accepted.
    """
    folder = find_version(path, number)
    digest = check_digest(folder, expect)
    served, golden = read_model(folder.path), read_golden(folder.path)
    model = load_model(folder.path, served)
    forward = Forward(
        served.bind(golden.rows.schema, load(served.transforms)), logits_on(model, served.parts.device), served.blocks
    )
    with inference_mode(model, served.parts.device, served.precision):
        yield ServedVersion(
            name=served.name,
            number=folder.number,
            digest=digest,
            forward=forward,
            schema=pa.schema([golden.rows.schema.field(name) for name in forward.preparation.names]),
            tasks=served.parts.tasks,
            stats=decode_json(read_bytes(folder.path / STATS), dict[str, ColumnStats]),
            identity=_check_golden(folder, forward, golden),
        )


def open_predictor(path: Path, number: int | None = None, expect: str | None = None) -> Predictor:
    """The model of a version, for `rowwise predict`."""
    folder = find_version(path, number)
    check_digest(folder, expect)
    served = read_model(folder.path)
    return Predictor(
        model=load_model(folder.path, served),
        columns=served.parts.columns,
        tables=served.parts.tables,
        transforms=load(served.transforms),
        tasks=served.parts.tasks,
        device=served.parts.device,
        precision=served.precision,
        batch=served.batch,
        blocks=served.blocks,
    )


def check_digest(folder: VersionFolder, expect: str | None) -> str:
    """The digest of a version; raises for another than expected, before anything of the version runs."""
    digest = folder.digest
    if expect is not None and digest != expect:
        raise CheckpointError(f"{folder.path} has digest {digest}, not {expect}: want the version that you expect")
    return digest


def golden_logits(forward: Forward, rows: pa.Table, batch: int) -> Tensor:
    return forward(arrays_of(rows), rows.num_rows, batch)


def _check_golden(folder: VersionFolder, forward: Forward, golden: GoldenRows) -> Identity:
    """Compute the golden rows, which also warms the model up; raises if they differ by more than rounding."""
    found_RK = golden_logits(forward, golden.rows, golden.rows.num_rows).numpy()
    wanted_RK = np.stack([golden.logits[name].to_numpy() for name in golden.logits.column_names], 1)
    if found_RK.tobytes() == wanted_RK.astype(np.float32).tobytes():
        return "exact"
    worst = float(np.abs(found_RK - wanted_RK).max())
    if worst > CLOSE or np.isnan(worst):
        got = f"logits of its golden rows differ by {worst:.1e} from those of the export"
        raise CheckpointError(f"{folder.path}: {got}; want at most {CLOSE}: export the version again")
    return "close"


def _locate(parts: ModelParts, version: Path) -> ModelParts:
    """Parts with the paths of files in a version's folder."""

    def table_at(table: Table) -> Table:
        stored = table.id_map
        if not isinstance(stored, StoredIds):
            return table
        return structs.replace(table, id_map=structs.replace(stored, file=str(version.absolute() / stored.file)))

    model = parts.model
    if isinstance(model, UserModel):
        model = structs.replace(model, module=str(version.absolute() / model.module))
    return structs.replace(parts, model=model, tables=tuple(map(table_at, parts.tables)))
