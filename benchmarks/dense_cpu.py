"""How fast is the dense side of a DLRM beside plain torch: interaction, linear layers, and a whole step?

    python benchmarks/dense_cpu.py [--quick | --smoke] [--save] [--library onednn]

Both sides run forward and backward through autograd, interleaved (A B A B) in one process; results are first
checked to be equal; a time is the minimum of the repeats. What is counted in the limit of a step is in
`parts/limits.py`. The last printed line is one JSON object.

Takes: 7 minutes; --quick 1 minute
Needs: nothing else
"""

import argparse
import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from parts.batches import clicks_of, tables_of
from parts.dlrm import BOTTOM, DENSE, DIM, FEATURES, TOP, WIDTH, TorchInteraction, torch_mlp
from parts.limits import PEAK_SIZE, SMOKE_SIZE, Rows, dlrm_flops, limit_of, peak_flops_s, rows_s, share_floor
from parts.report import at_least, environment, exactly, finish, geomean, options, parsed, show
from parts.timer import beside
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise import DLRM, Batch, Embeddings, Mlp, RowWiseAdagrad, interact
from rowwise.tables.ops import linear

ROWS = 20_000  # of each table


class Work(NamedTuple):
    """One measurement; `what` names the inputs within its kind."""

    kind: str
    what: str
    batch: int
    threads: int
    dtype: str = "fp32"


class TorchDlrm(nn.Module):
    """The same model over the same kind of tables, its dense side in plain torch."""

    def __init__(self, embeddings: Embeddings):
        super().__init__()
        self.embeddings = embeddings
        self.bottom, self.top = torch_mlp((DENSE, *BOTTOM), True), torch_mlp((WIDTH, *TOP), False)
        self.interaction = TorchInteraction(FEATURES + 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.top(self.interaction(self.bottom(batch.dense_BF), self.embeddings(batch.sparse).values()))


def copy_dense(source: nn.Module, target: nn.Module) -> None:
    """The dense parameters of one module into another, which has them in the same order."""
    for a, b in zip(dense_parameters(source), dense_parameters(target), strict=True):
        b.data.copy_(a.data)


def dense_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def assert_equal(kind: str, ours: list[Tensor], peer: list[Tensor], tolerance: float) -> None:
    for a, b in zip(ours, peer, strict=True):
        # As a norm: an output next to zero may fall on the other side of a ReLU, and its gradient with it.
        error = float((a.double() - b.double()).norm() / b.double().norm())
        if not error <= tolerance:
            raise AssertionError(f"{kind}: relative error {error}")


def both_ways(function: Callable[..., Tensor], inputs: list[Tensor], parameters: list, grad: Tensor) -> list[Tensor]:
    """Forward and backward; the output and all gradients."""
    out = function(*inputs)
    wanted = [t for t in (*inputs, *parameters) if t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.dtype))]


def compare(work: Work, ours: Callable[[], object], peer: Callable[[], object], at_most_s: float) -> dict:
    ours(), peer()
    times = beside(ours, peer, 60, at_most_s)
    best = {name: min(values) * 1e3 for name, values in times.items()}
    noise = sorted(times["ours"])[len(times["ours"]) // 2] * 1e3 / best["ours"] - 1
    return {
        **work._asdict(),
        "ours_ms": best["ours"],
        "peer_ms": best["peer"],
        "ratio": best["peer"] / best["ours"],
        "noise": noise,
    }


def measure_interaction(work: Work, at_most_s: float) -> dict:
    dim = int(work.what.removeprefix("dim "))
    dense_BD = torch.randn(work.batch, dim, requires_grad=True)
    pooled_BS = torch.randn(work.batch, FEATURES * dim, requires_grad=True)
    grad = torch.randn(work.batch, dim + FEATURES * (FEATURES + 1) // 2)
    usual, inputs = TorchInteraction(FEATURES + 1), [dense_BD, pooled_BS]
    assert_equal(work.kind, both_ways(interact, inputs, [], grad), both_ways(usual, inputs, [], grad), 1e-6)
    return compare(
        work, lambda: both_ways(interact, inputs, [], grad), lambda: both_ways(usual, inputs, [], grad), at_most_s
    )


def measure_linears(work: Work, at_most_s: float) -> dict:
    sizes = tuple(map(int, work.what.split("-")))
    bottom = sizes[0] == DENSE
    ours, peer = Mlp(sizes, relu_last=bottom), torch_mlp(sizes, bottom)
    copy_dense(peer, ours)
    x_BI = torch.randn(work.batch, sizes[0], requires_grad=not bottom)
    grad = torch.randn(work.batch, sizes[-1])

    def run(module: nn.Module) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=work.dtype == "bf16"):
            return both_ways(module, [x_BI], dense_parameters(module), grad)

    assert_equal(f"{work.kind} {work.what}", run(ours), run(peer), 5e-3 if work.dtype == "fp32" else 1e-2)
    return compare(work, lambda: run(ours), lambda: run(peer), at_most_s)


def measure_step(work: Work, at_most_s: float) -> dict:
    tables = tables_of([ROWS] * FEATURES, DIM, optimizer=RowWiseAdagrad(lr=0.01))
    models = [DLRM(Embeddings(tables), DENSE, BOTTOM, TOP), TorchDlrm(Embeddings(tables))]
    copy_dense(models[1], models[0])
    optimizers = [torch.optim.SGD(dense_parameters(model), lr=0.01) for model in models]
    batch = clicks_of(work.batch, FEATURES, ROWS, DENSE)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=work.dtype == "bf16"):
            logits_BK = model(batch)
        loss = F.binary_cross_entropy_with_logits(logits_BK.float(), batch.labels_BK)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.embeddings.update()
        return [loss.detach()]

    ours, peer = (lambda k=k: step(models[k], optimizers[k]) for k in (0, 1))
    for _ in range(2):
        assert_equal(work.kind, ours(), peer(), 1e-5 if work.dtype == "fp32" else 1e-2)
    peak_size = PEAK_SIZE if at_most_s else SMOKE_SIZE
    peak_before = peak_flops_s(peak_size) if work.dtype == "fp32" else 0.0
    row = compare(work, ours, peer, at_most_s)
    if work.dtype == "fp32":
        rows = [Rows(models[0].embeddings, clicks_of(work.batch, FEATURES, ROWS, DENSE).sparse) for _ in range(4)]
        flops = dlrm_flops(work.batch, (DENSE, *BOTTOM), (WIDTH, *TOP), FEATURES + 1)
        row |= limit_of(flops, max(peak_before, peak_flops_s(peak_size)), rows_s(rows, 3))
        row["limit_share"] = row["limit_ms"] / row["ours_ms"]
    return row


MEASURES = {"interaction": measure_interaction, "linears": measure_linears, "step": measure_step}


def all_works(args: argparse.Namespace) -> Iterator[Work]:
    stacks = ["-".join(map(str, sizes)) for sizes in ((DENSE, *BOTTOM), (WIDTH, *TOP))]
    batches = (2048,) if args.quick else (2048, 8192)
    batches, larger = ((32,), (32, 64)) if args.smoke else (batches, (2048, 8192))
    for dim, batch, n in product((DIM,) if args.quick else (16, 32, 64, 128), larger, args.threads):
        yield Work("interaction", f"dim {dim}", batch, n)
    for dtype, stack, batch, n in product(("fp32", "bf16"), stacks, batches, args.threads):
        yield Work("linears", stack, batch, n, dtype)
    for dtype, batch, n in product(("fp32", "bf16"), batches, args.threads):
        yield Work("step", "DLRM", batch, n, dtype)


def floors_of(rows: list[dict], library: str) -> list[dict]:
    def ratios(kind: str, **wanted: object) -> list[float]:
        return [r["ratio"] for r in rows if r["kind"] == kind and all(r[k] == v for k, v in wanted.items())]

    named = [(f"interaction, dim {DIM}, worst cell", ratios("interaction", what=f"dim {DIM}"), min, 5.0)]
    if library == "onednn":
        named.append(("linear layers in float32, geometric mean", ratios("linears", dtype="fp32"), geomean, 1.9))
    # Where torch's library is chosen, or 16 bits are asked for, both sides multiply with the same one.
    same = [*ratios("linears", dtype="bf16"), *(ratios("linears", dtype="fp32") if library == "torch" else [])]
    named.append(("linear layers through the same library, geometric mean", same, geomean, 0.97))
    named.append(("step in float32, worst cell", ratios("step", dtype="fp32"), min, 1.1))
    shares = [r["limit_share"] for r in rows if "limit_share" in r]
    floors = [at_least(name, how(values), floor) for name, values, how, floor in named]
    return [*floors, share_floor("step in float32, worst cell", min(shares))]


def main() -> None:
    parser = options("dense_cpu", __doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--library", choices=["torch", "onednn"], help="for linear layers; measured if not given")
    args = parsed(parser)
    torch.manual_seed(0)
    linear.choose_library(args.library)
    library = linear.current_library()
    print(f"linear layers use {library}")
    rows = []
    for work in all_works(args):
        torch.set_num_threads(work.threads)
        rows.append(MEASURES[work.kind](work, 0.0 if args.smoke else 1.0 if args.quick else 5.0))
        show(rows[-1])
    # `assert_equal` raises where the sides do not agree.
    agree = [exactly("cells in which both sides agree", len(rows), 16)]
    floors = agree if args.smoke else floors_of(rows, library)
    finish("dense_cpu", rows, floors, args, environment={**environment(), "library": library})


if __name__ == "__main__":
    main()
