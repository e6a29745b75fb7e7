"""The state of torch's random generators, behind a lock: one thread reads or sets it at a time.

Lock order: torch holds a generator's lock while it allocates the tensor of its state. Python may collect garbage there
and switch threads. A thread that then waits for the generator holds the GIL, and both threads deadlock.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_lock = threading.Lock()


def random_state() -> Tensor:
    """The state of the CPU's generator."""
    with _lock:
        return torch.get_rng_state()


def set_random_state(state: Tensor) -> None:
    with _lock:
        torch.set_rng_state(state)


def seed_draws(seed: int) -> None:
    """Seed the generators of all devices."""
    with _lock:
        torch.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of the current GPU for the with block, then restore their states."""
    on_gpu = torch.cuda.is_initialized()
    fork = torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else [])
    with _lock:
        fork.__enter__()
        # Not torch.manual_seed: it queues a call for each device type that is not initialised, a millisecond each.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        with _lock:
            fork.__exit__(None, None, None)
