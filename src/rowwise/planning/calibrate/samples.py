"""Measurements as JSON lines: sets of tables that a rank looked up, and exchanges between ranks.

Measuring appends lines. Fitting ignores a last line that is cut off, as a calibration may be killed.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rowwise.base.errors import SpecError
from rowwise.base.textfile import append, decode_json, open_regular, read_bytes
from rowwise.planning.perf.access import Workload
from rowwise.tables.spec import Value


class SetSample(Value, frozen=True, kw_only=True, tag="set"):
    """Seconds of tables that one rank looked up and updated together."""

    number: int  # of the set; the seed of its draw
    rank: int
    batch: int  # samples of the lookup
    workloads: tuple[Workload, ...]
    lookup_s: float
    update_s: float  # backward and update
    again: bool = False  # the second measurement of its set: the difference is noise
    took_s: float  # wall-clock time, also of untimed parts
    waited: float = 0.0  # fraction of `took_s` that this process waited for a processor


class LinkSample(Value, frozen=True, kw_only=True, tag="link"):
    """Seconds of one exchange on each rank, and the amounts exchanged."""

    number: int
    layout: str  # of the tables that were exchanged
    hosts: int
    batch: int  # samples of all ranks
    dim_W: tuple[int, ...]  # columns of pooled vectors that each rank looks up for a sample
    ids_W: tuple[int, ...]  # ids that each rank receives; of replicated tables, those of its own samples
    copied: int = 0  # weights of replicated tables, whose gradients are all-reduced in the update (`return_W`)
    skew_W: tuple[float, ...]  # seconds by which each rank began later than the first
    route_W: tuple[float, ...]  # seconds: ids to the ranks of their rows
    exchange_W: tuple[float, ...]  # seconds: vectors to their samples, from when a rank began
    return_W: tuple[float, ...]  # seconds: gradients back
    took_s: float


Sample = SetSample | LinkSample


def write_sample(path: Path, sample: Sample) -> None:
    append(path, msgspec.json.encode(sample) + b"\n")


def read_samples(path: Path) -> Iterator[Sample]:
    """All complete lines of a file."""
    lines = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        yield decode_sample(line, f"{path}, line {number}")


def decode_sample(line: bytes, origin: str) -> Sample:
    try:
        return decode_json(line, SetSample | LinkSample)
    except msgspec.DecodeError as error:
        raise SpecError(f"{origin}: not a measurement: {error}; delete the line or the file") from None


def truncate_partial_line(path: Path) -> None:
    """Removes an incomplete last line, so that the next measurement starts on a line of its own."""
    if not path.exists():
        return
    with open_regular(path, "r+b", links=False) as file:
        data = file.read()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            file.truncate(end)
