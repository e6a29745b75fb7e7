"""Finds the origin of a number that is not finite: the first module that outputs one, and the sample.

Runs only after a step has failed, so it may take its time: it does the forward once more and looks at everything. Of
several ranks not all may be here, and a forward needs them all: then it says what is known without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from rowwise.batch import Batch
from rowwise.embedding import Embeddings, Vectors
from rowwise.hashing.embeddings import MappedEmbeddings
from rowwise.spec import Pooling


@dataclass(slots=True)
class _First:
    """The first module whose output has a bad number, and the first sample in it."""

    name: str = ""
    sample: int | None = None
    handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    def watch(self, model: nn.Module) -> None:
        """Look at the outputs of all modules."""
        for name, module in model.named_modules():
            self.handles.append(module.register_forward_hook(partial(self._look, name)))

    def _look(self, name: str, _module: nn.Module, _given: object, out: object) -> None:
        found = out.matrix_BS if isinstance(out, Vectors) else out
        if self.name or not isinstance(found, Tensor) or not found.is_floating_point():
            return
        bad = ~found.isfinite()
        if bad.any():
            self.name, self.sample = name or "the model", int(bad.nonzero()[0][0]) if found.dim() > 1 else None


@torch.no_grad()
def find_cause(model: nn.Module, batches: Sequence[Batch], said: str, *, alone: bool = True) -> str:
    """The cause of a bad number: its message, and, `alone`, the module in which it begins."""
    bad = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    if bad:
        return f"{said}; the weights of {bad[0]!r} are not finite: lower train.optimizer.lr, or set train.clip"
    for index, batch in enumerate(batches if alone else ()):
        first = _First()
        first.watch(model)
        try:
            model(batch)
        finally:
            for handle in first.handles:
                handle.remove()
        if first.name:
            return f"{said}; it begins in {first.name!r}, {_about(model, batch, index, first.sample)}"
    return f"{said}{_about_gradients(model)}; {_about_largest(model, batches)}"


def _about_gradients(model: nn.Module) -> str:
    """The dense gradient that is not finite, or the largest: the length of finite ones can be past all range, too."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.numel()}
    bad = [name for name, grad in found.items() if not _finite(grad)]
    if bad:
        return f", first in that of {bad[0]!r}"
    sizes = {name: float(grad.abs().max()) for name, grad in found.items()}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    return f"; the largest number in a dense gradient is {sizes[largest]:.3g}, of {largest!r}" if sizes else ""


def _about_largest(model: nn.Module, batches: Sequence[Batch]) -> str:
    """The sample with the largest number, where what is out of range mostly comes from; and what else can be done."""
    way_out = "lower train.optimizer.lr, or set train.clip"
    sizes = [float(batch.dense_BF.abs().max()) if batch.dense_BF.numel() else 0.0 for batch in batches]
    if not any(sizes):
        return way_out
    index = sizes.index(max(sizes))
    batch = batches[index]
    sample = int(batch.dense_BF.abs().argmax()) // batch.dense_BF.shape[1]
    return f"look at {_about(model, batch, index, sample)}; else {way_out}"


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _about(model: nn.Module, batch: Batch, index: int, sample: int | None) -> str:
    """A sample of a batch, and what in it is largest."""
    if sample is None or sample >= len(batch.labels_BK):
        return f"batch {index} of the step"
    key = "" if batch.keys_B is None else f", key {int(batch.keys_B[sample])}"
    parts = [f"batch {index} of the step, sample {sample}{key}"]
    if batch.dense_BF.shape[1]:
        column = int(batch.dense_BF[sample].abs().argmax())
        parts.append(f"whose largest number is {float(batch.dense_BF[sample, column]):.3g} in dense column {column}")
    largest = max(_lengths(model, batch, sample), default=None)
    if largest is not None:
        length, table, feature = largest
        parts.append(f"and whose longest vector is {length:.3g}, of table {table!r}, feature {feature!r}")
    return ", ".join(parts)


def _lengths(model: nn.Module, batch: Batch, sample: int) -> Iterator[tuple[float, str, str]]:
    """Norms of a sample's pooled vectors."""
    inside = {one.stored for one in model.modules() if isinstance(one, MappedEmbeddings)}
    for module in model.modules():
        if isinstance(module, MappedEmbeddings | Embeddings) and module not in inside:
            vectors = module(batch.sparse)
            pooled = (table for table in module.tables if table.pooling is not Pooling.SEQUENCE)
            for table in pooled:
                for feature in table.feature_names:
                    yield float(vectors[feature][sample].norm()), table.name, feature
