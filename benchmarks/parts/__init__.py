"""What benchmarks share, and what runs in processes of theirs: nothing here is a benchmark by itself."""

from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
