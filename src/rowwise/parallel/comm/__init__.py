"""Communication between ranks. Only this package uses torch.distributed; all others use the `Comm` protocol.

Names are loaded when first used.
"""

from typing import TYPE_CHECKING

from rowwise.base.lazy import export_lazily

if TYPE_CHECKING:
    from rowwise.parallel.comm.interface import BytesSent as BytesSent
    from rowwise.parallel.comm.interface import Comm as Comm
    from rowwise.parallel.comm.launch import connect as connect
    from rowwise.parallel.comm.spawn import run_processes as run_processes
    from rowwise.parallel.comm.thread import run_threads as run_threads

_HOMES = {
    "launch": ("connect",),
    "interface": ("Comm", "BytesSent"),
    "spawn": ("run_processes",),
    "thread": ("run_threads",),
}
__all__, __getattr__ = export_lazily(__name__, _HOMES)
