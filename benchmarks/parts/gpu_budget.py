"""What the machine code of a kernel may have, and what a variant has beyond it."""

from parts.gpu_compile import MachineCode, compile_kernel, machine_code
from parts.gpu_variants import Variant
from rowwise.tables.ops._triton import specialise, update
from rowwise.tables.spec import RowType

REGISTERS = 80  # of a lane: 25 programs of a warp on a multiprocessor; 64 are 32
INT4_REGISTERS = 96  # a lane loads its bytes for both columns of each
AMD_REGISTERS = 128


def machine_code_of(variant: Variant, arch: str) -> MachineCode:
    if variant.multiplies and arch.startswith("gfx"):
        variant = variant._replace(constants=variant.constants | {"PRECISION": "ieee"})
    capability = int(arch.removeprefix("sm_")) if arch.startswith("sm_") else 0
    chosen: dict = {}
    if variant.kernel is update.apply:
        ahead = specialise.loads_ahead(variant.bucket, capability) and not variant.constants["UNITS"]
        chosen = {"AHEAD": ahead, "maxnreg": specialise.max_registers(variant.bucket, capability)}
    return machine_code(compile_kernel(variant.kernel, variant.constants | chosen, arch))


def least_width(variant: Variant) -> int:
    """Bytes that the widest load of a lane has at least; 0: any."""
    if variant.dim < specialise.FULL_WARP or variant.copies or variant.multiplies or variant.of_ids:
        return 0
    if variant.of_rows:  # of gradients in fp32, a row spread over the lanes
        return min(16, variant.dim * 4 // 32)
    return 8 if variant.type.facts.scaled else 16  # the scale before the codes has 8 bytes


def faults(variant: Variant, code: MachineCode, arch: str) -> list[str]:
    """Empty if the code keeps the budget."""
    amd = arch.startswith("gfx")
    if variant.multiplies:
        return [f"{code.spills} spills, expected none"] if code.spills else []
    if variant.of_ids:
        limits = [("spills", code.spills), ("atomics", code.atomics), ("instructions not rounded", len(code.inexact))]
        return [f"{got} {what}, expected none" for what, got in limits if got]
    one_warp = variant.constants["num_warps"] == 1 and "apply rowwise_adam " not in variant.name
    most = INT4_REGISTERS if variant.type is RowType.INT4 else REGISTERS
    limits = [
        ("spills", code.spills, 0),
        ("registers", code.registers, AMD_REGISTERS if amd else most),
        ("bytes of shared memory", code.shared_bytes, 0 if one_warp and not variant.copies else 1024),
        ("barriers", code.barriers, 0 if one_warp else 64),
        ("atomics", code.atomics, 0),
        ("fused multiply-adds", 0 if amd else code.fused, 0),
        ("floats in one sum", max(code.float_sums, default=0), 2),
    ]
    found = [f"{got} {what}, expected at most {most}" for what, got, most in limits if got > most]
    if code.inexact:
        found.append(f"instructions that are not correctly rounded: {', '.join(code.inexact)}")
    if not amd and code.widest_load < least_width(variant):
        found.append(f"{code.widest_load} bytes in the widest load of a lane, expected {least_width(variant)}")
    return found
