"""A served model as one torch module, from raw columns to predictions, which torch.export traces.

Lookups are gathers and sums over lists, so the graph has torch's own operators only and runs where rowwise is not
installed. Its rows are in memory.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np
import pyarrow as pa
import torch
from pyarrow import types
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from rowwise.base.errors import CheckpointError, RowwiseError, SpecError
from rowwise.base.quantity import format_bytes
from rowwise.checkpoint.tables import table_modules
from rowwise.ingest.bags import combine_chunks, decoded, flatten_values
from rowwise.ingest.columns import Sparse
from rowwise.ingest.kinds import decoded_kind, element_of, is_list, is_text
from rowwise.ingest.transform import LoadedTransforms, load, unread
from rowwise.recipes.formats.columns import (
    MISSING,
    GraphColumn,
    apply_transform,
    dense_numbers,
    hashed_rows,
)
from rowwise.recipes.model_configs import kind_of
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.resolved import ModelParts
from rowwise.recipes.served import CLOSE, ServedModel, load_model, read_model
from rowwise.serve.answer import prediction_names
from rowwise.serve.oip import OFFSETS, VALUES
from rowwise.serve.package import GoldenRows, read_golden
from rowwise.tables.embedding import Embeddings, Vectors
from rowwise.tables.ops import reference
from rowwise.tables.spec import Pooling, RowType, Table

TRACED = {"single": [0] * 3, "values": [0] * 4, "offsets": [0, 1, 3, 4]}  # sizes of 0 and 1 would become constants
CHECKED_ROWS = (1, 5)  # sizes of batches in which the golden rows are checked, beside all at once
CALL_ROWWISE = "export with --mlflow or --triton, which call rowwise, or serve it: rowwise serve"
KEPT_TYPES = (RowType.FP32, RowType.FP16)  # rows of other types are stored as 32-bit numbers
RunTensors = Callable[[tuple[Tensor, ...]], Sequence[Any]]  # outputs, as arrays or tensors
Part = Literal["single", "values", "offsets"]


class GraphInput(NamedTuple):
    """An input of the graph: a column of single values, or the values or offsets of one of lists."""

    column: str
    part: Part
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.column + {"single": "", "values": VALUES, "offsets": OFFSETS}[self.part]


class GraphIds(NamedTuple):
    """The ids of a batch in the graph, by feature."""

    features: Mapping[str, GraphColumn]
    batch_size: int


class GraphBatch(NamedTuple):
    """The batch that a user's model gets in the graph."""

    dense_BF: Tensor
    sparse: GraphIds


@final
class GatheredTables(nn.Module):
    """`Embeddings` as gathers and sums over lists.

    Args:
        embeddings: the tables.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        super().__init__()
        self.tables = embeddings.tables
        self._columns = embeddings._columns
        self.rows = nn.ParameterList()  # not by name, which may be that of a method
        for table in self.tables:
            kept = table.row_type in KEPT_TYPES
            rows_RD = embeddings.table(table.name) if kept else embeddings.weights(table.name)
            self.rows.append(nn.Parameter(rows_RD.clone(), requires_grad=False))

    def forward(self, sparse: GraphIds) -> Vectors:
        """Look the ids of a batch up."""
        pooled = [
            self._pool(table, rows_RD, sparse.features[feature], sparse.batch_size)
            for table, rows_RD in zip(self.tables, self.rows, strict=True)
            for feature in table.feature_names
        ]
        return Vectors.of(torch.cat(pooled, 1), self._columns, {})

    def _pool(self, table: Table, rows_RD: Tensor, ids: GraphColumn, batch: int) -> Tensor:
        outside_N = (ids.values_N < 0) | (ids.values_N >= table.rows)
        # A gather wraps negative numbers around, and refuses the number of rows.
        rows_N = torch.where(outside_N, table.rows - (table.unknown == "last_row"), ids.values_N)
        rows_N = torch.where(ids.missing_N, 0, rows_N)
        rows_ND = rows_RD[rows_N].to(torch.float32)
        rows_ND = torch.where(ids.missing_N.unsqueeze(1), 0.0, rows_ND)
        if ids.offsets_B1 is None:
            return rows_ND
        row_of_each = ids.row_of_each
        sums_BD = torch.zeros(batch, table.dim).index_add(0, row_of_each, rows_ND)
        if table.pooling is Pooling.SUM:
            return sums_BD
        counts_B = torch.zeros(batch).index_add(0, row_of_each, (~ids.missing_N).to(torch.float32))
        return sums_BD / counts_B.clamp(min=1).unsqueeze(1)


@final
class ServedGraph(nn.Module):
    """The predictions of raw columns, one tensor [B] for each of `outputs`.

    Args:
        served: the description of the model.
        model: the model, whose tables are replaced.
        schema: of the raw rows.
        transforms: those of `served`.
    """

    def __init__(self, served: ServedModel, model: nn.Module, schema: pa.Schema, transforms: LoadedTransforms) -> None:
        super().__init__()
        parts = served.parts
        self._parts, self._own = parts, family_of(parts.model).name == "own"
        preparation = parts.bind(schema, transforms)
        self._columns = preparation.columns
        skipped = {step.number for step in unread(transforms, self._columns.names)}
        self._steps = [step.transform for step in transforms.steps if step.number not in skipped]
        self.inputs = tuple(part for name in preparation.names for part in inputs_of(schema.field(name)))
        self.outputs = tuple(prediction_names(parts.tasks, parts.link))
        for path, module in [*table_modules(model)]:
            assert isinstance(module, Embeddings)
            model.set_submodule(path, GatheredTables(module))
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors in the order of `inputs`."""
        given = {tensor.name: x for tensor, x in zip(self.inputs, tensors, strict=True)}
        columns: dict[str, GraphColumn] = {}
        for part in self.inputs:
            if part.part != "offsets":
                offsets_B1 = given[part.column + OFFSETS] if part.part == "values" else None
                columns[part.column] = GraphColumn.of(given[part.name], offsets_B1)
        for transform in self._steps:
            columns[transform.makes[0]] = apply_transform(transform, columns[transform.reads[0]])
        first = self.inputs[0]
        batch = tensors[0].shape[0] if first.part == "single" else given[first.column + OFFSETS].shape[0] - 1
        numbers = [dense_numbers(columns[dense.column], dense) for dense in self._columns.dense]
        dense_BF = torch.stack(numbers, 1) if numbers else torch.zeros(batch, 0)
        ids = GraphIds({s.feature_name: self._ids(columns[s.column], s) for s in self._columns.sparse}, batch)
        logits_BK = self.model(GraphBatch(dense_BF, ids)) if self._own else self.model(dense_BF, ids)
        link = self._parts.link
        scores_BK = logits_BK.sigmoid() if link is None else link.amounts(logits_BK)
        return torch.stack((logits_BK, scores_BK), 2).flatten(1).unbind(1)

    def _ids(self, column: GraphColumn, sparse: Sparse) -> GraphColumn:
        if sparse.first is not None:
            column = column.first(sparse.first, counts_missing=False)
        if sparse.ids == "direct":
            return column
        rows = next(table.rows for table in self._parts.tables if table.name == sparse.table_name)
        return column.with_values(hashed_rows(column.values_N, rows))


def check_exportable(parts: ModelParts, precision: str) -> None:
    """Raise for a model that a graph cannot hold."""
    if family_of(parts.model).name not in ("clicks", "own"):
        problem = f"model.kind={kind_of(parts.model)} answers with items, which a graph does not search"
        raise SpecError(problem, "a model of labels", hint=CALL_ROWWISE)
    if precision != "fp32":
        problem = f"train.precision={precision}: a graph multiplies in 32 bits, and differs by more than {CLOSE}"
        raise SpecError(problem, "a run with train.precision=fp32", hint=CALL_ROWWISE)
    for table in parts.tables:
        problem = _problem_of(table)
        if problem:
            raise SpecError(f"table {table.name!r} {problem}", "pooled tables whose ids are rows", hint=CALL_ROWWISE)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch's exporters, and others, say about themselves."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(disabled)


def export_graph(version: Path, memory_bytes: int | None) -> tuple[ServedGraph, ExportedProgram, GoldenRows]:
    """The graph of a version, as a module and as a program with any number of rows, and rows to check it.

    Args:
        version: its folder.
        memory_bytes: budget for rows; None if all fit.
    """
    served, golden = read_model(version), read_golden(version)
    check_exportable(served.parts, served.precision)
    _refuse_large(served.parts.tables, memory_bytes)
    model, transforms = load_model(version, served), load(served.transforms)
    graph = ServedGraph(served, model, golden.rows.schema, transforms).eval().requires_grad_(False)
    example = tuple(torch.tensor(TRACED[part.part], dtype=part.dtype) for part in graph.inputs)
    batch = Dim("rows", min=1)
    sizes = {"single": batch, "offsets": batch + 1}
    shapes = tuple({0: sizes.get(part.part, Dim(f"values{n}", min=0))} for n, part in enumerate(graph.inputs))
    try:
        with torch.no_grad(), quiet():
            graph(*example)  # raises what tracing would hide
            program = torch.export.export(graph, example, dynamic_shapes=(shapes,))
            return graph, program.run_decompositions(_plain_operators()), golden
    except RowwiseError:
        raise
    except Exception as error:  # whatever a model does that torch.export does not trace
        reason, _, _ = str(error).partition("\n")
        problem = f"model.kind={kind_of(served.parts.model)} is not traced by torch.export: {reason[:200]}"
        raise SpecError(problem, hint=CALL_ROWWISE) from error


def _plain_operators() -> dict[Any, Any]:
    """rowwise's operators in a traced model, in torch's."""
    operators = torch.ops.rowwise
    return {
        operators.interact.default: reference.interact,
        operators.pair_sums.default: reference.pair_sums,
        operators.onednn_product.default: F.linear,
    }


def tensors_of(inputs: Sequence[GraphInput], rows: pa.Table) -> tuple[Tensor, ...]:
    """The tensors of raw rows."""
    tensors: dict[str, np.ndarray] = {}
    for part in inputs:
        if part.part == "offsets":
            continue
        values, offsets_B1 = flatten_values(combine_chunks(rows[part.column]))
        values = decoded(values).cast(pa.float64() if types.is_decimal(values.type) else values.type)
        if part.dtype.is_floating_point:
            array = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
        else:
            array = values.cast(pa.int64()).fill_null(MISSING).to_numpy(zero_copy_only=False)
        if offsets_B1 is None:
            tensors[part.name] = array
            continue
        if not part.dtype.is_floating_point:  # a missing id in a list is left out
            used_N = array != MISSING
            offsets_B1, array = np.append(0, used_N.cumsum())[offsets_B1], array[used_N]
        tensors[part.name], tensors[part.column + OFFSETS] = array, offsets_B1
    return tuple(torch.from_numpy(tensors[part.name].copy()).to(part.dtype) for part in inputs)


def check_golden(run: RunTensors, graph: ServedGraph, golden: GoldenRows, what: str) -> float:
    """The largest difference of logits of the golden rows, by batches of several sizes; raises above `CLOSE`.

    Args:
        run: computes the outputs of tensors.
        graph: the graph.
        golden: rows with their logits.
        what: the format, for errors.
    """
    worst, count = 0.0, golden.rows.num_rows
    for size in (*CHECKED_ROWS, count):
        for begin in range(0, count, size):
            rows = golden.rows.slice(begin, size)
            outputs = dict(zip(graph.outputs, run(tensors_of(graph.inputs, rows)), strict=True))
            for name, task in zip(graph.outputs[::2], golden.logits.column_names, strict=True):
                expected_B = golden.logits[task].to_numpy()[begin : begin + size]
                worst = float(np.maximum(worst, np.abs(np.asarray(outputs[name]) - expected_B).max()))  # NaN stays
    if not worst <= CLOSE:
        raise CheckpointError(
            f"{what}: logits of golden rows differ by {worst:.1e} from those of `rowwise predict`",
            f"at most {CLOSE}",
            hint=CALL_ROWWISE,
        )
    return worst


def _problem_of(table: Table) -> str:
    if table.managed is not None:
        return "is managed: a map that is no tensor gives its ids rows"
    if table.id_map is not None:
        return f"has an id_map of kind {table.id_map.__struct_config__.tag}, which a graph does not apply"
    if table.pooling in (Pooling.SEQUENCE, Pooling.WEIGHTED):
        what = "the lists that attention reads" if table.pooling is Pooling.SEQUENCE else "weights of ids"
        return f"has pooling {table.pooling}: a graph does not hold {what}"
    return ""


def _refuse_large(tables: Sequence[Table], memory_bytes: int | None) -> None:
    sizes = {table.name: table.rows * table.dim * (2 if table.row_type is RowType.FP16 else 4) for table in tables}
    total, largest = sum(sizes.values()), max(sizes, key=sizes.__getitem__)
    if memory_bytes is not None and total > memory_bytes:
        raise SpecError(
            f"tables take {format_bytes(total)} in a graph, {largest!r} {format_bytes(sizes[largest])} of them, and "
            f"memory for rows is {format_bytes(memory_bytes)}",
            "tables that fit",
            hint="rowwise serve --memory reads such rows from disk",
        )


def inputs_of(field: pa.Field) -> list[GraphInput]:
    kind = decoded_kind(element_of(field.type))
    if is_text(kind):
        raise SpecError(
            f"column {field.name!r} holds text, and a graph has no hash of text",
            "whole numbers",
            hint=f"write hashes of the texts into the data, or {CALL_ROWWISE}",
        )
    if types.is_floating(kind) or types.is_decimal(kind):
        dtype = torch.float64 if types.is_float64(kind) or types.is_decimal(kind) else torch.float32
    elif types.is_boolean(kind) or (types.is_integer(kind) and not types.is_uint64(kind)):
        dtype = torch.int64
    else:
        raise SpecError(f"column {field.name!r} holds {kind}", "numbers of at most 64 signed bits", hint=CALL_ROWWISE)
    if not is_list(field.type):
        return [GraphInput(field.name, "single", dtype)]
    return [GraphInput(field.name, "values", dtype), GraphInput(field.name, "offsets", torch.int64)]
