"""What tables in memory pay for those that may be on disk: the calls of `Arena.pinned`, beside kernels called directly.

Direct calls and steps take turns; the seam is so small beside a step that its calls are also timed alone.
"""

import time

import torch

from parts.report import show
from parts.tiers_rowwise import Rowwise
from parts.tiers_work import Size, gradient_of, ids_by_table
from parts.timer import timed_s
from rowwise.tables.ops.arena import PinnedBags
from rowwise.tables.ops.update import concat_staged, next_step

CALLS = 20_000  # of the seam, timed together
CALLS_OF_STEP = 2  # one lookup and one update of one group of tables


def measure_resident(size: Size, steps: int) -> list[dict]:
    side = Rowwise(size, None)
    tiles = side.tables
    ids_TB, grad_BS = ids_by_table(size, 0), gradient_of(size, 0)
    side.look_up(ids_TB)
    assert side.pooled_BS is not None
    side.pooled_BS.backward(grad_BS)
    (staged,) = tiles.staged
    one, arena = concat_staged([staged]), tiles.arena
    call, group = one.call, one.call.group
    tiles.discard()

    def through_seam() -> None:
        with torch.no_grad():
            call.rows(arena, None)
            with arena.pinned(call.bags, changes=True) as values_N:
                change(values_N)

    def direct() -> None:
        with torch.no_grad():
            bags: PinnedBags = call.bags
            torch.ops.rowwise.pool(
                arena.rows, bags.features_FC, bags.values_N, bags.offsets, None, bags.batch_size, group.columns
            )
            change(bags.values_N)

    def change(values_N: torch.Tensor) -> None:
        hyper_TH, keys_T = next_step(arena, group)
        torch.ops.rowwise.update(
            *(arena.rows, arena.state, group.tables_TC, hyper_TH, keys_T, call.features_FC, values_N, call.offsets),
            *(one.weights, one.grad, call.jagged.batch_size, call.per_id),
        )

    times: dict[str, list[float]] = {"seam": [], "direct": []}
    calls = {"seam": through_seam, "direct": direct}
    for step in range(steps):
        for name in sorted(calls, reverse=bool(step % 2)):  # the second one meets rows that are in the cache
            times[name].append(timed_s(calls[name]))
    begin_s = time.perf_counter()
    for _ in range(CALLS):
        with arena.pinned(call.bags):
            pass
    call_s = (time.perf_counter() - begin_s) / CALLS
    best = {name: min(found) for name, found in times.items()}
    row = {"section": "resident", "seam_ms": best["seam"] * 1e3, "direct_ms": best["direct"] * 1e3}
    row |= {"call_us": call_s * 1e6, "share": CALLS_OF_STEP * call_s / best["direct"]}
    show(row)
    return [row]
