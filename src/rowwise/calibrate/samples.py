"""What was measured, one line a measurement: sets of tables that one device looked up, and exchanges between ranks.

A line is whole or is not there; one that was cut off is left out.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rowwise.errors import SpecError
from rowwise.perf.access import Workload
from rowwise.spec import Value
from rowwise.textfile import append, decode_json, open_regular, read_bytes


class SetSample(Value, frozen=True, kw_only=True, tag="set"):
    """Tables of one rank, looked up and updated together."""

    number: int  # of the set, by which it was drawn
    rank: int
    batch: int  # samples that were looked up
    workloads: tuple[Workload, ...]
    lookup_s: float
    update_s: float  # backward and update
    again: bool = False  # the set had been measured before: what differs is noise
    took_s: float  # all of it, with what was not timed
    waited: float = 0.0  # share of that in which other processes had the processor


class LinkSample(Value, frozen=True, kw_only=True, tag="link"):
    """One exchange of all ranks: the amounts and seconds of each."""

    number: int
    layout: str  # of the tables that were exchanged
    hosts: int
    batch: int  # samples of all ranks
    dim_W: tuple[int, ...]  # columns of pooled vectors that each rank makes
    ids_W: tuple[int, ...]  # that each rank gets, of all samples; of tables that it has copies of, its own
    copied: int = 0  # weights of tables that every rank has: their gradients travel with the update, in `return_W`
    skew_W: tuple[float, ...]  # seconds that each began later
    route_W: tuple[float, ...]  # seconds: ids to where their rows are
    exchange_W: tuple[float, ...]  # vectors to their samples, from when a rank began
    return_W: tuple[float, ...]  # gradients back
    took_s: float


Sample = SetSample | LinkSample


def write_sample(path: Path, sample: Sample) -> None:
    append(path, msgspec.json.encode(sample) + b"\n")


def read_samples(path: Path) -> Iterator[Sample]:
    """All whole lines of a file; the last may have been cut off."""
    lines = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        yield decode_sample(line, f"{path}, line {number}")


def decode_sample(line: bytes, place: str) -> Sample:
    try:
        return decode_json(line, SetSample | LinkSample)
    except msgspec.DecodeError as error:
        raise SpecError(f"{place}: not a measurement: {error}; delete the line or the file") from None


def cut_torn(path: Path) -> None:
    """Take off a last line that was not written to its end, so that the next one is a line of its own."""
    if not path.exists():
        return
    with open_regular(path, "r+b", links=False) as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)
