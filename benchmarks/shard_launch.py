"""Stands in for `rowwise.comm.launch` until there is one: enough of it for TorchRec's side."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import distributed


class Place(NamedTuple):
    rank: int
    ranks: tuple[int, ...]


def run_processes(world: int, function: Callable[..., Any], *args: Any, shared_memory: bool = False) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    ranks = tuple(range(world))
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    more = (results, store.port, function)
    processes = [context.Process(target=_run, args=(*more, Place(r, ranks), args)) for r in ranks]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in ranks)
    for process in processes:
        process.join()
    failed = [f"rank {rank}: {result}" for rank, result in found.items() if isinstance(result, BaseException)]
    if failed:
        raise RuntimeError("; ".join(failed))
    return [found[rank] for rank in ranks]


def _run(results: Any, port: int, function: Callable[..., Any], place: Place, args: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = distributed.TCPStore("127.0.0.1", port, is_master=False)
        distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=len(place.ranks))
        results.put((place.rank, function(place, *args)))
    except BaseException as error:
        results.put((place.rank, RuntimeError(repr(error))))
        raise
