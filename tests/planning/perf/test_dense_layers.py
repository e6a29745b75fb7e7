"""Layers by their widths, what they take by shape, and what they hold and send."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.planning.perf.dense_layers import DenseLayer, parse_layers, side_of_layers
from rowwise.planning.perf.hardware import hardware_named
from rowwise.planning.perf.linear_times import LinearTimes, SumTimes
from rowwise.tables.spec import Topology

AXES = {"samples": (8, 64), "inputs": (4, 16, 64), "outputs": (4, 16)}


def times(seconds):
    """A grid of a function of the shape."""
    grid = tuple(
        tuple(tuple(seconds(b, i, o) for o in AXES["outputs"]) for i in AXES["inputs"]) for b in AXES["samples"]
    )
    return LinearTimes(
        **AXES, forward_s=grid, backward_s=tuple(tuple(tuple(2 * x for x in y) for y in z) for z in grid)
    )


def test_widths_are_read():
    layers = parse_layers("13, 512,256:415,256,1")
    assert [(layer.inputs, layer.outputs) for layer in layers.before] == [(13, 512), (512, 256)]
    assert [layer.name for layer in layers.after] == ["top.0", "top.1"]
    assert layers.parameters == 13 * 512 + 512 + 512 * 256 + 256 + 415 * 256 + 256 + 257
    assert parse_layers("8*3:8*2") == parse_layers("8,8,8:8,8")
    assert parse_layers(":4,1").before == ()


@pytest.mark.parametrize(
    "text", ["512,256", "1:2:3", "a:b", "0,1:2", "8*0:1", "-1,2:3", "1.5:2", "8*1001:2", "99999,1:2"]
)
def test_wrong_widths_are_refused(text):
    with pytest.raises(SpecError, match=r"--dense .*: expected widths"):
        parse_layers(text)


def test_without_measurements_a_layer_takes_its_operations():
    hardware = hardware_named("zionex")
    found = DenseLayer("top.0", 100, 200, rows=3.0, flops=50.0).seconds(hardware, 64)
    assert found.forward_s == pytest.approx((2 * 100 * 200 * 3 + 50) * 64 / hardware.flops)
    assert found.backward_s == 2 * found.forward_s


@given(st.floats(8, 64), st.integers(4, 64), st.integers(4, 16))
def test_times_between_points_of_a_product_are_the_product(samples, inputs, outputs):
    found = times(lambda b, i, o: 1e-9 * b * i * o).of(samples, inputs, outputs)
    assert found.forward_s == pytest.approx(1e-9 * samples * inputs * outputs)
    assert found.backward_s == pytest.approx(2 * found.forward_s)


def test_beyond_the_grid_times_grow_with_the_operations_and_never_shrink():
    found = times(lambda b, i, o: 1e-6 + 1e-9 * b * i * o)
    most, least = found.of(64, 64, 16).forward_s, found.of(8, 4, 4).forward_s
    assert found.of(640, 64, 32).forward_s == pytest.approx(20 * most)
    assert found.of(1, 1, 1).forward_s == pytest.approx(least)


def test_measured_layers_are_used():
    hardware = structs.replace(hardware_named("cpu"), linears=times(lambda b, i, o: 0.5))
    assert DenseLayer("top.0", 16, 16).seconds(hardware, 8) == (pytest.approx(0.5), pytest.approx(1.0))
    assert DenseLayer("top.0", flops=1e11).seconds(hardware, 1).forward_s == pytest.approx(1.0)


def test_sums_are_interpolated():
    sums = SumTimes(ranks=2, sizes=(100, 10_000), seconds=(1.0, 4.0))
    assert sums.of(1_000) == pytest.approx(2.0)
    assert sums.of(20_000) == pytest.approx(8.0)
    assert sums.of(1) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: structs.replace(times(lambda b, i, o: 1.0), samples=(64, 8)), "linears.samples"),
        (lambda: structs.replace(times(lambda b, i, o: 1.0), outputs=(4,)), "linears.forward_s"),
        (lambda: times(lambda b, i, o: 0.0), "linears.forward_s"),
        (lambda: SumTimes(ranks=2, sizes=(), seconds=()), "sums.sizes"),
        (lambda: SumTimes(ranks=2, sizes=(1, 2), seconds=(1.0,)), "sums.seconds"),
    ],
)
def test_wrong_measurements_are_refused(make, what):
    with pytest.raises(SpecError, match=what):
        make()


def test_memory_of_layers_is_that_of_their_parameters():
    layers = parse_layers("4,8:16,8,1")
    side = side_of_layers(layers, state_slots=2)
    numbers = sum(prod(shape) for unit in side.shapes.units for shape in unit)
    assert numbers == layers.parameters
    assert side.cost(Topology(devices=2)).memory_bytes == 4 * 4 * layers.parameters
    assert side.activations.kept == 4 * (4 + 16 + 8)
