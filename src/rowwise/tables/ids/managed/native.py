"""The C++ map from ids to rows, without torch. Arguments are not checked here."""

from ctypes import Structure, c_int32, c_int64, c_uint64, c_void_p

from rowwise.base.library import CLibrary, Int64s, NativeStruct, Numbers

OK = 0
RESET, CHANGED, EVICTED = range(3)
COUNTERS = ("in_use", "admitted", "evicted", "rejected", "overflowed", "expired")


class NativeManaged(Structure):
    """The settings of a map."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "bucket_rows", "bucket_bits", "first_bucket", "least_used", "admit")),
        ("threshold", c_uint64), ("seed", c_uint64), ("ttl", c_int64),
    ]  # fmt: skip


class NativeRowState(NativeStruct):
    """The state of rows."""

    _fields_ = tuple((name, Numbers) for name in ("id", "used", "count", "candidate", "seen"))


library = CLibrary(
    "librowwise_managed.so",
    {
        "managed_open": (c_void_p, [NativeManaged, NativeRowState]),
        "managed_close": (None, [c_void_p]),
        "managed_find": (None, [c_void_p, Numbers, c_int64, Numbers]),
        "managed_observe": (c_int32, [c_void_p, Numbers, Numbers, c_int64, c_int64]),
        "managed_list": (c_int64, [c_void_p, c_int32, Numbers]),
        "managed_counters": (None, [c_void_p, Int64s]),
        "managed_buckets": (None, [Numbers, c_int64, c_int64, Numbers]),
    },
)
