"""Assigns rows of tensors shared by all ranks to writers, so that all write about the same number of bytes.

Known limits: a tensor is cut wherever a rank's share ends, which may make more chunks than necessary.
"""

from collections.abc import Sequence

MIN_CHUNK_bytes = 1 << 20  # min. size of a chunk, except of smaller tensors


def assign_rows(sizes: Sequence[tuple[int, int]], loads_W: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """For each tensor of (rows, bytes per row): its cuts, as (rank, first row, end row).

    `loads_W`: bytes of each rank's own shards.
    """
    budgets_W = _write_budgets(sum(rows * row_bytes for rows, row_bytes in sizes), loads_W)
    rank = 0
    cuts_T: list[list[tuple[int, int, int]]] = []
    for rows, row_bytes in sizes:
        at = 0
        cuts: list[tuple[int, int, int]] = []
        while at < rows or not cuts:
            while rank < len(budgets_W) - 1 and budgets_W[rank] <= 0:
                rank += 1
            budget_bytes = max(MIN_CHUNK_bytes, budgets_W[rank])
            end = min(rows, at + -(-budget_bytes // max(1, row_bytes)))
            if rank == len(budgets_W) - 1 or (rows - end) * row_bytes < MIN_CHUNK_bytes:
                end = rows
            cuts.append((rank, at, end))
            budgets_W[rank] -= (end - at) * row_bytes
            at = end
        cuts_T.append(cuts)
    return cuts_T


def _write_budgets(total_bytes: int, loads_W: Sequence[int]) -> list[int]:
    """Bytes of shared tensors for each rank, so that totals are as equal as possible."""
    # Water filling: `level` is the common total of all ranks that take any.
    ordered, level = sorted(loads_W), 0
    for count in range(len(ordered), 0, -1):
        level = -(-(total_bytes + sum(ordered[:count])) // count)
        if level >= ordered[count - 1]:
            break
    return [max(0, level - load) for load in loads_W]
