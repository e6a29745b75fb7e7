"""Tables in a folder of their own, beside the checkpoint of a framework that knows nothing of their tiles and state.

The folder is a checkpoint like any other, without dense parameters: `rowwise ckpt` reads it, and it loads under another
plan and on another number of ranks.
"""

from pathlib import Path

from torch import nn

from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.tables import shards_to_read, shards_to_write, table_modules
from rowwise.checkpoint.write import write
from rowwise.parallel.comm.interface import Comm


def save_tables(model: nn.Module, folder: Path, comm: Comm | None = None) -> None:
    """Save the rows of a model's tables and their optimizer state in a new folder; collective."""
    write(folder, [shard for path, module in table_modules(model) for shard in shards_to_write(path, module)], {}, comm)


def load_tables(model: nn.Module, folder: Path) -> None:
    """Load what `save_tables` has saved of a model with the same tables."""
    checkpoint = Checkpoint.open(folder)
    saved = checkpoint.manifest.tensors
    checkpoint.fill_all(shard for path, module in table_modules(model) for shard in shards_to_read(path, module, saved))
