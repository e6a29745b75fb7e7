"""A version of a model that answers requests, as the parts above and below `serve` see it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from rowwise.models.link import AmountLink
from rowwise.serve.cached_rows import CachedRows
from rowwise.serve.forward import Forward
from rowwise.serve.package import ColumnStats
from rowwise.serve.retrieval import Retriever
from rowwise.serve.sides import SideTable
from rowwise.tables.ops.host_rows import HostRows

Identity = Literal["exact", "close"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """A model with its weights, ready to compute."""

    name: str
    number: int
    digest: str | None  # as it was checked, or as `files.json` says; None: of an earlier rowwise, which wrote none
    forward: Forward
    schema: pa.Schema  # of the raw columns
    tasks: tuple[str, ...]
    link: AmountLink | None = None  # None: logits of labels 0 and 1
    stats: Mapping[str, ColumnStats]
    sides: tuple[SideTable, ...]
    cached: tuple[CachedRows, ...]  # of tables that are larger than memory
    identity: Identity  # whether the golden rows have the bits that they were exported with
    retriever: Retriever | None = None  # of two towers, or of a model of lists
    device_caches: tuple[HostRows, ...] = ()  # of tables that a device has in part
