"""Sharded dense parameters: `shard_dense` applies FSDP2 to a model beside its sharded tables.

A unit is a module whose parameters are gathered at once: a layer of the model's stacks, or an MLP. Small modules are
gathered with the model.

[Note: Construction] `ShardedConstruction` is for models whose dense parameters do not fit a rank. When a module is
registered in its parent, its initial values exist; each rank then keeps its rows of them, and the parameter moves to
the meta device. All ranks draw the same numbers in the same order, so initial weights are those of an unsharded model,
and peak memory is that of the rows and the largest module. Layers in a list hold all their values until they are
registered: see `stack` in `models/mlp.py`. Values that are set later are an error, unless they are set through `.data`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self, cast, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from rowwise.base.errors import SpecError
from rowwise.models.histories import HistoryEncoder
from rowwise.parallel.comm.fsdp import (
    FsdpOptions,
    fill_parameters,
    recompute,
    reset_after_error,
    shard_parameters,
)
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.shard.embeddings import AnyEmbeddings
from rowwise.tables.ids.make import IdTables
from rowwise.tables.spec import Topology
from rowwise.train.settings import DenseParallel

MIN_UNIT = 1 << 12  # parameters; gathering fewer costs more than it saves


def shards_of(settings: DenseParallel, topology: Topology) -> int:
    """The number of ranks that share the parameters; 1 if they are replicated."""
    world = topology.world
    if settings.kind == "replicate" or world == 1:
        return 1
    shards = world if settings.kind == "full" else settings.shards or topology.devices
    if world % shards:
        raise SpecError(
            f"train.dense_parallel.shards={shards} on {world} ranks",
            f"one of {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}",
        )
    return shards


def shard_dense(
    model: nn.Module, settings: DenseParallel, comm: Comm, construction: "ShardedConstruction | None" = None
) -> None:
    """Shard the dense parameters by the settings, in place; a collective. Tables have to be sharded already.

    With one rank, or replicated, only `recompute` has an effect.
    """
    units, shards = find_units(model), shards_of(settings, comm.topology)
    if settings.recompute:
        for unit in units:
            recompute(unit)
    if shards == 1:
        return
    tables = check_parameters(model)
    rows: dict[str, Tensor] = {} if construction is None else construction.rows_by_name(model)
    bf16 = settings.params == "bf16"
    options = FsdpOptions(shards=shards, reshard=settings.reshard, bf16=bf16, prefetch=settings.prefetch)
    shard_parameters(model, units, comm, options, tables)
    if rows:
        fill_parameters(model, rows)


def check_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Raise for parameters that cannot be sharded; returns those of tables."""
    tables = _own_parameters(model)
    for name, parameter in model.named_parameters():
        if parameter in tables and parameter.requires_grad:
            raise SpecError(
                f"parameter {name} projects vectors of an id map, and cannot be sharded",
                hint="set train.dense_parallel.kind=replicate, or choose another id map",
            )
        if parameter.requires_grad and not parameter.dim():
            raise SpecError(f"parameter {name} is a single number, and cannot be sharded", "a shape of (1,)")
    return tables


def has_id_maps(model: nn.Module) -> bool:
    """Whether an id map projects its vectors, by parameters that cannot be sharded."""
    return any(parameter.requires_grad for parameter in _own_parameters(model))


def _own_parameters(model: nn.Module) -> set[nn.Parameter]:
    return {p for module in model.modules() if _has_own_tables(module) for p in module.parameters()}


def find_units(model: nn.Module, min_parameters: int = MIN_UNIT) -> list[nn.Module]:
    """The modules whose parameters are gathered together, in order of registration."""
    return [unit for unit in _candidates(model) if sum(p.numel() for p in unit.parameters()) >= min_parameters]


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if _has_own_tables(child):
            continue
        lists = isinstance(child, (nn.Sequential, nn.ModuleList, HistoryEncoder))
        if lists or any(map(_has_own_tables, child.modules())):
            yield from _candidates(child)
        else:
            yield child


def _has_own_tables(module: nn.Module) -> bool:
    return isinstance(module, (AnyEmbeddings, IdTables))


def unit_shapes(model: nn.Module) -> tuple[list[list[tuple[int, ...]]], list[tuple[int, ...]]]:
    """Shapes of the parameters of each unit, and of the parameters outside of units; call before `shard_dense`."""
    units = [list(unit.parameters()) for unit in find_units(model)]
    inside = {parameter for unit in units for parameter in unit}
    outside = [p for p in model.parameters() if p.requires_grad and p not in inside]
    return [[tuple(p.shape) for p in unit] for unit in units], [tuple(p.shape) for p in outside]


def has_dtensors(model: nn.Module) -> bool:
    """Whether `shard_dense` has sharded parameters of the model."""
    return any(map(is_dtensor, model.parameters()))


def reshard(model: nn.Module) -> None:
    """Free parameters gathered by a forward without a backward, so that each rank has only its shards again."""
    for module in model.modules():
        if hasattr(module, "set_custom_all_gather"):  # FSDP's
            cast(Any, module).reshard()


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor, without the import of its class, which takes a second."""
    return hasattr(tensor, "device_mesh")


class LocalRows(NamedTuple):
    """The part of a DTensor on this rank."""

    tensor: Tensor
    rows: tuple[int, int]  # of the whole tensor
    shards: int


def local_rows(tensor: Any) -> LocalRows:
    """This rank's rows of a DTensor: ceil(rows / shards) on each rank until none are left."""
    local, shards, count = local_part(tensor.detach()), tensor.device_mesh.size(), len(tensor)
    first = min(tensor.device_mesh.get_local_rank() * -(-count // shards), count)
    return LocalRows(local, (first, first + len(local)), shards)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's rows of a DTensor; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[operator]


@final
class ShardedConstruction:
    """Inside the `with`, a rank keeps only its rows of new parameters: [Note: Construction].

    Args:
        comm: all ranks.
        shards: number of ranks that share the parameters; a no-op for 1.
    """

    def __init__(self, comm: Comm, shards: int) -> None:
        self._rank, self._shards = comm.rank % shards, shards
        self._rows: dict[nn.Parameter, Tensor] = {}  # by the parameter on the meta device
        self._moved = WeakIdKeyDictionary()  # parameter on the meta device by original, which two modules may share

    def __enter__(self) -> Self:
        self._hook = register_module_module_registration_hook(self._take_child)
        return self

    def __exit__(self, *raised: object) -> None:
        self._hook.remove()

    def _take_child(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self.take(child)

    def take(self, module: nn.Module) -> None:
        """Keep only this rank's rows of the parameters of an initialised module."""
        for owner in module.modules() if self._shards > 1 else ():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.requires_grad and parameter.dim() and not parameter.is_meta:
                    if parameter not in self._moved:
                        self._moved[parameter] = self._move(parameter)
                    owner._parameters[name] = self._moved[parameter]

    def _move(self, parameter: nn.Parameter) -> nn.Parameter:
        moved = nn.Parameter(torch.empty_like(parameter, device="meta"))
        rows = -(-len(parameter) // self._shards)
        self._rows[moved] = parameter.detach()[self._rank * rows : (self._rank + 1) * rows].clone()
        return moved

    def rows_by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's rows of each parameter of the model."""
        self.take(model)
        rows: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter in self._rows:
                if parameter._version:
                    raise SpecError(
                        f"parameter {name} was changed after its module was registered",
                        hint="change it inside its module, or set train.dense_parallel.kind=replicate",
                    )
                rows[name] = self._rows.pop(parameter)
        return rows


@final
class FsdpGradients:
    """The methods of `DenseGradients` for sharded parameters, whose gradients FSDP adds during the backward."""

    def __init__(self, comm: Comm, shards: int, model: nn.Module) -> None:
        """`model`: the argument of `shard_dense`."""
        self._comm, self._shards, self._model = comm, shards, model
        self._raised = False

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._raised = True
        loss.backward()
        self._raised = False

    def finish(self) -> None:
        """A no-op: the backward has summed the gradients over all ranks."""

    def discard(self) -> None:
        """Let FSDP begin anew after a backward that raised."""
        if self._raised:
            reset_after_error(self._model)
        self._raised = False

    def norm(self, gradients: Sequence[Tensor]) -> float:
        """The norm of all gradients together; a collective."""
        squares = [float(local_part(gradient).double().square().sum()) for gradient in gradients]
        total = self._comm.all_reduce(torch.tensor([math.fsum(squares)], dtype=torch.float64), "status").wait()
        return math.sqrt(float(total) * self._shards / len(self._comm.ranks))
