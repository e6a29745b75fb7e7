"""Profiles with networks that come with the package predict the saved results that they were trained on."""

import numpy as np
import pytest
import saved_results
from profiles_from_ops import PROCESSORS, sets_of

from rowwise.planning.calibrate.set_arrays import stack_sets
from rowwise.planning.perf.hardware import MEASURED, PROFILE_FOLDER, hardware_named
from rowwise.planning.perf.learned import LearnedModel, model_of
from rowwise.tables.spec import Topology


@pytest.fixture(scope="module", params=PROCESSORS)
def profile(request):
    hardware = hardware_named(request.param)
    model = model_of(hardware, Topology())
    measured = stack_sets(sets_of(saved_results.read("ops", PROCESSORS[request.param])))
    predicted_S = np.array([float(model.phi(model.loads(*pair).sum(0))) for pair in measured.shards])
    return hardware, model, predicted_S, measured.sets.seconds_S


def test_networks_predict_what_was_measured(profile):
    hardware, model, predicted_S, seconds_S = profile
    assert isinstance(model, LearnedModel)
    assert model.phi.is_convex
    held_out_S = np.arange(len(seconds_S)) % 7 == 0
    error = np.abs(predicted_S / seconds_S - 1)[held_out_S].mean()
    assert error == pytest.approx(hardware.kernels.error, rel=0.05)
    assert error < 0.15


def test_profiles_are_small_and_name_their_source(profile):
    hardware = profile[0]
    assert "links, memory, disks and dense layers are those of the preset cpu" in hardware.source
    assert all((PROFILE_FOLDER / f"{name}.json").stat().st_size < 200_000 for name in MEASURED)
    assert set(PROCESSORS) < set(MEASURED)


def test_the_tables_of_a_row_are_those_of_the_benchmark():
    """Counts, rows and totals of benchmarks/ops.py, written out."""
    base = {"threads": 1, "dim": 16, "batch": 2048, "pooling": 20, "ids": "zipf", "row_type": "fp32"}
    base |= {"ours_forward_ms": 2.0, "ours_rest_ms": 4.0, "optimizer": "sgd"}
    expected = {
        "fp32": (26, 4_000_000),
        "fp16": (26, 4_000_000),
        "shapes": (15, 1_000_000),
        "row types": (26, 1_000_000),
    }
    for section, (tables, most) in expected.items():
        (made,) = sets_of({"rows": [base | {"section": section}, base | {"section": section, "threads": 2}]})
        rows = [w.table.rows for w in made.workloads]
        assert len(rows) == tables
        assert (rows[0], rows[-1]) == pytest.approx((1000, most), abs=1)
        assert (made.lookup_s, made.update_s, made.batch) == (0.002, 0.004, 2048)
        assert {(w.table.dim, w.access.pooling, w.access.zipf_a) for w in made.workloads} == {(16, 20, 1.05)}
