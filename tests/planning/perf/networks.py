"""Hardware profiles with networks of random numbers, for tests of what is evaluated and not of what was learned."""

import numpy as np
from msgspec import structs

from rowwise.planning.perf.hardware import Hardware, Kernels, hardware_named
from rowwise.planning.perf.network import SetNetwork
from rowwise.planning.perf.reuse import BINS

FEATURES = 10 + BINS
WORK = {
    "lookup": ("gathered", "distinct", "pooled", "issued", "bags"),
    "update": ("merged", "distinct", "gradients", "issued", "sorted"),
}


def network(rng, form="scaled", *, bounded=True, width=5, hidden=7, hinges=9) -> SetNetwork:
    """Loads of it are within a factor of 20 of nominal work, or about as large where they have no unit."""

    def layer(*shape):
        return rng.normal(size=shape) / np.sqrt(shape[0])

    hinge, out = layer(hinges, width), layer(hinges) * 1e-3
    if bounded:
        hinge, out = np.abs(hinge), np.abs(out)
    unit = 1e3 if form == "scaled" else 1.0
    return SetNetwork(
        form=form,
        mean=tuple(rng.normal(size=FEATURES).tolist()),
        scale=tuple(rng.uniform(1, 3, FEATURES).tolist()),
        inner=_rows(layer(FEATURES, hidden)),
        inner_offset=tuple(rng.normal(size=hidden).tolist()),
        outer=_rows(layer(hidden, width)),
        outer_offset=tuple(rng.normal(size=width).tolist()),
        gain=tuple(rng.uniform(0.5, 2, width).tolist()),
        hinge=_rows(hinge * unit),
        hinge_offset=tuple(rng.normal(size=hinges).tolist()),
        hinge_out=tuple(out.tolist()),
        constant_s=float(rng.uniform(0, 1e-4)),
        power=float(rng.choice([1.0, 1.7, 6.0])) if form == "scaled" else 1.0,
    )


def profile(seed, form="scaled", *, bounded=True) -> Hardware:
    """Of a CPU whose networks nobody trained."""
    rng = np.random.default_rng(seed)
    made = {stage: network(rng, form, bounded=bounded, width=len(names)) for stage, names in WORK.items()}
    return structs.replace(hardware_named("cpu"), name="random", kernels=Kernels(**made, error=0.1, noise=0.1, sets=0))


def _rows(matrix) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix.tolist())
