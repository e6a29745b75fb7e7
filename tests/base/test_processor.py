"""What processors are and lack, from samples of how Linux describes them; and what a recipe makes of it."""

import platform

import pytest

from rowwise.base.processor import (
    CPUINFO,
    FAMILIES,
    OPTIONAL_FEATURES,
    Processor,
    family_of,
    gemm_library_of,
    missing_features,
    parse_cpuinfo,
    read_processor,
)
from rowwise.recipes.processor import replace_unsupported
from rowwise.train.settings import Training

AVX2 = "fpu sse2 ssse3 pclmulqdq avx f16c fma avx2"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl"
SAMPLES = {  # maker, family, model, flags: name, products, what it lacks
    "Zen 1": (("AuthenticAMD", 23, 1, AVX2), "Zen 1", "torch", ["AVX-512", "bf16 products"]),
    "Rome": (("AuthenticAMD", 23, 49, AVX2), "Zen 2", "onednn", ["AVX-512", "bf16 products"]),
    "Milan": (("AuthenticAMD", 25, 1, AVX2), "Zen 3", "onednn", ["AVX-512", "bf16 products"]),
    "Cezanne": (("AuthenticAMD", 25, 80, AVX2), "Zen 3", "onednn", ["AVX-512", "bf16 products"]),
    "Genoa": (("AuthenticAMD", 25, 17, f"{AVX512} avx512_bf16"), "Zen 4", "onednn", []),
    "masked Genoa": (("AuthenticAMD", 25, 17, AVX512), "Zen 4", "onednn", ["bf16 products"]),
    "Turin": (("AuthenticAMD", 26, 2, f"{AVX512} avx512_bf16"), "Zen 5", "onednn", []),
    "unknown AMD": (("AuthenticAMD", 99, 2, AVX2), None, "onednn", ["AVX-512", "bf16 products"]),
    "Haswell": (("GenuineIntel", 6, 63, AVX2), None, "torch", ["AVX-512", "bf16 products"]),
    "Skylake": (("GenuineIntel", 6, 85, AVX512), None, "torch", ["bf16 products"]),
    "Sapphire Rapids": (("GenuineIntel", 6, 143, f"{AVX512} amx_bf16 avx512_bf16"), None, "torch", []),
    "before AVX2": (("GenuineIntel", 6, 45, "sse2 avx"), None, "torch", [lack.what for lack in OPTIONAL_FEATURES]),
    "silent": (("", 0, 0, ""), None, "torch", []),
}


def cpuinfo(maker: str, family: int, model: int, flags: str) -> str:
    one = f"vendor_id\t: {maker}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: A: B\nflags\t\t: {flags}\n"
    return "\n".join(f"processor\t: {n}\n{one}" for n in range(2))


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_known_of_a_processor(name):
    facts, family, products, missing = SAMPLES[name]
    found = parse_cpuinfo(cpuinfo(*facts), "x86_64")
    named = family_of(found)
    assert (None if named is None else named.name) == family
    assert gemm_library_of(found) == products
    assert [lack.what for lack in missing_features(found)] == missing
    got, lines = replace_unsupported(Training(precision="bf16"), found)
    assert got == Training(precision="fp32" if "bf16 products" in missing else "bf16")
    assert len(lines) == (got.precision == "fp32")


def test_arm_is_asked_for_what_it_may_have():
    graviton = parse_cpuinfo("Features\t: fp asimd asimdhp sve\nCPU implementer\t: 0x41\n", "aarch64")
    assert [lack.what for lack in missing_features(graviton)] == ["bf16 products"]
    assert missing_features(parse_cpuinfo("Features\t: fp asimd bf16\n", "aarch64")) == ()
    assert gemm_library_of(graviton) == "torch"


def test_no_processor_is_in_two_families():
    for family in FAMILIES:
        for models in family.models:
            for model in models:
                assert family_of(Processor(maker=family.maker, family=family.family, model=model)) == family


def test_what_this_processor_says():
    assert read_processor() == parse_cpuinfo(CPUINFO.read_text() if CPUINFO.exists() else "", platform.machine())


def test_a_replaced_precision_says_so_and_can_be_forced():
    zen = parse_cpuinfo(cpuinfo("AuthenticAMD", 25, 1, AVX2), "x86_64")
    (line,) = replace_unsupported(Training(precision="bf16"), zen)[1]
    assert "train.precision=bf16 is replaced by fp32, because this processor has no bf16 instructions" in line
    assert "measured on Zen 3: a step of dlrm-synthetic" in line
    assert "train.precision=bf16_always keeps it" in line
    assert "\n" not in line
    for other in (Training(), Training(precision="bf16_always"), Training(precision="bf16", device="cuda")):
        assert replace_unsupported(other, zen) == (other, ())
