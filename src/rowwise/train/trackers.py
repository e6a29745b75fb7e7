"""Trackers of experiments: TensorBoard, MLflow, Weights & Biases, and MLPerf's log get the numbers of a run.

A tracker on another machine may be slow, or fail in the middle of a run. So it is called by a thread of its own behind
a bounded queue: a step never waits, and lost calls are counted and reported in a warning. Its connection is checked
before the first step, when a mistyped address is cheap.

The clients read addresses and credentials from their own environment variables, so a recipe holds none.
"""

import importlib
import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, final

import msgspec

from rowwise.base.errors import DataError, SpecError
from rowwise.base.plainyaml import load_yaml
from rowwise.base.textfile import decode_json, read_bytes, read_text
from rowwise.base.value import MAX_BATCH, MAX_STEPS, Value, check_max
from rowwise.train.mllog import Event, MlLog
from rowwise.train.run_folder import AFTER, RunFolder

MAX_WAITING = 1000  # queued calls
DEADLINE_s = 30.0  # for the calls that are queued at the end of a run
SAVED = "trackers.json"  # ids of the run at each tracker, for a resume
MAX_PARAMETERS = 100  # of a request to MLflow
MAX_TEXT = 500  # characters of a parameter
STEPS = re.compile(r"(?:steps=)?([0-9]{1,12}):([0-9]{1,12})")
Status = Literal["finished", "stopped", "failed"]


class Log(Value, frozen=True):
    """Section `log` of a recipe: the recording of a run, which changes no result."""

    every: int = 100  # steps between lines of metrics.csv and steps.csv
    window: int = 100  # batches of the "train" metrics
    tensorboard: bool = False  # scalars in the run's folder tb/
    mllog: str | None = None  # MLPerf's log in the run's mllog.txt, for this benchmark of its rules, such as dlrmv4
    mlflow: str | None = None  # name of an experiment, at the server of MLFLOW_TRACKING_URI
    wandb: str | None = None  # name of a Weights & Biases project, in the mode of WANDB_MODE
    group: str | None = None  # of runs at both: a group of Weights & Biases, a tag at MLflow
    profile: str | None = None  # "10:20": a trace of these steps in the run's folder trace/

    def __post_init__(self) -> None:
        if self.every < 1 or self.window < 1:
            raise SpecError(f"log: every={self.every}, window={self.window}", "at least 1")
        if "" in [getattr(self, key) for key in (*REMOTE, "group", "mllog")]:
            expected = "the name of an experiment, project, group or benchmark, or null"
            raise SpecError(f"log: {', '.join(REMOTE)}, group or mllog is empty", expected)
        check_max("log.", self, every=MAX_STEPS, window=MAX_BATCH)
        self.profiled()

    @property
    def is_remote(self) -> bool:
        """Whether a tracker on another machine gets the numbers."""
        return any(getattr(self, key) is not None for key in REMOTE)

    def profiled(self) -> range:
        """The steps to trace."""
        if self.profile is None:
            return range(0)
        match = STEPS.fullmatch(self.profile)
        first, last = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= first <= last:
            raise SpecError(f"log.profile={self.profile!r}", "the first and last step, such as '10:20'")
        return range(first, last + 1)


class Tracker(Protocol):
    """Receives the numbers of a run; `begin` raises if it cannot. A tracker without a connection has `log` only."""

    def begin(self) -> None:
        return

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def mark(self, event: Event, epoch: int, samples: int) -> None:
        """Something begins or ends after this number of samples; epochs count from 1."""
        return

    def end(self, status: Status, files: Sequence[Path]) -> None:
        return


@final
class Trackers:
    """The trackers that a recipe names; none without a folder."""

    def __init__(self, folder: RunFolder | None, log: Log) -> None:
        """Raise if the package of a tracker is missing."""
        self.active: list[Tracker] = []
        if folder is not None:
            self.active += [kind(folder, log) for key, kind in LOCAL.items() if getattr(log, key)]
            remote = {key: kind(folder, log) for key, kind in REMOTE.items() if getattr(log, key)}
            self.active += [_QueuedTracker(key, tracker, folder.warn) for key, tracker in remote.items()]

    def begin(self) -> None:
        for tracker in self.active:
            tracker.begin()

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Pass on the numbers of a step, without NaN, infinity and None."""
        finite = {name: float(x) for name, x in values.items() if x is not None and math.isfinite(x)}
        for tracker in self.active:
            tracker.log(finite, step)

    def mark(self, event: Event, epoch: int, samples: int) -> None:
        for tracker in self.active:
            tracker.mark(event, epoch, samples)

    def end(self, status: Status, files: Sequence[Path]) -> None:
        """End the run at each tracker, and upload these files."""
        for tracker in self.active:
            tracker.end(status, files)


@final
class _TensorBoard(Tracker):
    def __init__(self, folder: RunFolder, log: Log) -> None:
        board = _import("torch.utils.tensorboard", "tensorboard=true: tensorboard", "tensorboard")
        self._writer = board.SummaryWriter(str(folder.path / "tb"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


@final
class _QueuedTracker(Tracker):
    """Calls a tracker from a thread, behind a bounded queue."""

    def __init__(self, name: str, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self._name, self._tracker, self._warn = name, tracker, warn
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._error = ""  # the first error
        self._lost, self._warned = 0, False

    def begin(self) -> None:
        if self._thread.ident is None:
            self._tracker.begin()
            self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        try:
            self._calls.put_nowait(lambda: self._tracker.log(values, step))
        except queue.Full:
            self._error, self._lost = self._error or f"its queue of {MAX_WAITING:,} lines is full", self._lost + 1
        if self._error and not self._warned:
            self._warned = True
            self._warn(f"log.{self._name}: {self._error}: the run continues, and its files have all numbers")

    def end(self, status: Status, files: Sequence[Path]) -> None:
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + DEADLINE_s
        for call in (lambda: self._tracker.end(status, files), None):
            with suppress(queue.Full):
                self._calls.put(call, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        waiting = self._calls.qsize() + self._thread.is_alive()
        if self._lost or waiting:
            self._warn(f"log.{self._name}: {self._lost + waiting} lines were not sent: {self._error or 'too slow'}")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # whatever a client raises, training continues
                self._error, self._lost = self._error or _first_line(error), self._lost + 1


@final
class _Mlflow(Tracker):
    """A run of an MLflow experiment, at the server of MLFLOW_TRACKING_URI."""

    def __init__(self, folder: RunFolder, log: Log) -> None:
        self._make = _import("mlflow", "mlflow: mlflow", "mlflow-skinny").MlflowClient
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        self._folder, self._experiment, self._group = folder, log.mlflow, log.group
        self._resumed = False
        self._newest: dict[str, int] = {}  # the last step of each number that an earlier process sent

    def begin(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client = self._make()
            saved_id = _saved_ids(self._folder).get("mlflow")
            self._resumed, self._run = saved_id is not None, saved_id or self._create()
            self._client.update_run(self._run, status="RUNNING")
        except (MlflowException, OSError) as error:
            raise SpecError(
                f"log.mlflow={self._experiment}: {_first_line(error)}",
                hint="set MLFLOW_TRACKING_URI to a server that runs, or log.mlflow=null",
            ) from None

    def _create(self) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        tags: dict[str, str] = {} if self._group is None else {"group": self._group}
        name = _run_name(self._folder, self._group)
        run: str = self._client.create_run(number, run_name=name, tags=tags).info.run_id
        items = sorted(_recipe_values(self._folder).items())
        for begin in range(0, len(items), MAX_PARAMETERS):
            self._client.log_batch(run, params=[Param(name, x) for name, x in items[begin : begin + MAX_PARAMETERS]])
        self._folder.write_json(SAVED, _saved_ids(self._folder) | {"mlflow": run})
        return run

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        names = {name.replace("@", "_at_"): value for name, value in values.items()}  # MLflow refuses @
        new = [Metric(name, x, now, step) for name, x in names.items() if step > self._newest_step(name)]
        if new:
            self._client.log_batch(self._run, metrics=new)

    def _newest_step(self, name: str) -> int:
        if name not in self._newest:
            history = self._client.get_metric_history(self._run, name) if self._resumed else ()
            self._newest[name] = max((metric.step for metric in history), default=-1)
        return self._newest[name]

    def end(self, status: Status, files: Sequence[Path]) -> None:
        for file in files:
            self._client.log_artifact(self._run, str(file))
        self._client.set_terminated(
            self._run, {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}[status]
        )


@final
class _Wandb(Tracker):
    """A run of a Weights & Biases project, in the mode of WANDB_MODE."""

    def __init__(self, folder: RunFolder, log: Log) -> None:
        self._wandb = _import("wandb", "wandb: wandb", "wandb")
        self._folder, self._project, self._group = folder, log.wandb, log.group

    def begin(self) -> None:
        saved_id = _saved_ids(self._folder).get("wandb")
        try:
            self._run: Any = self._wandb.init(
                project=self._project,
                id=saved_id,
                resume="allow" if saved_id else None,
                name=_run_name(self._folder, self._group),
                group=self._group,
                config=_recipe_values(self._folder),
                settings=self._wandb.Settings(silent=True, console="off", init_timeout=DEADLINE_s),
            )
        except (self._wandb.errors.Error, OSError) as error:
            raise SpecError(
                f"log.wandb={self._project}: {_first_line(error)}",
                hint="run wandb login, or set WANDB_MODE=offline or log.wandb=null",
            ) from None
        self._folder.write_json(SAVED, _saved_ids(self._folder) | {"wandb": self._run.id})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)
        # A run that was killed before its test repeats its last step, which a server does not accept twice.
        self._run.summary.update({name: x for name, x in values.items() if name.endswith(f"/{AFTER}")})

    def end(self, status: Status, files: Sequence[Path]) -> None:
        for file in files:
            self._run.save(str(file), base_path=str(file.parent), policy="now")
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status == "failed"))


# Trackers by their fields of `Log`: local files, and other machines.
LOCAL: dict[str, Callable[[RunFolder, Log], Tracker]] = {
    "tensorboard": _TensorBoard,
    "mllog": lambda folder, log: MlLog(folder, str(log.mllog)),
}
REMOTE: dict[str, Callable[[RunFolder, Log], Tracker]] = {"mlflow": _Mlflow, "wandb": _Wandb}


def _import(module: str, what: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SpecError(f"log.{what} is not installed; pip install {package}") from None


def _run_name(folder: RunFolder, group: str | None) -> str:
    """The name of the run at a tracker, such as clicks/1, or in a group 0003/clicks/1."""
    return "/".join(folder.path.parts[-2 if group is None else -3 :])


def _recipe_values(folder: RunFolder) -> dict[str, str]:
    """The resolved recipe as flat names and texts, such as train.batch: 512."""
    values: dict[str, str] = {}
    stack: list[tuple[str, Any]] = [("", load_yaml(read_text(folder.path / "recipe.yaml")))]
    while stack:
        name, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{name}.{key}".strip("."), inner) for key, inner in value.items()]
        else:
            values[name] = str(value)[:MAX_TEXT]
    return values


def _saved_ids(folder: RunFolder) -> dict[str, str]:
    if not (folder.path / SAVED).exists():
        return {}
    try:
        return decode_json(read_bytes(folder.path / SAVED), dict[str, str])
    except msgspec.DecodeError as error:
        raise DataError(
            f"{folder.path / SAVED}: {error}", hint="remove it, and the run begins anew at its trackers"
        ) from None


def _first_line(error: Exception) -> str:
    """The message of a client, without the password that an address may contain."""
    line = (str(error).splitlines() or [type(error).__name__])[0][:MAX_TEXT]
    return re.sub(r"://\S*@", "://", " ".join(line.split()))
