"""The hit rates of the cache of tables on disk, beside the simulator's on the same accesses."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parts.report import show
from rowwise.tables.store.disk import DiskRows
from rowwise.tables.store.policy import POLICIES, WAYS, Policy
from rowwise.tables.store.row_store import SlotIds, SlotTable
from rowwise.tables.store.simulate import Trace, simulate
from rowwise.tables.store.sizes import cache_slots, overflow_slots

ROWS, SKEW = 100_000, 1.05
MEASURED = {"lru": 0.588, "lfu": 0.672}  # by others, with 1 % of the rows cached, from an empty cache
CACHED_PART = 100
BATCHES = (1, 64, 4096)
WIDTH = 16


def zipf_rows(rows: int, count: int, seed: int = 0) -> np.ndarray:
    """Accesses by Zipf's law, the most frequent rows anywhere in the table."""
    share_R = np.arange(1, rows + 1.0) ** -SKEW
    draw = np.random.default_rng(seed)
    places = np.searchsorted(np.cumsum(share_R / share_R.sum()), draw.random(count))
    return draw.permutation(rows)[places.clip(max=rows - 1)]


def measure_policy(folder: Path, accesses: int) -> list[dict]:
    rows = []
    trace_N = zipf_rows(ROWS, accesses)
    for policy in POLICIES:
        for batch in BATCHES:
            live = live_hit_rate(folder, policy, trace_N, batch)
            simulated = simulate(Trace.of(trace_N, batch), ROWS // CACHED_PART, policy).hit_rate
            row = {"section": "policy", "policy": policy, "batch": batch, "live": live, "simulated": simulated}
            rows.append(row | {"measured": MEASURED[policy]})
            show(row)
    return rows


def live_hit_rate(folder: Path, policy: Policy, trace_N: np.ndarray, batch: int) -> float:
    slots = cache_slots(ROWS // CACHED_PART)
    overflow = max(overflow_slots(slots), batch)
    table = SlotTable(
        name="t",
        rows=ROWS,
        row_memory=torch.zeros(slots + overflow, WIDTH, dtype=torch.uint8),
        state_memory=torch.zeros(slots + overflow, 1),
        slot_rows=torch.empty(slots + overflow, dtype=torch.int64),
        overflow=overflow,
        initial=new_rows,
    )
    disk = DiskRows([table], folder, policy=policy)
    values_N = torch.from_numpy(trace_N)
    for ids in values_N.split(batch):
        with disk.pin(SlotIds(ids, torch.tensor([0, len(ids)]), [0]), changes=False, counts=True):
            pass
    return disk.counters(0).hit_rate


def new_rows(rows_U: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(rows_U), WIDTH, dtype=torch.uint8), torch.zeros(len(rows_U), 1)


assert WAYS == 32, "the measured rates are of sets of 32"
