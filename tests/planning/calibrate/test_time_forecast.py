"""How long a calibration takes, said before it begins."""

import re

import pytest
from msgspec import structs
from test_fit import made_up

from rowwise.planning.calibrate import forecast
from rowwise.planning.calibrate.draw import SetLimits
from rowwise.planning.calibrate.folder import MeasurementSpec, open_folder
from rowwise.planning.calibrate.samples import write_sample
from rowwise.planning.calibrate.set_arrays import stack_sets
from rowwise.planning.perf.learned import STAGES

LIMITS = SetLimits(pool_bytes=20_000_000)
LINE = re.compile(r"takes about (.+): (.+) to measure( \(.+ are measured\))?, (.+) to fit at most")


@pytest.fixture
def folder(tmp_path):
    return open_folder(tmp_path / "made", MeasurementSpec(limits=LIMITS))


@pytest.mark.slow
def test_minutes_that_are_left_and_the_fit(folder):
    total, left, done, _ = LINE.fullmatch(forecast.forecast_calibration(folder.read_spec(), folder, 10)).groups()
    assert int(total.split()[0]) >= 10
    assert left.split() == ["10", "min", "00", "s"]
    assert done is None


@pytest.mark.slow
def test_what_is_measured_is_not_measured_again(folder):
    for sample in made_up(50):
        seconds = {"lookup_s": float(sample.lookup_s), "update_s": float(sample.update_s)}
        write_sample(folder.sets_of(0), structs.replace(sample, **seconds))
    measured_s = 0.1 * 55  # every tenth set twice
    _, left, done, _ = LINE.fullmatch(forecast.forecast_calibration(folder.read_spec(), folder, 1)).groups()
    assert done.split() == [f"({measured_s:.1f}", "s", "are", "measured)"]
    assert left.split() == [f"{60 - measured_s:.1f}", "s"]
    _, left, _, _ = LINE.fullmatch(forecast.forecast_calibration(folder.read_spec(), folder, 0.05)).groups()
    assert left.split() == ["0", "ms"]


def test_made_up_sets_have_as_many_columns_as_measured_ones():
    measured = stack_sets(list(made_up(3)))
    drawn = forecast._draw_sets(3)
    for stage in STAGES:
        real = measured.of_stage(stage)
        assert (drawn.features_NF.shape[1], drawn.work_NK.shape[1]) == (
            real.features_NF.shape[1],
            real.work_NK.shape[1],
        )


@pytest.mark.slow
def test_more_sets_take_longer_up_to_the_most_steps():
    few, many = (forecast.forecast_fit_s(count) for count in (100, 3000))
    assert few < many
