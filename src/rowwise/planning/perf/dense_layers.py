"""The dense layers of a model as shapes, and their seconds on a device."""

import itertools
import re
from collections.abc import Sequence

from rowwise.base.errors import SpecError
from rowwise.base.value import MAX_DIM, MAX_LAYERS
from rowwise.planning.perf.dense_parallel import ActivationBytes, DenseSide, DenseUnits, FLOAT_bytes
from rowwise.planning.perf.hardware import Hardware
from rowwise.planning.perf.linear_times import LinearSeconds
from rowwise.tables.spec import Value

WIDTHS = re.compile(r"(?P<width>[0-9]{1,9})(?:\*(?P<times>[0-9]{1,9}))?")
BACKWARD = 2.0  # operations of a backward, of those of the forward
SYNTAX = 'widths of the layers before the vectors, a colon, and of those after: "512,256:512,256", "826*23:826*23"'


class DenseLayer(Value, frozen=True):
    """Products of one layer: a linear layer, or others that count as operations."""

    name: str
    inputs: int = 0  # of a linear layer; 0 counts `flops` alone
    outputs: int = 0
    rows: float = 1.0  # vectors of a sample that the layer is applied to
    flops: float = 0.0  # of a sample in a forward, beside the linear layer's
    parameters: int = 0
    experts: int = 1  # copies of the linear layer, with parameters of their own
    active: int = 1  # experts that a sample uses

    def sample_flops(self) -> float:
        """Operations of a forward."""
        return 2.0 * self.rows * self.active * self.inputs * self.outputs + self.flops

    def seconds(self, hardware: Hardware, samples: float) -> LinearSeconds:
        """Forward and backward, from measured shapes if the profile has them, else from the operations."""
        rest_s = self.flops * samples / hardware.flops
        if hardware.linears is None or not self.inputs:
            all_s = self.sample_flops() * samples / hardware.flops
            return LinearSeconds(all_s, BACKWARD * all_s)
        measured = hardware.linears.of(self.rows * self.active * samples, self.inputs, self.outputs)
        return LinearSeconds(measured.forward_s + rest_s, measured.backward_s + BACKWARD * rest_s)


class DenseLayers(Value, frozen=True):
    """The layers that need no vectors of tables, and those that do; in order."""

    before: tuple[DenseLayer, ...] = ()
    after: tuple[DenseLayer, ...] = ()

    @property
    def all(self) -> tuple[DenseLayer, ...]:
        return (*self.before, *self.after)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.all)


def parse_layers(text: str) -> DenseLayers:
    """Two MLPs by the widths of their layers, each with its input width first; `826*3` is 826,826,826."""
    parts = text.split(":")
    if len(parts) != 2:
        raise SpecError(f"--dense {text!r}", SYNTAX)
    before, after = (_parse_widths(part, text) for part in parts)
    return DenseLayers(_linears("bottom", before), _linears("top", after))


def side_of_layers(layers: DenseLayers, state_slots: int = 2) -> DenseSide:
    """Memory and bytes of MLPs; each layer is gathered at once, and keeps its inputs for the backward."""
    units = tuple(((x.experts * x.outputs, x.inputs), (x.experts * x.outputs,)) for x in layers.all)
    inputs = [int(FLOAT_bytes * layer.rows * layer.inputs) for layer in layers.all]
    kept, largest = sum(inputs), max(inputs, default=0)
    activations = ActivationBytes(kept, kept + largest)
    return DenseSide(shapes=DenseUnits(units, ()), state_slots=state_slots, activations=activations)


def _parse_widths(part: str, text: str) -> list[int]:
    widths: list[int] = []
    for word in part.split(",") if part.strip() else ():
        match = WIDTHS.fullmatch(word.strip())
        width, times = (int(match["width"]), int(match["times"] or 1)) if match else (0, 0)
        if not 1 <= width <= MAX_DIM or not 1 <= times <= MAX_LAYERS:
            raise SpecError(f"--dense {text!r}: {word.strip()!r}", SYNTAX)
        widths += [width] * times
    if len(widths) > MAX_LAYERS:
        raise SpecError(f"--dense {text!r}: {len(widths)} widths", f"at most {MAX_LAYERS:,}")
    return widths


def _linears(name: str, widths: Sequence[int]) -> tuple[DenseLayer, ...]:
    return tuple(
        DenseLayer(f"{name}.{k}", inputs, outputs, parameters=(inputs + 1) * outputs)
        for k, (inputs, outputs) in enumerate(itertools.pairwise(widths))
    )
