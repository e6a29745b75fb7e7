"""MLPerf's log of a run: `mllog.txt` in its folder, for `python -m mlperf_logging.compliance_checker`.

A line is ":::MLLOG " and a JSON object with time_ms, key, value and metadata. The log begins with the settings of the
recipe, then has epochs and evaluations by samples, and ends with what only a whole run knows. A resume cuts off the
lines after its checkpoint. Settings that a run does not have are no lines: the checker names these keys.

[Note: What a referee must know]
init_start is when the trainer was made, after the tables were. run_stop has the time of the last event before it, as
the test at the end is not a part of training. cache_clear is false: caches of the system are left as they are.
lowest_numerical_precision is the recipe's; some processors compute bf16 in fp32, and warn.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from rowwise.base.plainyaml import load_yaml
from rowwise.base.textfile import read_text
from rowwise.train.run_folder import RunFolder

FILE, PREFIX = "mllog.txt", ":::MLLOG "
Event = Literal["epoch_start", "epoch_stop", "eval_start"]
TYPES = {"bf16": "bfloat16", "bf16_always": "bfloat16"}  # MLPerf's names; others are the same
BITS = ("fp32", "bf16", "fp16", "int8", "int4")  # of wire types, descending
OPTIMIZERS = {"rowwise_adagrad": "RowWiseAdagrad", "sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "lamb": "LAMB"}
ADAM = {"beta1": "opt_adam_beta_1", "beta2": "opt_adam_beta_2", "eps": "opt_adam_epsilon"}


class MlLine(NamedTuple):
    """A line of the log; `samples` of an event are those trained before it."""

    key: str
    value: Any = None
    metadata: Mapping[str, Any] = {}
    time_ms: int = 0

    @property
    def samples(self) -> int | None:
        return self.metadata.get("samples_count")

    @property
    def text(self) -> str:
        kind = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(self.key.rpartition("_")[2], "POINT_IN_TIME")
        return PREFIX + json.dumps({"namespace": "", "event_type": kind, **self._asdict()}) + "\n"

    @classmethod
    def read(cls, path: Path) -> "list[MlLine]":
        """The complete lines of a log, without those that a kill has cut."""
        if not path.exists():
            return []
        texts = takewhile(lambda line: line.endswith("}\n"), read_text(path).splitlines(keepends=True))
        fields = [json.loads(text.removeprefix(PREFIX)) for text in texts]
        return [cls(*(field[name] for name in cls._fields)) for field in fields]


@final
class MlLog:
    """Writes the log of a run for the benchmark that `log.mllog` names."""

    def __init__(self, folder: RunFolder, benchmark: str) -> None:
        self._folder, self._benchmark, self._begun_ms = folder, benchmark, _now_ms()
        self._lines: list[MlLine] = []
        self._continues = False  # an earlier process has begun the log

    def begin(self) -> None:
        recipe = _typed(load_yaml(read_text(self._folder.path / "recipe.yaml")))
        self._evaluation = recipe["evaluate"]
        self._lines = MlLine.read(self._folder.path / FILE)
        self._continues = any(line.key == "run_start" for line in self._lines)
        if not self._continues:
            environment = json.loads(read_text(self._folder.path / "env.json"))
            self._lines = [*_submission(recipe, environment, self._benchmark, self._begun_ms), MlLine("run_start")]
            self._lines = [line._replace(time_ms=line.time_ms or _now_ms()) for line in self._lines]
            self._rewrite()

    def mark(self, event: Event, epoch: int, samples: int) -> None:
        if self._continues:
            self._cut(samples)
        if event == "epoch_start" and self._open_epoch == epoch:  # a resume within the epoch
            return
        self._add(MlLine(event, None, {"epoch_num": epoch, "samples_count": samples}))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the accuracy of an evaluation of the validation rows: its AUC, or the metric that decides."""
        names = [name.rsplit("/", 2) for name in values if name.endswith("/valid")]
        if not names:
            return
        started = next((line for line in reversed(self._lines) if line.key == "eval_start"), MlLine("eval_start"))
        task = self._evaluation["task"] or names[0][0]
        count = values.get(f"{task}/count/valid")
        for metric in ("auc", self._evaluation["metric"]):
            value = values.get(f"{task}/{metric}/valid")
            if value is not None:
                facts = {"task": task, "metric": metric, "step": step, "rows": None if count is None else int(count)}
                self._add(MlLine("eval_accuracy", value, {**started.metadata, **facts}))
                break
        self._add(MlLine("eval_stop", None, started.metadata))

    def end(self, status: str, files: Sequence[Path]) -> None:
        if not any(line.key == "run_start" for line in self._lines):
            return
        events, last = [line for line in self._lines if line.samples is not None], self._lines[-1]
        results = [json.loads(read_text(file)) for file in files if file.name == "result.json"]
        samples = results[0]["samples"] if results else max((line.samples or 0 for line in events), default=0)
        stopped_ms = last.time_ms
        epochs = [line.samples or 0 for line in events if line.key == "epoch_stop"] or [samples]
        if self._open_epoch is not None:  # without samples: a resume goes on in this epoch
            self._add(MlLine("epoch_stop", None, {"epoch_num": self._open_epoch}, stopped_ms))
        scored = [line for line in events if line.key == "eval_accuracy"]
        self._add(MlLine("train_samples", epochs[0], {}, stopped_ms))
        if scored and scored[0].metadata["rows"] is not None:
            self._add(MlLine("eval_samples", scored[0].metadata["rows"], {}, stopped_ms))
        if scored and epochs[0]:
            self._add(MlLine("eval_every_data_pct", (scored[0].samples or 0) / epochs[0], {}, stopped_ms))
        success = "success" if status == "finished" else "aborted"
        self._add(MlLine("run_stop", None, {"status": success, "samples_count": samples}, stopped_ms))

    @property
    def _open_epoch(self) -> int | None:
        """The number of an epoch that has begun and not ended."""
        marks = [line for line in self._lines if line.key in ("epoch_start", "epoch_stop")]
        return marks[-1].metadata["epoch_num"] if marks and marks[-1].key == "epoch_start" else None

    def _cut(self, samples: int) -> None:
        """Drop the lines after a checkpoint, and those of an earlier end."""
        begun = [line.key for line in self._lines].index("run_start") + 1
        events = (line for line in self._lines[begun:] if line.samples is not None and line.key != "run_stop")
        kept = [line for line in events if (line.samples or 0) <= samples]
        self._lines, self._continues = self._lines[:begun] + kept, False
        self._rewrite()

    def _add(self, line: MlLine) -> None:
        self._lines.append(line._replace(time_ms=line.time_ms or _now_ms()))
        self._folder.add(FILE, self._lines[-1].text)

    def _rewrite(self) -> None:
        self._folder.write(FILE, "".join(line.text for line in self._lines))


def _submission(recipe: dict[str, Any], environment: dict[str, Any], benchmark: str, begun_ms: int) -> Iterator[MlLine]:
    """The lines before run_start: who and what runs, and its settings."""
    train, ranks = recipe["train"], environment["ranks"]
    precision = TYPES.get(train["precision"], train["precision"])
    values = {
        "submission_benchmark": benchmark, "submission_org": "unofficial", "submission_division": "open",
        "submission_status": "research", "submission_platform": f"{ranks} x {environment['cpu']}, {train['device']}",
        "cache_clear": False,
    }  # fmt: skip
    yield from (MlLine(key, value) for key, value in values.items())
    yield MlLine("init_start", None, {}, begun_ms)
    values = {
        "seed": recipe["seed"], "global_batch_size": train["batch"] * train["accumulate"],
        "gradient_accumulation_steps": train["accumulate"], "micro_batch_size": max(1, train["batch"] // ranks),
        "tensor_parallelism": 1, "pipeline_parallelism": 1, "context_parallelism": 1, "expert_parallelism": 1,
        "lowest_numerical_precision_in_linear": precision, "lowest_numerical_precision_in_attn": precision,
        "lowest_numerical_precision_in_comm": _wire_type(environment["wire"]) if ranks > 1 else "fp32",
        "config_filename": "recipe.yaml", **_dense_optimizer(train), **_row_optimizers(recipe["tables"]["list"]),
    }  # fmt: skip
    if isinstance(recipe["model"], dict) and "length" in recipe["model"]:
        values["max_sequence_length"] = recipe["model"]["length"]
    yield from (MlLine(key, value) for key, value in values.items())
    yield MlLine("init_stop")


def _wire_type(wire: Mapping[str, Any]) -> str:
    """The narrowest type on any link; `topk` sends fp32."""
    vectors = (name for link in ("host", "network", "uplink") for name in (wire[link] or {}).values())
    links = (wire["dense"], wire["far"], *vectors)
    narrowest = max((BITS.index(name) for name in links if name in BITS), default=0)
    return TYPES.get(BITS[narrowest], BITS[narrowest])


def _dense_optimizer(train: Mapping[str, Any]) -> dict[str, Any]:
    settings, schedule = train["optimizer"], train["schedule"] or {}
    warmup = schedule.get("warmup_steps", 0)
    name = "AdamW" if settings["kind"] == "adam" and settings["weight_decay"] else OPTIMIZERS[settings["kind"]]
    values = {
        "opt_name": name, "opt_base_learning_rate": settings["lr"], "opt_weight_decay": settings["weight_decay"],
        "opt_learning_rate_warmup_steps": warmup,
        "opt_learning_rate_warmup_start_lr": 0.0 if warmup else settings["lr"],
    }  # fmt: skip
    if settings["kind"] == "adam":
        values |= {key: settings[name] for name, key in ADAM.items()}
    if settings["kind"] == "adagrad":
        values["opt_adagrad_epsilon"] = settings["eps"]
    if train["clip"] is not None:
        values["opt_gradient_clip_norm"] = train["clip"]
    return values


def _row_optimizers(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Names and rates of the tables' optimizers; different ones are joined."""
    optimizers = [table["optimizer"] for table in tables]
    names = dict.fromkeys(OPTIMIZERS.get(x["kind"], x["kind"]) for x in optimizers)
    rates = list(dict.fromkeys(x["lr"] for x in optimizers))
    return {
        "opt_sparse_name": ", ".join(names),
        "opt_sparse_base_learning_rate": rates[0] if len(rates) == 1 else rates,
    }


def _typed(value: Any) -> Any:
    """Numbers, true, false and null for their texts."""
    if isinstance(value, dict):
        return {name: _typed(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_typed(inner) for inner in value]
    try:
        return json.loads(value)
    except (ValueError, TypeError):
        return value


def _now_ms() -> int:
    return int(1000 * time.time())
