"""Shared parts of launches: descriptors on the device, scratch memory, numbers of programs, and the fault word."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.tables.ops._triton import specialise
from rowwise.tables.ops._triton.specialise import Bucket
from rowwise.tables.ops.faults import FaultWord
from rowwise.tables.ops.layout import FeatureDescriptor, Mode, TableDescriptor
from rowwise.tables.ops.pinned import copy_to

PROGRAMS_OF_MULTIPROCESSOR = 32
TILED = {"TILE": specialise.TILE, "num_warps": specialise.TILE_WARPS}
INTERPRETED_PROGRAMS = 5  # few, as the interpreter is slow, but more than one, so that spans are shared


def begin(device: torch.device) -> Tensor:
    """The fault word of the device for the launches of an operator; raises if earlier launches have found a fault."""
    return FaultWord.of(device).begin()


def end(device: torch.device) -> None:
    """Start to copy the fault word to the host, where a later `begin` checks it."""
    FaultWord.of(device).end()


def on_device(descriptors: Tensor, device: torch.device) -> Tensor:
    """A copy of a small CPU tensor that rarely changes, cached by its content."""
    return _cached_copy(descriptors.numpy().tobytes(), descriptors.dtype, tuple(descriptors.shape), device)


@functools.lru_cache(maxsize=512)
def _cached_copy(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return copy_to(_tensor(data, dtype).view(shape), device)


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


class FeaturesOfBucket(NamedTuple):
    """The features that one launch looks up."""

    bucket: Bucket
    chosen: Tensor  # their indices, on the device
    columns: int  # largest power of two that divides the first column of each
    weighted: bool


@functools.lru_cache(maxsize=256)
def _features(data: bytes, device: torch.device) -> tuple[FeaturesOfBucket, ...]:
    descriptors = _read_features(data)
    return tuple(
        FeaturesOfBucket(
            bucket=bucket,
            chosen=torch.tensor(indices, dtype=torch.int64).to(device),
            columns=specialise.align_of(descriptors[i].column for i in indices),
            weighted=any(descriptors[i].mode == Mode.WEIGHTED for i in indices),
        )
        for bucket, indices in specialise.group_by_bucket(descriptors).items()
    )


def read_features(features_FC: Tensor) -> tuple[FeatureDescriptor, ...]:
    """The rows of a tensor of features on the CPU, cached by its content."""
    return _read_features(features_FC.numpy().tobytes())


@functools.lru_cache(maxsize=256)
def _read_features(data: bytes) -> tuple[FeatureDescriptor, ...]:
    return tuple(FeatureDescriptor.read(_tensor(data, torch.int64).view(-1, len(FeatureDescriptor._fields))))


def features_by_bucket(features_FC: Tensor, device: torch.device) -> tuple[FeaturesOfBucket, ...]:
    return _features(features_FC.numpy().tobytes(), device)


class TableOrder(NamedTuple):
    """Tables in the order of their buckets."""

    first_T: Tensor  # number of the first row of each table
    starts_K1: Tensor  # number of the first row of each bucket, and the number of rows
    rows: int  # number of all rows


@functools.lru_cache(maxsize=256)
def _tables(data: bytes, device: torch.device) -> tuple[tuple[Bucket, ...], TableOrder]:
    descriptors = TableDescriptor.read(_tensor(data, torch.int64).view(-1, len(TableDescriptor._fields)))
    buckets = specialise.group_by_bucket(descriptors)
    order = [index for indices in buckets.values() for index in indices]
    rows = torch.tensor([0, *(descriptors[index].rows for index in order)], dtype=torch.int64).cumsum(0)
    sizes = torch.tensor([0, *map(len, buckets.values())]).cumsum(0)
    order_T = torch.tensor(order, dtype=torch.int64)
    first_T, starts_K1 = rows[order_T.argsort()], rows[sizes]
    return tuple(buckets), TableOrder(first_T.to(device), starts_K1.to(device), rows=int(rows[-1]))


def tables_by_bucket(tables_TC: Tensor, device: torch.device) -> tuple[tuple[Bucket, ...], TableOrder]:
    """The buckets, and the tables in their order."""
    return _tables(tables_TC.numpy().tobytes(), device)


def over(count: int, tile: int = specialise.TILE) -> tuple[int]:
    """The grid of programs that take a tile each."""
    return (-(-count // tile),)


def empty_numbers(device: torch.device, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)


_memory: dict[tuple[str, torch.device], Tensor] = {}


def grown(name: str, floats: int, device: torch.device) -> Tensor:
    """Scratch memory of at least `floats` floats for the kernels of one stream, one at a time; it only grows."""
    memory = _memory.get((name, device))
    if memory is None or memory.numel() < floats:
        memory = _memory[name, device] = torch.full((floats,), float("nan"), device=device)
    return memory


@functools.cache
def capability_of(device: torch.device) -> int:
    """90 for sm_90; 0 for a device that is not NVIDIA's."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@functools.cache
def programs_of(device: torch.device) -> int:
    """Number of programs that are resident on the device at once."""
    if device.type == "cpu":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_OF_MULTIPROCESSOR


def shared_programs(count: int, tile: int, device: torch.device, groups: int = 1) -> int:
    """Number of programs of each group, which share the tiles of `count` items."""
    return max(1, min(-(-count // tile), programs_of(device) // groups))
