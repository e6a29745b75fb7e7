"""Limits on the responses of a store: names of a list, and time. ROWWISE_STORE_LIMITS sets them."""

import os
import re
from typing import NamedTuple

from rowwise.base.errors import StorageError

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
NUMBER = re.compile(r"0*[1-9]\d{0,11}", re.ASCII)
VARIABLE = "ROWWISE_STORE_LIMITS"


class Limits(NamedTuple):
    """Limits on the responses of a store."""

    names: float = 400_000  # in a list, of 128 bytes on average
    list_s: float = 600.0  # for a whole list
    stall_s: float = 30.0  # without a byte
    bytes_s: float = 64 << 10  # minimum rate of a request, beside `stall_s`

    @classmethod
    def of_environment(cls) -> "Limits":
        return cls.parse(os.environ.get(VARIABLE, ""))  # noqa: TID251 - as all settings of stores

    @classmethod
    def parse(cls, text: str) -> "Limits":
        """The defaults, but for those of a text such as names=5000000,list_s=60."""
        limits = cls()._asdict()
        for setting in filter(None, text.split(",")):
            key, _, value = setting.partition("=")
            if key not in limits or not NUMBER.fullmatch(value):
                expected = ",".join(f"{name}={default:.0f}" for name, default in cls()._asdict().items())
                raise StorageError(f"{VARIABLE}={text[:200]!r}", f"some of {expected}")
            limits[key] = float(value)
        return cls(**limits)


def endpoint_of_environment() -> str:
    """The endpoint that obstore uses for S3; empty for that of AWS."""
    endpoints = (os.environ.get(name, "") for name in ENDPOINTS)  # noqa: TID251 - obstore reads it there
    return next(filter(None, endpoints), "")
