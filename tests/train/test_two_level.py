"""Sums in two levels: near exact, far as the type says, the same bits on all ranks, the bytes of the formula."""

import functools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rowwise import SpecError, Topology
from rowwise.parallel.comm.spawn import run_processes
from rowwise.parallel.comm.thread import run_threads
from rowwise.planning.perf.wires import two_level_bytes
from rowwise.tables.spec import RUN, FarType, Wire
from rowwise.train.dense import DenseGradients

FAR = ("fp32", "fp16", "bf16", "int8", "int4", "topk:2%")
TOPOLOGIES = st.one_of(
    st.builds(
        lambda groups: Topology(hosts=sum(groups), groups=tuple(groups)),
        st.lists(st.integers(1, 3), min_size=2, max_size=3),
    ),
    st.sampled_from(
        (Topology(hosts=2, devices=2), Topology(hosts=3, devices=2), Topology(hosts=3, devices=2, groups=(2, 1)))
    ),
)


def draw(seed, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def sums(comm, wire, sizes, steps=1, seed=0):
    """The sums of the last step, all that arrived, the reducer, and what was sent for them by link."""
    parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
    reducer = DenseGradients(parameters, comm, wire, 1)
    before = dict(comm.sent.counts)
    arrived = [torch.zeros(n, dtype=torch.float64) for n in sizes]
    for _ in range(steps):
        for p in parameters:
            p.grad = None
        loss = sum((p * draw(seed + 10 * comm.rank + k, p.shape)).sum() for k, p in enumerate(parameters))
        reducer.backward(loss, last=True)
        reducer.finish()
        for total, p in zip(arrived, parameters, strict=True):
            total += p.grad
    sent = {key: n - before.get(key, 0) for key, n in comm.sent.counts.items() if key[1] != "all_reduce"}
    return [p.grad for p in parameters], arrived, reducer, sent


def exact_sums(world, sizes, seed=0):
    return [sum(draw(seed + 10 * w + k, n).double() for w in range(world)) for k, n in enumerate(sizes)]


@settings(max_examples=15)
@given(
    topology=TOPOLOGIES,
    far=st.sampled_from(FAR),
    sizes=st.lists(st.sampled_from((0, 1, 255, 256, 257, 3000)), min_size=1, max_size=3),
)
def test_all_ranks_end_with_the_same_bits_near_the_exact_sum(topology, far, sizes):
    wire = Wire(far=far, error_feedback=True)
    found_W = run_threads(topology, lambda comm: sums(comm, wire, sizes), timeout_s=30)
    for k, want in enumerate(exact_sums(topology.world, sizes)):
        parts = [grads[k] for grads, *_ in found_W]
        assert all(torch.equal(part, parts[0]) for part in parts)
        scale = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 2e-2, "int8": 5e-2, "int4": 1.0, "topk:2%": 1e9}[far]
        assert len(want) == 0 or ((parts[0] - want).abs() <= scale * (1 + want.abs().max())).all()


@settings(max_examples=15)
@given(topology=TOPOLOGIES, far=st.sampled_from(FAR), size=st.sampled_from((1, 256, 1000, 40_000)))
def test_bytes_by_link_are_those_of_the_formula(topology, far, size):
    wire = Wire(far=far, error_feedback=True)
    sent_W = [sent for *_, sent in run_threads(topology, lambda comm: sums(comm, wire, [size]), timeout_s=30)]
    found_W = [Counter() for _ in sent_W]
    for found, sent in zip(found_W, sent_W, strict=True):
        for (*_, link), count in sent.items():
            found[link] += count
    assert found_W == [+want for want in two_level_bytes(topology, size, FarType.parse(far))]


def test_two_groups_send_the_encoded_numbers_once_over_their_uplink():
    """And G groups 2 (G - 1) / G of them: 16 runs of every rank's share."""
    for groups, factor in (((2, 2), 1.0), ((2, 2, 2), 4 / 3), ((2, 3), 1.0)):
        topology, size = Topology(hosts=sum(groups), groups=groups), 2 * 48 * RUN
        for far in ("int8", "int4", "topk:1%"):
            kind = FarType.parse(far)
            sent_W = two_level_bytes(topology, size, kind)
            uplink_bytes = sum(sent["uplink"] for sent in sent_W[: groups[0]])
            assert uplink_bytes == size // RUN * kind.run_bytes * factor


@pytest.mark.few(1)
@pytest.mark.parametrize("far", ["int8", "int4", "topk:2%"])
def test_all_that_arrives_and_is_held_is_all_that_was_meant(far):
    topology, steps, size = Topology(hosts=4, groups=(2, 2)), 30, 1500
    meant = steps * exact_sums(4, [size])[0]
    off = {}
    for feedback in (True, False):
        if not feedback and far.startswith("topk"):
            continue
        wire = Wire(far=far, error_feedback=feedback)
        found_W = run_threads(topology, functools.partial(sums, wire=wire, sizes=[size], steps=steps), timeout_s=60)
        off[feedback] = (found_W[0][1][0] - meant).abs().max().item()
        if feedback:
            # Each rank holds the errors of its share: 3 runs of 6, the same on both ranks of a number.
            held_W = [reducer.residuals[0].double().view(-1) for *_, reducer, _ in found_W]
            held = torch.cat([held_W[0] + held_W[2], held_W[1] + held_W[3]])[:size]
            torch.testing.assert_close(found_W[0][1][0] + held, meant, rtol=0, atol=1e-5 * meant.abs().max().item())
        else:
            assert all(reducer.residuals == {} for *_, reducer, _ in found_W)
            assert off[True] < off[False] / 3


def test_every_rank_has_residuals_of_one_shape():
    """Also one without a share: a checkpoint has the residuals of all ranks as one tensor."""
    found_W = run_threads(
        Topology(hosts=5, groups=(2, 3)),
        lambda comm: sums(comm, Wire(far="int4", error_feedback=True), [700]),
        timeout_s=30,
    )
    assert {tuple(reducer.residuals[0].shape) for *_, reducer, _ in found_W} == {(2, RUN)}
    assert not found_W[4][2].residuals[0].any()


def test_near_ranks_of_one_host_are_added_up_by_the_transport():
    plain_W = run_threads(3, lambda comm: sums(comm, Wire(), [300]), timeout_s=30)
    near_W = run_threads(3, lambda comm: sums(comm, Wire(far="int4"), [300]), timeout_s=30)
    assert all(torch.equal(a[0][0], b[0][0]) for a, b in zip(plain_W, near_W, strict=True))
    assert all(b[2].residuals == {} and not b[3] for b in near_W)


def test_residuals_of_another_way_to_sum_are_dropped():
    def rank(comm):
        _, _, old, _ = sums(comm, Wire(dense="int8", error_feedback=True), [3000])
        parameter = nn.Parameter(torch.zeros(3000))
        reducer = DenseGradients([parameter], comm, Wire(far="int8", error_feedback=True), 1)
        reducer.residuals.update(old.residuals)
        reducer.backward((parameter * draw(10 * comm.rank, 3000)).sum(), last=True)
        reducer.finish()
        return parameter.grad

    topology = Topology(hosts=4, groups=(2, 2))
    fresh = run_threads(topology, lambda comm: sums(comm, Wire(far="int8", error_feedback=True), [3000]), timeout_s=30)
    for found, (grads, *_) in zip(run_threads(topology, rank, timeout_s=30), fresh, strict=True):
        assert torch.equal(found, grads[0])


def _sums_of_process(comm, wire):
    grads, _, reducer, _ = sums(comm, wire, [5000, 300], steps=2)
    return grads, reducer.residuals


@pytest.mark.dist
@pytest.mark.parametrize("topology", [Topology(hosts=2, devices=2), Topology(hosts=3, groups=(2, 1))], ids=str)
def test_processes_end_with_the_bits_of_threads(topology):
    """Near ranks of one host meet in shared memory, others over gloo."""
    wire = Wire(far="int8", error_feedback=True)
    threads_W = run_threads(topology, functools.partial(_sums_of_process, wire=wire), timeout_s=30)
    processes_W = run_processes(topology, _sums_of_process, wire)
    for (grads, held), (want, want_held) in zip(processes_W, threads_W, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))
        assert held.keys() == want_held.keys()
        assert all(torch.equal(held[k], want_held[k]) for k in held)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({"far": "int3"}, r"Wire: far='int3': expected one of 'fp32', 'fp16', 'bf16', 'int8', 'int4', or 'topk:1%'"),
        ({"far": "topk"}, r"Wire: far='topk': expected one of .* or 'topk:1%'"),
        ({"far": "topk:0%", "error_feedback": True}, r"far='topk:0%': expected more than 0 % and less than 20 %"),
        ({"far": "topk:25%", "error_feedback": True}, r"far='topk:25%': expected more than 0 % and less than 20 %"),
        ({"far": "topk:1%"}, r"without error_feedback: numbers left out would be lost: expected error_feedback=true"),
        ({"far": "int8", "dense": "bf16"}, r"Wire: dense=bf16 and far=int8: expected one of them"),
        ({"far": 8}, r"Wire: far=8: expected one of"),
    ],
)
def test_wires_that_are_refused(given, want):
    with pytest.raises(SpecError, match=want):
        Wire(**given)
