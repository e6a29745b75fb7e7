"""Kernels have the bits that were saved once: on every machine, of every instruction set, in every version."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problems import OPTIMIZERS, ROW_TYPES, make_problem

from rowwise import Pooling, Table
from rowwise.tables.ops.reference import FeatureBags
from rowwise.tables.ops.update import next_step

ops = torch.ops.rowwise
SAVED = Path(__file__).parent / "saved_answers.json"  # of AVX-512; a change of a definition's bits changes it
POOLINGS = (Pooling.SUM, Pooling.MEAN, Pooling.WEIGHTED)
WIDTHS = (1, 3, 16, 52, 130)


def digest(numbers: torch.Tensor) -> str:
    return hashlib.sha256(numbers.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def answers(optimizer) -> dict[str, str]:
    """Of three steps of tables of each row type, width and pooling; normal numbers have other bits on ARM."""
    g = torch.Generator().manual_seed(7)
    tables = tuple(
        Table(
            name=f"{row_type}-{width}-{POOLINGS[k % 3].value}-{group}",
            rows=90,
            dim=width,
            pooling=POOLINGS[k % 3],
            optimizer=optimizer,
            row_type=row_type,
            column_group=group,
        )
        for k, (width, (row_type, group)) in enumerate((w, t) for w in WIDTHS for t in ROW_TYPES)
    )
    problem = make_problem(tables, batch=33, most=6, seed=5)
    jagged = replace(problem.jagged, weights_N=torch.rand(len(problem.jagged.values_N), generator=g) - 0.5)
    arena = problem.arena()
    group = problem.group(arena)
    offsets = ops.offsets(jagged.lengths_FB)
    bags = FeatureBags(group.for_sources(jagged.features), jagged.values_N, offsets, jagged.weights_N, 33)
    found = {"first": digest(arena.rows)}
    for step in range(3):
        grad = torch.rand((33, group.columns), generator=g) - 0.5
        found[f"pool {step}"] = digest(ops.pool(arena.rows, *bags, group.columns))
        found[f"weight {step}"] = digest(ops.pool_weight_grad(arena.rows, *bags[:4], grad, 33))
        hyper, keys = next_step(arena, group)
        ops.update(arena.rows, arena.state, group.tables_TC, hyper, keys, *bags[:4], grad, 33, False)
        found[f"rows {step}"], found[f"state {step}"] = digest(arena.rows), digest(arena.state)
    return found


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_bits_are_those_saved(number):
    assert answers(OPTIMIZERS[number]) == json.loads(SAVED.read_text())[number]


if __name__ == "__main__":  # python tests/tables/ops/test_saved_answers.py
    SAVED.write_text(json.dumps([answers(optimizer) for optimizer in OPTIMIZERS], indent=0) + "\n")
