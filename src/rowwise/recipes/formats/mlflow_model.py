"""An MLflow model: a version with its signature, which `mlflow.pyfunc.load_model` opens by `_load_pyfunc`.

MLflow has no missing whole numbers and lists, so a column that had some in training has any type in the signature.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import pyarrow as pa
from pyarrow import types

import rowwise
from rowwise.base.errors import SpecError
from rowwise.ingest.kinds import decoded_kind, element_of, is_list, is_text
from rowwise.recipes.formats.graph import quiet
from rowwise.recipes.formats.scorer import VersionScorer
from rowwise.recipes.served import read_model
from rowwise.serve.answer import prediction_names
from rowwise.serve.package import read_golden, read_stats

if TYPE_CHECKING:
    import pandas as pd

MISSING = "--mlflow needs MLflow and pandas"
HINT = "pip install 'rowwise[mlflow]' pandas"


@final
class MlflowScorer:
    """The model as MLflow calls it."""

    def __init__(self, scorer: VersionScorer) -> None:
        self._scorer = scorer

    def predict(self, model_input: "pd.DataFrame", params: dict[str, Any] | None = None) -> "pd.DataFrame":
        """A frame with a column for each output; `params` are none."""
        table = pa.Table.from_pandas(model_input, preserve_index=False)
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        return pa.table(self._scorer.score(columns)).to_pandas()


def _load_pyfunc(path: str) -> MlflowScorer:
    """Called by MLflow with the folder of the version."""
    return MlflowScorer(VersionScorer(Path(path)))


def require_mlflow() -> None:
    try:
        with quiet():
            import mlflow.pyfunc  # noqa: F401
    except ImportError:
        raise SpecError(MISSING, hint=HINT) from None


def write_mlflow(version: Path, folder: Path) -> None:
    """Write the model; `version` is copied."""
    import mlflow.pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types.schema import AnyType, Array, ColSpec, DataType, Schema

    served, stats = read_model(version), read_stats(version)

    def column(field: pa.Field) -> ColSpec:
        name = _datatype(decoded_kind(element_of(field.type)))
        if stats[field.name].null_share and (is_list(field.type) or name in ("long", "boolean")):
            return ColSpec(AnyType(), field.name)
        return ColSpec(Array(DataType[name]) if is_list(field.type) else DataType[name], field.name)

    inputs = Schema([column(field) for field in read_golden(version).rows.schema])
    names = prediction_names(served.parts.tasks, served.parts.link)
    signature = ModelSignature(inputs, Schema([ColSpec(DataType.float, name) for name in names]))
    with quiet():
        mlflow.pyfunc.save_model(
            str(folder),
            loader_module=__name__,
            data_path=str(version),
            signature=signature,
            pip_requirements=[f"rowwise=={rowwise.__version__}", "pandas"],
        )


def _datatype(kind: pa.DataType) -> str:
    """MLflow's name of a type."""
    if types.is_integer(kind):
        return "long"
    if is_text(kind):
        return "binary" if types.is_binary(kind) or types.is_large_binary(kind) else "string"
    if types.is_boolean(kind):
        return "boolean"
    if types.is_timestamp(kind) or types.is_date(kind):
        return "datetime"
    return "float" if types.is_float16(kind) or types.is_float32(kind) else "double"
