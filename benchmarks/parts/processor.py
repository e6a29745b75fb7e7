"""The name of a processor, by which results are kept: vendor, family and instruction set."""

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# Of AMD, by family: the first model of a generation and its name, in order.
AMD = {
    23: ((0x00, "zen1"), (0x30, "zen2")),
    25: ((0x00, "zen3"), (0x10, "zen4"), (0x20, "zen3"), (0x60, "zen4")),
    26: ((0x00, "zen5"),),
}
AVX2 = {"avx2", "fma", "bmi2", "f16c"}  # what the kernels want of it
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


def processor_name(cpuinfo: str, machine: str) -> str:
    """Such as amd-zen3-avx2, of what Linux says of a processor, and of the kind of machine, such as x86_64."""
    facts: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    if "vendor_id" not in facts:
        return f"{machine}-neon" if machine in ("aarch64", "arm64") else f"{machine}-base"
    flags = set(facts.get("flags", "").split())
    isa = "avx512" if flags >= AVX512 else "avx2" if flags >= AVX2 else "base"
    family, model = int(facts.get("cpu family", 0)), int(facts.get("model", 0))
    match facts["vendor_id"]:
        case "AuthenticAMD":
            known = [name for first, name in AMD.get(family, ()) if model >= first]
            return f"amd-{known[-1] if known else f'family{family}'}-{isa}"
        case "GenuineIntel":
            return f"intel-{'xeon' if 'xeon' in facts.get('model name', '').lower() else 'core'}-{isa}"
        case vendor:
            return f"{vendor.lower()}-family{family}-{isa}"


def this_processor() -> str:
    return processor_name(CPUINFO.read_text() if CPUINFO.exists() else "", platform.machine())
