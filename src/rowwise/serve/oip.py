"""The Open Inference Protocol over HTTP (`/v2`): columns as tensors in JSON or binary, for clients of this protocol.

A column of single values is a tensor of shape [rows] or [rows, 1]; a column of lists is two, `<column>__values` and
`<column>__offsets` with rows + 1 whole numbers. Missing numbers are NaN, or null in JSON. Outputs are FP32 of shape
[rows], binary where the request asks for it.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import UNSET, UnsetType
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.base.textfile import parse_whole
from rowwise.ingest.kinds import is_list, is_text
from rowwise.serve.json_body import WHERE, BodyLimits, check_count, decode_body, kinds_of
from rowwise.serve.request import RequestReader, RequestRows

VALUES, OFFSETS = "__values", "__offsets"
LENGTH = struct.Struct("<I")  # prefix of each text in a binary tensor
BYTES = "BYTES"
KINDS: dict[str, pa.DataType] = {
    "BOOL": pa.bool_(), "INT8": pa.int8(), "INT16": pa.int16(), "INT32": pa.int32(), "INT64": pa.int64(),
    "UINT8": pa.uint8(), "UINT16": pa.uint16(), "UINT32": pa.uint32(), "UINT64": pa.uint64(), "FP16": pa.float16(),
    "FP32": pa.float32(), "FP64": pa.float64(), BYTES: pa.string(),
}  # fmt: skip
NAMES = {kind: name for name, kind in KINDS.items()}
HEADER, BINARY = "inference-header-content-length", "application/octet-stream"


class TensorParameters(msgspec.Struct):
    """Parameters of a tensor."""

    binary_data_size: int | None = None
    binary_data: bool | None = None


class InputTensor(msgspec.Struct):
    """A tensor of a request."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: TensorParameters = msgspec.field(default_factory=TensorParameters)


class OutputName(msgspec.Struct):
    """Name and encoding of a requested output."""

    name: str
    parameters: TensorParameters = msgspec.field(default_factory=TensorParameters)


class RequestParameters(msgspec.Struct):
    """Parameters of all outputs."""

    binary_data_output: bool = False


class InferRequest(msgspec.Struct):
    """The JSON of a request."""

    inputs: list[InputTensor]
    id: str | None = None
    parameters: RequestParameters = msgspec.field(default_factory=RequestParameters)
    outputs: list[OutputName] | None = None  # None for all


class OutputTensor(msgspec.Struct):
    """A tensor of a response: its data, or in `parameters` the number of bytes after the JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float | None] | UnsetType = UNSET
    parameters: dict[str, int] | UnsetType = UNSET


class InferResponse(msgspec.Struct):
    """The JSON of a response."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    parameters: dict[str, str] | UnsetType = UNSET
    id: str | UnsetType = UNSET


class TensorFacts(msgspec.Struct):
    """A tensor that a model reads or returns; a dimension of -1 has any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelFacts(msgspec.Struct):
    """Metadata of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorFacts]
    outputs: list[TensorFacts]


class ServerFacts(msgspec.Struct):
    """Metadata of a server."""

    name: str
    version: str
    extensions: list[str]


class ServerHealth(msgspec.Struct):
    """Whether a server is live and ready."""

    live: bool
    ready: bool


class ModelHealth(msgspec.Struct):
    """Whether a model is ready."""

    name: str
    ready: bool


class InferAnswer(NamedTuple):
    """The body of a response; `json_bytes`: length of its JSON, if binary tensors follow."""

    body: bytes
    json_bytes: int | None


@final
class InferForm:
    """One request, with the format of its response.

    Args:
        body: of the request.
        header: the request header `HEADER`, the length of the JSON; None if the body is all JSON.
        limits: of the JSON.
    """

    def __init__(self, body: bytes | bytearray, header: str | None, limits: BodyLimits | None = None) -> None:
        end = len(body) if header is None else parse_whole(header)
        if end is None or end > len(body):
            raise DataError(f"{HEADER}: {str(header)[:20]!r}", f"the number of bytes of JSON, at most {len(body)}")
        self._limits = limits or BodyLimits()
        text = body if header is None else bytes(memoryview(body)[:end])
        self.request = decode_body(text, InferRequest, self._limits, "JSON with inputs")
        self._rest = memoryview(body)[end:]

    def read(self, reader: RequestReader) -> RequestRows:
        """Decode tensors to columns; skips the values of unused ones."""
        inputs = self.request.inputs
        check_count("tensors", len(inputs), reader.max_columns)
        seen: set[str] = set()
        for tensor in inputs:
            if tensor.name in seen:
                raise DataError(f"{WHERE}: tensor {tensor.name[:80]!r} is given twice", "each tensor once")
            seen.add(tensor.name)
        reader.check_names([tensor.name.removesuffix(VALUES) for tensor in inputs if not tensor.name.endswith(OFFSETS)])
        tensors: dict[str, pa.Array] = {}
        for tensor in inputs:
            data = self._take(tensor)
            if reader.reads(tensor.name.removesuffix(VALUES).removesuffix(OFFSETS)):
                tensors[tensor.name] = self._read_tensor(tensor, data)
        rows = reader.read_columns(join_columns(tensors))
        return rows._replace(ignored=rows.ignored + len(inputs) - len(tensors))

    def answer(
        self, model: str, version: int, columns: Mapping[str, pa.Array], parameters: Mapping[str, str] | None = None
    ) -> InferAnswer:
        """The requested outputs; `parameters` are of the whole response."""
        requested = self.request.outputs
        selected = (
            {name: TensorParameters() for name in columns}
            if requested is None
            else {o.name: o.parameters for o in requested}
        )
        outputs: list[OutputTensor] = []
        parts: list[bytes] = []
        for name, options in selected.items():
            if name not in columns:
                raise DataError(f"{WHERE}: no output {name[:80]!r}", f"some of {', '.join(columns)}")
            values = columns[name]
            output = OutputTensor(name, NAMES[values.type], [len(values)])
            binary = options.binary_data
            if self.request.parameters.binary_data_output if binary is None else binary:
                parts.append(values.to_numpy().tobytes())
                output.parameters = {"binary_data_size": len(parts[-1])}
            else:
                output.data = values.to_pylist()
            outputs.append(output)
        response = InferResponse(model, str(version), outputs)
        if parameters:
            response.parameters = dict(parameters)
        if self.request.id is not None:
            response.id = self.request.id
        text = msgspec.json.encode(response)
        return InferAnswer(b"".join([text, *parts]), len(text) if parts else None)

    def _take(self, tensor: InputTensor) -> memoryview | None:
        """The binary data of a tensor, next after the JSON; None if its data is in the JSON."""
        where, size = f"{WHERE}: tensor {tensor.name[:80]!r}", tensor.parameters.binary_data_size
        if (size is None) == (tensor.data is None):
            raise DataError(where, "either data or binary_data_size")
        if size is None:
            return None
        if not 0 <= size <= len(self._rest):
            raise DataError(f"{where} has {size} bytes: {len(self._rest)} are left")
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def _read_tensor(self, tensor: InputTensor, data: memoryview | None) -> pa.Array:
        where = f"{WHERE}: tensor {tensor.name[:80]!r}"
        kind = KINDS.get(tensor.datatype)
        if kind is None:
            raise DataError(f"{where} has datatype {tensor.datatype[:20]!r}", f"one of {', '.join(KINDS)}")
        if not (len(tensor.shape) == 1 or tensor.shape[1:] == [1]) or not 0 <= tensor.shape[0] < 1 << 31:
            raise DataError(f"{where} has shape {str(tensor.shape)[:80]}", "[rows] or [rows, 1]")
        count = tensor.shape[0]
        if data is None:
            return _decode_json(where, tensor.data or [], kind, count)
        if tensor.datatype == BYTES and count > self._limits.values:
            raise DataError(f"{where} has {count:,} texts", f"at most {self._limits.values:,}", hint="send fewer rows")
        return _decode_binary(where, data, tensor.datatype, count)


def join_columns(tensors: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """Columns of tensors by name; the two tensors of lists become one."""
    columns: dict[str, pa.Array] = {}
    for name, values in tensors.items():
        if name.endswith(VALUES):
            columns[name.removesuffix(VALUES)] = _join_lists(name.removesuffix(VALUES), values, tensors)
        elif not name.endswith(OFFSETS):
            columns[name] = values
    return columns


def describe(name: str, versions: Sequence[int], schema: pa.Schema, outputs: Sequence[str]) -> ModelFacts:
    """Metadata of a model: its tensors."""
    inputs = [tensor for field in schema for tensor in _tensors_of(field)]
    output_tensors = [TensorFacts(output, "FP32", [-1]) for output in outputs]
    return ModelFacts(name, [str(version) for version in versions], "rowwise", inputs, output_tensors)


def _tensors_of(field: pa.Field) -> list[TensorFacts]:
    if is_list(field.type):
        kind = _datatype(field.type.value_type)
        return [TensorFacts(field.name + VALUES, kind, [-1]), TensorFacts(field.name + OFFSETS, "INT64", [-1])]
    return [TensorFacts(field.name, _datatype(field.type), [-1])]


def _datatype(kind: pa.DataType) -> str:
    return BYTES if is_text(kind) else NAMES.get(kind, "FP64")


def _join_lists(column: str, values: pa.Array, tensors: Mapping[str, pa.Array]) -> pa.Array:
    offsets = tensors.get(column + OFFSETS)
    if offsets is None or not types.is_integer(offsets.type) or not len(offsets):
        problem = "there is none" if offsets is None else f"it has {len(offsets)} of {offsets.type}"
        raise DataError(f"{WHERE}: tensor {column + OFFSETS!r}: {problem}", "rows + 1 whole numbers")
    try:
        lists = pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), values)
        lists.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{WHERE}: tensor {column + OFFSETS!r}: {str(error)[:200]}") from None
    return lists


def _decode_json(where: str, data: Sequence[Any], kind: pa.DataType, count: int) -> pa.Array:
    flat = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in data]
    if len(flat) != count:
        raise DataError(f"{where} has {len(flat)} values and shape {count}", f"{count} values")
    try:
        array = pa.array(flat, kind)
        # Arrow would truncate 2.5 to 2, and convert true to 1.
        kinds = kinds_of(flat)
        is_exact = kinds <= {int, type(None)} if types.is_integer(kind) else types.is_boolean(kind) or bool not in kinds
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise DataError(f"{where}: {str(error)[:200]}", kind) from None
    if not is_exact:
        names = sorted(kind.__name__ for kind in kinds)
        raise DataError(f"{where}: values of {', '.join(names)}", f"{kind}, or null")
    return array


def _decode_binary(where: str, data: memoryview, datatype: str, count: int) -> pa.Array:
    if datatype == BYTES:
        return _decode_texts(where, data, count)
    dtype = np.dtype(bool if datatype == "BOOL" else KINDS[datatype].to_pandas_dtype())
    if len(data) != count * dtype.itemsize:
        raise DataError(f"{where} has {len(data)} bytes", f"{count * dtype.itemsize} for {count} of {datatype}")
    if datatype == "BOOL":
        return pa.array(np.frombuffer(data, np.uint8) != 0)
    return pa.array(np.frombuffer(data, dtype))


def _decode_texts(where: str, data: memoryview, count: int) -> pa.Array:
    texts: list[bytes] = []
    position = 0
    for _ in range(count):
        if position + LENGTH.size > len(data):
            break
        (length,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size
        texts.append(bytes(data[position : position + length]))
        position += length
    if len(texts) != count or position != len(data):
        raise DataError(f"{where} has {len(data)} bytes", f"{count} texts, each after its length in 4 bytes")
    try:
        return pa.array([text.decode() for text in texts], pa.string())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {error}", "UTF-8") from None
