"""The state of torch's random numbers, which one thread reads or sets at a time.

Torch holds the lock of a generator while it makes the tensor of its state. Python may collect garbage meanwhile, and
let another thread run. If that one waits for the generator, it keeps the lock of Python, and both wait for ever.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_one_thread = threading.Lock()


def random_state() -> Tensor:
    """The state of the CPU's generator."""
    with _one_thread:
        return torch.get_rng_state()


def set_random_state(state: Tensor) -> None:
    with _one_thread:
        torch.set_rng_state(state)


def seed_draws(seed: int) -> None:
    """Seed the generators of all devices."""
    with _one_thread:
        torch.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of the current GPU for the with block, then restore their states."""
    on_gpu = torch.cuda.is_initialized()
    fork = torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else [])
    with _one_thread:
        fork.__enter__()
        # Not torch.manual_seed: it queues a call for each device type that is not initialised, a millisecond each.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        with _one_thread:
            fork.__exit__(None, None, None)
