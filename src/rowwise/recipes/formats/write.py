"""`export_as`: a checkpoint of a run in a format of others.

The run is exported as a version in a temporary folder, which is converted: what a format gets is what is served.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rowwise.base.errors import SpecError
from rowwise.base.storage.folder import refuse_url
from rowwise.checkpoint.atomic import atomic_output, scratch_beside
from rowwise.recipes.export import export, memory_for_rows
from rowwise.recipes.formats.aoti import require_compiler, write_pt2
from rowwise.recipes.formats.graph import check_exportable
from rowwise.recipes.formats.mlflow_model import require_mlflow, write_mlflow
from rowwise.recipes.formats.onnx_file import require_onnx, write_onnx
from rowwise.recipes.formats.triton_model import write_triton
from rowwise.recipes.trained import resolve_saved
from rowwise.tables.spec import RowType
from rowwise.train.run_folder import RunFolder

ForeignFormat = Literal["onnx", "pt2", "mlflow", "triton"]
FILES: dict[ForeignFormat, str] = {"onnx": ".onnx", "pt2": ".pt2"}  # the others are folders

NEEDS: dict[ForeignFormat, Callable[[], None]] = {  # raise without a package or a compiler
    "onnx": require_onnx,
    "pt2": require_compiler,
    "mlflow": require_mlflow,
}


class ForeignModel(NamedTuple):
    """A model that was written."""

    path: Path
    step: int
    difference: float | None  # of the logits of golden rows; None: rowwise itself computes them


def export_as(  # noqa: PLR0913 - all but the first three have defaults
    form: ForeignFormat,
    run: Path,
    out: Path,
    *,
    which: str = "best",
    rows: RowType | None = None,
    sides: Sequence[str] = (),
    memory_bytes: int | None = None,
    warn: Callable[[str], None] = print,
) -> ForeignModel:
    """Write a checkpoint of a run as a new file or folder.

    Args:
        form: onnx and pt2 are graphs of torch's operators; mlflow and triton call rowwise.
        run: the folder of the run.
        out: the file or folder, which must not exist.
        which: the checkpoint: best, last or step-<number>.
        rows: row type of the tables, where it makes their rows smaller; None: as trained.
        sides: side tables, whose columns requests omit, each as FILE:KEY.
        memory_bytes: budget for rows; None: free memory, or the budget of the recipe.
        warn: called with a line on blocks of rows that cost time.
    """
    _check_out(form, out)
    resolved = resolve_saved(RunFolder.open(run).path)
    if form in FILES:
        check_exportable(resolved.parts, resolved.recipe.train.precision)
    NEEDS.get(form, lambda: None)()
    limit = memory_for_rows(resolved, run) if memory_bytes is None else memory_bytes
    difference = None
    with atomic_output(out) as unfinished, scratch_beside(out) as scratch:
        exported = export(run, scratch / "versions", which=which, rows=rows, sides=sides, memory_bytes=limit, warn=warn)
        made, version = scratch / "made" / out.name, exported.folder.path
        made.parent.mkdir()
        match form:
            case "onnx":
                difference = write_onnx(version, made, limit)
            case "pt2":
                difference = write_pt2(version, made, limit)
            case "mlflow":
                write_mlflow(version, made)
            case "triton":
                write_triton(version, made)
        for file in made.parent.glob(f"{out.name}.*"):  # weights of a large ONNX model, which it names
            file.rename(out.with_name(file.name))
        made.rename(unfinished)
    return ForeignModel(out, exported.step, difference)


def _check_out(form: ForeignFormat, out: Path) -> None:
    refuse_url(out, "write it here, and copy it there")
    if out.suffix != FILES.get(form, out.suffix):
        raise SpecError(f"--{form} writes {out}", f"a name that ends in {FILES[form]}")
    if out.exists():
        raise SpecError(f"{out} exists already", "a new name")
