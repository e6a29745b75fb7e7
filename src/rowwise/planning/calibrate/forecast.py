"""Predicts the time of `rowwise calibrate`: the remaining minutes of measuring, and the fit after them.

The seconds of a training step are measured here, on made-up sets. Their number is extrapolated from the measured ones,
or that of a fast machine, so most fits end sooner.
"""

from dataclasses import replace
from time import perf_counter

import numpy as np

from rowwise.base.quantity import format_duration
from rowwise.planning.calibrate.fit import DRIFT_SHAPE, HELD_OUT, SHAPES, count_steps
from rowwise.planning.calibrate.folder import MeasurementFolder, MeasurementSpec, Tally
from rowwise.planning.calibrate.measure import SETS_FRACTION
from rowwise.planning.calibrate.train_network import NetworkShape, Sets, train_network
from rowwise.planning.perf.learned import STAGES

SETS_A_SECOND = 5.0  # of each rank of a fast machine
PROBED_STEPS, MAX_PROBED = 20, 1200  # steps and sets of a measured training; more are drawn as batches, too
TABLES, FEATURES, WORK = 8, 27, 5  # tables of a made-up set, and the columns that describe one
# To start the command and ranks; to measure narrow wires, and steps, with their start.
START_s, WIRES_s, STEPS_s = 12.0, 15.0, 20.0


def forecast_calibration(spec: MeasurementSpec, folder: MeasurementFolder, minutes: float) -> str:
    """One line: the time of measuring and of fitting."""
    tally = Tally(folder)
    measured_s = tally.update()
    left_s = max(60 * minutes - measured_s, 0.0)
    by_rank = SETS_A_SECOND * spec.world * (SETS_FRACTION if spec.world > 1 else 1.0)
    rate = tally.sets / measured_s if tally.sets else by_rank
    sets = tally.sets + round(rate * left_s)
    fit_s = forecast_fit_s(sets) + (WIRES_s + STEPS_s if spec.world > 1 else 0.0)
    total = format_duration(left_s + fit_s + (START_s if left_s else 0.0))
    done = f" ({format_duration(measured_s)} are measured)" if measured_s else ""
    return f"takes about {total}: {format_duration(left_s)} to measure{done}, {format_duration(fit_s)} to fit at most"


def forecast_fit_s(sets: int) -> float:
    """Seconds of all trainings on `sets` measured sets."""
    training = sets - sets // HELD_OUT
    probed = _draw_sets(min(max(training, 1), MAX_PROBED))
    seconds = DRIFT_SHAPE.steps * _step_s(DRIFT_SHAPE, probed)
    return seconds + sum(
        len(STAGES) * count_steps(shape, training) * _step_s(shape, probed) for shape in SHAPES.values()
    )


def _step_s(shape: NetworkShape, sets: Sets) -> float:
    """Seconds of a step, without the start of a training."""
    short, long = (_train_s(shape, sets, steps) for steps in (PROBED_STEPS, 2 * PROBED_STEPS))
    return max(long - short, long / 4) / PROBED_STEPS


def _train_s(shape: NetworkShape, sets: Sets, steps: int) -> float:
    begin_s = perf_counter()
    train_network(sets, replace(shape, steps=steps))
    return perf_counter() - begin_s


def _draw_sets(count: int) -> Sets:
    rng = np.random.default_rng(0)
    tables = count * TABLES
    features_NF, work_NK = rng.random((tables, FEATURES)), rng.random((tables, WORK))
    return Sets(features_NF, work_NK, np.arange(0, tables + 1, TABLES), 1e-3 * (1 + rng.random(count)))
