"""From files to batches, in bounded memory: a `Reader` of splits, the roles of `Columns`, and a `Batcher`.

Names are imported lazily: inspecting files needs no torch.
"""

from typing import TYPE_CHECKING

from rowwise.base.lazy import export_lazily

if TYPE_CHECKING:
    from rowwise.ingest.batch_shard import BatchShard as BatchShard
    from rowwise.ingest.batcher import Batcher as Batcher
    from rowwise.ingest.batcher import Batching as Batching
    from rowwise.ingest.batcher import Position as Position
    from rowwise.ingest.columns import Columns as Columns
    from rowwise.ingest.columns import Dense as Dense
    from rowwise.ingest.columns import Sparse as Sparse
    from rowwise.ingest.delimited import CsvReader as CsvReader
    from rowwise.ingest.delimited import Dialect as Dialect
    from rowwise.ingest.frames import FrameReader as FrameReader
    from rowwise.ingest.generator import GeneratorReader as GeneratorReader
    from rowwise.ingest.parquet import ParquetReader as ParquetReader
    from rowwise.ingest.reader import Reader as Reader
    from rowwise.ingest.reader import Split as Split
    from rowwise.ingest.share import Share as Share

_HOMES = {
    "batcher": ("Batcher", "Batching", "Position"),
    "columns": ("Columns", "Dense", "Sparse"),
    "batch_shard": ("BatchShard",),
    "delimited": ("CsvReader", "Dialect"),
    "frames": ("FrameReader",),
    "generator": ("GeneratorReader",),
    "parquet": ("ParquetReader",),
    "reader": ("Reader", "Split"),
    "share": ("Share",),
}
__all__, __getattr__ = export_lazily(__name__, _HOMES)
