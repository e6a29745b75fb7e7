"""What this processor is, what it lacks, and what follows from that: one table of measured families, and no torch.

Facts are read once from the system as text and judged here by pure functions, so that every processor can be tested on
any other. A choice follows from the family and never from a measurement of this moment: two choices round differently,
and a run must not depend on what else the machine was doing.
"""

import platform
from pathlib import Path
from typing import Literal, NamedTuple

CPUINFO = Path("/proc/cpuinfo")
AMD, INTEL = "AuthenticAMD", "GenuineIntel"
Products = Literal["torch", "onednn"]  # libraries for products of float32 matrices


class Processor(NamedTuple):
    """Facts about a processor, as Linux tells them; without flags where nobody does."""

    maker: str = ""
    family: int = 0
    model: int = 0
    flags: frozenset[str] = frozenset()
    machine: str = ""  # x86_64, aarch64, ...


class ProcessorFamily(NamedTuple):
    """Processors that behave alike, and what was measured on them."""

    name: str
    maker: str
    family: int
    models: tuple[range, ...]
    products: Products
    measured: str


# The first that fits counts. `measured` is of one thread; none: the maker's other processors speak for it.
FAMILIES = (
    ProcessorFamily(
        "Zen 1", AMD, 0x17, (range(0x30),), "torch", "oneDNN's float32 layers run at .95 of torch's; bf16 at .13"
    ),
    ProcessorFamily("Zen 2", AMD, 0x17, (range(0x30, 0x100),), "onednn", ""),
    ProcessorFamily(
        "Zen 3", AMD, 0x19, (range(0x10), range(0x20, 0x60)), "onednn",
        "a step of dlrm-synthetic in bf16 runs at .11 of float32, single layers at .05 to .12, fp16 likewise",
    ),
    ProcessorFamily(
        "Zen 4", AMD, 0x19, (range(0x10, 0x20), range(0x60, 0x100)), "onednn",
        "a step of a DLRM takes 116.6 ms with torch's library, 108.6 with oneDNN; bf16 products of our own gain 3 %",
    ),
    ProcessorFamily("Zen 5", AMD, 0x1A, (range(0x100),), "onednn", ""),
)  # fmt: skip
OTHERS: dict[str, Products] = {AMD: "onednn"}  # of families that are not listed


class MissingFeature(NamedTuple):
    """A feature that a processor may lack, and what is used instead."""

    what: str
    flags: frozenset[str]  # any of them will do
    instead: str
    x86_only: bool = True


BF16 = MissingFeature(
    "bf16 products",
    frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "train.precision=bf16 is replaced by fp32, which is faster than bf16 in software",
    x86_only=False,
)
LACKS = (
    MissingFeature("AVX2", frozenset({"avx2"}), "tables take the kernels for SSE2"),
    MissingFeature("AVX-512", frozenset({"avx512f"}), "tables take the kernels for AVX2, or SSE2"),
    MissingFeature("carry-less products", frozenset({"pclmulqdq"}), "checksums of checkpoints are zlib's"),
    BF16,
)


def read_processor() -> Processor:
    return parse(CPUINFO.read_text() if CPUINFO.exists() else "", platform.machine())


def parse(cpuinfo: str, machine: str) -> Processor:
    """From the text of /proc/cpuinfo, whose first processor stands for all."""
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
    """Its row of the table; None: it is not listed."""
    for family in FAMILIES:
        same = (family.maker, family.family) == (processor.maker, processor.family)
        if same and any(processor.model in models for models in family.models):
            return family
    return None


def products_of(processor: Processor) -> Products:
    """The library for products of float32 matrices."""
    family = family_of(processor)
    return OTHERS.get(processor.maker, "torch") if family is None else family.products


def lacks(processor: Processor) -> tuple[MissingFeature, ...]:
    """What it does not have; none of a processor that tells nothing."""
    if not processor.flags:
        return ()
    x86 = processor.machine == "x86_64"
    return tuple(lack for lack in LACKS if not lack.flags & processor.flags and (x86 or not lack.x86_only))
