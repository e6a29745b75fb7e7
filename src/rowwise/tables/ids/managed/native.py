"""The C++ map from ids to rows, by ctypes; without torch. Arguments are not checked here."""

import ctypes
import functools
from ctypes import POINTER, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

from rowwise.base.library import Signatures, bind_library

LIBRARY = "librowwise_managed.so"
OK = 0
RESET, CHANGED, EVICTED = range(3)
COUNTERS = ("in_use", "admitted", "evicted", "rejected", "overflowed", "expired")


class NativeManaged(ctypes.Structure):
    """The settings of a map."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "bucket_rows", "bucket_bits", "first_bucket", "least_used", "admit")),
        ("threshold", c_uint64), ("seed", c_uint64), ("ttl", c_int64),
    ]  # fmt: skip


class NativeRowState(ctypes.Structure):
    """The addresses of the state of rows."""

    _fields_ = [(name, c_void_p) for name in ("id", "used", "count", "candidate", "seen")]


@functools.cache
def library() -> Any:
    """The library, with the types of its functions."""
    numbers = c_void_p
    signatures: Signatures = {
        "managed_open": (c_void_p, [POINTER(NativeManaged), POINTER(NativeRowState)]),
        "managed_close": (None, [c_void_p]),
        "managed_find": (None, [c_void_p, numbers, c_int64, numbers]),
        "managed_observe": (c_int32, [c_void_p, numbers, numbers, c_int64, c_int64]),
        "managed_list": (c_int64, [c_void_p, c_int32, numbers]),
        "managed_counters": (None, [c_void_p, numbers]),
        "managed_buckets": (None, [numbers, c_int64, c_int64, numbers]),
    }
    return bind_library(LIBRARY, signatures)
