"""Sums over neighbours against dense products, and which edges a sampled graph keeps."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import BatchError, SpecError
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


@given(EDGES, st.integers(1, 12), st.sampled_from(["first", "spread"]))
def test_a_sampled_graph_keeps_so_many_edges_and_scales_them(edges, most, how):
    graph = make_graph([(target, source, 1) for target, source, _ in edges])
    sampled = graph.sampled(most, how)
    assert torch.equal(sampled.degrees_T, graph.degrees_T.clamp(max=most))
    for target in range(TARGETS):
        all_of, kept = (one.sources_E[one.starts_T1[target] : one.starts_T1[target + 1]] for one in (graph, sampled))
        if len(all_of) <= most or how == "first":
            assert torch.equal(kept, all_of[:most])
        counts = torch.bincount(all_of, minlength=SOURCES) - torch.bincount(kept, minlength=SOURCES)
        assert (counts >= 0).all()
    ones_S1 = torch.ones(SOURCES, 1)
    torch.testing.assert_close(aggregate(sampled, ones_S1), graph.degrees_T.float().unsqueeze(1))


@given(EDGES, st.integers(1, 12), st.sampled_from(["first", "spread"]))
def test_targets_with_few_edges_have_the_bits_of_the_whole_graph(edges, most, how):
    graph, vectors_SD = make_graph(edges), torch.randn(SOURCES, DIM)
    few_T = graph.degrees_T <= most
    exact_TD, sampled_TD = aggregate(graph, vectors_SD), aggregate(graph.sampled(most, how), vectors_SD)
    assert torch.equal(sampled_TD[few_T], exact_TD[few_T])


@pytest.mark.parametrize("degree", [576, 577, 578, 1154, 577 * 2 * 3])
@pytest.mark.parametrize("most", [1, 100, 575])
def test_edges_are_spread_evenly_and_do_not_repeat(degree, most):
    sampled = star(degree).sampled(most)
    kept = sampled.sources_E[: sampled.starts_T1[1]]
    assert len(kept.unique()) == most
    assert (kept < degree).all()
    if most > 1:  # from all over the edges
        assert kept.diff().max() <= degree // most + 1


@pytest.mark.parametrize("dim", [1, 7, 64, 130])
def test_any_number_of_threads_gives_the_same_bits(threads, dim):
    generator = torch.Generator().manual_seed(0)
    targets_E = (torch.rand(20_000, generator=generator) ** 3 * 300).long()
    graph = Graph.of_edges(targets_E, torch.randint(400, (20_000,), generator=generator), (300, 400))
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
    with pytest.raises(SpecError, match="most=0: expected at least"):
        graph.sampled(0)
    with pytest.raises(SpecError, match="'first' or 'spread'"):
        graph.sampled(1, "random")
