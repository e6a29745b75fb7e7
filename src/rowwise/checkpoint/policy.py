"""Decides whether the next checkpoint is full or an increment: Check-N-Run's intermittent policy.

A chain is a full checkpoint and the increments after it. A checkpoint costs the bytes written, plus the expected bytes
that restores read: the whole chain. Early in a chain few increments share the cost of the full checkpoint; late in it
each restore reads much. The average cost over the chain falls while the next increment costs less than the average so
far; then a full checkpoint is due. Known limits: disk space has no cost; a chain has at most `longest` increments.
"""

from collections.abc import Sequence

LONGEST = 16  # max. increments in a chain
RESTORES = 0.02  # per checkpoint: a failure a day, two checkpoints an hour


def is_full_due(
    chain_bytes: Sequence[int],
    full_bytes: int,
    increment_bytes: int,
    *,
    restores: float = RESTORES,
    longest: int = LONGEST,
) -> bool:
    """Whether the next checkpoint is a full one.

    Args:
        chain_bytes: bytes written by the full checkpoint and by each increment since; empty without one.
        full_bytes: bytes of a full checkpoint now.
        increment_bytes: bytes of an increment now.
        restores: expected restores per checkpoint.
        longest: max. increments in a chain.
    """
    if not chain_bytes or len(chain_bytes) > longest or increment_bytes >= full_bytes:
        return True
    read = sum(chain_bytes) + increment_bytes
    return increment_bytes + restores * read > average_bytes(chain_bytes, restores)


def average_bytes(chain_bytes: Sequence[int], restores: float) -> float:
    """The mean cost of the chain's checkpoints, written and read."""
    count = len(chain_bytes)
    read = sum((count - k) * size for k, size in enumerate(chain_bytes))  # checkpoint k reads files 0 to k
    return (sum(chain_bytes) + restores * read) / count
