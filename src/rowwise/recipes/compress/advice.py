"""The result of `rowwise compress` as values, written as advice.json: measurements and choice of each table."""

from rowwise.spec import Value


class SizePoint(Value, frozen=True):
    """A table by one method in one size, as measured."""

    method: str
    ratio: float  # that was asked for
    size_bytes: int
    map_bytes: int
    ne: float  # these three are above those of the whole model
    loss: float
    auc: float


class TableAdvice(Value, frozen=True, kw_only=True):
    """The measurements of one table, and the id map that it should have."""

    name: str
    ids: int
    full_bytes: int
    points: tuple[SizePoint, ...]
    method: str  # none: as it is
    size_bytes: int
    map_bytes: int
    ne: float  # expected, above that of the whole model
    measured: bool  # the size was measured, or lies between such
    file: str = ""  # of its map
    digest: str = ""  # of what is in it
    ordered: float | None = None  # by how much neighbouring ids are alike


class KeptTable(Value, frozen=True):
    """A table that stays as it is, and why."""

    name: str
    ids: int
    size_bytes: int
    why: str


class ModelScore(Value, frozen=True):
    """Metrics of a model on the later rows, as a mean over seeds."""

    ne: float
    loss: float
    auc: float


class CompressionAdvice(Value, frozen=True, kw_only=True):
    """The result of `rowwise compress`: an id map for each table, and the expected quality."""

    recipe: str
    history: tuple[str, ...]  # conditions
    later: str  # which rows were measured on
    rows: int | None  # that trials were trained on; None: all
    full: ModelScore  # the mean over seeds
    noise: float  # the standard deviation of NE between seeds
    seeds: int
    full_bytes: int  # of all tables
    budget_bytes: int
    size_bytes: int
    ne: float  # expected: the sum over tables
    error: float  # by which the choice is not the best at most
    together: ModelScore | None  # measured with all tables as chosen, less the whole model's
    tables: tuple[TableAdvice, ...]
    left: tuple[KeptTable, ...]
    warnings: tuple[str, ...] = ()
