"""Files that the first rank writes to a run's folder before training: recipe, transforms, code, machine and plan."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from time import time

import msgspec
import torch
from torch import nn

from rowwise.base.textfile import read_bytes
from rowwise.ingest.transform import sources, to_json
from rowwise.ingest.warehouse.popularity import log_use
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import all_gather_uneven
from rowwise.parallel.plan import Plan
from rowwise.recipes.code import file_of
from rowwise.recipes.compose import parts_of
from rowwise.recipes.hosts import ENVIRONMENT, NETWORK, NetworkOfRun
from rowwise.recipes.id_maps import copy_maps
from rowwise.recipes.label_facts import inspect_labels
from rowwise.recipes.machine import Environment, NativeLibrary
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.rows import RowSelection
from rowwise.recipes.text import RECIPE, write
from rowwise.recipes.unused_keys import find_notes
from rowwise.train.run_folder import RunFolder, now
from rowwise.train.snapshot import WarmStartMatch

PLAN, DISK, TRANSFORMS, TOWERS = "plan.json", "disk", "transforms.json", "towers.json"


def write_start(folder: RunFolder, resolved: ResolvedRecipe, model: nn.Module, match: WarmStartMatch | None) -> None:
    """Write the files of a new run that a resume does not rewrite; `match`: weights of its warm start."""
    recipe = resolved.recipe
    folder.write(RECIPE, write(copy_maps(recipe, folder.path), defaults=True))
    if recipe.transforms:  # includes the source of user functions, so that serving needs only this file
        folder.write(TRANSFORMS, to_json(resolved.transforms).decode())
    if resolved.wire_choice is not None:
        folder.log(f"wire {resolved.wire_choice.text()}")
    _log_columns(resolved)
    write_towers(folder, recipe, model, finished=False)
    if (path := file_of(recipe.model)) is not None:
        (folder.path / "code").mkdir()
        shutil.copyfile(path, folder.path / "code" / path.name)
    for line in match.lines() if match else ():
        folder.log(line)


def write_environment(
    folder: RunFolder,
    resolved: ResolvedRecipe,
    comm: Comm,
    plan: Plan,
    network: NetworkOfRun | None,
    notes: Sequence[str],
) -> None:
    """Write env.json, plan.json and warnings; a resume rewrites them, as its ranks may differ."""
    topology, wire = comm.topology, msgspec.to_builtins(resolved.recipe.wire_types)
    ranks = {"started": now(), "ranks": topology.world, "hosts": topology.hosts, "wire": wire}
    machine = {**asdict(Environment.read("passive")), **asdict(NativeLibrary.read())}
    ordered = {} if network is None else {"network": msgspec.to_builtins(network.ordered)}
    folder.write_json(ENVIRONMENT, {**machine, **ranks, **ordered})
    if network is not None:
        folder.log(f"{now()} {network.ordered.in_words}")
        for line in network.ordered.notes:
            folder.warn(line)
        if network.probed is not None:
            folder.write(NETWORK, network.probed.to_json() + "\n")
    folder.write(PLAN, plan.to_json() + "\n")
    for line in (*find_notes(resolved, topology), *notes):
        folder.warn(line)


def write_towers(folder: RunFolder, recipe: Recipe, model: nn.Module, *, finished: bool) -> None:
    facts = parts_of(recipe.model).facts(model, chosen=finished)
    if facts is not None:
        folder.write_json(TOWERS, facts)


def log_start(folder: RunFolder, comm: Comm, step: int) -> None:
    """Log that all ranks begin; a collective."""
    topology = comm.topology
    pids = [int(pid) for pid in all_gather_uneven(comm, torch.tensor([os.getpid()]), "processes")]
    if comm.rank == 0:
        folder.log(f"{now()} training from step {step} on")
        if topology.world > 1:
            hosts = f"{topology.hosts} hosts" if topology.hosts > 1 else "1 host"
            folder.log(f"{now()} {topology.world} ranks on {hosts}, processes {' '.join(map(str, pids))}")


def label_notes(resolved: ResolvedRecipe, rows: RowSelection) -> tuple[str, ...]:
    """A warning if the first rows of the files have no label."""
    if not resolved.columns.labels or resolved.rows.dataset.ceiling is not None:
        return ()
    note = inspect_labels(rows, resolved.columns, resolved.tables, resolved.transforms).note
    return () if note is None else (note,)


def _log_columns(resolved: ResolvedRecipe) -> None:
    """Log which columns of a warehouse the run reads, so that `data convert` can sort columns by use."""
    kind, _, path = resolved.recipe.data.dataset.partition(":")
    if kind == "parquet":
        log_use(path, sources(resolved.transforms, resolved.columns.names), time())


def write_resumed(folder: RunFolder, recipe: Recipe, *, changed: bool) -> None:
    """Write the recipe if it has changed; warn if the file of a user's model has since the run began."""
    if changed:
        folder.write(RECIPE, write(recipe, defaults=True))
    if (path := file_of(recipe.model)) is not None:
        copy = folder.path / "code" / path.name
        if path.is_file() and copy.is_file() and read_bytes(path) != read_bytes(copy):
            folder.warn(f"{path} has changed since the run began; the old version is {copy}")
