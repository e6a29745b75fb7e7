"""A device that is not the host, with values, on machines without a GPU.

Tensors say that they are on `meta`, and have their numbers in memory. An operation that mixes them with tensors of the
host raises, as it would on a GPU; so what runs here copies all that it needs. Numbers that the host reads are counted.
"""

from collections import Counter
from threading import get_ident

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from rowwise.tables.ops.faults import FaultWord

DEVICE = torch.device("meta")
# Arguments of our operators that a GPU reads from the host.
HOST_ARGUMENTS = {"features", "tables", "hyper", "keys", "segments", "bounds", "slices", "messages", "limits"}
READS = {"aten::_local_scalar_dense"}
reads = Counter()  # by thread: how often the host has waited for numbers of the device
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"}


class OnDevice(torch.Tensor):
    """A tensor of the device; `inside` has its numbers."""

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inside.shape,
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=DEVICE,
        )

    def __init__(self, inside):
        self.inside = inside

    def tolist(self):
        reads[get_ident()] += 1
        return self.inside.tolist()

    def __repr__(self):
        return f"OnDevice({self.inside!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class MadeOnDevice(TorchFunctionMode):
    """Numbers of Python go to the device by a function that dispatches nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            return OnDevice(func(*args, **{**kwargs, "device": "cpu"}))
        if func is torch.Tensor.new_tensor and isinstance(args[0], OnDevice):
            return OnDevice(func(args[0].inside, *args[1:], **kwargs))
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            args = args[0], tuple(torch.tensor(x) if isinstance(x, list) else x for x in args[1])
        return func(*args, **kwargs)


class PretendGpu(TorchDispatchMode):
    """While it is entered, `to("meta")` and tensors made on `meta` are on the pretended device."""

    def __enter__(self):
        FaultWord._by_device.pop(DEVICE, None)  # that of other tests has no numbers
        self._made = MadeOnDevice()
        self._made.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._made.__exit__(*error)
        FaultWord._by_device.pop(DEVICE, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def on_host(x):
    """The numbers of a tensor."""
    return x.inside if isinstance(x, OnDevice) else x


def run(func, args, kwargs):
    schema = func._schema
    flat, _ = tree_flatten((args, kwargs))
    given = [x for x in flat if isinstance(x, torch.Tensor)]
    here = [x for x in given if isinstance(x, OnDevice)]
    target = kwargs.get("device")
    lands = bool(here) if target is None else torch.device(target) == DEVICE
    if here and schema.name not in COPIES:
        named = {one.name: x for one, x in zip(schema.arguments, args, strict=False)} | kwargs
        wrong = {name: tuple(y.shape) for name, x in named.items() for y in left_behind(func, name, x)}
        if wrong:
            raise RuntimeError(f"{schema.name} with tensors of the device, and of the host: {wrong}")
    if target is not None and lands:
        kwargs = {**kwargs, "device": "cpu"}
    elif target is not None and not here and not lands:
        return func(*args, **kwargs)
    args, kwargs = tree_map(on_host, (args, kwargs)) if here else (args, kwargs)
    out = func(*args, **kwargs)
    reads[get_ident()] += bool(here) and schema.name in READS
    if schema.name in READS or not lands:
        return out
    known = {id(x.inside): x for x in here}  # of operations in place, which return what they were given

    def moved(x):
        if not isinstance(x, torch.Tensor):
            return x
        return known[id(x)] if id(x) in known else OnDevice(x)

    return tree_map(moved, out)


def left_behind(func, name, x):
    """Tensors of the host in an argument, unless they are numbers, or read there."""
    ours = func.namespace == "rowwise" and (name in HOST_ARGUMENTS or (func._opname, name) == ("expand", "places"))
    if ours or name == "indices":  # torch takes indices from the host, too
        return
    for one in x if isinstance(x, list | tuple) else [x]:
        if isinstance(one, torch.Tensor) and not isinstance(one, OnDevice) and one.dim():
            yield one
