"""Assigns tensors that all ranks have to the ranks that write them, balanced by bytes.

Known limits: the fewest pieces; a tensor is cut wherever a rank's share ends.
"""

from collections.abc import Sequence

SMALLEST_bytes = 1 << 20  # what is shorter is not worth a piece of its own


def deal(sizes: Sequence[tuple[int, int]], loads_W: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """For each tensor, given as (rows, bytes of a row): the (rank, first row, end) of each range of rows.

    `loads_W` are bytes that the ranks write anyway.
    """
    rooms_W = _rooms(sum(rows * row_bytes for rows, row_bytes in sizes), loads_W)
    rank = 0
    found: list[list[tuple[int, int, int]]] = []
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
        found.append(cuts)
    return found


def _rooms(total_bytes: int, loads_W: Sequence[int]) -> list[int]:
    """Bytes that each rank takes so that all ranks end with equal totals, as far as possible."""
    # The level up to which water fills vessels that stand side by side.
    ordered, level = sorted(loads_W), 0
    for count in range(len(ordered), 0, -1):
        level = -(-(total_bytes + sum(ordered[:count])) // count)
        if level >= ordered[count - 1]:
            break
    return [max(0, level - load) for load in loads_W]
