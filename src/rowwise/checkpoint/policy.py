"""Decides whether the next checkpoint is full or has only the rows that changed.

The policy is Check-N-Run's intermittent one: increments one after the other, and everything again when going on would
cost more than it saves. A checkpoint costs the bytes that are written, and, as often as a run has to go back to one,
those that are read: all of the chain. Early in a chain the full checkpoint is spread over few; late in it each restore
reads much. The average over a chain falls as long as the next increment costs less than the average so far, and then
it is time. Known limits: disk space is no cost of its own; a chain that is worth going on with takes at most `longest`
increments beside the full one.
"""

from collections.abc import Sequence

LONGEST = 16  # increments after a full one
RESTORES = 0.02  # of each checkpoint: a failure a day, two checkpoints an hour


def is_full_due(
    chain_bytes: Sequence[int],
    full_bytes: int,
    increment_bytes: int,
    *,
    restores: float = RESTORES,
    longest: int = LONGEST,
) -> bool:
    """Whether to save everything.

    Args:
        chain_bytes: what was written: by the full checkpoint, and by each increment since; nothing: there is none.
        full_bytes: what saving everything would write now.
        increment_bytes: what saving the rows that changed since the last one would write.
        restores: how often a checkpoint is gone back to.
        longest: as many increments as a chain has at most.
    """
    if not chain_bytes or len(chain_bytes) > longest or increment_bytes >= full_bytes:
        return True
    read = sum(chain_bytes) + increment_bytes
    return increment_bytes + restores * read > average_bytes(chain_bytes, restores)


def average_bytes(chain_bytes: Sequence[int], restores: float) -> float:
    """Bytes written and read per checkpoint of this chain so far."""
    count = len(chain_bytes)
    read = sum((count - k) * size for k, size in enumerate(chain_bytes))  # each file by all checkpoints from its own on
    return (sum(chain_bytes) + restores * read) / count
