"""The name of a processor, by which results are kept: maker, family and instruction set."""

import platform

from rowwise.base.processor import AMD, CPUINFO, INTEL, family_of, parse_cpuinfo

MAKERS = {AMD: "amd", INTEL: "intel"}
AVX2 = {"avx2", "fma", "bmi2", "f16c"}  # what the kernels want of it
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


def processor_name(cpuinfo: str, machine: str) -> str:
    """Such as amd-zen3-avx2, of what Linux says of a processor, and of the kind of machine, such as x86_64."""
    found = parse_cpuinfo(cpuinfo, machine)
    if not found.maker:
        return f"{machine}-{'neon' if machine in ('aarch64', 'arm64') else 'base'}"
    isa = "avx512" if found.flags >= AVX512 else "avx2" if found.flags >= AVX2 else "base"
    known = family_of(found)
    family = f"family{found.family}" if known is None else known.name.lower().replace(" ", "")
    if found.maker == INTEL:
        family = "xeon" if "xeon" in cpuinfo.lower() else "core"
    return f"{MAKERS.get(found.maker, found.maker.lower())}-{family}-{isa}"


def this_processor() -> str:
    return processor_name(CPUINFO.read_text() if CPUINFO.exists() else "", platform.machine())
