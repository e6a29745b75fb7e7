"""Kernels for GPUs, without a GPU: their bits in the interpreter, their machine code, and that nothing waits."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from from_benchmarks import part
from problems import make_problem
from rearranged import on_device_of

from rowwise import Pooling, RowWiseAdagrad, Table
from rowwise.tables.ops.operators import OPERATORS

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no build for this machine")
HERE = Path(__file__).parent
# Of each kernel and row type one, and those that are short of registers.
SAMPLE = (
    "pool 1 ids fp32 dim 64", "pool 20 ids fp32 dim 128", "pool 20 ids int8 dim 128", "pool weighted bf16 dim 128",
    "pool_weight_grad fp32 dim 64", "gather fp32 dim 128", "sum_units fp32 dim 128", "apply adam fp32 dim 128",
    "apply rowwise_adagrad units fp16 dim 64", "apply sgd int8 dim 64", "apply rowwise_adagrad fp32 dim 128",
    "apply rowwise_adam bf16 dim 64", "apply ftrl fp32 dim 64",
    "interact dim 128", "interact_grad dim 128", "route locate scaled", "route expand 20 ids", "route write_records",
    "route cut", "route find_bounds",
    "batch copy_segments", "batch copy_bags 20 ids", "batch find_buckets", "batch place_ids", "batch write_ids",
    "batch write_distinct", "batch find_newer", "batch map_section listed", "batch map_section quotient",
    "pack4 dim 256", "unpack4 dim 128", "sum_sampled spread dim 64", "sum_sampled stride dim 128",
)  # fmt: skip


def test_every_operator_has_an_implementation_on_a_gpu():
    from rowwise.tables.ops._triton.operators import LAUNCHES

    assert LAUNCHES.keys() == {name for name, one in OPERATORS.items() if one.on_gpu == "triton"}


@pytest.mark.timeout(1200)  # on a machine that does much else
@pytest.mark.few(1)
@pytest.mark.parametrize("which", ["not slow", ""])
def test_kernels_have_the_bits_of_the_reference(which):
    """In a process of its own: kernels are made for the interpreter when they are imported."""
    command = [sys.executable, "-m", "pytest", "-m", which, *sorted(HERE.glob("interpreted_*.py"))]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def faults_of(variant, arch):
    """What the machine code of a variant has that it must not have."""
    budget = part("gpu_budget")
    return budget.faults(variant, budget.machine_code_of(variant, arch), arch)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SAMPLE)
def test_machine_code_keeps_its_budget(name):
    assert not faults_of(part("gpu_variants").variants()[name], "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942"])
def test_machine_code_of_other_gpus_keeps_its_budget(arch):
    """A sample of the variants."""
    variants = part("gpu_variants").variants()
    found = {name: faults_of(variants[name], arch) for name in SAMPLE}
    assert not {name: faults for name, faults in found.items() if faults}


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 3])
def test_machine_code_of_many_variants_keeps_its_budget(number):
    """Each sixth of the variants twice; `rowwise bench gpu_static` compiles all of them, in 12 minutes."""
    variants = list(part("gpu_variants").variants().items())[number::6]
    found = {name: faults_of(variant, "sm_90") for name, variant in variants}
    assert not {name: faults for name, faults in found.items() if faults}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("flaw", "fault"),
    [
        ("divides", "instructions that are not correctly rounded"),
        ("roots", "instructions that are not correctly rounded"),
        ("exponent", "instructions that are not correctly rounded"),
        ("atomic", "atomics"),
        ("sums", "floats in one sum"),
        ("unaligned", "bytes in the widest load"),
    ],
)
def test_a_planted_flaw_is_found(flaw, fault):
    found = faults_of(part("gpu_flaws").variant(flaw), "sm_90")
    assert any(fault in line for line in found), found


def routed(device):
    from rowwise.tables.ops._triton import launch, route

    tables = (
        Table(name="a", rows=50, dim=8, features=("x", "y"), optimizer=RowWiseAdagrad()),
        Table(name="b", rows=40, dim=24, pooling=Pooling.MEAN, optimizer=RowWiseAdagrad()),
        Table(name="c", rows=7, dim=64, pooling=Pooling.WEIGHTED, optimizer=RowWiseAdagrad()),
    )
    problem = make_problem(tables, batch=300, most=3, seed=1)
    group, jagged = problem.group(problem.arena()), problem.jagged
    features = problem.sources(group)
    _, order = launch.tables_by_bucket(group.tables_TC, torch.device("cpu"))
    order = order._replace(**{name: x.to(device) for name, x in order._asdict().items() if isinstance(x, torch.Tensor)})
    offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
    batch = route.DeviceBatch(
        launch.read_features(features),
        *(x.to(device) for x in (features, jagged.values_N, offsets, jagged.weights_N)),
        batch=jagged.batch_size,
        stride=group.columns,
        per_id=False,
    )
    return route.route(batch, group.tables_TC.to(device), order, torch.zeros(2, dtype=torch.int32, device=device))


class Launches:
    """Stands for a kernel: `meta` tensors have nothing for it to read."""

    def __getitem__(self, grid):
        return lambda *_, **__: None


def test_a_route_waits_for_nothing(monkeypatch):
    """On `meta` there are no values to wait for."""
    from rowwise.tables.ops._triton import contributions, route

    for name in ("count_ids", "expand", "locate", "find_rows", "cut", "write_records", "find_bounds"):
        assert hasattr(contributions, name)
        monkeypatch.setattr(route.kernels, name, Launches())
    found = routed("meta")
    assert all(x.is_meta for x in found if isinstance(x, torch.Tensor))


IDS, BAGS = torch.arange(4), torch.tensor([1, 3])
# What each operator asks the device for, by one wait or by none, and the sizes of its results.
WAITS = {
    "take": (([IDS], [BAGS], [], torch.tensor([[0, 1, 1]])), [[1, 4], [4, 0]], [3, 1, 0, 2]),
    "expand": (([IDS], [BAGS], [], [IDS[:1]], torch.tensor([[0, 0]]), False), [[0], [1], [4, 0]], [1, 1, 0]),
    "deduplicate": ((IDS, torch.tensor([0, 1, 4])), [[0, 1, 3]], [3, 3, 4, 3]),
    "pack_ids": (
        (IDS, BAGS, None, torch.tensor([[0, 9]]), torch.tensor([[1, 1, 0]]), 2), [[0], [0, 4], [4, 0]], [10, 2, 1],
    ),
    "in_range": ((IDS, BAGS, torch.tensor([[1, 9]]), 1), [[0], [4, 0]], None),
    "bucketize": ((IDS, BAGS, IDS.float(), torch.tensor([[0, 2, 4]])), None, [4, 4, 4, 4, 3]),
    "map_ids": ((IDS, torch.tensor([[0, 5, 0, 1, 7, 1, 0, 0, 0, 0]]), IDS, 9, 2), None, None),
    "find_newer": ((IDS, IDS[:3], torch.tensor([[0, 9, 0, 4]]), IDS, IDS, 2), None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_operators_on_batches_wait_once_or_not_at_all(name, monkeypatch):
    """On `meta` there is nothing to wait for but in `to_host`."""
    from rowwise.tables.ops._triton import idmap, jagged, rearrange

    args, answer, sizes = WAITS[name]
    asked = []
    for kernel in ("copy_segments", "find_bags", "copy_bags", "find_buckets", "place_ids", "find_outside", "write_ids",
                   "find_distinct", "write_distinct", "find_newer"):  # fmt: skip
        assert hasattr(rearrange, kernel)
        monkeypatch.setattr(rearrange, kernel, Launches())
    monkeypatch.setattr(idmap, "map_section", Launches())
    for moved in ("on_device", "copy_to"):
        monkeypatch.setattr(jagged, moved, lambda numbers, device: numbers.to(device))
    monkeypatch.setattr(jagged, "shared_programs", lambda *_: 5)
    monkeypatch.setattr(jagged, "begin", lambda _: torch.zeros(3))
    monkeypatch.setattr(jagged, "end", lambda _: None)
    monkeypatch.setattr(jagged, "to_host", lambda parts: asked.append([len(part) for part in parts]) or answer)
    found = jagged.LAUNCHES[name](*on_device_of(name, args, "meta"))
    assert asked == ([] if answer is None else [[len(numbers) for numbers in answer]])
    if sizes is not None:
        assert [len(x) for x in found] == sizes


@pytest.mark.parametrize(
    "wait",
    [torch.Tensor.item, torch.unique, torch.nonzero, lambda x: x[x > 0], lambda x: x.tolist()],
    ids=["item", "unique", "nonzero", "mask", "tolist"],
)
def test_a_wait_is_found(wait):
    with pytest.raises((RuntimeError, NotImplementedError)):
        wait(torch.empty(1, device="meta"))
