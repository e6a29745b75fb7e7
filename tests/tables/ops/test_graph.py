"""Sums over neighbours against dense products, and which edges a sampled graph keeps."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import BatchError, SpecError
from rowwise.tables.ops import reference
from rowwise.tables.ops.graph import COPIED_BYTES, COPIED_READS, Graph, aggregate

TARGETS, SOURCES, DIM = 6, 9, 5
EDGES = st.lists(st.tuples(st.integers(0, TARGETS - 1), st.integers(0, SOURCES - 1), st.integers(-4, 4)), max_size=60)


def make_graph(edges):
    targets_E, sources_E, weights_E = torch.tensor(edges, dtype=torch.int64).view(-1, 3).unbind(1)
    return Graph.of_edges(targets_E, sources_E, (TARGETS, SOURCES), weights_E.float())


def dense(graph):
    matrix_TS = torch.zeros(graph.targets, graph.sources)
    return matrix_TS.index_put_((graph.targets_E, graph.sources_E), graph.weights_E, accumulate=True)


def whole_numbers(rows, seed):
    return torch.randint(-8, 9, (rows, DIM), generator=torch.Generator().manual_seed(seed)).float()


HOWS = ["first", "spread", "stride"]


def chosen_places(degree, most, how):
    """The edges of a node by the formulas, in the order of choice; a list of whole numbers."""
    s = np.arange(min(degree, most))
    if degree <= most or how == "first":
        return s.tolist()
    if how == "spread":
        return np.floor(s * degree / most).astype(int).tolist()
    places = s * 577 % degree
    return (places if degree % 577 else (s * 577 + s // (degree // 577)) % degree).tolist()


def listed(graph, most, how, *, rescaled=True):
    """A graph of the sampled edges alone."""
    starts, edges, targets, scales = graph.starts_T1.tolist(), [], [], []
    for target, (begin, end) in enumerate(pairwise(starts)):
        places = chosen_places(end - begin, most, how)
        edges += [begin + place for place in places]
        targets += [target] * len(places)
        scale = np.float32(end - begin) / np.float32(most) if rescaled and end - begin > most else np.float32(1)
        scales += [scale] * len(places)
    at = torch.tensor(edges, dtype=torch.int64)
    weights_E = graph.weights_E[at] * torch.tensor(np.array(scales, dtype=np.float32))
    shape = graph.targets, graph.sources
    return Graph.of_edges(torch.tensor(targets, dtype=torch.int64), graph.sources_E[at], shape, weights_E)


def star(degree):
    """One target with so many edges, and one with a single edge."""
    targets_E = torch.tensor([0] * degree + [1])
    return Graph.of_edges(targets_E, torch.arange(degree + 1), (2, degree + 1))


@given(EDGES)
def test_sums_and_their_gradients_are_the_dense_products(edges):
    """Of whole numbers, so that both are exact; targets without edges get 0."""
    graph = make_graph(edges)
    vectors_SD = whole_numbers(SOURCES, 0).requires_grad_()
    out_TD, grad_TD = aggregate(graph, vectors_SD), whole_numbers(TARGETS, 1)
    assert torch.equal(out_TD, dense(graph) @ vectors_SD)
    out_TD.backward(grad_TD)
    assert torch.equal(vectors_SD.grad, dense(graph).t() @ grad_TD)


@given(EDGES, st.integers(1, 8))
def test_parts_of_a_graph_have_the_sums_of_the_whole_graph(edges, parts):
    """Their bits, too: a target's edges are in one part."""
    sources_E = [(target, source % TARGETS, weight) for target, source, weight in edges]
    targets_E, sources_E, weights_E = torch.tensor(sources_E, dtype=torch.int64).view(-1, 3).unbind(1)
    graph = Graph.of_edges(targets_E, sources_E, (TARGETS, TARGETS), weights_E.float())
    ends, vectors_TD, grad_TD = graph.cuts(parts), torch.randn(TARGETS, DIM, requires_grad=True), whole_numbers(6, 1)
    assert (len(ends), ends[0], ends[-1]) == (parts + 1, 0, TARGETS)
    assert ends == sorted(ends)
    most = max(end - begin + int(graph.degrees_T[begin:end].sum()) for begin, end in pairwise(ends))
    assert most <= (len(edges) + TARGETS) / parts + 1 + int(graph.degrees_T.max())
    parts_P = [graph.part(*some, lambda _: vectors_TD) for some in pairwise(ends)]
    sums = [aggregate(part, vectors_TD[: part.targets]) for part in parts_P]
    assert torch.equal(torch.cat(sums), aggregate(graph, vectors_TD))
    torch.cat(sums).backward(grad_TD)
    torch.testing.assert_close(vectors_TD.grad, dense(graph).t() @ grad_TD)


@given(EDGES, st.integers(1, 12), st.sampled_from(HOWS), st.booleans())
def test_sampled_sums_and_their_gradients_have_the_bits_of_the_edges_that_formulas_choose(edges, most, how, rescaled):
    graph, vectors_SD = make_graph(edges), torch.randn(SOURCES, DIM, requires_grad=True)
    sampled = graph.sampled(most, how, rescaled=rescaled)
    out_TD, grad_TD = aggregate(sampled, vectors_SD), torch.randn(TARGETS, DIM)
    want_TD = aggregate(listed(graph, most, how, rescaled=rescaled), vectors_SD)
    assert torch.equal(out_TD, want_TD)
    grads = [torch.autograd.grad(x_TD, vectors_SD, grad_TD)[0] for x_TD in (out_TD, want_TD)]
    assert torch.equal(*grads)
    assert sampled.edges_read == int(graph.degrees_T.clamp(max=most).sum())


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("degree", [575, 576, 577, 578, 1154, 577 * 34, 577 * 2 * 3 * 7])
@pytest.mark.parametrize("most", [1, 100, 576, 1000, 1100])
def test_large_degrees(how, degree, most):
    """Each edge is the basis vector of its number, so that sums show which are kept, and how often."""
    graph = star(degree)
    counts_E = torch.zeros(degree + 1)
    counts_E[chosen_places(degree, most, how)] = 1
    sampled, ones_T1 = graph.sampled(most, how, rescaled=False), torch.tensor([[1.0], [0.0]])
    assert counts_E.sum() == min(most, degree)
    vectors_S1 = torch.zeros(degree + 1, 1, requires_grad=True)
    aggregate(sampled, vectors_S1).backward(ones_T1)
    assert torch.equal(vectors_S1.grad[:, 0], counts_E)
    numbers_S1 = torch.arange(degree + 1.0).unsqueeze(1)
    assert float(aggregate(sampled, numbers_S1)[0]) == pytest.approx(float(numbers_S1[:, 0] @ counts_E), rel=1e-5)
    if degree > most > 1 and how == "spread":  # from all over the edges
        assert counts_E[:degree].nonzero()[:, 0].diff().max() <= degree // most + 1


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("most", [1, 3, 600])
def test_native_sums_are_those_of_the_reference(how, most):
    """With more edges than a list in the cache holds, and with ids of 64 bits."""
    generator = torch.Generator().manual_seed(0)
    targets_E = torch.cat((torch.zeros(2000, dtype=torch.int64), torch.randint(300, (3000,), generator=generator)))
    graph = Graph.of_edges(targets_E, torch.randint(9, (5000,), generator=generator), (300, 9)).sampled(most, how)
    vectors_SD = torch.randn(9, 20, generator=generator)
    for ids_E in (graph.sources_E, graph.sources_E.long()):
        args = vectors_SD, ids_E, graph.starts_T1, graph.weights_E, *graph.sampling
        assert torch.equal(torch.ops.rowwise.sum_sampled(*args), reference.sum_sampled(*args))


def test_parts_of_a_sampled_graph_have_its_bits():
    generator = torch.Generator().manual_seed(1)
    ends = torch.randint(40, (2, 2000), generator=generator)
    graph = Graph.of_edges(*ends, (40, 40), torch.rand(2000, generator=generator)).sampled(20, "stride")
    vectors_ND = torch.randn(40, DIM, generator=generator)
    parts = [graph.part(*some, lambda _: vectors_ND) for some in pairwise(graph.cuts(3))]
    assert torch.equal(torch.cat([aggregate(part, vectors_ND) for part in parts]), aggregate(graph, vectors_ND))


WRONG = {
    "ids": (lambda a: a | {"ids": torch.tensor([0, 3, 1], dtype=torch.int32)}, "id 3 at position 1 is outside"),
    "a negative id": (lambda a: a | {"ids": torch.tensor([0, 1, -1])}, "id -1 at position 2 is outside"),
    "starts": (lambda a: a | {"starts": torch.tensor([0, 2, 1, 3])}, "starts do not ascend"),
    "an end": (lambda a: a | {"starts": torch.tensor([0, 2, 4])}, "starts do not ascend"),
    "weights": (lambda a: a | {"weights": torch.ones(2)}, "a weight for each edge"),
    "a width": (lambda a: a | {"width": 0}, "a width of 0"),
    "a choice": (lambda a: a | {"choice": 3}, "choice 3"),
    "no starts": (lambda a: a | {"starts": torch.empty(0, dtype=torch.int64)}, "starts .T . 1."),
    "types": (lambda a: a | {"vectors": torch.ones(3, 2).double()}, "vectors must be"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_operator_reads_nothing_outside_of_its_tensors(wrong):
    good = {
        "vectors": torch.ones(3, 2), "ids": torch.tensor([0, 1, 2]), "starts": torch.tensor([0, 2, 3]),
        "weights": torch.ones(3), "width": 2, "choice": 0, "rescaled": True,
    }  # fmt: skip
    change, message = WRONG[wrong]
    assert torch.equal(torch.ops.rowwise.sum_sampled(*good.values()), torch.tensor([[2.0, 2.0], [1.0, 1.0]]))
    with pytest.raises(RuntimeError, match=message):
        torch.ops.rowwise.sum_sampled(*change(good).values())


@pytest.mark.parametrize("how", [None, *HOWS])
@pytest.mark.parametrize("dim", [1, 7, 64, 130])
def test_any_number_of_threads_gives_the_same_bits(threads, dim, how):
    generator = torch.Generator().manual_seed(0)
    targets_E = (torch.rand(20_000, generator=generator) ** 3 * 300).long()
    graph = Graph.of_edges(targets_E, torch.randint(400, (20_000,), generator=generator), (300, 400))
    graph = graph if how is None else graph.sampled(30, how)
    found = []
    for count in (1, 2, 4):
        threads(count)
        vectors_SD = torch.randn(400, dim, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out_TD = aggregate(graph, vectors_SD)
        out_TD.square().sum().backward()
        found.append((out_TD, vectors_SD.grad))
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))


def test_vectors_that_are_copied_to_huge_pages_give_the_same_bits():
    """The same edges with vectors of few columns, which are not copied."""
    sources, columns = 70_000, 64
    assert sources * columns * 4 >= COPIED_BYTES
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(sources, (2, COPIED_READS * sources), generator=generator)
    graph, vectors_SD = Graph.of_edges(*ends, (sources, sources)), torch.randn(sources, columns, generator=generator)
    before_SD = vectors_SD.clone()
    few = [aggregate(graph, part_SD) for part_SD in vectors_SD.split(8, dim=1)]
    assert torch.equal(aggregate(graph, vectors_SD), torch.cat(few, 1))
    assert torch.equal(vectors_SD, before_SD)


def test_16_bit_vectors_are_summed_in_float32():
    graph, vectors_SD = make_graph([(0, 1, 1), (0, 2, 3)]), torch.randn(SOURCES, DIM).bfloat16().requires_grad_()
    out_TD = aggregate(graph, vectors_SD)
    assert torch.equal(out_TD, aggregate(graph, vectors_SD.float()))
    out_TD.sum().backward()
    assert vectors_SD.grad.dtype == torch.bfloat16


def test_a_graph_without_edges_or_targets():
    none = torch.empty(0, dtype=torch.int64)
    assert torch.equal(aggregate(Graph.of_edges(none, none, (3, 2)), torch.ones(2, 4)), torch.zeros(3, 4))
    assert aggregate(Graph.of_edges(none, none, (0, 2)).sampled(1), torch.ones(2, 4)).shape == (0, 4)
    sources_S = torch.ones(2, 4, requires_grad=True)
    aggregate(Graph.of_edges(none, none, (3, 2)), sources_S).sum().backward()
    assert torch.equal(sources_S.grad, torch.zeros(2, 4))


def test_what_is_no_edge_is_named():
    ends = torch.tensor([0, 1])
    with pytest.raises(BatchError, match="edge 1: target 7"):
        Graph.of_edges(torch.tensor([0, 7]), ends, (2, 2))
    with pytest.raises(BatchError, match="edge 0: source -1"):
        Graph.of_edges(ends, torch.tensor([-1, 0]), (2, 2))
    with pytest.raises(BatchError, match=r"\(2,\) of torch.float32"):
        Graph.of_edges(ends, ends.float(), (2, 2))
    with pytest.raises(BatchError, match="2 targets, 2 sources"):
        Graph.of_edges(ends, ends, (2, 2), torch.ones(1))
    graph = Graph.of_edges(ends, ends, (2, 2))
    with pytest.raises(BatchError, match=r"vectors \(3, 4\)"):
        aggregate(graph, torch.ones(3, 4))
    with pytest.raises(BatchError, match=r"vectors of torch.int64"):
        aggregate(graph, torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(SpecError, match="max_edges=0: expected 1 to 4,194,304"):
        graph.sampled(0)
    with pytest.raises(SpecError, match="'first', 'spread' or 'stride'"):
        graph.sampled(1, "random")
