"""The C++ library of `disk.py`: a cache of rows in memory over a log on disk.

Calls release the GIL; the caller serialises them. Arguments are not checked here.
"""

from ctypes import Structure, c_char_p, c_double, c_int32, c_int64, c_void_p

from rowwise.base.library import CLibrary, Float64s, Int64s, Numbers

LIBRARY = "librowwise_tier.so"
OK, BAD_ID, TOO_SMALL, DAMAGED, IO, LOG_FULL, MEMORY, FORKED = range(8)
COUNTERS = ("hits", "misses", "new_rows", "evictions", "writes")
IO_COUNTERS = ("reads", "read_bytes", "written_bytes", "read_wait_s", "write_wait_s", "busy_s")
MAX_INTERVALS = 4096


class Status(Structure):
    """The outcome of a call."""

    _fields_ = [
        ("code", c_int32), ("error", c_int32), ("table", c_int32), ("row", c_int64), ("distinct", c_int64),
    ]  # fmt: skip


class NativeTable(Structure):
    """A table and the memory of its slots."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "row_bytes", "state_bytes", "slots", "overflow", "policy")),
        *((name, c_void_p) for name in ("row_memory", "state_memory", "slot_rows", "pinned_rows")),
        ("pinned", c_int64),
    ]


class Segment(Structure):
    """The ids of one feature, and the buffer for their slots."""

    _fields_ = [("table", c_int64), ("wide", c_int64), ("ids", c_void_p), ("count", c_int64), ("slots", c_void_p)]


library = CLibrary(
    LIBRARY,
    {
        "tier_open": (c_void_p, [c_char_p, c_int64, c_int32, c_int64, NativeTable, Status]),
        "tier_close": (None, [c_void_p]),
        "tier_pin": (None, [c_void_p, c_int64, Segment, c_int32, c_int32, Status]),
        "tier_read_ahead": (None, [c_void_p, c_int64, Segment, Status]),
        "tier_new_rows": (c_int64, [c_void_p, c_int64, Numbers, Numbers]),
        "tier_unpin": (None, [c_void_p, Status]),
        "tier_read": (None, [c_void_p, c_int64, Numbers, c_int64, Numbers, Numbers, Numbers, Status]),
        "tier_write": (None, [c_void_p, c_int64, Numbers, c_int64, Numbers, Numbers, Status]),
        "tier_flush": (None, [c_void_p, Status]),
        "tier_written": (c_int64, [c_void_p, c_int64, c_int64, c_int64, Numbers]),
        "tier_forget": (None, [c_void_p, c_int64]),
        "tier_counters": (None, [c_void_p, c_int64, Int64s]),
        "tier_io": (None, [c_void_p, Float64s]),
        "tier_busy": (c_int64, [c_void_p, c_double, c_int64, Float64s, Float64s]),
        "tier_disk_bytes": (c_int64, [c_void_p]),
        "tier_file": (c_int32, [c_void_p]),
    },
)
