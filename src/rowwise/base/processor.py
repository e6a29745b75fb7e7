"""Reads facts about the processor, and makes the choices that depend on its family; no torch.

All functions but two take the text of /proc/cpuinfo, so that tests cover every processor on any. A choice depends
on the family, never on a measurement at run time: GEMM libraries round differently, and the result of a run must not
depend on the load of the machine.
"""

import os
import platform
from pathlib import Path
from typing import Literal, NamedTuple

CPUINFO = Path("/proc/cpuinfo")
AMD, INTEL = "AuthenticAMD", "GenuineIntel"
GemmLibrary = Literal["torch", "onednn"]  # for float32


class Processor(NamedTuple):
    """Facts about a processor from /proc/cpuinfo; defaults where the system has none."""

    maker: str = ""
    family: int = 0
    model: int = 0
    flags: frozenset[str] = frozenset()
    machine: str = ""  # x86_64, aarch64, ...


class ProcessorFamily(NamedTuple):
    """Processors with equal choices, and measurements on them."""

    name: str
    maker: str
    family: int
    models: tuple[range, ...]
    gemm_library: GemmLibrary
    measured: str


# The first match counts. `measured` is of one thread; empty: assumed from other processors of the maker.
FAMILIES = (
    ProcessorFamily(
        "Zen 1", AMD, 0x17, (range(0x30),), "torch", "oneDNN's float32 layers run at .95 of torch's; bf16 at .13"
    ),
    ProcessorFamily("Zen 2", AMD, 0x17, (range(0x30, 0x100),), "onednn", ""),
    ProcessorFamily(
        "Zen 3", AMD, 0x19, (range(0x10), range(0x20, 0x60)), "onednn",
        "a step of dlrm-synthetic in bf16 runs at .11 of float32, single layers at .05 to .12; fp16 is as slow",
    ),
    ProcessorFamily(
        "Zen 4", AMD, 0x19, (range(0x10, 0x20), range(0x60, 0x100)), "onednn",
        "a step of a DLRM takes 116.6 ms with torch's library, 108.6 with oneDNN; bf16 products of our own gain 3 %",
    ),
    ProcessorFamily("Zen 5", AMD, 0x1A, (range(0x100),), "onednn", ""),
)  # fmt: skip
DEFAULT_GEMM_LIBRARIES: dict[str, GemmLibrary] = {AMD: "onednn"}  # by maker, for other families


class MissingFeature(NamedTuple):
    """An instruction set that a processor may lack, and what replaces it."""

    what: str
    flags: frozenset[str]  # any one suffices
    instead: str
    x86_only: bool = True


BF16 = MissingFeature(
    "bf16 products",
    frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "train.precision=bf16 is replaced by fp32, which is faster than bf16 in software",
    x86_only=False,
)
OPTIONAL_FEATURES = (
    MissingFeature("AVX2", frozenset({"avx2"}), "tables take the kernels for SSE2"),
    MissingFeature("AVX-512", frozenset({"avx512f"}), "tables take the kernels for AVX2, or SSE2"),
    MissingFeature("carry-less products", frozenset({"pclmulqdq"}), "checksums of checkpoints are zlib's"),
    BF16,
)


def usable_processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_processor() -> Processor:
    """The processor of this machine."""
    return parse_cpuinfo(CPUINFO.read_text() if CPUINFO.exists() else "", platform.machine())


def parse_cpuinfo(cpuinfo: str, machine: str) -> Processor:
    """Facts from the text of /proc/cpuinfo, of its first processor."""
    facts: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    family, model = (facts.get(name, "") for name in ("cpu family", "model"))
    return Processor(
        maker=facts.get("vendor_id", ""),
        family=int(family) if family.isdecimal() else 0,
        model=int(model) if model.isdecimal() else 0,
        flags=frozenset((facts.get("flags") or facts.get("Features") or "").split()),
        machine=machine,
    )


def family_of(processor: Processor) -> ProcessorFamily | None:
    """The processor's entry in `FAMILIES`, or None."""
    for family in FAMILIES:
        same_family = (family.maker, family.family) == (processor.maker, processor.family)
        if same_family and any(processor.model in models for models in family.models):
            return family
    return None


def gemm_library_of(processor: Processor) -> GemmLibrary:
    """The faster GEMM library for float32 on a processor."""
    family = family_of(processor)
    return DEFAULT_GEMM_LIBRARIES.get(processor.maker, "torch") if family is None else family.gemm_library


def missing_features(processor: Processor) -> tuple[MissingFeature, ...]:
    """The optional features that a processor lacks; empty if its flags are unknown."""
    if not processor.flags:
        return ()
    x86 = processor.machine == "x86_64"
    return tuple(f for f in OPTIONAL_FEATURES if not f.flags & processor.flags and (x86 or not f.x86_only))
