"""Job: a run that a scheduler starts, recorded in the home folder. JobRequest: a job to submit."""

import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

from rowwise.base.errors import DataError, SpecError, printable
from rowwise.base.textfile import decode_json, parse_whole, read_bytes, read_text, replace_file
from rowwise.base.value import Value

State = Literal["pending", "running", "completed", "failed", "cancelled", "gone"]
RECORDS = ".local/state/rowwise/jobs"  # in the home folder
KEY = re.compile("[a-z][a-z0-9-]*")
PROGRAM_S = 60.0  # timeout after which the scheduler is regarded as down
MAX_OUTPUT_bytes, PIECE_bytes = 4 << 20, 1 << 16  # limit and read size for the output of its programs
MAX_NUMBER = 65535  # seconds, or cores
MAX_SHOWN = 1000  # characters of a line of output in a message


class Job(Value, frozen=True):
    """A submitted job, as its record in the home folder."""

    name: str  # the scheduler and the job id, such as slurm-17
    id: str
    recipe: str
    run: str
    log: str
    submitted: str
    cluster: str = ""  # its name, or the address of Ray's dashboard

    @property
    def full_name(self) -> str:
        """The name that is unique across clusters."""
        return f"{self.name}@{self.cluster}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A recipe to train on nodes of a cluster."""

    recipe: str  # name of the recipe
    command: tuple[str, ...]  # arguments of rowwise, without --run
    cwd: Path
    runs: Path
    run: Path | None  # None for a folder named by the job
    nodes: int
    nproc: int
    node_counts: tuple[int, ...] = ()  # on which the recipe can run, in ascending order
    settings: dict[str, str]  # --job settings

    def __post_init__(self) -> None:
        texts = (*self.command, str(self.cwd), str(self.runs), str(self.run or ""))
        bad = next((text for text in texts if not text.isprintable()), None)
        if bad is not None:
            raise SpecError(f"{bad!r} in the script of a job", "printable characters")

    def run_of(self, name: str) -> Path:
        """The folder of the run for a job of this name."""
        return self.run or self.runs / self.recipe / name

    def submitted(self, name: str, job_id: str, log: str, cluster: str) -> Job:
        """The record of this request as submitted; `log` is relative to the working folder."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        run, path = str(self.run_of(name)), str(self.cwd / log)
        return Job(name=name, id=job_id, recipe=self.recipe, run=run, log=path, submitted=now, cluster=cluster)


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """Scheduler settings from KEY=VALUE texts and YAML files; later ones override earlier ones."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        settings |= {key: value} if equals else _read_settings(Path(pair))
    for key, value in settings.items():
        if not KEY.fullmatch(key) or not value.isprintable():
            raise SpecError(f"--job {key}={value}", "KEY=VALUE, such as partition=gpu, in printable characters")
    return settings


def check_keys(settings: Mapping[str, str], known: Collection[str], hint: str = "") -> None:
    """Raise for a setting that the scheduler does not have."""
    unknown = settings.keys() - known
    if unknown:
        raise SpecError(f"--job {min(unknown)}={settings[min(unknown)]}", f"one of {', '.join(known)}", hint=hint)


def check_number(settings: Mapping[str, str], key: str, minimum: int = 1) -> None:
    """Raise if a setting is present and not a number in range."""
    value = settings.get(key, str(minimum))
    number = parse_whole(value)
    if number is None or not minimum <= number <= MAX_NUMBER:
        raise SpecError(f"--job {key}={value}", f"a number from {minimum} to {MAX_NUMBER}")


def _read_settings(path: Path) -> dict[str, str]:
    import yaml

    from rowwise.base.plainyaml import load_yaml

    try:
        read = load_yaml(read_text(path))
    except FileNotFoundError:
        raise SpecError(f"--job {path}", "KEY=VALUE, such as partition=gpu, or a YAML file of them") from None
    except yaml.YAMLError as error:
        raise SpecError(f"--job {path}: {' '.join(str(error).split())}") from None
    if not isinstance(read, dict) or not all(isinstance(value, str | int) for value in read.values()):
        raise SpecError(f"--job {path}", "a YAML file of settings, a line each, such as partition: gpu")
    return {str(key): str(value) for key, value in read.items()}


def run_program(command: Sequence[str], missing: str, *, within_s: float = PROGRAM_S) -> str:
    """The output of a scheduler program; raises with its last lines of errors, or with `missing` if not on the PATH."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        raise SpecError(f"no {command[0]} on the PATH: {missing}") from None
    with process:
        try:
            printed, errors = _read_output(command[0], process, within_s)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        lines = [line[:MAX_SHOWN] for line in errors.splitlines() if line.strip()]
        raise DataError("; ".join(lines[-2:]) or f"{command[0]} has failed with code {process.returncode}")
    return printed


def _read_output(name: str, process: subprocess.Popen[bytes], within_s: float) -> list[str]:
    """Standard output and errors of a program that ends; raises on a timeout, or on too much output."""
    end_s = time.monotonic() + within_s
    pipes = process.stdout, process.stderr
    output_of = {pipe: bytearray() for pipe in pipes if pipe is not None}
    with selectors.DefaultSelector() as ready:
        for pipe in output_of:
            ready.register(pipe, selectors.EVENT_READ, output_of[pipe])
        while ready.get_map():
            events = ready.select(max(end_s - time.monotonic(), 0))
            for key, _ in events:
                piece = os.read(key.fd, PIECE_bytes)
                key.data.extend(piece)
                if not piece:
                    ready.unregister(key.fileobj)
                if len(key.data) > MAX_OUTPUT_bytes:
                    raise DataError(f"{name} prints more than {MAX_OUTPUT_bytes >> 20} MB: is it the scheduler's?")
            if not events or time.monotonic() > end_s:
                raise DataError(f"{name} has not answered in {within_s:g} s: is the scheduler up?")
    try:
        process.wait(max(end_s - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        raise DataError(f"{name} has not ended in {within_s:g} s: is the scheduler up?") from None
    return [text.decode(errors="replace") for text in output_of.values()]


def save_record(job: Job) -> None:
    folder = Path.home() / RECORDS
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{quote(job.full_name, safe='@')}.json", msgspec.json.encode(job))


def read_records() -> list[Job]:
    """Submitted jobs, oldest first."""
    jobs: list[Job] = []
    for path in (Path.home() / RECORDS).glob("*.json"):
        try:
            jobs.append(decode_json(read_bytes(path), Job))
        except (OSError, ValueError) as error:
            print(f"rowwise: {printable(str(path))} is left out: {printable(str(error))}", file=sys.stderr)
    return sorted(jobs, key=lambda job: job.submitted)


def find_record(name: str) -> Job:
    """The newest job with this name or id; raises if it is ambiguous between clusters."""
    matches = [job for job in read_records() if name in (job.name, job.id, job.full_name)]
    if not matches:
        raise SpecError(f"{name!r} is not a job submitted from this home folder: rowwise ps lists the jobs")
    names = {job.full_name for job in matches}
    if len(names) > 1:
        raise SpecError(f"{name!r} is a job of {len(names)} clusters", f"one of {', '.join(sorted(names))}")
    return matches[-1]
