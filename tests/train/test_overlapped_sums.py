"""Sums of sharded gradients while the backward goes on: the order and times of events, and the bits of sums in turn."""

from functools import partial

import pytest
import torch
from train import overlap_ranks

from rowwise.parallel.comm.simulated_link import SimulatedLink
from rowwise.parallel.comm.spawn import run_processes

pytestmark = [pytest.mark.slow, pytest.mark.dist]
LINK = SimulatedLink(latency_s=0.1)
LAYERS, LAYER_s = 5, 0.2


def run(shards, layer_s=LAYER_s, backwards=1, *, overlap=True, shared_memory=True, link=LINK):
    args = (shards, LAYERS, layer_s, backwards)
    function = overlap_ranks.run if overlap else run_in_turn
    return run_processes(4, function, *args, timeout_s=60, shared_memory=shared_memory, link=link)


def run_in_turn(comm, *args):
    return overlap_ranks.run(comm, *args, overlap=False)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_layers_sums_travel_while_earlier_layers_are_differentiated(shared_memory):
    """A layer takes as long as its two sums."""
    for rank in run(2, shared_memory=shared_memory):
        scatters, reduces = (
            [times for kind, *times in rank["sums"] if kind == collective]
            for collective in ("reduce_scatter", "all_reduce")
        )
        assert len(scatters) == len(reduces) == LAYERS
        for (scatter_s, scattered_s), (reduce_s, reduced_s) in zip(scatters, reduces, strict=True):
            assert scatter_s < scattered_s <= reduce_s < reduced_s
        for layer, (_, next_end_s) in enumerate(rank["backwards"][1:]):
            assert rank["backwards"][layer][1] < scatters[layer][0], "a layer's sum follows its backward"
            assert scatters[layer][1] < next_end_s, "its reduce-scatter ends during the next backward"
            assert reduces[layer][0] < next_end_s, "its all-reduce begins during the next backward"


def test_a_step_takes_the_time_of_the_backward_and_not_of_the_sums():
    together, in_turn = run(2), run(2, overlap=False)
    for rank, other in zip(together, in_turn, strict=True):
        hidden_s = (LAYERS - 1) * 2 * LINK.latency_s
        assert other["seconds"] - rank["seconds"] > 0.6 * hidden_s


def test_more_units_than_a_transport_takes_calls():
    """Shared memory takes 64 calls that nobody has waited for."""
    for rank in run_processes(4, overlap_ranks.run, 2, 70, 0.0, timeout_s=60, shared_memory=True):
        assert len(rank["sums"]) == 2 * 70


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("backwards", [1, 3])
def test_bits_are_those_of_sums_in_turn(shards, backwards):
    link = SimulatedLink(latency_s=0.002)
    together, in_turn = (run(shards, 0.0, backwards, overlap=overlap, link=link) for overlap in (True, False))
    for rank, other in zip(together, in_turn, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rank["gradients"], other["gradients"], strict=True))
        assert any(gradient.abs().sum() for gradient in rank["gradients"])


def test_a_backward_that_raised_adds_nothing_to_the_next():
    wanted, found = (
        run_processes(2, partial(overlap_ranks.after_an_error, fails=fails), timeout_s=60) for fails in (False, True)
    )
    for rank, other in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rank, other, strict=True))
