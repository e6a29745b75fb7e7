"""The interface of an open version, between `serve` and the layers that build it."""

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
    digest: str | None  # verified, or by `files.json`; None for a version of an earlier rowwise
    forward: Forward
    schema: pa.Schema  # of the raw columns
    tasks: tuple[str, ...]
    link: AmountLink | None = None  # None for binary labels
    stats: Mapping[str, ColumnStats]
    sides: tuple[SideTable, ...]
    cached: tuple[CachedRows, ...]  # of tables larger than memory
    identity: Identity  # whether the golden rows are reproduced bit for bit
    retriever: Retriever | None = None  # of a two-tower or sequence model
    device_caches: tuple[HostRows, ...] = ()  # of tables cached on a device
