"""The drill of a server: faults under load, with each answer compared with the golden logits of its version.

A small run is exported as several versions. Clients request its golden rows over keep-alive connections before, during
and after each fault.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from rowwise.base.errors import RowwiseError, SpecError
from rowwise.checkpoint.write import PART
from rowwise.serve.package import list_versions, read_golden, version_folder, write_traffic
from rowwise.serve.start import end_server, is_loader, start_server
from rowwise.serve.traffic import Canary, Traffic
from rowwise.tables.spec import Value

STEPS, EVERY, CLIENTS = 40, 10, 4
LIMIT_S = 60.0  # for each fault, and for each command
SETTLED_S = 0.5  # of load after a fault
BACK_S, RESTART_S = 5.0, 30.0  # recovery time limits: after a fault, and of a restarted host
RECIPE = f"""
name: drill
data: {{dataset: synthetic, rows: {256 * STEPS}, test_rows: 512}}
tables: {{all: {{dim: 16}}}}
model: {{kind: dlrm, bottom: [16], top: [16]}}
train: {{batch: 256, steps: {STEPS}, epochs: 9, threads: 1}}
save: {{every: {EVERY}, keep: {STEPS // EVERY}}}
"""

Tell = Callable[[str], None]


class ServingCase(Value, frozen=True):
    """A fault, and its effect on clients."""

    fault: str
    answers: int
    wrong: int  # answers whose logits differ from their version's
    failed: int  # requests without an answer
    may_fail: bool  # whether requests were in flight in a killed process
    back_s: float  # from the fault until the first right answer to a new connection
    max_s: float  # limit of back_s
    versions: tuple[int, ...]  # versions that answered
    trouble: str = ""  # error or timeout of the drill

    @property
    def survived(self) -> bool:
        answered = self.answers > 0 and not self.wrong and (self.may_fail or not self.failed)
        return answered and self.back_s < self.max_s and not self.trouble


class ServingReport(Value, frozen=True):
    """All faults of the drill."""

    drill: str
    workers: int
    cases: tuple[ServingCase, ...]

    @property
    def survived(self) -> bool:
        return all(case.survived for case in self.cases)


@dataclass(slots=True)
class _Load:
    """Clients that request golden rows, and their counts since the last fault."""

    models: Path
    rows: pa.Table  # golden rows, the same in all versions
    url: str = ""
    answers: int = 0
    wrong: int = 0
    failed: int = 0
    versions: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ending: threading.Event = field(default_factory=threading.Event)

    def request(self, connection: HTTPConnection, chosen: Sequence[int]) -> bool:
        """Request rows over a connection; returns whether the answer was right."""
        rows = self.rows.take(chosen).to_pydict()
        connection.request("POST", "/v1/models/drill/score", json.dumps({"rows": rows}, default=str))
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise RowwiseError(f"{response.status} {answer}")
        right = is_right(self.models, answer, chosen)
        with self.lock:
            self.answers += 1
            self.wrong += not right
            self.versions.add(answer["version"])
        return right

    def connect(self) -> HTTPConnection:
        return HTTPConnection(self.url, timeout=LIMIT_S)

    def run(self, seed: int) -> None:
        draw, connection = random.Random(seed), self.connect()
        while not self.ending.is_set():
            try:
                self.request(connection, sorted(draw.sample(range(64), draw.randint(1, 40))))
            except Exception:  # any error: the request has no answer
                connection.close()
                connection = self.connect()
                with self.lock:
                    self.failed += 1
                time.sleep(0.01)
        connection.close()

    def reset(self) -> None:
        with self.lock:
            self.answers = self.wrong = self.failed = 0
            self.versions = set()


def is_right(models: Path, answer: dict[str, Any], chosen: Sequence[int]) -> bool:
    """Whether an answer has the golden logits of the version that it names, bitwise."""
    golden = read_golden(version_folder(models, answer["version"]).path).logits
    return all(
        np.array(answer["outputs"][f"{name}_logit"], np.float32).tobytes()
        == golden[name].to_numpy()[list(chosen)].astype(np.float32).tobytes()
        for name in golden.column_names
    )


def run_serving_drill(workers: int, folder: Path, tell: Tell) -> ServingReport:
    """Run the drill in a new folder; `tell` takes the current activity."""
    if workers < 1:
        raise SpecError(f"--nproc {workers}", "at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drill.yaml").write_text(RECIPE)
    tell("training and exporting a small run")
    _command(folder, "train", "drill.yaml", "--runs", "runs")
    for step in range(EVERY, STEPS + 1, EVERY):
        _command(folder, "export", "runs/drill/1", "served", "--which", f"step-{step}")
    write_traffic(folder / "served", Traffic(1))
    drill = _ServingDrill(folder, workers, tell)
    return ServingReport(drill="serve", workers=workers, cases=tuple(drill.run()))


def _command(folder: Path, *args: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "rowwise", *args], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    if process.returncode:
        raise RowwiseError(f"the drill's `rowwise {' '.join(args)}` fails here even without a fault: {process.stderr}")


@dataclass(slots=True)
class _ServingDrill:
    folder: Path
    workers: int
    tell: Tell
    load: _Load = field(init=False)
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.load = _Load(self.models, read_golden(version_folder(self.models, 1).path).rows)

    @property
    def models(self) -> Path:
        return self.folder / "served"

    def run(self) -> Iterator[ServingCase]:
        with self._serving():
            threads = [threading.Thread(target=self.load.run, args=(seed,)) for seed in range(CLIENTS)]
            for thread in threads:
                thread.start()
            try:
                yield from self._cases()
            finally:
                self.load.ending.set()
                for thread in threads:
                    thread.join()

    def _cases(self) -> Iterator[ServingCase]:
        yield self._case("no fault", lambda: None)
        yield self._case("version 2 becomes the current one", lambda: self._switch(Traffic(2)))
        yield self._case("SIGKILL of a worker", self._kill_worker, may_fail=True)
        yield self._case("SIGKILL of a worker while versions change", self._kill_during_switch, may_fail=True)
        yield self._case("SIGKILL of the loader while versions change", self._kill_loader)
        yield self._case("a canary, then back to version 1", self._run_canary)
        yield self._case("a version with a flipped byte", self._damage_version)
        yield self._case("current.json cut short", self._truncate_traffic)
        yield self._case("SIGKILL of an export, and another one", self._kill_export)
        yield self._case("SIGKILL of the host, and another start", self._kill_host, may_fail=True, max_s=RESTART_S)

    def _case(
        self, fault: str, inject: Callable[[], float | None], *, may_fail: bool = False, max_s: float = BACK_S
    ) -> ServingCase:
        """`inject` returns the time of the fault, if it waits for something afterwards."""
        self.tell(fault)
        self.load.reset()
        problem, begin_s = "", time.monotonic()
        try:
            begin_s = inject() or time.monotonic()
            self._wait(self._answers, "answer over a new connection")
        except Exception as error:  # the other faults are still injected
            problem = str(error) if isinstance(error, RowwiseError) else f"{type(error).__name__}: {error}"
        back_s = time.monotonic() - begin_s
        time.sleep(SETTLED_S)
        with self.load.lock:
            load = self.load
            return ServingCase(
                fault=fault, answers=load.answers, wrong=load.wrong, failed=load.failed, may_fail=may_fail,
                back_s=back_s, max_s=max_s, versions=tuple(sorted(load.versions)), trouble=problem,
            )  # fmt: skip

    def _answers(self) -> bool:
        connection = self.load.connect()
        try:
            return self.load.request(connection, [0])
        except Exception:  # any error counts as no answer
            return False
        finally:
            connection.close()

    def _wait(self, condition: Callable[[], object], event: str) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > end_s:
                raise RowwiseError(f"the drill's server took more than {LIMIT_S:g} s to {event}")
            time.sleep(0.01)

    def _versions(self) -> dict[str, Any]:
        connection = self.load.connect()
        try:
            connection.request("GET", "/v1/versions")
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def _switch(self, traffic: Traffic) -> None:
        write_traffic(self.models, traffic)
        self._wait(lambda: set(traffic.versions) <= self.load.versions, f"answer by {traffic}")

    def _kill_worker(self) -> float:
        os.kill(random.choice(_workers_of(self.process.pid)), signal.SIGKILL)
        return time.monotonic()

    def _kill_during_switch(self) -> None:
        for number in (3, 2, 4):
            self._wait(lambda: len(_workers_of(self.process.pid)) == self.workers, "start its workers")
            victim = random.choice(_workers_of(self.process.pid))
            write_traffic(self.models, Traffic(number))
            time.sleep(random.uniform(0, 0.5))
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            self._wait(lambda n=number: n in self.load.versions, f"answer by version {number}")

    def _kill_loader(self) -> None:
        for number in (3, 2, 1):
            write_traffic(self.models, Traffic(number))
            time.sleep(random.uniform(0, 0.3))
            for pid in filter(is_loader, _forks_of(self.process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._wait(lambda n=number: n in self.load.versions, f"answer by version {number}")

    def _run_canary(self) -> None:
        self._switch(Traffic(4, Canary(3, 0.3)))
        self._switch(Traffic(1))

    def _damage_version(self) -> None:
        number = list_versions(self.models)[-1] + 1
        path = version_folder(self.models, number).path
        shutil.copytree(version_folder(self.models, 4).path, path)
        weights = max(path.glob("*.safetensors"), key=lambda path: path.name)
        content = bytearray(weights.read_bytes())
        content[-3] ^= 1
        weights.write_bytes(content)
        write_traffic(self.models, Traffic(number))
        self._wait(lambda: str(number) in self._versions()["refused"], f"refuse version {number}")
        write_traffic(self.models, Traffic(1))

    def _truncate_traffic(self) -> None:
        (self.models / "current.json").write_text('{"curr')
        time.sleep(1.0)
        self._switch(Traffic(2))

    def _kill_export(self) -> None:
        """Kill an export while it writes; a later export then becomes current and answers."""
        args, versions = ["export", "runs/drill/1", "served"], list_versions(self.models)
        with subprocess.Popen(
            [sys.executable, "-m", "rowwise", *args],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as export:
            part = self.models / "versions" / f"{versions[-1] + 1:06}{PART}"
            self._wait(lambda: any(part.glob("*")) or export.poll() is not None, "write a version")
            time.sleep(random.uniform(0, 0.05))
            killed = export.poll() is None
            export.kill()
        if not killed or list_versions(self.models) != versions:
            raise RowwiseError("the export ended before it could be killed")
        _command(self.folder, *args)
        number = list_versions(self.models)[-1]
        self._wait(lambda: number in self.load.versions, f"answer by version {number}")

    def _kill_host(self) -> float:
        begin_s = time.monotonic()
        self.process.kill()
        self.process.wait()
        self.process = self._start()
        return begin_s

    def _start(self) -> subprocess.Popen[str]:
        with (self.folder / "server.log").open("a") as log:
            server = start_server(["served", "--workers", str(self.workers)], errors=log, folder=self.folder)
        if server is None:
            raise RowwiseError(f"the drill's server does not start: see {self.folder / 'server.log'}")
        self.load.url = urlsplit(server.url).netloc
        return server.process

    @contextmanager
    def _serving(self) -> Iterator[None]:
        self.process = self._start()
        try:
            yield
        finally:
            end_server(self.process, LIMIT_S)


def _forks_of(host: int) -> list[int]:
    """Pids of the workers and the loader: forks of the host's fork server."""
    parents = {int(name): _parent_of(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    return sorted(pid for pid, parent in parents.items() if parents.get(parent) == host)


def _workers_of(host: int) -> list[int]:
    return [pid for pid in _forks_of(host) if not is_loader(pid)]


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
