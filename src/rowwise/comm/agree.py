"""All ranks learn that one is in trouble: wrong input on one rank ends the step on all of them, with its reason.

Its own file because it needs nothing but the seam. Gives up: one small all-gather each time, also when all is well.
"""

import torch

from rowwise.comm.seam import Comm
from rowwise.errors import AgreedError

LONGEST_BYTES = 1000  # of a rank's reason


def agree(comm: Comm, trouble: BaseException | None, where: str) -> None:
    """Called by all ranks; returns if none has trouble. A rank that has raises its own, the others an `AgreedError`."""
    text = b"" if trouble is None else f"{type(trouble).__name__}: {trouble}".encode()[:LONGEST_BYTES]
    lengths_W = comm.all_gather(torch.tensor([len(text)]), (1,) * len(comm.ranks), "agree").wait().tolist()
    if not any(lengths_W):
        return
    texts = comm.all_gather(torch.tensor(list(text), dtype=torch.uint8), lengths_W, "agree").wait()
    if trouble is not None:
        raise trouble
    reasons = [bytes(t.tolist()).decode(errors="replace") for t in texts.split(lengths_W)]
    said = "; ".join(f"rank {r} ({where}): {t}" for r, t in zip(comm.ranks, reasons, strict=True) if t)
    raise AgreedError(said, frozenset(t.partition(":")[0] for t in reasons if t))
