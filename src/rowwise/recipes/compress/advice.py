"""The result of `rowwise compress` as values, written as advice.json: measurements and choice for each table."""

from rowwise.spec import Value


class SizePoint(Value, frozen=True):
    """One measurement: a table compressed by a method to a size."""

    method: str
    ratio: float  # uncompressed over compressed bytes, as requested
    size_bytes: int
    map_bytes: int
    ne: float  # ne, loss and auc: differences to the uncompressed model
    loss: float
    auc: float


class TableAdvice(Value, frozen=True, kw_only=True):
    """The measurements of a table, and its chosen method and size."""

    name: str
    ids: int
    full_bytes: int
    points: tuple[SizePoint, ...]
    method: str  # empty: uncompressed
    size_bytes: int
    map_bytes: int
    ne: float  # expected difference to the uncompressed model
    measured: bool  # False: between two measured sizes
    file: str = ""  # path of its id map
    digest: str = ""  # digest of its id map
    ordered: float | None = None  # correlation of neighbouring ids, if significant


class KeptTable(Value, frozen=True):
    """A table that is not compressed, and why."""

    name: str
    ids: int
    size_bytes: int
    why: str


class ModelScore(Value, frozen=True):
    """Metrics of a model on the later rows, averaged over labels."""

    ne: float
    loss: float
    auc: float


class CompressionAdvice(Value, frozen=True, kw_only=True):
    """The content of advice.json."""

    recipe: str
    history: tuple[str, ...]  # conditions
    later: str  # description of the rows to measure on
    rows: int | None  # most rows that a trial trains on; None: all
    full: ModelScore  # the mean over seeds
    noise: float  # the standard deviation of NE between seeds
    seeds: int
    full_bytes: int  # of all tables
    budget_bytes: int
    size_bytes: int
    ne: float  # expected: the sum over tables
    error: float  # an upper bound on the loss above the best choice's
    together: ModelScore | None  # measured difference of one model with all chosen tables
    tables: tuple[TableAdvice, ...]
    left: tuple[KeptTable, ...]  # tables that are not compressed
    warnings: tuple[str, ...] = ()
