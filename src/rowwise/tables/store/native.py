"""The C++ library of `disk.py`, by ctypes: a cache of rows in memory over a log on disk.

Calls run without Python's lock; the caller makes them one after the other. Arguments are not checked here.
"""

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_void_p
from typing import Any

from rowwise.base.library import Signatures, bind_library

LIBRARY = "librowwise_tier.so"
OK, BAD_ID, TOO_SMALL, DAMAGED, IO, LOG_FULL, MEMORY, FORKED = range(8)
COUNTERS = ("hits", "misses", "new_rows", "evictions", "writes")
IO_COUNTERS = ("reads", "read_bytes", "written_bytes", "read_wait_s", "write_wait_s", "busy_s")
MAX_INTERVALS = 4096


class Status(ctypes.Structure):
    """The outcome of a call."""

    _fields_ = [
        ("code", c_int32), ("error", c_int32), ("table", c_int32), ("row", c_int64), ("distinct", c_int64),
    ]  # fmt: skip


class NativeTable(ctypes.Structure):
    """A table and the memory of its slots."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "row_bytes", "state_bytes", "slots", "overflow", "policy")),
        ("row_memory", c_void_p), ("state_memory", c_void_p), ("slot_rows", c_void_p),
    ]  # fmt: skip


class Segment(ctypes.Structure):
    """The ids of one feature, and where their slots go."""

    _fields_ = [("table", c_int64), ("wide", c_int64), ("ids", c_void_p), ("count", c_int64), ("slots", c_void_p)]


@functools.cache
def library() -> Any:
    """The library, with the types of its functions."""
    status, numbers = POINTER(Status), c_void_p
    signatures: Signatures = {
        "tier_open": (c_void_p, [c_char_p, c_int64, c_int32, c_int64, POINTER(NativeTable), status]),
        "tier_close": (None, [c_void_p]),
        "tier_pin": (None, [c_void_p, c_int64, POINTER(Segment), c_int32, c_int32, status]),
        "tier_read_ahead": (None, [c_void_p, c_int64, POINTER(Segment), status]),
        "tier_new_rows": (c_int64, [c_void_p, c_int64, numbers, numbers]),
        "tier_unpin": (None, [c_void_p, status]),
        "tier_read": (None, [c_void_p, c_int64, numbers, c_int64, numbers, numbers, numbers, status]),
        "tier_write": (None, [c_void_p, c_int64, numbers, c_int64, numbers, numbers, status]),
        "tier_flush": (None, [c_void_p, status]),
        "tier_written": (c_int64, [c_void_p, c_int64, c_int64, c_int64, numbers]),
        "tier_forget": (None, [c_void_p, c_int64]),
        "tier_counters": (None, [c_void_p, c_int64, numbers]),
        "tier_io": (None, [c_void_p, numbers]),
        "tier_busy": (c_int64, [c_void_p, c_double, c_int64, numbers, numbers]),
        "tier_disk_bytes": (c_int64, [c_void_p]),
        "tier_file": (c_int32, [c_void_p]),
    }
    return bind_library(LIBRARY, signatures)
