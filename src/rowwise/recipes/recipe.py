"""The types of a recipe: frozen values, read strictly, so that an unknown key is an error.

A resolved recipe (see `compose`) has every column, table and thread count, and so makes the same run again even after
defaults change.
"""

import math
import re
from typing import Any, Literal

import msgspec

from rowwise.base.errors import SpecError
from rowwise.base.value import check_layers, check_max
from rowwise.ingest.columns import Columns
from rowwise.ingest.dialect import Dialect
from rowwise.ingest.service.local import Workers
from rowwise.ingest.transform import Transforms
from rowwise.planning.planner.machines import parse_size
from rowwise.recipes.model_configs import DlrmConfig, Model, kind_of, layers_of, pictures_of
from rowwise.recipes.model_kinds import check_use, family_of
from rowwise.tables.idmaps import AnyIdMap
from rowwise.tables.managed import Managed
from rowwise.tables.row_optimizers import RowOptimizer
from rowwise.tables.spec import Init, Pooling, RowType, Table, Value, Wire
from rowwise.train.loss_settings import AmountLoss, CoTeaching, Smc
from rowwise.train.settings import Augment, DenseParallel, Evaluation, Log, Saving, Training

MAX_ROWS = 1 << 34  # of synthetic data
MIN_CACHE_bytes = 1_000_000
PROBE = "probe"  # the `network` of runs that probe links first
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class About(Value, frozen=True):
    """The head of a recipe: its description, and the results that it reached."""

    what: str = ""
    run: str = ""  # the command
    expect: dict[str, float] = msgspec.field(default_factory=dict)  # test metrics, as measured
    spread: dict[str, float] = msgspec.field(default_factory=dict)  # between seeds
    published: dict[str, float] = msgspec.field(default_factory=dict)  # published test metrics on the same split
    published_by: str = ""  # authors and model
    time_s: float | None = None
    memory_gb: float | None = None
    machine: str = ""

    def __post_init__(self) -> None:
        numbers = {"time_s": self.time_s, "memory_gb": self.memory_gb, **self.expect, **self.spread, **self.published}
        for name, value in numbers.items():
            if value is not None and not math.isfinite(value):
                raise SpecError(f"about: {name}={value}", "a finite number")
        for name, value in (("time_s", self.time_s), ("memory_gb", self.memory_gb)):
            if value is not None and value < 0:
                raise SpecError(f"about.{name}={value}", "at least 0")


class TimeShare(Value, frozen=True):
    """Shares by time: early rows train, later ones validate, the last ones test. Rows without a time are left out."""

    column: str  # times or whole numbers
    # Rows from here on validate, such as 1717200000 or "2024-06-01T12:00:00"; None: no validation rows
    valid_from: int | str | None = None
    test_from: int | str | None = None  # rows from here on test; None: no test rows
    formats: tuple[str, ...] = ()  # formats of times in text, as for the transform `to_time`

    def __post_init__(self) -> None:
        borders = [border for border in (self.valid_from, self.test_from) if border is not None]
        if not borders:
            raise SpecError(f"data.share: {self.column!r} without valid_from and test_from", "one or both")
        values = f"data.share: valid_from={self.valid_from!r} and test_from={self.test_from!r}"
        if len({type(border) for border in borders}) > 1:
            raise SpecError(values, "two whole numbers or two times")
        if len(borders) == 2 and borders != sorted(set(borders)):
            raise SpecError(values, "valid_from before test_from")


class DataCache(Value, frozen=True):
    """A disk cache for the byte ranges of remote files that were read."""

    folder: str  # shared by the runs of a machine
    size: int | str = "50GB"  # capacity, with LRU eviction; a number is in bytes

    def __post_init__(self) -> None:
        if not self.folder or self.size_bytes < MIN_CACHE_bytes:
            raise SpecError(f"data.cache: folder={self.folder!r}, size={self.size}", "a folder and at least 1MB")

    @property
    def size_bytes(self) -> int:
        return parse_size(self.size, "data.cache.size") if isinstance(self.size, str) else self.size


class Data(Value, frozen=True):
    """The rows to train on, and those to validate and to test on."""

    dataset: (
        str  # a name of `rowwise data ls`, parquet:PATH, csv:PATH, hf:FOLDER, delta:TABLE, iceberg:TABLE, kafka:TOPIC
    )
    folder: str = "data"  # where `rowwise data get` puts datasets
    # For files without `columns`: a column, or a condition such as "rating >= 4"; None: the column label or click
    label: str | None = None
    valid: str | None = None  # parquet:PATH or the like; None: those of the dataset, or a share of the training rows
    test: str | None = None
    valid_share: float = 0.0  # share of the training rows to validate on, without other validation rows
    test_share: float = 0.1  # share of the training rows to test on, without other test rows
    # How shares are taken: by a hash of a row's place, the last splits, or by the time of a row
    share: Literal["random", "last"] | TimeShare = "random"
    group: str | None = None  # column of random shares: rows with an equal value, such as a patient, are in one share
    rows: int | None = None  # training rows, synthetic only
    test_rows: int | None = None  # synthetic only
    where: tuple[str, ...] = ()  # filters on rows of `dataset`, such as "day >= 3", combined by AND
    together: str | None = None  # column whose runs of equal values stay together in shuffling
    on_bad_rows: Literal["raise", "quarantine"] = "raise"  # quarantine: go on, with bad rows in bad_rows/ of the run
    text: Dialect | None = None  # dialect of csv:PATH files, as printed by `data inspect`; None: detected
    cache: DataCache | None = None  # disk cache for s3://, gs:// and az://; None: each epoch reads the object store
    # Worker processes that prepare the training rows, or their number; None: each trainer prepares its own
    workers: Workers | int | None = None

    def __post_init__(self) -> None:
        for name, share in (("valid_share", self.valid_share), ("test_share", self.test_share)):
            if not 0 <= share < 1:
                raise SpecError(f"data.{name}={share}", "at least 0 and less than 1")
        if self.group is not None and self.share != "random":
            raise SpecError(f"data.group={self.group!r}: groups are for random shares", "share: random, or no group")
        for name, rows in (("rows", self.rows), ("test_rows", self.test_rows)):
            if rows is not None and rows < 1:
                raise SpecError(f"data.{name}={rows}", "at least 1")
        check_max("data.", self, rows=MAX_ROWS, test_rows=MAX_ROWS)
        if self.valid_share + self.test_share >= 1:
            raise SpecError(f"data: valid_share={self.valid_share} and test_share={self.test_share} leave no rows")


class TableChanges(Value, frozen=True):
    """Changes to the settings of a table; None leaves a setting unchanged."""

    rows: int | None = None
    dim: int | None = None
    pooling: Pooling | None = None
    optimizer: RowOptimizer | None = None
    init: Init | None = None
    row_type: RowType | None = None
    unknown: Literal["raise", "last_row"] | None = None
    id_map: AnyIdMap | None = None  # ids share rows
    managed: Managed | None = None  # maps any ids to `rows` rows, with eviction

    def apply(self, table: Table) -> Table:
        changes = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}
        fields = {name: getattr(table, name) for name in table.__struct_fields__}
        return Table(**(fields | changes))


class Tables(Value, frozen=True):
    """The tables: `all` and `each` change the dataset's tables, all of them or by name; `list` replaces them."""

    all: TableChanges = TableChanges()
    each: dict[str, TableChanges] = msgspec.field(default_factory=dict)
    list: tuple[Table, ...] = ()

    def resolve(self, suggested: tuple[Table, ...]) -> tuple[Table, ...]:
        tables = self.list or suggested
        unknown = set(self.each) - {t.name for t in tables}
        if unknown:
            names = ", ".join(t.name for t in tables)
            raise SpecError(f"tables.each: no table {', '.join(sorted(unknown))}", f"some of {names}")
        changed = (self.all.apply(table) for table in tables)
        resolved = tuple(self.each[t.name].apply(t) if t.name in self.each else t for t in changed)
        for table in resolved:
            if not table.row_type.facts.trained:
                problem = f"table {table.name!r}: row_type={table.row_type} cannot be trained"
                raise SpecError(problem, hint="train another type, and store the rows by rowwise export --rows int4")
        return resolved


class TuneRange(Value, frozen=True):
    """The values of a setting that `rowwise tune` tries: choices, or numbers between two."""

    low: int | float | None = None  # integers, if both bounds are
    high: int | float | None = None
    log: bool = False  # uniform in the logarithm
    choices: tuple[Any, ...] = ()  # instead of low and high

    def __post_init__(self) -> None:
        values = f"low={self.low}, high={self.high}, choices={list(self.choices)}"
        if bool(self.choices) == (self.low is not None and self.high is not None):
            raise SpecError(f"tune: {values}", "choices, or low and high")
        if self.low is None or self.high is None:
            return
        if not math.isfinite(self.low) or not math.isfinite(self.high) or self.low >= self.high:
            raise SpecError(f"tune: {values}", "finite numbers, low below high")
        if self.log and self.low <= 0:
            raise SpecError(f"tune: {values} with log", "low above 0")


class Recipe(Value, frozen=True, kw_only=True):
    """The configuration of a run."""

    about: About = About()
    name: str = ""  # folder in runs/; empty: the name of the file
    seed: int = 0
    data: Data
    transforms: Transforms = ()  # applied to columns before they are encoded
    columns: Columns | None = None  # None: the dataset's
    tables: Tables = Tables()
    model: Model | str = DlrmConfig()  # path.py:Class is short for {kind: own, module: path.py:Class}
    train: Training = Training()
    evaluate: Evaluation = Evaluation()
    save: Saving = Saving()
    log: Log = Log()
    init_from: str | None = None  # warm start: a run or a checkpoint, matched by name
    plan: str | None = None  # JSON file of a sharding plan; None: a plan is searched
    # Hardware preset or profile (JSON) for the plan search and the predicted step; None: a typical machine
    hardware: str | None = None
    # Memory budget for tables of a host, or of a GPU, in bytes or such as 4GB; None: free memory. Tables over it go
    # to disk, or from a GPU to its host
    memory: int | str | None = None
    disk: str | None = None  # folder of tables on disk; None: disk/ in the run's folder
    # Training rows to count before a run, to pin the hottest rows of tables on disk in memory; None: none are pinned
    pin: int | None = None
    wire: Wire | Literal["auto"] = Wire()  # number types between ranks; auto: by the link speeds, when a run starts
    # Orders hosts: a file from rowwise net probe, or probe to measure before the run; None: the launcher's order
    network: str | None = None
    # Search space of `rowwise tune`, by setting such as train.batch; empty: usual ranges around the recipe's values
    tune: dict[str, TuneRange] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name and not NAME.fullmatch(self.name):
            raise SpecError(f"name={self.name!r}", "letters, digits, '-', '_' and '.', as it names a folder")
        check_layers("model.", **layers_of(self.model))
        dropout = getattr(self.model, "dropout", 0.0)
        if not 0 <= dropout < 1:
            raise SpecError(f"model.dropout={dropout}", "at least 0 and less than 1")
        plain = dropout == 0.0 and hasattr(self.model, "dropout") and self.train.augment.keeps_all
        if isinstance(self.train.objective, Smc) and plain:
            raise SpecError(
                "train.objective.kind=smc with model.dropout=0 and no train.augment: its two predictions of a sample "
                "differ by one update only",
                "dropout, such as 0.2, or train.augment",
            )
        _check_augment(self.model, self.train.augment)
        if isinstance(self.train.objective, CoTeaching):
            _check_co_teaching(self.train)
            if auxiliary := getattr(self.model, "auxiliary", 0.0):
                raise SpecError(
                    f"train.objective.kind=co_teaching with model.auxiliary={auxiliary}: samples are chosen "
                    "by the loss of their labels",
                    "auxiliary=0",
                )
        _check_choice(self.model, self.train)
        check_amounts(self)
        if self.train.dense_parallel.recompute and getattr(self.model, "norm", None) == "batch":
            raise SpecError("train.dense_parallel.recompute with model.norm=batch: statistics would count twice")
        if not 0 <= self.seed < 1 << 63:
            raise SpecError(f"seed={self.seed}", "at least 0, and less than 2**63")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise SpecError(f"memory={self.memory}", "more than 0, such as 4GB")
        _check_pin(self.pin, self.train.device)

    @property
    def wire_types(self) -> Wire:
        """The wire types; fp32 while `auto` is undecided."""
        return Wire() if self.wire == "auto" else self.wire

    @property
    def memory_bytes(self) -> int | None:
        return parse_size(self.memory, "memory") if isinstance(self.memory, str) else self.memory

    @property
    def max_samples(self) -> int:
        """Global samples of the largest lookup, in a step or an evaluation."""
        return max(self.train.batch * self.train.accumulate, self.evaluate.batch)


def _check_pin(pin: int | None, device: str) -> None:
    if pin is not None and pin < 1:
        raise SpecError(f"pin={pin}", "at least 1 training row to count, such as 100000")
    if pin is not None and device != "cpu":
        problem = f"pin={pin} with train.device={device}: a GPU caches the rows of recent batches"
        raise SpecError(problem, "pin=null, or train.device=cpu")


def _check_augment(model: Model | str, augment: Augment) -> None:
    """Raise for augmentations that take ids away that a model requires."""
    if not augment.keeps_all and not isinstance(model, str) and family_of(model).ranks_items:
        raise SpecError(
            f"train.augment with model.kind={kind_of(model)}: it would leave out items that the model learns to rank",
            "no train.augment",
        )
    if augment.drop_features and getattr(model, "histories", {}):
        raise SpecError(
            f"train.augment.drop_features={augment.drop_features} with model.histories: a target has one id in each "
            "sample",
            "drop_ids or crop_lists",
        )


def _check_co_teaching(train: Training) -> None:
    """Raise for settings under which two copies cannot choose samples for each other."""
    if train.determinism == "elastic":
        raise SpecError(
            "train.objective.kind=co_teaching with train.determinism=elastic: samples are chosen from a whole "
            "batch, and a virtual shard holds a part of it",
            "determinism=run",
        )
    if train.dense_parallel != DenseParallel():
        raise SpecError(
            "train.objective.kind=co_teaching with train.dense_parallel: only layers of the first copy would be "
            "sharded",
            "the defaults of train.dense_parallel",
        )


def check_amounts(recipe: Recipe, use: str = "", slices: tuple[str, ...] = ()) -> None:
    """Raise for settings, a command's `use` or `slices` that require labels 0 and 1, if labels are amounts."""
    loss, model = recipe.train.objective, recipe.model
    if not isinstance(loss, AmountLoss):
        return
    refused = {
        "train.label_smoothing": (recipe.train.label_smoothing > 0, "it mixes the labels 0 and 1: expected 0"),
        "evaluate.slices": (
            bool(slices or recipe.evaluate.slices),
            "slices are measured by NE and AUC: expected no slices",
        ),
        "model.chain": (getattr(model, "chain", False), "it multiplies probabilities: expected false"),
        "a model that ranks items": (
            family_of(model).ranks_items,
            "it learns from rows of label 1, or from lists: expected another model",
        ),
        use: (bool(use), "it is about probabilities of labels 0 and 1: expected a run of another objective"),
    }
    for name, (is_used, reason) in refused.items():
        if is_used:
            raise SpecError(f"train.objective.kind={loss.__struct_config__.tag} with {name}: {reason}")


def _check_choice(model: Model | str, train: Training) -> None:
    """Raise for settings under which a scale model cannot learn beside its tower."""
    pictures = pictures_of(model)
    if pictures is not None and pictures.choose is not None and train.dense_parallel != DenseParallel():
        raise SpecError(
            "model.item_pictures.choose with train.dense_parallel: layers of a tower and its scale model run "
            "outside of the model's forward, unsharded",
            "the defaults of train.dense_parallel",
        )


def check_ranks(recipe: Recipe, world: int) -> None:
    """Raise for recipes that cannot run on this many ranks; nothing is read or built."""
    elastic = recipe.train.determinism == "elastic"
    if elastic:
        check_use(recipe.model, "elastic", "train.determinism=elastic")
    if getattr(recipe.model, "norm", None) == "batch" and (world > 1 or elastic):
        where = f"on {world} ranks" if world > 1 else "with train.determinism=elastic"
        raise SpecError(f"model.norm=batch {where}: statistics cover the samples of one rank", "model.norm=layer")
    shards = recipe.train.virtual_shards
    if elastic and shards % world:
        divisors = ", ".join(str(w) for w in range(1, shards + 1) if shards % w == 0)
        raise SpecError(
            f"{shards} virtual shards of elastic training on {world} ranks",
            f"{divisors} ranks, or another train.virtual_shards in a new run, as that changes the result",
        )
    if elastic and (recipe.wire == "auto" or not recipe.wire.exact):
        raise SpecError(
            "train.determinism=elastic with a wire that rounds", "fp32 for all of `wire`, or determinism=run"
        )
