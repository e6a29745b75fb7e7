"""What all ranks end with is the sum of what each had, whatever came first, was missing, or was rounded on the way."""

import functools
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rowwise import SpecError
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.thread import run_threads
from rowwise.tables.spec import RowType, Wire
from rowwise.train.coded import RUN
from rowwise.train.dense import BUCKET_BYTES, DenseGradients

EXACT = Wire()
SHAPES = [(3,), (2, 5), (), (40, 7), (0,), (1, 1, 300)]


def draw(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def backward(reducer, parameters, grads, *, last=True, order=None):
    """A backward in which parameters get these gradients, in some order."""
    terms = [(p * g).sum() for p, g in zip(parameters, grads, strict=True) if g is not None]
    terms = [terms[k] for k in order(len(terms))] if order else terms
    reducer.backward(sum(terms, torch.zeros((), requires_grad=True)), last=last)


def reduced(comm, parameters, grads, wire=EXACT, bucket_bytes=BUCKET_BYTES):
    """The sums over ranks of gradients, which the parameters then have."""
    reducer = DenseGradients(parameters, comm, wire, bucket_bytes)
    backward(reducer, parameters, grads)
    reducer.finish()
    return [p.grad for p in parameters]


def total_of(grads_W):
    """The sum in rank order."""
    there = [g for g in grads_W if g is not None]
    shape = there[0].shape if there else ()
    return functools.reduce(torch.add, [torch.zeros(shape) if g is None else g for g in grads_W]) if there else None


@settings(max_examples=30)
@given(
    world=st.integers(1, 4),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6),
    parts=st.integers(1, 3),
    bucket_bytes=st.sampled_from((1, 64, 1 << 20)),
    data=st.data(),
)
def test_gradients_become_the_sums_in_rank_order(world, shapes, parts, bucket_bytes, data):
    missing = data.draw(st.sets(st.tuples(st.integers(0, world - 1), st.integers(0, parts - 1), st.integers(0, 5))))
    seeds = data.draw(st.lists(st.integers(0, 99), min_size=world, max_size=world))
    grads_WKP = [
        [
            [None if (w, k, p) in missing else draw(100 * w + 10 * k + p, shape) for p, shape in enumerate(shapes)]
            for k in range(parts)
        ]
        for w in range(world)
    ]

    def rank(comm):
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        reducer = DenseGradients(parameters, comm, EXACT, bucket_bytes)
        generator = torch.Generator().manual_seed(seeds[comm.rank])
        for again in range(2):
            for p in parameters:
                p.grad = None
            for k, grads in enumerate(grads_WKP[comm.rank]):
                order = lambda n: torch.randperm(n, generator=generator).tolist()  # noqa: E731
                backward(
                    reducer,
                    parameters,
                    [None if g is None else g + again for g in grads],
                    last=k == parts - 1,
                    order=order,
                )
            reducer.finish()
        return [p.grad for p in parameters]

    found_W = run_threads(world, rank, timeout_s=20)
    for p in range(len(shapes)):
        local_W = []
        for grads_KP in grads_WKP:
            there = [grads[p] + 1 for grads in grads_KP if grads[p] is not None]
            local_W.append(list(accumulate(there))[-1] if there else None)
        want = total_of(local_W)
        for found in found_W:
            assert (found[p] is None) == (want is None)
            assert want is None or torch.equal(found[p], want)


class Mlp(nn.Module):
    def __init__(self, layers=6, width=16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Watched:
    """A comm that tells of each collective that starts."""

    def __init__(self, comm, tell) -> None:
        self._comm, self._tell = comm, tell

    def __getattr__(self, name):
        found = getattr(self._comm, name)
        if name not in ("all_reduce", "all_to_all", "all_gather"):
            return found

        def start(*given):
            self._tell(name)
            return found(*given)

        return start


@pytest.mark.parametrize("dense", ["fp32", "bf16"])
def test_the_last_layers_are_on_their_way_before_the_first_have_a_gradient(dense):
    def rank(comm):
        told = []
        model = Mlp()
        reducer = DenseGradients(
            list(model.parameters()), Watched(comm, told.append), Wire(dense=RowType(dense)), 16 * 16 * 4
        )
        model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: told.append("the first layer"))
        reducer.backward(model(torch.randn(4, 16)).sum(), last=False)
        assert told == ["the first layer"]
        reducer.backward(model(torch.randn(4, 16)).sum(), last=True)
        reducer.finish()
        return told[1:]

    for told in run_threads(2, rank, timeout_s=20):
        kind = "all_reduce" if dense == "fp32" else "all_to_all"
        assert told[: told.index("the first layer")] == [kind] * 5
        assert told.count(kind) == 6 + (dense == "fp32")  # one a layer, and which gradients are there


def test_no_rank_waits_for_another_order():
    """Gradients are ready last layer first on one rank, first layer first on the other: the calls stay the same."""

    def rank(comm):
        told = []
        parameters = [nn.Parameter(torch.zeros(8)) for _ in range(5)]
        reducer = DenseGradients(parameters, Watched(comm, told.append), EXACT, 1)
        backward(
            reducer,
            parameters,
            [torch.full((8,), 1.0 + k) for k in range(5)],
            order=lambda n: range(n)[:: 1 - 2 * comm.rank],
        )
        reducer.finish()
        return [p.grad[0].item() for p in parameters]

    assert run_threads(2, rank, timeout_s=20) == [[2.0, 4.0, 6.0, 8.0, 10.0]] * 2


def test_a_gradient_lies_in_memory_as_its_parameter_does():
    def rank(comm):
        parameter = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
        other = nn.Parameter(torch.zeros(5, 3).t())
        grads = [draw(comm.rank, (2, 3, 4, 4)), draw(comm.rank, (3, 5)) if comm.rank else None]
        reduced(comm, [parameter, other], grads)
        assert parameter.grad.stride() == parameter.stride()
        assert other.grad.stride() == other.stride()
        return parameter.grad, other.grad

    want = draw(0, (2, 3, 4, 4)) + draw(1, (2, 3, 4, 4)), draw(1, (3, 5))
    for found in run_threads(2, rank, timeout_s=20):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_types_may_differ():
    def rank(comm):
        parameters = [nn.Parameter(torch.zeros(6, dtype=d)) for d in (torch.float64, torch.bfloat16, torch.float32)]
        return reduced(comm, parameters, [draw(comm.rank, (6,)).to(p.dtype) for p in parameters])

    for found in run_threads(2, rank, timeout_s=20):
        for grad in found:
            assert torch.equal(grad, draw(0, (6,)).to(grad.dtype) + draw(1, (6,)).to(grad.dtype))


def test_with_one_rank_nothing_is_done():
    model, plain = Mlp(), Mlp()
    told = []
    x = torch.randn(4, 16)
    plain(x).sum().backward()
    reducer = DenseGradients(list(model.parameters()), Watched(solo(), told.append), Wire(dense=RowType.INT8))
    reducer.backward(model(x).sum(), last=True)
    kept = [p.grad for p in model.parameters()]
    reducer.finish()
    assert not told
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class Recomputed(torch.autograd.Function):
    """What torch's reentrant checkpointing does: a backward of its own inside the backward."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.x, ctx.layer = x.detach(), layer
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            ctx.layer(x).backward(grad)
        return x.grad, None


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_layer_that_is_used_twice(recomputed):
    def rank(comm):
        layer = nn.Linear(16, 16, bias=False)
        reducer = DenseGradients([layer.weight], comm, EXACT, 1)
        x = draw(comm.rank, (4, 16)).requires_grad_()
        if recomputed:
            loss = Recomputed.apply(Recomputed.apply(x, layer), layer).sum()
            want = r"a parameter of shape \(16, 16\) got a second gradient in one backward, after its first was sent"
            with pytest.raises(SpecError, match=want):
                reducer.backward(loss, last=True)
            return None
        reducer.backward(layer(layer(x)).sum(), last=False)
        local, layer.weight.grad = layer.weight.grad, None
        reducer.backward(layer(layer(x)).sum(), last=True)
        reducer.finish()
        return local, layer.weight.grad

    found_W = run_threads(2, rank, timeout_s=20)
    if not recomputed:
        (a, found), (b, same) = found_W
        assert torch.equal(found, a + b)
        assert torch.equal(found, same)


def bound(kind, runs_RC):
    """How far an encoding may be off."""
    if kind == "int8":
        return (runs_RC.amax(1) - runs_RC.amin(1)).clamp(min=0)[:, None].expand_as(runs_RC) * 0.503 / 255 + 1e-6
    return runs_RC.abs() * {"bf16": 2.0**-8, "fp16": 2.0**-11}[kind] + {"bf16": 0.0, "fp16": 2.0**-25}[kind]


def runs_of(flat_N):
    return torch.nn.functional.pad(flat_N, (0, -len(flat_N) % RUN)).view(-1, RUN)


@settings(max_examples=20)
@given(
    world=st.integers(2, 4),
    kind=st.sampled_from(("int8", "bf16", "fp16")),
    sizes=st.lists(st.sampled_from((1, 100, 256, 257, 2000)), min_size=1, max_size=3),
    spread=st.sampled_from((0.0, 2.0)),
)
def test_lossy_sums_are_within_the_rounding_of_each_part_and_of_the_sum(world, kind, sizes, spread):
    grads_WP = [
        [draw(w * 10 + p, (n,)) * 10 ** (spread * draw(50 + w, (n,)).clamp(-2, 2)) for p, n in enumerate(sizes)]
        for w in range(world)
    ]

    def rank(comm):
        parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
        return reduced(comm, parameters, grads_WP[comm.rank], Wire(dense=RowType(kind)), 1)

    found_W = run_threads(world, rank, timeout_s=20)
    for p in range(len(sizes)):
        parts_W = [runs_of(grads[p]) for grads in grads_WP]
        off = sum(bound(kind, part) for part in parts_W)
        total = sum(parts_W)
        most = off + bound(kind, total) + bound(kind, off) + 1e-5 * sum(part.abs() for part in parts_W)
        if kind == "int8":  # the run of sums may span more than that of the exact ones
            most = most + 2 * off.amax(1, keepdim=True) * 0.503 / 255
        for found in found_W:
            assert torch.equal(found[p], found_W[0][p]), "ranks have other bits"
            assert (runs_of(found[p]) - total).abs().le(most).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["int8", "bf16", "fp16"])
def test_feedback_makes_good_what_rounding_took(kind):
    """All that arrived over many steps is all that was meant, but for what is held; without it the loss only grows."""
    steps, n = 60, 1000

    def rank(comm, feedback):
        parameter = nn.Parameter(torch.zeros(n))
        reducer = DenseGradients([parameter], comm, Wire(dense=RowType(kind), error_feedback=feedback))
        arrived = torch.zeros(n, dtype=torch.float64)
        for _ in range(steps):  # the same each time: rounding always errs to the same side
            parameter.grad = None
            backward(reducer, [parameter], [draw(comm.rank, (n,))])
            reducer.finish()
            arrived += parameter.grad
        held = reducer.residuals.get(0, torch.zeros(1, RUN)).view(-1)
        return arrived, held[:n] if feedback else held

    meant = steps * sum(draw(w, (n,)).double() for w in range(3))
    off = {}
    for feedback in (False, True):
        arrived_W = run_threads(3, functools.partial(rank, feedback=feedback), timeout_s=20)
        off[feedback] = (arrived_W[0][0] - meant).abs().max().item()
        if feedback:
            held = sum(h.double() for _, h in arrived_W)
            torch.testing.assert_close(
                arrived_W[0][0] + held, meant, rtol=0, atol=1e-3 * meant.abs().max().item() / 100
            )
            one_step = {"int8": 8 * 4 / 255, "bf16": 8 * 2.0**-8, "fp16": 8 * 2.0**-11}[kind]
            assert held.abs().max() < one_step
    assert off[True] < off[False] / 5


def test_bytes_on_the_wire():
    def rank(comm, kind):
        reduced(comm, [nn.Parameter(torch.zeros(64, 256))], [torch.ones(64, 256)], Wire(dense=RowType(kind)))
        return comm.sent.total("dense")

    sent = {kind: run_threads(2, functools.partial(rank, kind=kind))[0] for kind in ("fp32", "bf16", "int8")}
    assert sent == {"fp32": 64 * 256 * 4 + 4, "bf16": 64 * 256 * 2 + 4, "int8": 64 * (256 + 8) + 4}


def test_a_number_that_is_not_finite_comes_through_and_is_not_held():
    def rank(comm):
        parameter = nn.Parameter(torch.zeros(300))
        reducer = DenseGradients([parameter], comm, Wire(dense=RowType.INT8, error_feedback=True))
        grad = torch.ones(300)
        grad[7] = float("nan") if comm.rank else 1.0
        backward(reducer, [parameter], [grad])
        reducer.finish()
        bad = not parameter.grad[7].isfinite()
        parameter.grad = None
        backward(reducer, [parameter], [torch.ones(300)])
        reducer.finish()
        return bad, bool(parameter.grad.isfinite().all())

    assert run_threads(2, rank, timeout_s=20) == [(True, True)] * 2
