"""Everything that a training run has to remember, as named tensors and plain data, and back.

Apart from the checkpoint, which knows files and nothing of models. Names are those of the model, never numbers, so that
a model that gained a layer or a table can still take what it knows:

    model/<name>                       parameters and buffers; rows of tables as they are stored
    rows/<module>/<table>/<slot>       optimizer state of rows; `step` counts a table's updates
    optimizer/<which>/<name>/<slot>    state of torch's optimizers
    rng/torch                          torch's random numbers

What else a run saves has names that begin otherwise, and is left to whoever saved it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowwise.checkpoint.read import Checkpoint
from rowwise.embedding import Embeddings
from rowwise.errors import CheckpointError

Optimizers = Mapping[str, Optimizer]
OURS = ("model/", "rows/", "optimizer/", "rng/")


def collect(model: nn.Module, optimizers: Optimizers) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (views, not copies: save them before the next step) and data of a run."""
    tensors = {f"model/{name}": x for name, x in model.state_dict().items()}
    tensors |= dict(_row_state(model))
    data: dict[str, Any] = {}
    for which, optimizer in optimizers.items():
        names = _names(model, optimizer, which)
        # Of a group everything but its parameters: rates that a schedule has moved are part of the state.
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, state in optimizer.state.items():
            for slot, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{which}/{names[parameter]}/{slot}"] = value
                else:
                    numbers.setdefault(names[parameter], {})[slot] = value
        data[which] = {"kind": type(optimizer).__name__, "groups": groups, "numbers": numbers}
    tensors["rng/torch"] = torch.get_rng_state()
    return tensors, {"optimizers": data}


def restore(checkpoint: Checkpoint, model: nn.Module, optimizers: Optimizers) -> None:
    """Put a run back exactly where it was; every name has to be there, and nothing may be left over."""
    left = {name for name in checkpoint.names() if name.startswith(OURS)}
    left -= _copy_all(checkpoint, [*_model_tensors(model), *_row_state(model)])
    for which, optimizer in optimizers.items():
        left -= _restore_optimizer(checkpoint, model, which, optimizer)
    torch.set_rng_state(checkpoint.load("rng/torch"))
    left.discard("rng/torch")
    if left:
        raise CheckpointError(f"{checkpoint.folder} holds what this model does not: {', '.join(sorted(left)[:5])}")


def restore_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Put the model where it was, for use: no optimizer and no random numbers."""
    _copy_all(checkpoint, _model_tensors(model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a warm start took over, by name."""

    loaded: list[str] = field(default_factory=list)
    grown: dict[str, str] = field(default_factory=dict)  # some rows taken over: how many of how many
    skipped: dict[str, str] = field(default_factory=dict)  # in both, and why not
    new: list[str] = field(default_factory=list)  # in the model only: keep their initial values
    unused: list[str] = field(default_factory=list)  # in the checkpoint only

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{len(self.loaded)} tensors taken over",
            *(f"grown: {name}: {how}" for name, how in self.grown.items()),
            *(f"not taken over: {name}: {why}" for name, why in self.skipped.items()),
            *(f"new: {name}" for name in self.new),
            *(f"not in this model: {name}" for name in self.unused),
        ]


def warm_start(checkpoint: Checkpoint, model: nn.Module) -> Match:
    """Take over what matches by name: equal shapes whole, tables that have grown their first rows, with their state."""
    found = Match()
    mine = dict([*_model_tensors(model), *_row_state(model)])
    tables = {f"model/{_join(path, t.name)}" for path, m in _embeddings(model) for t in m.tables}
    for name, tensor in mine.items():
        if name not in checkpoint.manifest.tensors:
            found.new.append(name)
            continue
        entry = checkpoint.entry(name)
        rows = min(len(tensor), entry.shape[0]) if tensor.dim() and entry.shape else 0
        if entry.dtype != str(tensor.dtype).removeprefix("torch."):
            found.skipped[name] = f"{entry.dtype} there, {tensor.dtype} here"
        elif entry.shape == tuple(tensor.shape):
            checkpoint.copy_into(tensor, name)
            found.loaded.append(name)
        elif (name in tables or name.startswith("rows/")) and entry.shape[1:] == tuple(tensor.shape[1:]):
            checkpoint.copy_into(tensor[:rows], name)
            found.grown[name] = f"{rows} of {len(tensor)} rows, {entry.shape[0]} there"
        else:
            found.skipped[name] = f"{entry.shape} there, {tuple(tensor.shape)} here"
    found.unused.extend(n for n in checkpoint.names() if n not in mine and not n.startswith(("optimizer/", "rng/")))
    return found


def _copy_all(checkpoint: Checkpoint, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Fill the tensors, each of which has to be there just so; returns their names."""
    names: set[str] = set()
    for name, tensor in tensors:
        entry = checkpoint.entry(name)
        if entry.shape != tuple(tensor.shape) or entry.dtype != str(tensor.dtype).removeprefix("torch."):
            got, want = f"{entry.shape} of {entry.dtype}", f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise CheckpointError(f"{checkpoint.folder}: {name}: got {got}, want {want}; start from it instead")
        checkpoint.copy_into(tensor, name)
        names.add(name)
    return names


def _restore_optimizer(checkpoint: Checkpoint, model: nn.Module, which: str, optimizer: Optimizer) -> set[str]:
    """Returns the names that it took."""
    data = checkpoint.manifest.data.get("optimizers", {}).get(which)
    if data is None or len(data["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(f"{checkpoint.folder} has no state of optimizer {which!r} with as many groups")
    kind = type(optimizer).__name__
    if data.get("kind", kind) != kind:
        want = "resume with that one, or start from the checkpoint instead"
        raise CheckpointError(f"{checkpoint.folder}: optimizer {which!r} is {data['kind']}, not {kind}: {want}")
    for group, saved in zip(optimizer.param_groups, data["groups"], strict=True):
        # JSON has no tuples: a pair of betas comes back as a list.
        group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved.items()})
    taken: set[str] = set()
    for parameter, name in _names(model, optimizer, which).items():
        prefix = f"optimizer/{which}/{name}/"
        slots = [n for n in checkpoint.names() if n.startswith(prefix)]
        state = {n.removeprefix(prefix): checkpoint.load(n) for n in slots}
        state |= data["numbers"].get(name, {})
        if state:
            optimizer.state[parameter] = {
                k: v.to(parameter.device) if isinstance(v, Tensor) and v.dim() else v for k, v in state.items()
            }
        taken.update(slots)
    return taken


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        yield f"model/{name}", tensor


def _row_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in _embeddings(model):
        for table, slots in module.optimizer_state().items():
            for slot, tensor in slots.items():
                yield f"rows/{_join(path, table)}/{slot}", tensor


def _embeddings(model: nn.Module) -> Iterator[tuple[str, Embeddings]]:
    for path, module in model.named_modules():
        if isinstance(module, Embeddings):
            yield path, module


def _join(path: str, table: str) -> str:
    return f"{path}.{table}" if path else table


def _names(model: nn.Module, optimizer: Optimizer, which: str) -> dict[Tensor, str]:
    known: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    names: dict[Tensor, str] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise CheckpointError(f"optimizer {which!r} has a parameter that is not the model's")
            names[parameter] = known[parameter]
    return names
