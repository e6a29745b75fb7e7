"""The kernels of ingestion on one core, beside numpy, torch and Polars on the same arrays."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from parts.ingest_data import FIRST, ROWS, ids
from parts.ingest_peers import hashed, there
from rowwise.ingest import native
from rowwise.ingest.transform.ids import pick_ids

COUNT, MEAN, BORDERS = 1 << 20, 30, 1024
Case = tuple[str, str, int, Callable[[], object]]  # kernel, whose, elements, the call


def cases(count: int = COUNT) -> list[Case]:
    """The same work for each side, on arrays as large as a column of a split."""
    import torch

    draw = np.random.default_rng(0)
    id_N = ids(draw, count, 10**6)
    offsets_R1 = np.concatenate([[0], draw.poisson(MEAN, count // MEAN).cumsum()])
    listed_N = ids(draw, int(offsets_R1[-1]), 10**6)
    x_N = draw.exponential(20, count).astype(np.float32)
    borders_K = np.sort(draw.exponential(20, BORDERS)).astype(np.float32)
    out_N = np.empty_like(id_N)
    short, total = "FirstX and hash", len(listed_N)
    to_rows, lists = native.RowMapping(native.SIGRID, ROWS, 7), pa.LargeListArray.from_arrays(offsets_R1, listed_N)
    tensor_N, tensor_K = torch.from_numpy(x_N), torch.from_numpy(borders_K)

    def masked() -> np.ndarray:
        at_N = np.arange(total) - np.repeat(offsets_R1[:-1], np.diff(offsets_R1))
        return hashed(listed_N[at_N < FIRST])

    made: list[Case] = [
        ("SigridHash", "rowwise", count, lambda: native.map_ids(id_N, to_rows, out_N)),
        ("SigridHash", "numpy", count, lambda: hashed(id_N)),
        (short, "rowwise", total, lambda: pick_ids(lists, to_rows, FIRST)),
        (short, "numpy", total, masked),
        ("Bucketize", "rowwise", count, lambda: native.bucketize(x_N, borders_K)),
        ("Bucketize", "numpy", count, lambda: np.searchsorted(borders_K, x_N, "right")),
        ("Bucketize", "torch", count, lambda: torch.bucketize(tensor_N, tensor_K, right=True)),
    ]
    return made + (
        _of_polars(id_N, pa.ListArray.from_arrays(offsets_R1.astype(np.int32), listed_N)) if there("Polars") else []
    )


def _of_polars(id_N: np.ndarray, lists: pa.ListArray) -> list[Case]:
    """With its own hash, in an expression."""
    import polars as pl

    single, several = pl.DataFrame({"x": id_N}), pl.DataFrame({"x": pl.from_arrow(lists)})
    hash_all = (pl.col("x").hash() % ROWS).cast(pl.Int64)
    hash_first = pl.col("x").list.head(FIRST).list.eval((pl.element().hash() % ROWS).cast(pl.Int64))
    return [
        ("SigridHash", "Polars", len(id_N), lambda: single.select(hash_all)),
        ("FirstX and hash", "Polars", len(lists.values), lambda: several.select(hash_first)),
    ]
