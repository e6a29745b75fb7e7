"""Finds the cause of NaN or infinity in a step: the first module that outputs it, the sample, its largest values.

Runs only after a step has failed, so it may be slow: it repeats the forward with a hook on every module. On several
ranks it does not repeat the forward, which would be a collective, and reports weights and gradients only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from rowwise.tables.batch import Batch
from rowwise.tables.embedding import Embeddings, Vectors
from rowwise.tables.ids.make import IdTables
from rowwise.tables.spec import Pooling


@dataclass(slots=True)
class _FirstNonFinite:
    """The first module whose output is not finite, and the first such sample."""

    name: str = ""
    sample: int | None = None
    handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            self.handles.append(module.register_forward_hook(partial(self._check, name)))

    def _check(self, name: str, _module: nn.Module, _args: object, out: object) -> None:
        output = out.matrix_BS if isinstance(out, Vectors) else out
        if self.name or not isinstance(output, Tensor) or not output.is_floating_point():
            return
        bad = ~output.isfinite()
        if bad.any():
            self.name, self.sample = name or "the model", int(bad.nonzero()[0][0]) if output.dim() > 1 else None


@torch.no_grad()
def find_cause(model: nn.Module, batches: Sequence[Batch], error: str, *, alone: bool = True) -> str:
    """The error with its cause. `alone`: the run has a single rank, which can repeat the forward."""
    bad = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    if bad:
        return f"{error}; the weights of {bad[0]!r} are not finite: lower train.optimizer.lr, or set train.clip"
    for index, batch in enumerate(batches if alone else ()):
        first = _FirstNonFinite()
        first.watch(model)
        try:
            with torch.compiler.set_stance("force_eager"):  # compiled layers would not call the hooks
                model(batch)
        finally:
            for handle in first.handles:
                handle.remove()
        if first.name:
            return f"{error}; it begins in {first.name!r}, {_describe_sample(model, batch, index, first.sample)}"
    return f"{error}{_describe_gradients(model)}; {_describe_largest(model, batches)}"


def _describe_gradients(model: nn.Module) -> str:
    """The first dense gradient that is not finite, else the largest: the norm of finite gradients may overflow."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.numel()}
    bad = [name for name, grad in grads.items() if not _finite(grad)]
    if bad:
        return f", first in that of {bad[0]!r}"
    sizes = {name: float(grad.abs().max()) for name, grad in grads.items()}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    return f"; the largest number in a dense gradient is {sizes[largest]:.3g}, of {largest!r}" if sizes else ""


def _describe_largest(model: nn.Module, batches: Sequence[Batch]) -> str:
    """The sample with the largest dense number, the most common cause of an overflow; and other remedies."""
    remedy = "lower train.optimizer.lr, or set train.clip"
    sizes = [float(batch.dense_BF.abs().max()) if batch.dense_BF.numel() else 0.0 for batch in batches]
    if not any(sizes):
        return remedy
    index = sizes.index(max(sizes))
    batch = batches[index]
    sample = int(batch.dense_BF.abs().argmax()) // batch.dense_BF.shape[1]
    return f"look at {_describe_sample(model, batch, index, sample)}; else {remedy}"


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _describe_sample(model: nn.Module, batch: Batch, index: int, sample: int | None) -> str:
    """A sample of a batch, with its largest dense number and its longest vector."""
    if sample is None or sample >= len(batch.labels_BK):
        return f"batch {index} of the step"
    key = "" if batch.keys_B is None else f", key {int(batch.keys_B[sample])}"
    parts = [f"batch {index} of the step, sample {sample}{key}"]
    if batch.dense_BF.shape[1]:
        column = int(batch.dense_BF[sample].abs().argmax())
        parts.append(f"whose largest number is {float(batch.dense_BF[sample, column]):.3g} in dense column {column}")
    longest = max(_vector_lengths(model, batch, sample), default=None)
    if longest is not None:
        length, table, feature = longest
        parts.append(f"and whose longest vector is {length:.3g}, of table {table!r}, feature {feature!r}")
    return ", ".join(parts)


def _vector_lengths(model: nn.Module, batch: Batch, sample: int) -> Iterator[tuple[float, str, str]]:
    """The norms of a sample's pooled vectors, each with table and feature."""
    mapped = {module.stored for module in model.modules() if isinstance(module, IdTables)}
    for module in model.modules():
        if isinstance(module, IdTables | Embeddings) and module not in mapped:
            vectors = module(batch.sparse)
            for table in module.tables:
                for feature in table.feature_names if table.pooling is not Pooling.SEQUENCE else ():
                    yield float(vectors[feature][sample].norm()), table.name, feature
