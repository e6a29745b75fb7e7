"""Rates of coding are measured: finite, positive, and of the threads that a rank has."""

import torch
from msgspec import structs

from rowwise.planning.calibrate.coding import measure_coding


def test_rates_of_coding_are_measured_and_threads_are_as_before():
    before = torch.get_num_threads()
    found = measure_coding(torch.device("cpu"), 1)
    assert torch.get_num_threads() == before
    for rates in (found.fp16, found.bf16, found.int8):
        assert all(1e6 < rate < 1e14 for rate in structs.asdict(rates).values())
