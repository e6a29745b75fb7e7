"""Collects the state of model, optimizers and generators as named tensors, and restores it.

`checkpoint` knows files and nothing of models; this module knows the names. Names are those of the model, without
indices or ranks. So a model with a new layer or table, or under another plan, can still load the tensors it knows:

    model/<name>                       parameters and buffers; rows of tables as they are stored
    rows/<module>/<table>/<slot>       optimizer state of rows; `step` counts a table's updates
    rows/<module>/<table>/id           of managed tables: the id of each row, and more state of its policy
    optimizer/<which>/<name>/<slot>    state of torch's optimizers
    rng/torch                          state of torch's generator, a row per rank
    held/<bucket>                      error feedback of dense gradients (lossy wires), a row per rank

Names with other prefixes are other tensors of a run (`recorder/`, `soft/`) and are ignored here. Rows saved in another
row type are rounded to the table's. Buffers may differ between ranks; those of rank 0 are saved. On another number of
ranks, rank 0 continues with its random numbers, the others get seeds derived from them, and error feedback starts at
zero.
"""

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.optim import Optimizer

from rowwise.base.errors import CheckpointError
from rowwise.base.inside import number_in
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import Span, TensorEntry
from rowwise.checkpoint.read import Checkpoint, reading_data
from rowwise.checkpoint.tables import (
    is_needed_for_lookups,
    shards_to_read,
    shards_to_write,
    table_modules,
    tensor_entries,
)
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.shard.embeddings import AnyEmbeddings
from rowwise.tables.spec import Value
from rowwise.train.dense_parallel import is_dtensor, local_rows, reshard
from rowwise.train.draws import random_state, seed_draws, set_random_state
from rowwise.train.id_maps import check_maps

Optimizers = Mapping[str, Optimizer]
PREFIXES = ("model/", "rows/", "optimizer/", "rng/", "held/")
NO_MODEL = ("optimizer/", "rng/", "held/", "soft/")
Residuals = dict[int, Tensor]  # see `CodedSum.residuals`
RANDOM = "rng/torch"
SLOTS = {"AdamW": ("step", "exp_avg", "exp_avg_sq"), "Adagrad": ("step", "sum")}  # state required by torch's step


class SavedOptimizer(Value, frozen=True):
    """A torch optimizer in a checkpoint, without its tensors."""

    groups: tuple[dict[str, Any], ...]
    numbers: dict[str, dict[str, int | float | bool | None]] = msgspec.field(default_factory=dict)
    kind: str | None = None  # class name; older versions did not save it


def collect(
    model: nn.Module, optimizers: Optimizers, comm: Comm | None = None, residuals: Residuals | None = None
) -> tuple[list[LocalShard], dict[str, Any]]:
    """This rank's local shards (views: save them before the next step), and the manifest's data; a collective."""
    comm = comm or solo()
    reshard(model)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    shards = [
        _local_shard(f"model/{name}", tensor, shared=name not in buffers)
        for name, tensor in _dense_tensors(model).items()
        if (comm.rank == 0 or name not in buffers) and _writes(tensor, comm)
    ]
    shards += [shard for path, module in table_modules(model) for shard in shards_to_write(path, module)]
    data: dict[str, Any] = {}
    for which, optimizer in optimizers.items():
        names = _names(model, optimizer, which)
        # Includes learning rates, which a schedule may have changed.
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, state in optimizer.state.items():
            for slot, value in state.items():
                if isinstance(value, Tensor):
                    if _writes(value, comm):
                        shards.append(_local_shard(f"optimizer/{which}/{names[parameter]}/{slot}", value))
                else:
                    numbers.setdefault(names[parameter], {})[slot] = value
        data[which] = {"kind": type(optimizer).__name__, "groups": groups, "numbers": numbers}
    per_rank = {RANDOM: random_state()} | {f"held/{bucket}": x for bucket, x in (residuals or {}).items()}
    for name, tensor in per_rank.items():
        shape, rows = (len(comm.ranks), *tensor.shape), (comm.rank, comm.rank + 1)
        shards.append(LocalShard(name=name, tensor=tensor.unsqueeze(0), shape=shape, rows=rows))
    return shards, {"optimizers": data}


def restore(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizers: Optimizers,
    comm: Comm | None = None,
    residuals: Residuals | None = None,
) -> None:
    """Restore a run bit-exactly; raises if the model and the checkpoint do not have the same tensors."""
    reshard(model)
    unused = {n for n in checkpoint.names() if n.startswith(PREFIXES) and not n.startswith(("rng/", "held/"))}
    unused -= _fill_model(checkpoint, model, state=True)
    for which, optimizer in optimizers.items():
        unused -= _restore_optimizer(checkpoint, model, which, optimizer)
    _restore_per_rank(checkpoint, comm or solo(), {} if residuals is None else residuals)
    if unused:
        raise CheckpointError(
            f"{checkpoint.folder} has tensors that this model does not have: {', '.join(sorted(unused)[:5])}",
            "the model that was saved",
            hint="warm-start with init_from instead",
        )


def restore_model(checkpoint: Checkpoint, model: nn.Module, *, without: Collection[str] = ()) -> None:
    """Restore the model's weights only, for inference; tensors of `without` keep their values."""
    _fill_model(checkpoint, model, state=False, without=without)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartMatch:
    """The tensors that a warm start took over, by name."""

    loaded: list[str] = field(default_factory=list)
    grown: dict[str, str] = field(default_factory=dict)  # first rows loaded; numbers of rows
    rounded: dict[str, str] = field(default_factory=dict)  # loaded from another row type; both types
    skipped: dict[str, str] = field(default_factory=dict)  # in model and checkpoint, but not loaded; reason
    new: list[str] = field(default_factory=list)  # in the model only; they keep their initial values
    unused: list[str] = field(default_factory=list)  # in the checkpoint only

    def lines(self) -> list[str]:
        return [
            f"{len(self.loaded)} tensors taken over",
            *(f"grown: {name}: {rows}" for name, rows in self.grown.items()),
            *(f"rounded: {name}: {types}" for name, types in self.rounded.items()),
            *(f"not taken over: {name}: {reason}" for name, reason in self.skipped.items()),
            *(f"new: {name}" for name in self.new),
            *(f"not in this model: {name}" for name in self.unused),
        ]


def warm_start(checkpoint: Checkpoint, model: nn.Module) -> WarmStartMatch:
    """Load the tensors that match by name and shape; of a table that has grown, the first rows and their state."""
    check_maps(checkpoint, model)
    reshard(model)
    match, saved = WarmStartMatch(), checkpoint.manifest.tensors
    dense = {f"model/{name}": _local_shard(f"model/{name}", x).entry for name, x in _dense_tensors(model).items()}
    rows: dict[str, TensorEntry] = {}
    for path, module in table_modules(model):
        rows |= tensor_entries(path, module)
    for name, entry in (dense | rows).items():
        if name not in saved:
            match.new.append(name)
        else:
            _match(match, name, saved[name], entry, grows=name in rows)
    loaded = {*match.loaded, *match.grown}
    for shard in _model_parts(checkpoint, model, state=True):
        if shard.name in loaded:
            entry = saved[shard.name]
            end = max(shard.rows[0], min(shard.rows[1], entry.rows))
            checkpoint.fill(replace(shard.cut(shard.rows[0], end), shape=entry.shape))
    known = dense | rows
    match.unused.extend(n for n in saved if n not in known and not n.startswith(NO_MODEL))
    return match


def _match(match: WarmStartMatch, name: str, saved: TensorEntry, wanted: TensorEntry, *, grows: bool) -> None:
    """Record in `match` how the tensor `saved` of a checkpoint is loaded into the tensor `wanted` of the model."""
    tables = saved.row_type is not None and wanted.row_type is not None
    if not tables and saved.dtype != wanted.dtype:
        match.skipped[name] = f"{saved.dtype} saved, {wanted.dtype} in this model"
    elif _fits(saved, wanted):
        match.loaded.append(name)
    elif (
        grows
        and saved.shape
        and wanted.shape
        and _fits(structs.replace(saved, shape=(wanted.rows, *saved.shape[1:])), wanted)
    ):
        match.grown[name] = f"{min(wanted.rows, saved.rows)} of {wanted.rows} rows, {saved.rows} saved"
    else:
        match.skipped[name] = f"{saved.shape} saved, {wanted.shape} in this model"
        return
    if tables and saved.row_type != wanted.row_type:
        match.rounded[name] = f"{saved.row_type} saved, {wanted.row_type} in this model"


def _fits(saved: TensorEntry, wanted: TensorEntry) -> bool:
    """Whether the shapes agree."""
    # Optimizer state of one number per row is saved once per column block where columns of a row were on several ranks.
    blocks = wanted.row_type is None and len(wanted.shape) == 1 and len(saved.shape) == 2
    return saved.shape[: 1 if blocks else None] == wanted.shape


def _fill_model(checkpoint: Checkpoint, model: nn.Module, *, state: bool, without: Collection[str] = ()) -> set[str]:
    """Fill this rank's shard of the model; raises if the checkpoint lacks a tensor. Returns all names of the model."""
    check_maps(checkpoint, model)
    names = check_weights(checkpoint, model, state=state)
    parts, left_out = _model_parts(checkpoint, model, state=state), _missing_optional(checkpoint, model) | set(without)
    checkpoint.fill_all(shard for shard in parts if shard.name not in left_out)
    return names


def check_weights(checkpoint: Checkpoint, model: nn.Module, *, state: bool = False) -> set[str]:
    """Raise unless a checkpoint has the weights of a model, which may be on the meta device; returns their names."""
    entries: dict[str, TensorEntry] = {}
    for path, module in table_modules(model):
        tables = tensor_entries(path, module)
        entries |= {name: entry for name, entry in tables.items() if state or is_needed_for_lookups(name)}
    dense = {f"model/{name}": LocalShard.whole(f"model/{name}", x).entry for name, x in _dense_tensors(model).items()}
    entries |= {name: entry for name, entry in dense.items() if name not in _missing_optional(checkpoint, model)}
    for name, wanted in entries.items():
        # Checked on every rank, also for tensors of other ranks: all must raise, or none.
        saved = checkpoint.entry(name)
        if not _fits(saved, wanted):
            raise CheckpointError(
                f"{checkpoint.folder}: {name}: got {saved.shape} of {saved.dtype}",
                f"{wanted.shape} of {wanted.dtype}",
                hint="warm-start with init_from instead",
            )
    return {*entries}


def _missing_optional(checkpoint: Checkpoint, model: nn.Module) -> set[str]:
    """Optional tensors missing in this checkpoint of an earlier version; they keep their values."""
    modules = model.named_modules(remove_duplicate=False)
    named = ((path, name) for path, module in modules for name in getattr(module, "optional_state", ()))
    return {f"model/{path}.{name}" if path else f"model/{name}" for path, name in named} - set(checkpoint.names())


def _model_parts(checkpoint: Checkpoint, model: nn.Module, *, state: bool) -> list[LocalShard]:
    """This rank's local shards of the model, with or without the optimizer state of rows."""
    shards = [_local_shard(f"model/{name}", tensor) for name, tensor in _dense_tensors(model).items()]
    for path, module in table_modules(model):
        tables = shards_to_read(path, module, checkpoint.manifest.tensors)
        shards += [shard for shard in tables if state or is_needed_for_lookups(shard.name)]
    return shards


def _restore_per_rank(checkpoint: Checkpoint, comm: Comm, residuals: Residuals) -> None:
    row = comm.rank, comm.rank + 1
    residuals.clear()
    if checkpoint.entry(RANDOM).rows == len(comm.ranks):
        _set_random(checkpoint, row)
        names = [name for name in checkpoint.names() if name.startswith("held/")]
        for name in names:
            bucket = number_in(name.removeprefix("held/"))
            if bucket is None:
                raise CheckpointError(f"{checkpoint.folder}: tensor {name!r}", "the number of a bucket after held/")
            residuals[bucket] = checkpoint.load(name, row)[0]
        return
    if comm.rank == 0:
        _set_random(checkpoint, (0, 1))
    else:
        first = checkpoint.load(RANDOM, (0, 1))[0]
        seed_draws(zlib.crc32(first.numpy().data, comm.rank))


def _set_random(checkpoint: Checkpoint, row: Span) -> None:
    try:
        set_random_state(checkpoint.load(RANDOM, row)[0])
    except (RuntimeError, TypeError):
        raise CheckpointError(
            f"{checkpoint.folder}: {RANDOM}: got {checkpoint.entry(RANDOM).shape} of {checkpoint.entry(RANDOM).dtype}",
            "a tensor of torch.get_rng_state()",
        ) from None


def _check_slots(where: str, kind: str, parameter: Tensor, state: Mapping[str, object]) -> None:
    """Raise for state that torch's optimizer step would fail on."""
    missing = [slot for slot in SLOTS.get(kind, ()) if not isinstance(state.get(slot), Tensor)]
    if missing and state:
        raise CheckpointError(f"{where}{missing[0]} is missing; {kind} needs it to continue")
    for slot, x in state.items():
        wanted = ((), torch.float32) if slot == "step" else (tuple(parameter.shape), parameter.dtype)
        if isinstance(x, Tensor) and slot in SLOTS.get(kind, ()) and (tuple(x.shape), x.dtype) != wanted:
            raise CheckpointError(f"{where}{slot}: got {tuple(x.shape)} of {x.dtype}", f"{wanted[0]} of {wanted[1]}")


def _restore_optimizer(checkpoint: Checkpoint, model: nn.Module, which: str, optimizer: Optimizer) -> set[str]:
    with reading_data(checkpoint.folder):
        known = msgspec.convert(checkpoint.manifest.data.get("optimizers", {}), dict[str, SavedOptimizer])
    data, kind = known.get(which), type(optimizer).__name__
    if data is None or len(data.groups) != len(optimizer.param_groups):
        groups = len(optimizer.param_groups)
        raise CheckpointError(f"{checkpoint.folder} has no state of optimizer {which!r} with {groups} parameter groups")
    if data.kind is not None and data.kind != kind:
        raise CheckpointError(
            f"{checkpoint.folder}: optimizer {which!r} is {data.kind[:80]}, not {kind}",
            hint="resume with the saved optimizer, or warm-start with init_from",
        )
    for group, saved in zip(optimizer.param_groups, data.groups, strict=True):
        for name in saved.keys() & group.keys() - {"params"}:
            value = saved[name]  # JSON has no tuples: a pair of betas comes back as a list
            group[name] = tuple(value) if isinstance(value, list) and isinstance(group[name], tuple) else value
    # Fused steps count on the parameters' device, others on the CPU.
    on_device = bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
    used: set[str] = set()
    for parameter, name in _names(model, optimizer, which).items():
        prefix = f"optimizer/{which}/{name}/"
        slots = [n for n in checkpoint.names() if n.startswith(prefix)]
        state = {n.removeprefix(prefix): _load_slot(checkpoint, n, parameter) for n in slots}
        state |= data.numbers.get(name, {})
        _check_slots(f"{checkpoint.folder}: {prefix}", kind, parameter, state)
        if state:
            optimizer.state[parameter] = {
                k: v.to(parameter.device) if isinstance(v, Tensor) and (v.dim() or on_device) else v
                for k, v in state.items()
            }
        used.update(slots)
    return used


def _local_shard(name: str, tensor: Tensor, *, shared: bool = True) -> LocalShard:
    """A whole tensor, or this rank's rows of a sharded tensor."""
    if not is_dtensor(tensor):
        return LocalShard.whole(name, tensor, shared=shared)
    part = local_rows(tensor)
    return LocalShard(name=name, tensor=part.tensor, shape=tuple(tensor.shape), rows=part.rows)


def _writes(tensor: Tensor, comm: Comm) -> bool:
    """Whether this rank saves its part of a tensor; of replicated shards, those of the first ranks are saved."""
    if not is_dtensor(tensor):
        return True
    part = local_rows(tensor)
    return comm.rank < part.shards and len(part.tensor) > 0


def _load_slot(checkpoint: Checkpoint, name: str, parameter: Tensor) -> Tensor:
    """Optimizer state of a parameter, sharded like the parameter."""
    if not is_dtensor(parameter) or checkpoint.entry(name).shape != tuple(parameter.shape):
        return checkpoint.load(name)
    loaded = torch.zeros_like(parameter, requires_grad=False)
    checkpoint.fill(_local_shard(name, loaded))
    return loaded


def _dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, without those of table modules."""
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, AnyEmbeddings):  # not `state_dict()`: rows on disk have none
            module._save_to_state_dict(tensors, f"{path}." if path else "", keep_vars=False)
    return tensors


def _names(model: nn.Module, optimizer: Optimizer, which: str) -> dict[Tensor, str]:
    known: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    names: dict[Tensor, str] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise CheckpointError(f"optimizer {which!r} has a parameter that is not the model's")
            names[parameter] = known[parameter]
    return names
