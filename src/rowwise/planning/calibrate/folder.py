"""The folder of a calibration: its specification and all measurements, so that a killed one can continue.

    order.json                 what is measured, and how
    samples/rank-<r>.jsonl     sets of tables, by the rank that measured them
    samples/links.jsonl        exchanges between all ranks

Ranks append lines; the parent process and fitting read them. A folder holds measurements of one specification.
"""

import fcntl
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import final

import msgspec

from rowwise.base.errors import SpecError
from rowwise.base.textfile import decode_json, open_regular, read_bytes, refuse_links, write_new
from rowwise.planning.calibrate.draw import SetLimits
from rowwise.planning.calibrate.samples import Sample, SetSample, decode_sample, read_samples, truncate_partial_line
from rowwise.planning.perf.access import Workload
from rowwise.tables.spec import Value

SPEC_FILE, LINKS_FILE = "order.json", "links.jsonl"


class MeasurementSpec(Value, frozen=True, kw_only=True):
    """What to measure and how. The same specification draws the same sets and exchanges."""

    seed: int = 0
    world: int = 1
    threads: int = 1  # of each rank
    device: str = "cpu"
    transport: str = "shared"
    tables: tuple[Workload, ...] = ()  # to draw sets from; empty draws synthetic ones
    limits: SetLimits


POOL_FRACTION, MAX_POOL_bytes = 0.15, 3 << 30  # of the memory of a host or GPU, for rows and optimizer state


def limits_of_machine(world: int, device: str = "cpu") -> SetLimits:
    """Limits of sets on this machine, where `world` ranks share the memory."""
    if device == "cuda":
        import torch

        memory_bytes = torch.cuda.get_device_properties(0).total_memory
        return SetLimits(pool_bytes=min(int(memory_bytes * POOL_FRACTION), MAX_POOL_bytes))
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return SetLimits(pool_bytes=min(int(memory_bytes * POOL_FRACTION / world), MAX_POOL_bytes))


OPTIONS = {
    "seed": "--seed",
    "world": "--nproc",
    "threads": "--threads",
    "device": "--device",
    "transport": "--transport",
    "tables": "--tables",
}


@final
class MeasurementFolder:
    """An existing folder of measurements; `open_folder` creates one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    def sets_of(self, rank: int) -> Path:
        return self.samples / f"rank-{rank}.jsonl"

    @property
    def links(self) -> Path:
        return self.samples / LINKS_FILE

    def read_spec(self) -> MeasurementSpec:
        path = self.path / SPEC_FILE
        try:
            return decode_json(read_bytes(path), MeasurementSpec)
        except msgspec.DecodeError as error:
            raise SpecError(f"{path}: not the specification of a calibration: {error}", "another folder") from None

    def read(self) -> list[Sample]:
        """All measurements: first those of ranks, then exchanges."""
        paths = [*sorted(self.samples.glob("rank-*.jsonl")), self.links]
        return [sample for path in paths if path.exists() for sample in read_samples(path)]


def open_folder(path: Path, spec: MeasurementSpec) -> MeasurementFolder:
    """A new folder, or one with an equal specification. The limits stay those of its first calibration."""
    if path.exists() and not path.is_dir():
        raise SpecError(f"{path}: is a file", "a folder for measurements")
    folder, spec_file = MeasurementFolder(path), path / SPEC_FILE
    if spec_file.exists():
        _check_same_spec(spec_file, folder.read_spec(), spec)
    else:
        if path.exists() and any(path.iterdir()):
            raise SpecError(f"{path}: not empty, and without {SPEC_FILE}", "a new folder")
        folder.samples.mkdir(parents=True, exist_ok=True)
        part = path / f".{SPEC_FILE}.part"
        write_new(part, msgspec.json.format(msgspec.json.encode(spec), indent=1))
        part.replace(spec_file)
    folder.samples.mkdir(exist_ok=True)
    return folder


def lock_folder(folder: MeasurementFolder) -> AbstractContextManager[None]:
    """Keeps other processes from measuring into the folder."""
    return lock_exclusively(folder.path / SPEC_FILE, folder.samples, "*.jsonl")


@contextmanager
def lock_exclusively(spec_file: Path, lines: Path, pattern: str) -> Iterator[None]:
    """Locks a folder by its specification, and cuts off partial lines of a killed process."""
    refuse_links(spec_file.parent)
    with open_regular(spec_file) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecError(
                f"{spec_file.parent}: another process measures into it", hint="wait for it, or use another folder"
            ) from None
        for path in lines.glob(pattern):
            truncate_partial_line(path)
        yield


def _check_same_spec(path: Path, existing: MeasurementSpec, requested: MeasurementSpec) -> None:
    """Raises for the first field that differs."""
    for field, option in OPTIONS.items():
        old, new = getattr(existing, field), getattr(requested, field)
        if old != new:
            got = "other tables" if field == "tables" else f"{option} {old}, not {new}"
            raise SpecError(f"{path}: measured with {got}", "the same options, or another folder")


@final
class Tally:
    """Counts measurements in a folder as it grows."""

    def __init__(self, folder: MeasurementFolder) -> None:
        self._folder = folder
        self._read: Counter[Path] = Counter()  # bytes read so far
        self._sets_s: dict[Path, float] = defaultdict(float)
        self.sets, self.links, self._links_s = 0, 0, 0.0

    def update(self) -> float:
        """Reads new lines; returns the seconds of measuring of the slowest rank."""
        for path in self._folder.samples.glob("*.jsonl"):
            with open_regular(path) as file:
                file.seek(self._read[path])
                new_lines = file.read()
            new_lines = new_lines[: new_lines.rfind(b"\n") + 1]
            self._read[path] += len(new_lines)
            for line in new_lines.splitlines():
                sample = decode_sample(line, str(path))
                if isinstance(sample, SetSample):
                    self.sets += 1
                    self._sets_s[path] += sample.took_s
                else:
                    self.links += 1
                    self._links_s += sample.took_s
        return max(self._sets_s.values(), default=0.0) + self._links_s
