"""What a recipe holds, as frozen values that are read strictly: a key that nobody knows is an error, not a default.

A recipe that is resolved (see `compose`) names every column, table and thread count, so that it makes the same run
again wherever the defaults go.
"""

import math
import re
from typing import Any, Literal

import msgspec

from rowwise.errors import SpecError
from rowwise.idmaps import AnyIdMap
from rowwise.ingest.columns import Columns
from rowwise.ingest.service.local import Workers
from rowwise.ingest.transform import Transforms
from rowwise.row_optimizers import RowOptimizer
from rowwise.spec import Init, Pooling, RowType, Table, Value, Wire
from rowwise.train.settings import Evaluation, Log, Saving, Training
from rowwise.value import check_layers, check_most

MOST_ROWS = 1 << 34  # that are made: a split of them is 65,536
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class About(Value, frozen=True):
    """The head of a recipe: what it is, how to run it, what to expect."""

    what: str = ""
    run: str = ""  # the command
    expect: dict[str, float] = msgspec.field(default_factory=dict)  # test metrics, as measured
    spread: dict[str, float] = msgspec.field(default_factory=dict)  # between seeds
    time_s: float | None = None
    memory_gb: float | None = None
    machine: str = ""

    def __post_init__(self) -> None:
        numbers = {"time_s": self.time_s, "memory_gb": self.memory_gb, **self.expect, **self.spread}
        for name, value in numbers.items():
            if value is not None and not math.isfinite(value):
                raise SpecError(f"about: {name}={value}: want a finite number")
        for name, value in (("time_s", self.time_s), ("memory_gb", self.memory_gb)):
            if value is not None and value < 0:
                raise SpecError(f"about.{name}={value}: want a number that is not negative")


class Data(Value, frozen=True):
    """The rows to train on, and those to validate and to test on."""

    dataset: str  # synthetic, movielens-100k, complete-journey, criteo, parquet:PATH or csv:PATH
    folder: str = "data"  # where `rowwise data get` puts datasets
    label: str | None = None  # of files, where no columns are given; None: the one that is called label or click
    valid: str | None = None  # parquet:PATH or csv:PATH; None: that of the dataset, or a share of the training rows
    test: str | None = None
    valid_share: float = 0.0  # of the training rows, where there are no validation rows
    test_share: float = 0.1  # of the training rows, where there are no test rows
    share: Literal["random", "last"] = "random"  # which rows: by a hash of their place, or the last splits
    rows: int | None = None  # synthetic only: how many to train on
    test_rows: int | None = None  # synthetic only
    where: tuple[str, ...] = ()  # which rows of `dataset`, such as "day >= 3"; all of these have to hold
    together: str | None = None  # neighbours that have the same in this column stay neighbours when rows are shuffled
    on_bad_rows: Literal["raise", "quarantine"] = "raise"  # or go on without them: they are in bad_rows/ of the run
    # Processes that prepare the training rows, or just how many; None: each trainer does it for itself
    workers: Workers | int | None = None

    def __post_init__(self) -> None:
        for name, share in (("valid_share", self.valid_share), ("test_share", self.test_share)):
            if not 0 <= share < 1:
                raise SpecError(f"data.{name}={share}: want at least 0 and less than 1")
        for name, rows in (("rows", self.rows), ("test_rows", self.test_rows)):
            if rows is not None and rows < 1:
                raise SpecError(f"data.{name}={rows}: want at least 1")
        check_most("data.", self, rows=MOST_ROWS, test_rows=MOST_ROWS)
        if self.valid_share + self.test_share >= 1:
            raise SpecError(f"data: valid_share={self.valid_share} and test_share={self.test_share} leave no rows")


class TableChanges(Value, frozen=True):
    """Fields of a table that differ from the dataset's; fields that are not given stay."""

    rows: int | None = None
    dim: int | None = None
    pooling: Pooling | None = None
    optimizer: RowOptimizer | None = None
    init: Init | None = None
    row_type: RowType | None = None
    unknown: Literal["raise", "last_row"] | None = None
    id_map: AnyIdMap | None = None  # fewer rows than there are ids

    def apply(self, table: Table) -> Table:
        """The table with the changes."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}
        kept = {name: getattr(table, name) for name in table.__struct_fields__}
        return Table(**(kept | given))


class Tables(Value, frozen=True):
    """The tables: `all` changes those of the dataset, `each` single ones; `list` replaces them."""

    all: TableChanges = TableChanges()
    each: dict[str, TableChanges] = msgspec.field(default_factory=dict)
    list: tuple[Table, ...] = ()

    def resolve(self, suggested: tuple[Table, ...]) -> tuple[Table, ...]:
        tables = self.list or suggested
        unknown = set(self.each) - {t.name for t in tables}
        if unknown:
            there = ", ".join(t.name for t in tables)
            raise SpecError(f"tables.each names {', '.join(sorted(unknown))}; the tables are {there}")
        changed = (self.all.apply(table) for table in tables)
        return tuple(self.each[t.name].apply(t) if t.name in self.each else t for t in changed)


class DlrmConfig(Value, frozen=True, tag="dlrm", tag_field="kind"):
    """`rowwise.DLRM`; the bottom layers end in the tables' dim, the top ones in one logit a label."""

    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (512, 256)


class DeepFmConfig(Value, frozen=True, tag="deepfm", tag_field="kind"):
    """Arguments of the model `rowwise.DeepFM`."""

    deep: tuple[int, ...] = (400, 400, 400)


class DcnConfig(Value, frozen=True, tag="dcn", tag_field="kind"):
    """Arguments of the model `rowwise.DCN`."""

    deep: tuple[int, ...] = (512, 256)
    crosses: int = 3
    rank: int | None = None
    structure: Literal["stacked", "parallel"] = "stacked"


class WideDeepConfig(Value, frozen=True, tag="wide_deep", tag_field="kind"):
    """Arguments of the model `rowwise.WideDeep`."""

    deep: tuple[int, ...] = (1024, 512, 256)
    wide: RowOptimizer | None = None  # of the weights of single ids; None: FTRL, as in the paper


class TwoTowerConfig(Value, frozen=True, tag="two_tower", tag_field="kind"):
    """`rowwise.TwoTower`, trained on the rows whose label is 1 by the softmax over the items of a batch."""

    item: str  # the feature that says which item it is: one id in each row
    user_features: tuple[str, ...]
    item_features: tuple[str, ...] = ()  # beside `item`
    user_dense: tuple[str, ...] = ()
    item_dense: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (128, 64)
    temperature: float = 0.1
    correct: bool = True  # for popular items (logQ)
    ks: tuple[int, ...] = (10, 50)  # of recall@k and NDCG@k

    def __post_init__(self) -> None:
        """Refuse a softmax that is flat, or upside down."""
        if not 0 < self.temperature < math.inf:
            raise SpecError(f"model.temperature={self.temperature}: want a finite number above 0")


class UserModel(Value, frozen=True, tag="own", tag_field="kind"):
    """A class of the user's: `module` is path.py:Class, called with (embeddings, dense_features, tasks, **args)."""

    module: str
    args: dict[str, Any] = msgspec.field(default_factory=dict)


Model = DlrmConfig | DeepFmConfig | DcnConfig | WideDeepConfig | TwoTowerConfig | UserModel


class Recipe(Value, frozen=True, kw_only=True):
    """Everything that a run is made of."""

    about: About = About()
    name: str = ""  # of the folder in runs/; none: that of the file
    seed: int = 0
    data: Data
    transforms: Transforms = ()  # what is made of the columns first
    columns: Columns | None = None  # None: the dataset's
    tables: Tables = Tables()
    model: Model | str = DlrmConfig()  # a text is path.py:Class, short for {kind: own, module: path.py:Class}
    train: Training = Training()
    evaluate: Evaluation = Evaluation()
    save: Saving = Saving()
    log: Log = Log()
    init_from: str | None = None  # a run or a checkpoint: take over what matches by name
    plan: str | None = None  # a plan's JSON file: where tables live on several ranks; None: one is searched for
    # What predicts where they are best, and what a step takes: a preset, or a profile's JSON file; None: a guess
    hardware: str | None = None
    wire: Wire = Wire()  # how numbers travel between ranks

    def __post_init__(self) -> None:
        if self.name and not NAME.fullmatch(self.name):
            raise SpecError(f"name={self.name!r}: want letters, digits, '-', '_' and '.', as a folder is called by it")
        check_layers("model.", **_layers(self.model))
        if not 0 <= self.seed < 1 << 63:
            raise SpecError(f"seed={self.seed}: want at least 0, and less than 2**63")


def _layers(model: Model | str) -> dict[str, tuple[int, ...]]:
    """All that says how wide a layer is."""
    match model:
        case DlrmConfig(bottom=bottom, top=top):
            return {"bottom": bottom, "top": top}
        case DeepFmConfig(deep=deep) | WideDeepConfig(deep=deep):
            return {"deep": deep}
        case DcnConfig(deep=deep, crosses=crosses, rank=rank):
            return {"deep": deep, "crosses": (crosses,) if crosses else (), "rank": () if rank is None else (rank,)}
        case TwoTowerConfig(sizes=sizes, ks=ks):
            return {"sizes": sizes, "ks": ks}
        case UserModel() | str():
            return {}


def check_ranks(recipe: Recipe, world: int) -> None:
    """Refuse what cannot run on so many ranks, before anything is read or made."""
    if world > 1 and isinstance(recipe.model, TwoTowerConfig):
        why = "its loss compares each user with the items of the whole batch, which is on one rank only"
        raise SpecError(f"model.kind=two_tower on {world} ranks: {why}; want one process, without --nproc")
    shards = recipe.train.virtual_shards
    if recipe.train.determinism == "elastic" and shards % world:
        fit = ", ".join(str(w) for w in range(1, shards + 1) if shards % w == 0)
        out = "or a new run with another train.virtual_shards, as it changes the result"
        raise SpecError(f"{shards} virtual shards of elastic training on {world} ranks: want {fit} ranks, {out}")
    if recipe.train.determinism == "elastic" and not recipe.wire.exact:
        raise SpecError(
            "train.determinism=elastic with a wire that rounds: want fp32 for all of `wire`, or determinism=run"
        )
