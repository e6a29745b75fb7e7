"""Describes the machine and the installation, for bug reports and env.json. Known limit: Linux and macOS only."""

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import rowwise
from rowwise.base.processor import family_of, missing_features, read_processor, usable_processors

UNKNOWN = "unknown"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions, processor and memory, read without the native operators."""

    rowwise: str
    python: str
    torch: str
    cuda: str
    numpy: str
    os: str
    cpu: str
    family: str  # name in the table of processors
    lacks: tuple[str, ...]  # missing instruction sets, and what is used instead
    cores: int
    usable_cores: int
    torch_threads: int
    omp_wait_policy: str
    huge_pages: str
    memory_gb: float

    @classmethod
    def read(cls, omp_wait_policy: str) -> "Environment":
        torch_version, cuda, threads = _torch()
        cores, processor = os.cpu_count() or 1, read_processor()
        family = family_of(processor)
        return cls(
            rowwise=rowwise.__version__,
            python=f"{platform.python_version()} ({platform.python_implementation()})",
            torch=torch_version,
            cuda=cuda,
            numpy=_installed_version("numpy"),
            os=platform.platform(),
            cpu=_cpu(),
            family="" if family is None else family.name,
            lacks=tuple(f"{lack.what}: {lack.instead}" for lack in missing_features(processor))
            if processor.flags
            else (UNKNOWN,),
            cores=cores,
            usable_cores=usable_processors(),
            torch_threads=threads,
            omp_wait_policy=omp_wait_policy,
            huge_pages=_huge_pages(),
            memory_gb=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLibrary:
    """The loaded library of native operators."""

    library: str
    library_bytes: int
    isa: str  # the instruction set in use
    isa_sets: tuple[str, ...]  # supported by both the processor and the library
    on_gpu: str  # implementation of each operator on the GPU

    @classmethod
    def read(cls) -> "NativeLibrary":
        """Load the operators; raises NativeError when they are missing, and ImportError when torch does not load."""
        from rowwise.base.library import find_library
        from rowwise.tables.ops.native import LIBRARY, isa
        from rowwise.tables.ops.operators import describe_gpu_operators

        library = find_library(LIBRARY)
        in_use = isa()
        return cls(
            library=str(library),
            library_bytes=library.stat().st_size,
            isa=in_use,
            isa_sets=_isa_sets(in_use),
            on_gpu=describe_gpu_operators(),
        )


def _isa_sets(in_use: str) -> tuple[str, ...]:
    import torch

    sets: list[str] = []
    for name in ("base", "avx2", "avx512"):
        try:
            torch.ops.rowwise.limit_isa(name)
        except RuntimeError:  # this processor lacks it
            continue
        sets.append(name)
    torch.ops.rowwise.limit_isa(in_use)
    return tuple(sets)


def _torch() -> tuple[str, str, int]:
    """Version, CUDA and threads; the version includes the error if torch does not load."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"{_installed_version('torch')}, does not load: {error}", UNKNOWN, 0
    return str(torch.__version__), _cuda(), torch.get_num_threads()


def _cuda() -> str:
    import torch

    built_for = getattr(torch.version, "cuda", None)  # such as "13.0"; torch's own annotations leave it out
    if built_for is None:
        return "no: this torch was built without CUDA"
    if not torch.cuda.is_available():
        return f"no device (torch was built for CUDA {built_for})"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)} (CUDA {built_for})"


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        return names[0] if names else platform.machine()
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or UNKNOWN
    return platform.processor() or UNKNOWN


def _huge_pages() -> str:
    """The setting in brackets of a line such as `always [madvise] never`."""
    if not HUGE_PAGES.exists():
        return UNKNOWN
    text = HUGE_PAGES.read_text()
    return text.partition("[")[2].partition("]")[0] or text.strip()
