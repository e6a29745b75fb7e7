"""FSDP2 over a `Comm`: torch's `fully_shard`, with the collectives of this package.

Torch asks its process group for sizes and ranks only; the collectives themselves can be replaced, and are. So FSDP
uses the transports of `Comm` (shared memory, gloo, a simulated link), with counted bytes and observed transfers. The
process group is the default group if there is one, else torch's "fake" group, which sends nothing: operations of
DTensors that communicate, such as `full_tensor`, do not work.

[Note: Hybrid] Each F consecutive ranks share the parameters. Torch sees a mesh of these F ranks. A rank's shard of the
summed gradients is then all-reduced over the W / F ranks with the same shard.

[Note: Overlap] A backward only starts the reduce-scatter of a unit. A thread waits for it, and starts the unit's
all-reduce. The backward of earlier layers goes on meanwhile, and the end of the whole backward waits for all sums.
Starts have one order on all ranks, and a collective adds in rank order, so bits are those of sums one after the other.
At most `MAX_SCATTERS` units have whole gradients in flight: more would hold the gradients of the whole model.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.parallel.comm.call_thread import CallThread
from rowwise.parallel.comm.interface import Comm, Work
from rowwise.tables.ops.in_backward import BackwardEnd

PURPOSE = "dense"
MAX_SCATTERS = 2  # reduce-scatters in flight
MAX_SUMS = 8  # units in flight: shared memory keeps a block for each, and has room for 64 calls


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpOptions:
    """The number of shards, and when parameters are gathered."""

    shards: int  # ranks that share the parameters; a divisor of all ranks
    reshard: bool = True  # free the gathered parameters after a forward
    bf16: bool = False  # gather and multiply parameters of units in bfloat16; gradients are added in float32
    prefetch: int = 1  # units gathered ahead
    overlap: bool = True  # of sums with the backward; else it waits for each unit's


def shard_parameters(
    model: nn.Module, units: Sequence[nn.Module], comm: Comm, options: FsdpOptions, ignored: set[nn.Parameter]
) -> None:
    """Shard the parameters of each unit, and the remaining ones of the model, among ranks; collective.

    Parameters become DTensors, except those in `ignored`. Units are gathered ahead in their order.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    world, shards = len(comm.ranks), options.shards
    if shards < 1 or world % shards:
        raise SpecError(f"{shards} ranks that share the dense parameters, of {world}", f"a divisor of {world}")
    shard = comm.split([range(first, first + shards) for first in range(0, world, shards)])
    replicas = comm.split([range(first, world, shards) for first in range(shards)])
    types: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if options.bf16 else {}
    common: dict[str, Any] = {"mesh": _mesh(comm, shards), "ignored_params": ignored}
    for unit in units:
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(**types), reshard_after_forward=options.reshard, **common)
    # The model's own parameters are few, and layer norms accept any dtype: fp32, and gathered until the backward.
    root = MixedPrecisionPolicy(output_dtype=torch.float32)
    fully_shard(model, mp_policy=root, reshard_after_forward=False, **common)
    forwards = [name for name in ("forward", "vectors") if hasattr(model, name)]
    if options.bf16:  # all products are in bfloat16; activations between layers may be float32, as those of `interact`
        for name in forwards:
            setattr(model, name, torch.autocast("cpu", torch.bfloat16)(getattr(model, name)))
    for name in forwards[1:]:
        register_fsdp_forward_method(model, name)
    gather, sums = cast(Any, _AllGather(shard)), _GradientSums(shard, replicas if world > shards else None)
    taken = set(ignored)
    for module in (*units, model):
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(gather)
        places = _parameter_places(module, taken)
        module.set_custom_reduce_scatter(cast(Any, _ReduceScatter(shard, sums, places, options.overlap)))
        module.set_gradient_divide_factor(1.0)  # the loss is already a mean over the samples of all ranks
        module.set_force_sum_reduction_for_comms(True)
    for order, direction in ((units, "forward"), (units[::-1], "backward")):
        for k, unit in enumerate(order):
            getattr(unit, f"set_modules_to_{direction}_prefetch")(list(order[k + 1 : k + 1 + options.prefetch]))


def _parameter_places(module: nn.Module, taken: set[nn.Parameter]) -> list[tuple[nn.Module, str]]:
    """Module and name of each trained parameter that is not taken yet; takes them."""
    places = []
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter not in taken:
                taken.add(parameter)
                places.append((owner, name))
    return places


def fill_parameters(model: nn.Module, rows: dict[str, Tensor]) -> None:
    """Give sharded parameters on the meta device this rank's rows, by name; takes over the rows' memory."""
    from torch.distributed.tensor import DTensor

    unfilled = {id(parameter): name for name, parameter in model.named_parameters() if name in rows}

    def fill(tensor: Any) -> Tensor:
        name = unfilled.pop(id(tensor), None)
        if name is None:
            return tensor
        layout = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(rows.pop(name), tensor.device_mesh, tensor.placements, run_check=False, **layout)

    model._apply(fill)


def recompute(module: nn.Module) -> None:
    """Compute the activations of a module again in its backward."""
    from torch.distributed._composable import checkpoint

    checkpoint(module)


def reset_after_error(model: nn.Module) -> None:
    """Drop all gradients, and let the next forward begin anew, after a backward that raised on all ranks."""
    model.zero_grad()  # of the gathered parameters that the backward has reached, which torch would keep
    cast(Any, model).reset_iter_state()
    model.zero_grad()  # of the shards


def _mesh(comm: Comm, shards: int) -> Any:
    """The ranks that share parameters with this one."""
    from torch.distributed.device_mesh import init_device_mesh

    world = len(comm.ranks)
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=comm.rank, world_size=world, store=FakeStore())
    if dist.get_world_size() != world:
        raise SpecError(f"torch.distributed's default group has {dist.get_world_size()} ranks", world)
    return init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard"))["shard"]


class _Allocator:
    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _AllGather(_Allocator):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False
    ) -> "_PendingGather":
        splits = [input_tensor.numel()] * len(self._comm.ranks)
        return _PendingGather(self._comm.all_gather(input_tensor, splits, PURPOSE), output_tensor)


@final
class _PendingGather(dist.Work):
    """A gather that torch waits for when it needs the parameters."""

    def __init__(self, work: Work, output: Tensor) -> None:
        super().__init__()
        self._work: Work | None = work
        self._output = output

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._work is not None:
            self._output.copy_(self._work.wait())
            self._work = None
        return True


@final
class _GradientSums:
    """Sums of gradients in flight: [Note: Overlap]."""

    def __init__(self, shard: Comm, replicas: Comm | None) -> None:
        self._shard, self._replicas = shard, replicas
        self._thread = CallThread("sums of dense gradients")
        self._pending: deque[tuple[Future[Work | None], Tensor]] = deque()
        self._earlier: list[tuple[Tensor, Tensor]] = []  # parameters with gradients of earlier backwards
        self._end = BackwardEnd()

    def start(self, gradients: Tensor, output: Tensor, parameters: Sequence[Tensor]) -> None:
        """Start a unit's sum. Its parameters have no gradients until `finish` adds the earlier ones to the sum."""
        self._end.join((self.finish,), self.discard)
        if len(self._pending) >= MAX_SCATTERS:
            self._pending[-MAX_SCATTERS][0].result()
        while len(self._pending) >= MAX_SUMS:
            self._finish_first()
        splits = [output.numel()] * len(self._shard.ranks)
        scatter = self._shard.reduce_scatter(gradients, splits, PURPOSE)
        self._pending.append((self._thread.call(partial(self._sum_replicas, scatter, output)), output))
        for parameter in parameters:
            if parameter.grad is not None:
                self._earlier.append((parameter, parameter.grad))
                parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all sums."""
        while self._pending:
            self._finish_first()
        for parameter, earlier in cast(Any, self._earlier):
            if parameter.grad is not None:
                earlier.to_local().add_(parameter.grad.to_local())
            parameter.grad = earlier
        self._earlier.clear()

    def discard(self) -> None:
        """Drop the sums of a backward that raised."""
        while self._pending:
            self._finish_first()
        self._earlier.clear()

    @torch.no_grad()
    def _finish_first(self) -> None:
        scattered, output = self._pending.popleft()
        work = scattered.result()
        if work is not None:
            output.copy_(work.wait())

    def _sum_replicas(self, scatter: Work, output: Tensor) -> Work | None:
        output.copy_(scatter.wait())
        return None if self._replicas is None else self._replicas.all_reduce(output, PURPOSE)


@final
class _ReduceScatter(_Allocator):
    """The sum of a unit's gradients over all ranks. Torch makes views of the output, and reads none of its numbers."""

    def __init__(self, comm: Comm, sums: _GradientSums, places: Sequence[tuple[nn.Module, str]], overlap: bool) -> None:
        super().__init__(comm)
        self._sums, self._places, self._overlap = sums, places, overlap

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        parameters = [module._parameters[name] for module, name in self._places]
        # Torch copies the sum at once if the parameters have another type.
        if self._overlap and all(p is not None and p.dtype == output_tensor.dtype for p in parameters):
            self._sums.start(input_tensor, output_tensor, cast(list[Tensor], parameters))
        else:
            self._sums.start(input_tensor, output_tensor, ())
            self._sums.finish()
