"""Calibration by slices: predictions compared with labels for values of features."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rowwise.base.records import CalibrationSlice
from rowwise.recipes.explain.rows import HeldRows
from rowwise.train.evaluate import NONE as NO_ID
from rowwise.train.evaluate import ids_or_none

MAX_IDS, QUANTILES, MIN_ROWS = 10, 5, 50


def calibration_slices(
    rows: HeldRows, logits_N: Tensor, task: int, sparse: tuple[str, ...], dense: dict[str, int]
) -> tuple[CalibrationSlice, ...]:
    """Slices by the most common ids and by ranges of numbers, the least calibrated first."""
    probability_N, labels_N = logits_N.double().sigmoid(), rows.batch.labels_BK[:, task].double()
    slices = []
    for feature, value, mask_N in (*_by_ids(rows, sparse), *_by_ranges(rows, dense)):
        p_M, y_M = probability_N[mask_N], labels_N[mask_N]
        if len(p_M) < MIN_ROWS:
            continue
        chance = math.sqrt(float((p_M * (1 - p_M)).sum()))
        slices.append(
            CalibrationSlice(
                feature=feature,
                value=value,
                rows=len(p_M),
                predicted=float(p_M.mean()),
                observed=float(y_M.mean()),
                deviations=float((y_M - p_M).sum()) / max(chance, 1e-12),
            )
        )
    return tuple(sorted(slices, key=lambda part: -abs(part.deviations)))


def _by_ids(rows: HeldRows, features: tuple[str, ...]) -> Iterator[tuple[str, str, Tensor]]:
    for feature in features:
        ids_N = ids_or_none(rows.batch, feature)
        ids_U, counts_U = torch.unique(ids_N[ids_N != NO_ID], return_counts=True)
        for common_id in ids_U[counts_U.argsort(descending=True)[:MAX_IDS]].tolist():
            yield feature, str(common_id), ids_N == common_id


def _by_ranges(rows: HeldRows, features: dict[str, int]) -> Iterator[tuple[str, str, Tensor]]:
    for feature, column in features.items():
        numbers_N = rows.batch.dense_BF[:, column]
        edges = torch.quantile(numbers_N, torch.linspace(0, 1, QUANTILES + 1)).unique()
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            last = high == float(edges[-1])
            mask_N = (numbers_N >= low) & ((numbers_N <= high) if last else (numbers_N < high))
            yield feature, f"{low:.4g} to {high:.4g}", mask_N
