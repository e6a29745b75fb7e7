"""Layers and sums are measured on all points, and a profile keeps them."""

import pytest
from msgspec import structs

from rowwise.planning.calibrate.dense_times import DenseGrid, measure_dense
from rowwise.planning.perf.hardware import hardware_named, read_hardware


@pytest.mark.slow
def test_layers_and_sums_are_measured_by_size():
    grid = DenseGrid(samples=(8, 64), widths=(4, 32), sums_bytes=(64, 4096))
    found = measure_dense(2, 1, shared_memory=True, grid=grid)
    assert (found.linears.samples, found.linears.inputs, found.linears.outputs) == ((8, 64), (4, 32), (4, 32))
    assert found.linears.of(16, 8, 8).forward_s > 0
    assert (found.sums.ranks, found.sums.sizes) == (2, (64, 4096))
    assert found.cpu_s_per_byte >= 0
    profile = structs.replace(hardware_named("cpu"), linears=found.linears, sums=found.sums)
    assert read_hardware(profile.to_json()) == profile
