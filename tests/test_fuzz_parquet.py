"""Thousands of damaged Parquet files, in a process of their own: Arrow may end it, which is a failure like another."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import parquet_mutants
import pyarrow.parquet as pq
import pytest

from rowwise.base.errors import DataError
from rowwise.ingest.warehouse.footer import check_chunks

COUNT, LIMIT_S = 2000, 300
FINE = ("refused in one line", "accepted and right")


@pytest.mark.slow
@pytest.mark.parametrize("kind", parquet_mutants.KINDS)
def test_damaged_files(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, parquet_mutants.__file__, str(tmp_path), kind, "0", str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = [line.partition(" ")[::2] for line in done.stdout.splitlines()]
    found = {seed: how for seed, how in lines}  # the last that was said of each
    counts = Counter(found.values())
    other = {seed: how for seed, how in found.items() if how not in FINE}
    print(f"\nCAMPAIGN Parquet, {kind}: {counts[FINE[0]]} {FINE[0]}, {counts[FINE[1]]} {FINE[1]}, {len(other)} other")
    assert not other, f"{other}: {done.stderr[-500:]}"
    assert (done.returncode, len(found)) == (0, COUNT)


@pytest.mark.parametrize("seed", [39, 423, 1182])
def test_names_that_are_not_utf_8_and_rows_that_are_not_those_of_the_file_are_refused(
    tmp_path: Path, seed: int
) -> None:
    """A traceback, and rows that were left out."""
    good = parquet_mutants.whole("checksums", tmp_path / "good.parquet")
    (tmp_path / "rows.parquet").write_bytes(parquet_mutants.mutant(good, seed))
    with pytest.raises(DataError, match=r"cannot be read as Parquet: .*(can't decode|row groups have)"):
        parquet_mutants.read(tmp_path / "rows.parquet")


@pytest.mark.parametrize(("kind", "seed"), [("checksums, packed", 73), ("no checksums, packed", 421)])
def test_a_footer_for_which_arrow_ends_the_process_is_refused(tmp_path: Path, kind: str, seed: int) -> None:
    path = tmp_path / "rows.parquet"
    data = parquet_mutants.mutant(parquet_mutants.whole(kind, path), seed)
    path.write_bytes(data)
    with pytest.raises(OSError, match="histogram size mismatch"):
        check_chunks(pq.read_metadata(path), len(data))
    with pytest.raises(DataError, match="histogram size mismatch"):
        parquet_mutants.read(path)
