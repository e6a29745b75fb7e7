"""How many threads torch's own operators may take for a while.

Its own file because training whose bits may not depend on threads and training of small networks both ask for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's operators on one thread: how they cut a sum among several shows in its bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
