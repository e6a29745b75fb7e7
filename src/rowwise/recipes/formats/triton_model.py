"""A model repository of Triton: a model of its Python backend, whose `model.py` opens the version beside it.

Tensors are those of the Open Inference Protocol (`serve/oip.py`). Batches are those of requests: Triton adds no
dimension, as lists have their own.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rowwise.base.errors import RowwiseError
from rowwise.recipes.formats.scorer import VersionScorer
from rowwise.recipes.served import read_model
from rowwise.serve.answer import prediction_names
from rowwise.serve.oip import BYTES, describe, join_columns
from rowwise.serve.package import read_golden

VERSION = "version"  # the folder beside model.py
MODEL = f'''"""Scores the version beside this file."""

from pathlib import Path

from rowwise.recipes.formats.triton_model import TritonScorer


class TritonPythonModel(TritonScorer):
    """The class that Triton looks for."""

    version = Path(__file__).parent / "{VERSION}"
'''
CONFIG = """\
name: {name}
backend: "python"
max_batch_size: 0
"""
TENSOR = "{key} {{ name: {name} data_type: TYPE_{kind} dims: [ -1 ] }}\n"


class TritonScorer:
    """The model as Triton's Python backend calls it."""

    version: Path  # the folder

    def initialize(self, args: dict[str, str]) -> None:
        """Open the version; `args` is not needed."""
        self._scorer = VersionScorer(self.version)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request; the error of a request is its response."""
        import triton_python_backend_utils as pb_utils  # exists inside Triton alone

        def answer(request: Any) -> Any:
            try:
                columns = self._scorer.score(join_columns(_arrays_of(request)))
            except RowwiseError as error:
                return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))
            tensors = [pb_utils.Tensor(name, values.to_numpy()) for name, values in columns.items()]
            return pb_utils.InferenceResponse(output_tensors=tensors)

        return [answer(request) for request in requests]


def write_triton(version: Path, repository: Path) -> None:
    """Write a repository of one model, with a copy of the version."""
    served = read_model(version)
    folder = repository / served.name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(MODEL)
    shutil.copytree(version, folder / "1" / VERSION)
    facts = describe(
        served.name, [1], read_golden(version).rows.schema, prediction_names(served.parts.tasks, served.parts.link)
    )
    lines = [
        TENSOR.format(key=key, name=json.dumps(tensor.name), kind=_kind(tensor.datatype))
        for key, tensors in (("input", facts.inputs), ("output", facts.outputs))
        for tensor in tensors
    ]
    (folder / "config.pbtxt").write_text(CONFIG.format(name=json.dumps(served.name)) + "".join(lines))


def _kind(datatype: str) -> str:
    """Triton's name of a type of the protocol."""
    return "STRING" if datatype == BYTES else datatype


def _arrays_of(request: Any) -> dict[str, pa.Array]:
    arrays = ((tensor.name(), tensor.as_numpy().reshape(-1)) for tensor in request.inputs())
    return {name: _array(values) for name, values in arrays}


def _array(values: np.ndarray) -> pa.Array:
    """Texts are objects of bytes, and NaN is missing."""
    if values.dtype == object:
        return pa.array([value.decode() for value in values], pa.string())
    return pa.array(values, from_pandas=values.dtype.kind == "f")
