"""A set network as data: a set of tables takes phi(sum of psi(x) over its tables) seconds, NeuroShard's form.

psi is one or two layers for each table, phi a layer over the sum. psi has one of two forms:

    published   as in NeuroShard: psi(x) are 32 numbers without a unit, none of them negative
    scaled      psi(x) is nominal work in seconds (see `features`): each kind of it times a gain, which is this
                device's, and a factor from the network, between 1/20 and 20. phi is then the p-norm of the
                loads (p = 1 where work is done one after the other, more where kinds of work overlap) plus
                hinges. Beyond what was measured it grows in proportion.

If no weight of phi is negative, phi is convex and grows with every load, so a planner's bounds hold whatever psi is
([Note: Bounds] in planning/planner/bound.py); see `Phi.is_convex`. `calibrate` trains networks with torch; they are
evaluated here in numpy and, phi alone, in C.
"""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.cost import Hinges, Phi
from rowwise.tables.spec import Value

Form = Literal["published", "scaled"]
REACH = math.log(20.0)  # largest logarithm of a factor
MAX_DEVIATIONS = 3.0  # features are clipped to the mean plus or minus this; nothing was learned beyond
Matrix = tuple[tuple[float, ...], ...]
Vector = tuple[float, ...]
MAX_LOADS, MAX_HINGES = 63, 128  # two networks and two sums fit the planner's 128 loads and 256 hinges


def check_shapes(network: Value, **shapes: tuple[int, ...]) -> None:
    """Raise if a layer does not fit the others."""
    for name, expected in shapes.items():
        layer = getattr(network, name)
        try:
            got = str(np.shape(layer))
        except ValueError:
            got = "rows of several lengths"
        if got != str(expected):
            raise SpecError(f"network: {name} is {got}", f"{expected}, to fit the other layers")


class SetNetwork(Value, frozen=True, kw_only=True):
    """Weights of one network, which predicts the seconds of one stage."""

    form: Form
    mean: Vector  # of each feature
    scale: Vector
    inner: Matrix  # features x hidden
    inner_offset: Vector
    outer: Matrix  # hidden x loads
    outer_offset: Vector
    gain: Vector  # of each load, on nominal work; 1 where loads have no unit
    hinge: Matrix  # hinges x loads
    hinge_offset: Vector
    hinge_out: Vector  # seconds
    constant_s: float  # at no load at all
    power: float = 1.0  # of the norm of loads that are seconds; at least 1

    def __post_init__(self) -> None:
        features, hidden, loads, hinges = (
            len(self.mean),
            len(self.inner_offset),
            len(self.outer_offset),
            len(self.hinge),
        )
        check_shapes(self, scale=(features,), inner=(features, hidden), outer=(hidden, loads), gain=(loads,),
                     hinge=(hinges, loads), hinge_offset=(hinges,), hinge_out=(hinges,))  # fmt: skip
        if loads > MAX_LOADS or hinges > MAX_HINGES:
            raise SpecError(f"network: {loads} loads and {hinges} hinges", f"at most {MAX_LOADS} and {MAX_HINGES}")
        if not 1 <= self.power < 100:
            raise SpecError(f"network: power={self.power}", "at least 1, or phi would not be convex")

    @property
    def width(self) -> int:
        return len(self.outer_offset)

    @property
    def is_scaled(self) -> bool:
        """Whether loads are seconds, whose norm is part of the cost."""
        return self.form == "scaled"

    def psi(self, features_NF: Floats, work_NK: Floats) -> Floats:
        """Loads (N, K) of tables."""
        input_NF = np.clip((features_NF - np.array(self.mean)) / np.array(self.scale), -MAX_DEVIATIONS, MAX_DEVIATIONS)
        hidden_NH = np.maximum(input_NF @ np.array(self.inner) + np.array(self.inner_offset), 0.0)
        out_NK = hidden_NH @ np.array(self.outer) + np.array(self.outer_offset)
        if self.form == "published":
            return np.maximum(out_NK, 0.0)
        return work_NK * np.array(self.gain) * np.exp(REACH * np.tanh(out_NK))

    @property
    def phi(self) -> Phi:
        hinges = Hinges(
            np.array(self.hinge).reshape(-1, self.width), np.array(self.hinge_offset), np.array(self.hinge_out)
        )
        ends, powers = ((self.width,), (self.power,)) if self.is_scaled else ((), ())
        return Phi(constant=self.constant_s, ends=ends, powers=powers, hinges=hinges)


def block_diagonal(parts: list[NDArray[np.float64]]) -> Floats:
    matrix = np.zeros((sum(p.shape[0] for p in parts), sum(p.shape[1] for p in parts)))
    row = column = 0
    for part in parts:
        matrix[row : row + part.shape[0], column : column + part.shape[1]] = part
        row, column = row + part.shape[0], column + part.shape[1]
    return matrix
