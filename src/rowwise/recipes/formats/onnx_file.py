"""An ONNX file of a version, written only if onnxruntime reproduces its golden rows."""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from rowwise.base.errors import SpecError
from rowwise.recipes.formats.graph import check_golden, export_graph, quiet

NEEDED = ("onnx", "onnxruntime", "onnxscript")


def require_onnx() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SpecError(f"--onnx needs {', '.join(missing)}", hint="pip install 'rowwise[onnx]'")


def write_onnx(version: Path, file: Path, memory_bytes: int | None) -> float:
    """Write the file; returns the largest difference of the logits of its golden rows."""
    import onnxruntime

    graph, program, golden = export_graph(version, memory_bytes)
    inputs = [part.name for part in graph.inputs]
    with quiet():
        traced = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=inputs, output_names=list(graph.outputs)
        )
    assert traced is not None
    traced.save(file)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def run(tensors: tuple[Tensor, ...]) -> list[object]:
        return session.run(None, {name: x.numpy() for name, x in zip(inputs, tensors, strict=True)})

    return check_golden(run, graph, golden, "onnxruntime")
