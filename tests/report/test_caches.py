"""A report says what the caches of tables on disk did."""

import pytest
from report import runs
from report.markup_check import check

from rowwise.report import write

HEAD = "step,table,hits,misses"


def with_caches(folder, lines, reads=(100, 50, 50), wait_s=0.0):
    """A run with lines of a table, hits and misses, at steps of ten."""
    runs.make(folder, steps=20)
    head = ("step", "samples", "samples_s", "forward_s", "memory_bytes", "reads", "disk_bytes", "disk_wait_s")
    steps = [(10 * n, 1000 * n, 100.0, 1.0, 10**9, count, 3 * 10**6, wait_s) for n, count in enumerate(reads, 1)]
    runs.put(folder / "steps.csv", head, steps)
    head = ("step", "table", "hits", "misses", "new_rows", "evictions", "writes", "memory_bytes")
    counts = [
        (10 * (n // 2 + 1), table, hits, misses, 0, misses // 2, misses // 4, 2 * 10**6)
        for n, (table, hits, misses) in enumerate(lines)
    ]
    runs.put(folder / "caches.csv", head, counts)
    return write(folder).read_text("utf-8")


def test_hit_rates_by_table_and_over_samples(tmp_path):
    lines = [("user", 50, 50), ("item", 90, 10), ("user", 80, 20), ("item", 100, 0)]
    page = with_caches(tmp_path / "r" / "1", lines)
    assert "2 tables on disk, in 4.00\u202fMB of memory and 3.00\u202fMB of disk: 80.0\u202f% of lookups" in page
    assert {"hit_rate", "reads"} <= set(check(page))
    assert page.index("user: hit rate 65.0") < page.index("item: hit rate 95.0")  # most misses first
    assert "last 90.0" in page
    assert "last 5.00" in page or "last 5 " in page or "last 5<" in page  # reads of a step


def test_the_part_of_a_step_that_waits_for_the_disk_is_no_phase(tmp_path):
    page = with_caches(tmp_path / "r" / "1", [("user", 5, 5)], wait_s=0.25)
    assert "Waits for the disk: 25.0\u202f% of the step." in page
    assert "disk_wait" not in page


@pytest.mark.parametrize("content", ["", f"{HEAD}\n", f"{HEAD}\n10,user,nan,3\n", "x\n1\n"])
def test_without_usable_lines_there_is_no_section(tmp_path, content):
    folder = runs.make(tmp_path / "r" / "1", steps=20)
    assert "Tables on disk" not in write(folder).read_text("utf-8")
    (folder / "caches.csv").write_text(content)
    page = write(folder).read_text("utf-8")
    check(page)
    assert "Tables on disk" not in page


def test_lines_of_other_steps_and_versions(tmp_path):
    folder = tmp_path / "r" / "1"
    with_caches(folder, [("user", 5, 5), ("<b>", 0, 0)])
    (folder / "steps.csv").write_text("step,samples,forward_s\n7,10,0.5\n")
    (folder / "caches.csv").write_text(f"{HEAD}\n10,user,5,5\n10,<b>,0,0\n")
    page = write(folder).read_text("utf-8")
    check(page)
    assert "2 tables on disk" in page
    (folder / "steps.csv").unlink()
    check(write(folder).read_text("utf-8"))
