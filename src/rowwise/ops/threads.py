"""How many threads torch's own operators may take for a while."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch's operators on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Torch's operators on one thread: how they cut a sum among several shows in its bits."""
    return torch_threads(1)
