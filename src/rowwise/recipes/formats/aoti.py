"""An AOTInductor package of a version, which C++ loads without Python: a shared library made by torch's compiler.

Its operators are torch's own, so it needs no library of rowwise. Its metadata has the names of inputs and outputs.
"""

import json
from pathlib import Path

from torch import Tensor

from rowwise.base.errors import SpecError
from rowwise.recipes.formats.graph import check_golden, export_graph, quiet


def require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise SpecError("--pt2 needs a C++ compiler", hint="install g++, or name one in CXX") from None


def write_pt2(version: Path, file: Path, memory_bytes: int | None) -> float:
    """Write the package; returns the largest difference of the logits of its golden rows."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    graph, program, golden = export_graph(version, memory_bytes)
    inputs = [{"name": part.name, "dtype": str(part.dtype).removeprefix("torch.")} for part in graph.inputs]
    names = {"inputs": json.dumps(inputs), "outputs": json.dumps(graph.outputs)}
    with quiet():
        aoti_compile_and_package(program, package_path=str(file), inductor_configs={"aot_inductor.metadata": names})
        package = aoti_load_package(str(file))

    def run(tensors: tuple[Tensor, ...]) -> list[Tensor]:
        return package(*tensors)

    return check_golden(run, graph, golden, "AOTInductor")
