"""Training settings as frozen values: the sections `train`, `evaluate` and `save` of a recipe.

This module does not import torch, as recipes are read and listed without it. Section `log` is in `train/trackers.py`.
"""

import math
from typing import Literal

from rowwise.base.errors import SpecError
from rowwise.base.value import MAX_BATCH, MAX_STEPS, MAX_THREADS, check_max
from rowwise.tables.row_optimizers import Schedule
from rowwise.tables.spec import Value
from rowwise.train.loss_settings import AnyLoss, LogLoss
from rowwise.train.trackers import Log

MAX_AHEAD = 4096  # batches or splits prepared ahead
MAX_DEPTH = 16  # steps in flight
MAX_STALENESS = 1024  # steps
COUNTS = ("batch", "epochs", "accumulate", "virtual_shards", "pipeline_depth")  # at least 1
Precision = Literal["fp32", "bf16", "bf16_always", "fp8"]
BETTER_LOWER = ("loss", "ne", "rmse", "mae", "poisson_deviance")  # of all other metrics higher values are better


class _CheckedNumbers(Value, frozen=True):
    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            number = getattr(self, name)
            if not 0 <= number < math.inf:
                raise SpecError(f"train.optimizer.{name}={number}", "a finite number that is not negative")


class DenseSgd(_CheckedNumbers, frozen=True, tag="sgd", tag_field="kind"):
    """`torch.optim.SGD` for the dense parameters."""

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0


class DenseAdagrad(_CheckedNumbers, frozen=True, tag="adagrad", tag_field="kind"):
    """`torch.optim.Adagrad` for the dense parameters."""

    lr: float = 0.01
    eps: float = 1e-10
    weight_decay: float = 0.0


class DenseAdam(_CheckedNumbers, frozen=True, tag="adam", tag_field="kind"):
    """`torch.optim.AdamW` for the dense parameters: weight decay is decoupled from the gradient."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if beta >= 1:
                raise SpecError(f"train.optimizer.{name}={beta}", "less than 1")


DenseOptimizer = DenseSgd | DenseAdagrad | DenseAdam


class DenseParallel(Value, frozen=True):
    """How dense parameters, gradients and optimizer state are distributed over ranks."""

    # replicate: each rank has all; full: sharded over all ranks (FSDP); hybrid: sharded over groups of `shards` ranks
    kind: Literal["replicate", "full", "hybrid"] = "replicate"
    shards: int | None = None  # ranks per group, if hybrid; default: the ranks of a host
    reshard: bool = True  # free gathered parameters after a forward, and gather them again for the backward
    params: Literal["fp32", "bf16"] = "fp32"  # type of gathered parameters and products; gradients are added in fp32
    prefetch: int = 1  # layers whose parameters are gathered ahead
    recompute: bool = False  # recompute a layer's activations in the backward instead of keeping them

    def __post_init__(self) -> None:
        if (self.shards is not None and self.shards < 1) or not 0 <= self.prefetch <= MAX_DEPTH:
            raise SpecError(
                f"train.dense_parallel: shards={self.shards}, prefetch={self.prefetch}",
                f"shards of at least 1, and a prefetch of 0 to {MAX_DEPTH}",
            )
        if self.shards is not None and self.kind != "hybrid":
            raise SpecError(f"train.dense_parallel: shards={self.shards} with kind={self.kind}", "kind=hybrid")


class Augment(Value, frozen=True):
    """What is randomly left out of training samples, each time anew. Evaluations read samples as they are."""

    drop_features: float = 0.0  # probability that a feature of a sample is left out: no ids, or a number of 0
    drop_ids: float = 0.0  # probability that an id is left out of a list of several ids
    crop_lists: float = 0.0  # maximum share of a list's ids that is cut off at its ends

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < 1:
                raise SpecError(f"train.augment.{name}={getattr(self, name)}", "at least 0 and less than 1")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is left out."""
        return not (self.drop_features or self.drop_ids or self.crop_lists)


class Training(Value, frozen=True):
    """Batch size, epochs, optimizer and precision of the steps."""

    batch: int = 2048
    epochs: int = 1
    steps: int | None = None  # maximum number of updates; default: those of the epochs
    optimizer: DenseOptimizer = DenseAdam()  # of the dense parameters; tables have optimizers of their own
    schedule: Schedule | None = None  # of the dense learning rate; default: constant
    accumulate: int = 1  # batches per update
    clip: float | None = None  # maximum norm of all dense gradients together; tables have `clip` of their own
    # Type of dense products (autocast); weights stay in 32 bits. A processor without bf16 products uses fp32 instead,
    # which is faster there, and warns; bf16_always emulates bf16 products. fp8: bf16, and 8 bits in linear layers whose
    # widths are multiples of 16; CPUs emulate these
    precision: Precision = "fp32"
    task_weights: tuple[float, ...] = ()  # weight of each label's loss; default: all 1
    # Loss of the labels: log_loss of 0 and 1, squared or poisson of amounts; other kinds are for labels with errors
    objective: AnyLoss = LogLoss()
    label_smoothing: float = 0.0  # s: the loss is that of labels s / 2 and 1 - s / 2; metrics take labels as they are
    augment: Augment = Augment()  # what is randomly left out of training samples; default: nothing
    # Whether torch.compile compiles the model's layers, for batches of this size; on CPUs only, needs a C++ compiler.
    # The last digits of results change
    compile: bool = False
    device: str = "cpu"
    threads: int | None = None  # of torch; default: 1 for small steps, else torch's default
    # elastic: the same bits for any number of ranks that divides virtual_shards; it costs speed
    determinism: Literal["run", "elastic"] = "run"
    virtual_shards: int = 8  # of a global batch, if elastic; aligned to blocks of 256 samples
    merge_shared: bool = False  # first add gradients of samples that share a bag: faster, but the last bits differ
    shuffle: bool = True
    ahead: int = 4  # batches that a thread prepares ahead; 0: no thread
    # Steps in flight: while a step runs, ids of the next steps are sent and their rows on disk are read. 1: no overlap
    pipeline_depth: int = 2
    # Number of newest updates of rows that a lookup may miss: with 1 or more, the vectors of the next step travel while
    # a step runs, but results change. 0: exact
    staleness: int = 0
    dense_parallel: DenseParallel = DenseParallel()

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in COUNTS}
        counts |= {name: n for name, n in (("steps", self.steps), ("threads", self.threads)) if n is not None}
        for name, count in counts.items():
            if count < 1:
                raise SpecError(f"train.{name}={count}", "at least 1")
        check_max("train.", self, batch=MAX_BATCH, epochs=MAX_STEPS, steps=MAX_STEPS, accumulate=MAX_BATCH)
        check_max("train.", self, threads=MAX_THREADS, virtual_shards=MAX_BATCH, ahead=MAX_AHEAD)
        check_max("train.", self, pipeline_depth=MAX_DEPTH, staleness=MAX_STALENESS)
        if self.staleness < 0:
            raise SpecError(f"train.staleness={self.staleness}", "at least 0")
        self._check_compile()
        if self.determinism == "elastic":
            self._check_elastic()
        if self.device != "cpu":
            self._check_device()
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise SpecError(f"train.clip={self.clip}", "a norm above 0, or null for no clipping")
        if not 0 <= self.label_smoothing < 1:
            raise SpecError(f"train.label_smoothing={self.label_smoothing}", "at least 0 and less than 1")
        if any(not 0 <= w < math.inf for w in self.task_weights):
            raise SpecError(f"train.task_weights={self.task_weights}", "finite numbers that are not negative")
        if self.schedule is not None and self.schedule.problem:
            raise SpecError(f"train.schedule.{self.schedule.problem}")

    def _check_compile(self) -> None:
        if self.compile and self.precision == "fp8":
            raise SpecError("train.compile=true with train.precision=fp8", "compile=false, or precision=bf16")
        if self.compile and self.device != "cpu":
            raise SpecError(f"train.compile=true on {self.device}: it runs on CPUs only", "false")

    def _check_device(self) -> None:
        on = f"on {self.device}: it runs on CPUs only"
        if self.dense_parallel.kind != "replicate":
            raise SpecError(f"train.dense_parallel.kind={self.dense_parallel.kind} {on}")

    def _check_elastic(self) -> None:
        elastic = "with train.determinism='elastic'"
        if self.accumulate > 1:
            raise SpecError(
                f"train.accumulate={self.accumulate} {elastic}",
                "1",
                hint=f"multiply the batch by {self.accumulate}: virtual shards are computed one by one anyway",
            )
        if self.merge_shared:
            raise SpecError(f"train.merge_shared=true {elastic}", "false, as sums depend on which samples a rank has")
        if self.compile:
            raise SpecError(
                f"train.compile=true {elastic}", "false, as the order of compiled sums depends on the shapes of a rank"
            )
        if self.dense_parallel.kind != "replicate":
            raise SpecError(
                f"train.dense_parallel.kind={self.dense_parallel.kind} {elastic}",
                "replicate, as sums of sharded gradients depend on the number of ranks",
            )


class Evaluation(Value, frozen=True):
    """When to evaluate on the validation data, and early stopping."""

    every: int = 0  # steps; 0: at the end of each epoch
    batch: int = 8192
    metric: str = "ne"  # decides which checkpoint is the best: ne, loss, auc, rmse, poisson_deviance, recall@10, ...
    patience: int | None = None  # stop after n evaluations without improvement; default: never
    min_gain: float = 0.0  # minimum improvement
    slices: tuple[str, ...] = ()  # features whose most common ids are measured separately
    slice_ids: int = 10  # number of ids of each such feature
    task: str = ""  # the label whose metric decides; default: the first

    def __post_init__(self) -> None:
        if self.every < 0 or self.batch < 1 or self.slice_ids < 1:
            raise SpecError(
                f"evaluate: every={self.every}, batch={self.batch}, slice_ids={self.slice_ids}",
                "every of at least 0, and batch and slice_ids of at least 1",
            )
        check_max("evaluate.", self, every=MAX_STEPS, batch=MAX_BATCH, slice_ids=MAX_BATCH, patience=MAX_STEPS)
        if self.patience is not None and self.patience < 1:
            raise SpecError(f"evaluate.patience={self.patience}", "at least 1, or null to never stop early")
        if not 0 <= self.min_gain < math.inf:
            raise SpecError(f"evaluate.min_gain={self.min_gain}", "a finite number that is not negative")

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value of the metric is better than the best so far; NaN and infinity never are."""
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        gain = best - value if self.metric in BETTER_LOWER else value - best
        return gain > self.min_gain


class Saving(Value, frozen=True):
    """When checkpoints are written. One is always written at the end, at Ctrl-C, and for each new best."""

    every: int = 0  # steps; 0: at the end of each epoch
    keep: int = 1  # number of newest checkpoints to keep, beside the best
    background: bool = False  # write a copy while training continues; the copy takes the memory of a checkpoint
    # only changed rows, if that writes and reads less than a full checkpoint; takes a byte of memory per row
    incremental: bool = False
    # bits per saved weight of tables: a resumed run continues with the rounded weights
    bits: Literal[32, 8, 4] = 32
    # a URL such as s3://bucket/clicks/7, or a folder, to which the run is copied while it trains; resume takes the URL
    mirror: str | None = None

    def __post_init__(self) -> None:
        if self.mirror == "":
            raise SpecError("save.mirror", "the URL of a folder of an object store, or null")
        if self.every < 0 or self.keep < 1:
            raise SpecError(
                f"save: every={self.every}, keep={self.keep}", "every of at least 0, and keep of at least 1"
            )
        check_max("save.", self, every=MAX_STEPS, keep=MAX_STEPS)


class Settings(Value, frozen=True):
    """The sections train, evaluate, save and log of a recipe."""

    train: Training = Training()
    evaluate: Evaluation = Evaluation()
    save: Saving = Saving()
    log: Log = Log()
