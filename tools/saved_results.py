"""Results of benchmarks as they are saved: a folder a processor, a file a benchmark."""

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
FIRST = (
    "amd-zen5-avx512",
    "amd-zen4-avx512",
    "intel-xeon-avx512",
    "amd-zen3-avx2",
    "nvidia-h100",
    "nvidia-h200",
)  # whose results are shown where there is room for one


class NotSaved(Exception):
    """No full run of a benchmark on a processor; coarse ones are in files of another name."""


def processors() -> list[str]:
    """Those with results, the first ones first."""
    found = sorted(folder.name for folder in RESULTS.iterdir() if folder.is_dir())
    return sorted(found, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def first_with(*benchmarks: str) -> str:
    """The first processor that has all of these results."""
    for name in processors():
        if all((RESULTS / name / f"{benchmark}.json").exists() for benchmark in benchmarks):
            return name
    raise NotSaved(f"no processor has results of {', '.join(benchmarks)}")


def read(benchmark: str, processor: str) -> dict:
    """A result, with the name of the processor."""
    path = RESULTS / processor / f"{benchmark}.json"
    if not path.exists():
        raise NotSaved(f"no {path}: `rowwise bench {benchmark} -- --save` makes it, on that processor")
    return json.loads(path.read_text()) | {"processor": processor}
