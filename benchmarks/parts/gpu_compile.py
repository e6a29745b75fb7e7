"""Kernels compiled for GPUs that are not here, and what can be read off the machine code. Not in the interpreter."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
OPTIONS = ("num_warps", "enable_fp_fusion", "maxnreg")
TYPES = {  # of arguments by name; the others are constants
    "arena": "*u8", "touched": "*u8", "out": "*fp32", "values": "*i64", "offsets": "*i64", "weights": "*fp32",
    "features": "*i64", "chosen": "*i64", "starts": "*i64", "fault": "*i32", "batch": "i32", "columns": "i32",
    "grad": "*fp32", "terms": "*fp32", "places": "*i64", "scales": "*fp32", "joins": "*i8", "unit_first": "*i32",
    "unit_last": "*i32", "unit_dims": "*i32", "span": "*i32", "waiting": "*fp32", "partial": "*fp32", "state": "*fp32",
    "tables": "*i64", "hyper": "*fp32", "keys": "*i64", "records": "*i64", "slot_rows": "*i64",
    "dense": "*fp32", "pooled": "*fp32", "dense_grad": "*fp32", "pooled_grad": "*fp32", "vectors": "i32", "dim": "i32",
    "rows": "*fp32", "packed": "*u8", "x": "*fp32", "n": "i32", "levels": "i32",
}  # fmt: skip
TYPES_OF_ROUTE = TYPES | {
    "counts": "*i32", "first_rows": "*i64", "ends": "*i32", "keys": "*i32", "bags": "*i32", "order": "*i64",
    "is_first": "*i32", "begins_unit": "*i32", "row_numbers": "*i32", "firsts": "*i32", "unit_numbers": "*i32",
    "unit_records": "*i64",
    "unit_joins": "*i8", "row_bounds": "*i32", "unit_bounds": "*i32", "num_features": "i32", "stride": "i32",
    "rows": "i32", "blocks": "i32", "levels": "i32", "num_bounds": "i32",
}  # fmt: skip

TYPES_OF_CACHE = TYPES_OF_ROUTE | {
    "bounds": "*i64", "cached": "*i64", "slots": "*i64", "max_key": "i64", "numbers": "*i32", "stamps": "*i32",
    "found": "*i64", "is_missed": "*i32", "missed": "*i32", "at_of": "*i32", "ways_of": "*i32", "spilled": "*i32",
    "changed": "*u8", "move_tables": "*i64", "move_slots": "*i64", "move_rows": "*i64", "move_victims": "*i64",
    "evicted": "*i32", "counts": "*i64", "overflow_used": "*i64", "count": "*i32", "now": "i32", "num_tables": "i32",
}  # fmt: skip

TYPES_OF_BATCHES = TYPES | {
    "segments": "*i64", "source": "*i64", "out": "*i64", "weights_out": "*fp32", "num_segments": "i32", "n": "i64",
    "samples": "*i32", "places": "*i64", "lengths": "*i64", "lengths_out": "*i64", "begins": "*i64", "outside": "*i64",
    "num_bags": "i32", "ends": "*i64", "bounds": "*i64", "buckets": "*u8", "bags": "*i32", "local": "*i64",
    "num_bounds": "i32", "order": "*i64", "firsts": "*i32", "lasts": "*i32", "slices": "*i64", "words": "*i32",
    "num_slices": "i32", "is_first": "*i32", "numbers": "*i64", "distinct": "*i64", "inverse": "*i64", "ids": "*i64",
    "section": "*i64", "rows": "*i64", "before": "*i64",
}  # fmt: skip
OF_MODULE = {
    "contributions": TYPES_OF_ROUTE, "cache": TYPES_OF_CACHE, "rearrange": TYPES_OF_BATCHES,
    "idmap": TYPES_OF_BATCHES | {"words": "*i64"},
    "graph": TYPES | {"vectors": "*fp32", "ids": "*i32", "nodes": "i32", "rows": "i32"},
}  # fmt: skip


class MachineCode(NamedTuple):
    """What a compiled kernel needs and does; of AMD, registers are vector registers."""

    registers: int
    spills: int  # instructions that move registers to memory and back
    shared_bytes: int
    barriers: int
    atomics: int
    fused: int  # multiply-adds that round once
    inexact: tuple[str, ...]  # instructions that are not correctly rounded
    loads: dict[str, int]  # by width, as the assembler writes it
    float_sums: tuple[int, ...]  # floats that each reduction of them adds
    instructions: int

    @property
    def widest_load(self) -> int:
        """Bytes of a lane."""
        widths = {"v4.b32": 16, "v2.b64": 16, "v2.b32": 8, "b64": 8, "dwordx4": 16, "dwordx2": 8}
        return max((widths.get(name, 4) for name in self.loads), default=0)


def compile_kernel(kernel: Any, constants: dict[str, Any], arch: str) -> Any:
    """`constants`: with the launch options."""
    options = {name: constants[name] for name in OPTIONS if constants.get(name) is not None}
    given = {name: value for name, value in constants.items() if name not in OPTIONS}
    types = OF_MODULE.get(kernel.fn.__module__.rpartition(".")[2], TYPES)
    signature = {name: "constexpr" if name in given else types[name] for name in kernel.arg_names}
    divisible = [["tt.divisibility", 16]]
    attributes = {(at,): divisible for at, name in enumerate(kernel.arg_names) if signature[name].startswith("*")}
    return triton.compile(ASTSource(kernel, signature, given, attributes), target=TARGETS[arch], options=options)


def machine_code(compiled: Any) -> MachineCode:
    reductions = re.findall(r'"tt\.reduce"(.*?)\}\) : \(tensor<([\dx]+)x', compiled.asm["ttir"], re.S)
    float_sums = tuple(int(shape.split("x")[-1]) for body, shape in reductions if "arith.addf" in body)
    return _nvidia(compiled, float_sums) if "ptx" in compiled.asm else _amd(compiled.asm["amdgcn"], float_sums)


def _nvidia(compiled: Any, float_sums: tuple[int, ...]) -> MachineCode:
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (_dump(name, file.name) for name in ("--dump-resource-usage", "--dump-sass"))
    registers, stack, shared = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage).groups())
    inexact = r"\b(?:div\.(?:full|approx)|sqrt\.approx|rsqrt\.approx|rcp\.approx|ex2\.approx|\w+\.ftz)[\w.]*"
    return MachineCode(
        registers=registers,
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)) + (stack > 0),
        shared_bytes=shared,
        barriers=len(re.findall(r"\bBAR\.", sass)),
        atomics=len(re.findall(r"\b(?:atom|red)\.", ptx)),
        fused=len(re.findall(r"\bfma\.", ptx)),
        inexact=tuple(sorted(set(re.findall(inexact, ptx)))),
        loads=dict(Counter(re.findall(r"\bld\.global(?:\.(?!v\d)(?!b\d)[\w:]+)*\.((?:v[248]\.)?b\d+)", ptx))),
        float_sums=float_sums,
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/", sass, re.M)),
    )


def _dump(option: str, path: str) -> str:
    return subprocess.run([str(BIN / "cuobjdump"), option, path], capture_output=True, text=True, check=True).stdout


def _amd(assembly: str, float_sums: tuple[int, ...]) -> MachineCode:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly).group(1))

    return MachineCode(
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count"),
        shared_bytes=number("group_segment_fixed_size"),
        barriers=len(re.findall(r"\bs_barrier\b", assembly)),
        atomics=len(re.findall(r"\b(?:global|flat|buffer)_atomic_", assembly)),
        fused=len(re.findall(r"\bv_(?:pk_)?(?:fmac?|mac|mad)\w*_f32 ", assembly)),
        inexact=(),  # its divisions are sequences with fused steps whose last result is rounded correctly
        loads=dict(Counter(re.findall(r"\b(?:global|buffer|flat)_load_(\w+)", assembly))),
        float_sums=float_sums,
        instructions=len(re.findall(r"^\t[vs]_", assembly, re.M)),
    )
