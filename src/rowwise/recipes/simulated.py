"""The input of `rowwise simulate` from a recipe: its tables, its dense layers and the settings of its step.

Layers are recorded in a forward of zeros, with tables of one row. For models that do not take such samples, each weight
matrix counts as a layer that is applied once per sample. Known limits: only matrix products take time, and accumulated
batches count as one.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rowwise.base.errors import SpecError
from rowwise.ingest.service.local import Workers
from rowwise.models.cost import flop_formulas
from rowwise.planning.perf.dense_layers import DenseLayer, DenseLayers
from rowwise.planning.perf.dense_parallel import NO_ACTIVATIONS, DenseSide
from rowwise.planning.perf.hardware import Machine
from rowwise.planning.simulate.simulation import SimulatedModel
from rowwise.recipes.compose import make_small_model
from rowwise.recipes.dense_side import SAMPLES, made_up_samples
from rowwise.recipes.plan import resolve_for
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.tables.embedding import Vectors
from rowwise.train.step import embeddings_of


def simulated_model(recipe: Recipe, machine: Machine) -> SimulatedModel:
    """The recipe's model and step on the ranks of a machine."""
    resolved, planned = resolve_for(recipe, machine)
    side, wire = planned.dense, planned.wire
    kind = recipe.train.dense_parallel.kind
    if wire.far is not None and kind != "replicate":
        raise SpecError(
            f"wire.far={wire.far} with train.dense_parallel.kind={kind}", "wire.far=null, or kind: replicate"
        )
    assert side is not None
    workers = resolved.recipe.data.workers
    on_ray = isinstance(workers, Workers) and workers.on == "ray"
    return SimulatedModel(
        name=recipe.name,
        workloads=planned.workloads,
        layers=shaped_layers(side) if side.activations == NO_ACTIVATIONS else record_layers(resolved, side),
        side=side,
        batch=planned.batch,
        wire=wire,
        depth=recipe.train.pipeline_depth,
        elastic=recipe.train.determinism == "elastic",
        columns=0 if on_ray else columns_of(resolved),
        workers=workers is not None,
    )


def columns_of(resolved: ResolvedRecipe) -> int:
    """Number of columns of a batch."""
    return len(resolved.columns.dense) + len(resolved.columns.sparse)


def shaped_layers(side: DenseSide) -> DenseLayers:
    """One layer per weight matrix."""
    shapes = [shape for unit in (*side.shapes.units, side.shapes.own) for shape in unit]
    matrices = [shape for shape in shapes if len(shape) == 2]
    layers = [
        DenseLayer(f"top.{k}", inputs, outputs, parameters=inputs * outputs)
        for k, (outputs, inputs) in enumerate(matrices)
    ]
    return DenseLayers(after=_with_rest(layers, side))


def record_layers(resolved: ResolvedRecipe, side: DenseSide) -> DenseLayers:
    """The products of a forward, in order, before and after the first use of vectors."""
    model = make_small_model(resolved)
    recorder = _Recorder()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(recorder.enter)
            module.register_forward_hook(recorder.leave)
    for module in embeddings_of(model):
        module.register_forward_hook(recorder.delay)
    with recorder.counter:
        model(made_up_samples(resolved))
        recorder.add_rest()
    before = tuple(recorder.before)
    return DenseLayers(before, _with_rest(recorder.after, side, sum(layer.parameters for layer in before)))


def _with_rest(layers: list[DenseLayer], side: DenseSide, counted: int = 0) -> tuple[DenseLayer, ...]:
    """Append all other parameters as a layer without products."""
    total = sum(prod(shape) for unit in (*side.shapes.units, side.shapes.own) for shape in unit)
    rest = total - counted - sum(layer.parameters for layer in layers)
    return (*layers, DenseLayer("top.other", parameters=rest)) if rest > 0 else tuple(layers)


@dataclass(slots=True)
class _Recorder:
    """Records the linear layers of a forward, and the operations between them."""

    counter: FlopCounterMode = field(
        default_factory=lambda: FlopCounterMode(display=False, custom_mapping=flop_formulas())
    )  # fmt: skip
    before: list[DenseLayer] = field(default_factory=list)
    after: list[DenseLayer] = field(default_factory=list)
    uses_vectors: bool = False
    flops: int = 0  # total that is part of recorded layers

    def delay(self, _module: nn.Module, _inputs: Any, vectors: Vectors) -> Vectors:
        """The same vectors, with a callback on first use."""

        def receive() -> Any:
            self.add_rest()
            self.uses_vectors = True
            return vectors.wait()

        return Vectors(vectors.columns, receive)

    def enter(self, _module: nn.Module, _inputs: Any) -> None:
        self.add_rest()

    def leave(self, module: nn.Linear, inputs: Any, _output: Any) -> None:
        self.flops = self.counter.get_total_flops()
        rows = inputs[0].numel() / module.in_features / SAMPLES
        parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
        self._add("", module.in_features, module.out_features, rows=rows, parameters=parameters)

    def add_rest(self) -> None:
        """Record the operations since the last layer as a layer."""
        total = self.counter.get_total_flops()
        if total > self.flops:
            self._add(".products", flops=(total - self.flops) / SAMPLES)
            self.flops = total

    def _add(self, suffix: str, inputs: int = 0, outputs: int = 0, **numbers: float) -> None:
        side, layers = ("top", self.after) if self.uses_vectors else ("bottom", self.before)
        layers.append(DenseLayer(f"{side}.{len(layers)}{suffix}", inputs, outputs, **numbers))  # type: ignore[arg-type]
