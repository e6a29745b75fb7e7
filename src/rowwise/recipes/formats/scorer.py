"""Scores columns in the process of another server, with the bits of `rowwise predict`. Rows of tables are in memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import final

import pyarrow as pa

from rowwise.recipes.served import open_version
from rowwise.serve.answer import prediction_columns, predictions_of
from rowwise.serve.json_body import BodyLimits
from rowwise.serve.request import RequestReader

BATCH = 4096  # rows of a forward
UNBOUNDED = 1 << 62  # the other server has limits of its own


@final
class VersionScorer:
    """A version of a model, opened and checked by its golden rows.

    Args:
        version: its folder.
    """

    def __init__(self, version: Path) -> None:
        self._version = open_version(version)
        limits = BodyLimits(list_values=UNBOUNDED)
        self._reader = RequestReader(self._version.schema, UNBOUNDED, self._version.sides, UNBOUNDED, limits)

    def score(self, columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
        """The predictions of raw columns, by name of output."""
        rows, version = self._reader.read_columns(columns), self._version
        predictions_RP = predictions_of(version.forward(rows.arrays, rows.rows, BATCH), version.link)
        return prediction_columns(version.tasks, version.link, predictions_RP)
