"""Assigns rows of tensors that all ranks have to ranks, so that all write about the same number of bytes.

Known limits: a tensor is cut wherever a rank's share ends, which may make more chunks than necessary.
"""

from collections.abc import Sequence

SMALLEST_bytes = 1 << 20  # no smaller chunks, except of smaller tensors


def assign_rows(sizes: Sequence[tuple[int, int]], loads_W: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """For each tensor of (rows, bytes per row): its cuts, as (rank, first row, end row).

    `loads_W`: bytes of each rank's own shards.
    """
    rooms_W = _rooms(sum(rows * row_bytes for rows, row_bytes in sizes), loads_W)
    rank = 0
    cuts_of: list[list[tuple[int, int, int]]] = []
    for rows, row_bytes in sizes:
        at = 0
        cuts: list[tuple[int, int, int]] = []
        while at < rows or not cuts:
            while rank < len(rooms_W) - 1 and rooms_W[rank] <= 0:
                rank += 1
            room_bytes = max(SMALLEST_bytes, rooms_W[rank])
            end = min(rows, at + -(-room_bytes // max(1, row_bytes)))
            if rank == len(rooms_W) - 1 or (rows - end) * row_bytes < SMALLEST_bytes:
                end = rows
            cuts.append((rank, at, end))
            rooms_W[rank] -= (end - at) * row_bytes
            at = end
        cuts_of.append(cuts)
    return cuts_of


def _rooms(total_bytes: int, loads_W: Sequence[int]) -> list[int]:
    """Bytes that each rank takes so that all ranks write the same, as far as possible."""
    # Water filling: the common level of the ranks that take anything.
    ordered, level = sorted(loads_W), 0
    for count in range(len(ordered), 0, -1):
        level = -(-(total_bytes + sum(ordered[:count])) // count)
        if level >= ordered[count - 1]:
            break
    return [max(0, level - load) for load in loads_W]
