"""Records: the results of commands, which are written as JSON and drawn in reports.

They are separate from the code that computes them, so that a report is drawn without torch and without that code.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rowwise.base.value import Value

NULLS_APART, MEANS_APART = 0.05, 0.25  # least differences that count: share of rows, fraction of a standard deviation
CHANCE, ROUNDING = 5.0, 1e-6  # tolerances of a mean: in standard errors, and relative


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of records that are read from files; keys that a later version wrote are ignored."""


# --- `rowwise recommend` ---


class Recommended(Record, frozen=True, kw_only=True):
    """Counts and shares of the recommendations to all users."""

    users: int
    items: int  # candidates
    k: int
    short: int  # users with fewer than k items
    coverage: float  # share of the candidates that are recommended to somebody
    popular: float  # share of the most popular candidates among the recommended items
    popular_rows: float  # their share of the rows
    novelty: float  # mean of -log2 of an item's share of the rows


# --- `rowwise plan --explain` ---


class StepPlacement(Record, frozen=True, kw_only=True):
    """Predicted seconds of a step, its bound, and the cost model."""

    seconds: float  # operators of the busiest rank plus links of the busiest rank
    operators_s: float
    forward_s: float | None = None  # if the model has separate directions
    backward_s: float | None = None
    links_s: float
    busiest: int = 0  # the rank whose operators take longest
    busiest_links: int = 0
    bound_s: float | None = None  # lower bound over all plans; None if none is proven
    bound: str = ""  # proof of the bound
    batch: int = 0
    model: str = ""
    hardware: str = ""
    source: str = ""  # of the hardware's numbers
    wire: str = ""  # types of vectors on links, in words

    @property
    def gap(self) -> float | None:
        """Relative distance from the bound."""
        return self.seconds / self.bound_s - 1 if self.bound_s else None


class RankPlacement(Record, frozen=True, kw_only=True):
    """Predicted seconds and bytes of a rank."""

    rank: int
    operators_s: float
    links_s: float
    memory_bytes: tuple[int, ...]  # by tier
    pieces: int = 0


class TablePlacement(Record, frozen=True, kw_only=True):
    """Layout, ranks and cost of a table, and the reason for its layout."""

    name: str
    rows: int
    dim: int
    bytes: int  # rows and optimizer state
    ids: float = 0.0  # per sample
    layout: str = ""
    ranks: tuple[int, ...] = ()
    operators_s: float = 0.0  # its share, on the rank with the largest one
    links_s: float = 0.0
    share: float = 0.0  # of the operators of the busiest rank
    reason: str = ""
    next: str = ""  # the best alternative, in words; empty: none
    together: tuple[str, ...] = ()  # tables that constraints keep on the same ranks


class ExplainedPlan(Record, frozen=True, kw_only=True):
    """A step of a plan, its ranks and its tables."""

    hosts: int
    devices: int  # of each host
    limits_bytes: tuple[int, ...]  # of each rank, by tier
    step: StepPlacement
    ranks: tuple[RankPlacement, ...]
    tables: tuple[TablePlacement, ...]  # in falling order of seconds


# --- `rowwise simulate` ---


class TierUse(Value, frozen=True):
    """Bytes of a rank in a tier of memory."""

    tier: str
    tables_bytes: int  # with their optimizer state, and ids and vectors of a step
    dense_bytes: int  # parameters, gradients, optimizer state and activations
    limit_bytes: int


class ResourceUse(Value, frozen=True):
    """Busy seconds of a resource in a step, and the part of them that the processor waits for."""

    resource: str
    busy_s: float
    exposed_s: float


class Help(Value, frozen=True):
    """The step with one cause of its time twice as fast, or without latency."""

    what: str
    step_s: float
    saved: float  # share of the step


class SimulatedStage(Value, frozen=True):
    """Seconds of a stage on the rank where it takes longest."""

    stage: str
    resource: str
    seconds: float


class PublishedRate(Value, frozen=True):
    """Samples a second that a paper or its code gives for a workload."""

    samples_s: float
    source: str


class CountedStep(Value, frozen=True):
    """A step counted as a published description does, in one more respect than the one before it."""

    what: str
    step_s: float
    samples_s: float


class Simulation(Value, frozen=True, kw_only=True):
    """A simulated step, and the assumptions behind it."""

    model: str
    machine: str
    hosts: int
    devices: int
    batch: int
    dense: str
    wire: str
    exact: bool  # whether no number is rounded on the wire
    runs_here: bool = True  # whether this library supports the settings
    step_s: float | None  # None if the memory is too small
    samples_s: float = 0.0
    lacking_bytes: int = 0  # memory that a rank lacks
    memory: tuple[TierUse, ...] = ()
    uses: tuple[ResourceUse, ...] = ()
    stages: tuple[SimulatedStage, ...] = ()
    help: tuple[Help, ...] = ()
    limits: str = ""  # what limits the step, in a sentence
    published: tuple[PublishedRate, ...] = ()
    counted: tuple[CountedStep, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.step_s is not None


class SweptRow(Value, frozen=True):
    """A combination of a sweep."""

    settings: dict[str, str]
    simulation: Simulation
    factor: float | None = None  # throughput over that of full sharding; None if full sharding does not fit
    best: str = ""  # "lossless" or "lossy": the fastest of its kind that this library runs


class Sweep(Value, frozen=True):
    """All combinations, the fastest first, and last those that do not fit."""

    rows: tuple[SweptRow, ...]
    fastest: Simulation | None = None  # with its `help`; None if nothing fits

    def best(self, kind: str) -> SweptRow | None:
        return next((row for row in self.rows if row.best == kind), None)


# --- `rowwise calibrate` ---


class ModelError(Value, frozen=True, kw_only=True):
    """Errors of a cost model on held-out sets."""

    model: str
    error: float  # mean absolute relative error, with the machine's drift removed; see `drift`
    tau: float  # Kendall's rank correlation, with the drift removed
    raw_error: float  # with the drift


class ProfileQuality(Value, frozen=True, kw_only=True):
    """Errors, noise and doubts of a profile."""

    sets: int
    held_out: int
    again: int  # sets measured twice
    noise: float  # with the drift removed
    raw_noise: float
    drift: float  # standard deviation of the log of the machine's speed
    errors: tuple[ModelError, ...]
    links: int  # exchanges that were measured
    links_error: float | None  # error of latency and rates, on exchanges that began together
    networks_error: float | None = None  # error of exchange networks, on all exchanges
    disturbed: float = 0.0  # fraction of the sets that waited for a processor
    doubts: tuple[str, ...] = ()  # reasons not to trust the networks; empty: trust them
    predicted_s: tuple[float, ...]  # of each held-out set
    measured_s: tuple[float, ...]  # with the drift removed
    stages: dict[str, ModelError]


# --- `rowwise compress`: advice.json ---


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
    """A table that is not compressed, and the reason."""

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
    rows: int | None  # limit of rows that a trial trains on; None: all
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


# --- `rowwise tune` ---


class TrialRecord(Value, frozen=True, kw_only=True):
    """A trial that has ended."""

    number: int
    state: str  # complete, pruned or failed
    value: float | None  # the best of the metric on the validation rows
    values: dict[str, Any]  # by setting
    run: str  # its folder in the study
    seconds: float
    why: str = ""  # reason of a failure


class StudyOutcome(Value, frozen=True, kw_only=True):
    """The trials of a study, and the metrics of its best settings."""

    recipe: str
    metric: str
    smaller_is_better: bool
    trials: tuple[TrialRecord, ...]
    best: int | None  # number of the best trial
    importance: dict[str, float]  # of each setting for the metric; empty for fewer than four trials
    test: dict[str, dict[str, float | None]]  # metrics of the best trial on the test rows; empty without such rows


class PrunedTable(Value, frozen=True, kw_only=True):
    """Dims of a table, and the rise of the validation log loss by dim in a trained model."""

    name: str
    rows: int
    dim: int
    chosen: int
    uniform: int
    curve: dict[int, float]


class DimsOutcome(Value, frozen=True, kw_only=True):
    """Dims under a budget of parameters, and the metric on validation rows of the runs: whole, chosen and uniform."""

    recipe: str
    metric: str
    parameters: int
    budget: int
    chosen: int  # parameters
    uniform: int
    values: dict[str, float]
    tables: tuple[PrunedTable, ...]


# --- `rowwise explain`: explanation.json ---


class Importance(Record, frozen=True, kw_only=True):
    """Of a feature: the rise of the log loss when it is permuted."""

    feature: str
    loss: float  # mean over the repeats
    spread: float  # standard deviation over the repeats; 0 of one repeat
    repeats: int


class IdEffect(Record, frozen=True, kw_only=True):
    """Of an id: its mean effect on the logit of its rows, relative to other ids of its feature."""

    feature: str
    id: int  # its row, after hashing or listing
    logit: float
    error: float  # standard error of the mean
    rows: int


class Dependence(Record, frozen=True, kw_only=True):
    """Mean probability of all rows when a dense feature has one value in each."""

    feature: str
    values: tuple[float, ...]
    probability: tuple[float, ...]


class CalibrationSlice(Record, frozen=True, kw_only=True):
    """Rows with one value of a feature."""

    feature: str
    value: str
    rows: int
    predicted: float  # mean probability
    observed: float  # mean label
    deviations: float  # of the sum of labels from that of probabilities, in standard deviations of chance


class Drift(Record, frozen=True, kw_only=True):
    """Of a feature: sum of (q - p) ln(q / p) over bins with shares p of training rows and q of the others."""

    feature: str
    index: float
    chance: float  # its mean for two samples of the same rows


class ModelExplanation(Record, frozen=True, kw_only=True):
    """What a run's model relies on, measured on a sample of rows."""

    task: str
    rows: int
    train_rows: int  # of the sample of training rows
    repeats: int
    loss: float  # log loss of the unchanged rows
    importance: tuple[Importance, ...]
    ids: tuple[IdEffect, ...]
    names: dict[str, dict[str, str]]  # of the ids that are shown: by feature, by id of the batch
    dependence: tuple[Dependence, ...]
    calibration: tuple[CalibrationSlice, ...]
    drift: tuple[Drift, ...]


# --- `rowwise audit` ---


class ColumnMeans(NamedTuple):
    """Means of a column, in training or in requests."""

    null_share: float
    mean: float | None = None  # of numbers with a fraction
    mean_length: float | None = None  # of lists
    deviation: float | None = None  # of numbers or lengths, where it is known


class AuditedFile(NamedTuple):
    """Rows of a version in a file of recorded requests."""

    file: Path
    version: int
    rows: int
    wrong: int  # rows with other logits, or other items
    first: str  # description of the first one
    trained: Mapping[str, ColumnMeans]
    recorded: Mapping[str, ColumnMeans]


class ColumnSkew(NamedTuple):
    """Statistics of a column in training and in requests."""

    column: str
    rows: int  # of requests
    trained: ColumnMeans
    recorded: ColumnMeans

    @property
    def is_large(self) -> bool:
        """Whether nulls differ by a twentieth of rows, or a mean by a quarter of a deviation and more than chance."""
        if abs(self.recorded.null_share - self.trained.null_share) > NULLS_APART:
            return True
        tolerance = (self.recorded.deviation or 0.0) * (MEANS_APART + CHANCE / math.sqrt(self.rows))
        pairs = ((self.trained.mean, self.recorded.mean), (self.trained.mean_length, self.recorded.mean_length))
        return any(
            before is not None and now is not None and abs(now - before) > tolerance + ROUNDING * abs(before)
            for before, now in pairs
        )
