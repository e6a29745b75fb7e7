"""The disk is measured past the page cache, in a file that is gone afterwards, or one line says why it is not."""

import os
from pathlib import Path

import pytest
from msgspec import structs
from planning.calibrate.test_fit import ABOUT

from rowwise.cli.doctor import _disk_line
from rowwise.planning.calibrate.disk import CHUNK_bytes, DiskRates, READ_bytes, ROW_bytes, measure_disk
from rowwise.planning.calibrate.fit import _preset_with_memory
from rowwise.planning.perf.hardware import hardware_named


def test_a_disk_has_rates_and_keeps_nothing(tmp_path):
    rates = measure_disk(tmp_path, 0.1, CHUNK_bytes)
    assert not os.listdir(tmp_path)
    if not rates.refused:
        assert rates.write_Bps > 0
        assert ROW_bytes in rates.reads_s
        assert set(rates.reads_s) <= set(READ_bytes)
        assert all(rate > 0 for rate in rates.reads_s.values())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux only")
def test_where_nothing_can_be_measured_a_line_says_why():
    rates = measure_disk(Path("/proc"), 0.1)
    assert rates == DiskRates(refused="/proc has no room for a file of 33,554,432 bytes")
    assert _disk_line(rates) == "not measured: /proc has no room for a file of 33,554,432 bytes"


def test_rates_are_said_and_become_those_of_a_profile():
    rates = DiskRates(reads_s={512: 9e4, 4096: 8e4, 65536: 1e4}, write_Bps=2e9)
    assert (
        _disk_line(rates) == "random reads 90,000/s of 512 B, 80,000/s of 4 KiB, 10,000/s of 64 KiB; writes 2,000 MB/s"
    )
    profile = _preset_with_memory(structs.replace(ABOUT, disk=rates, disk_bytes=10**12))
    assert (profile.disk_reads_s, profile.disk_write_Bps, profile.disk_bytes) == (8e4, 2e9, 10**12)
    usual = hardware_named("cpu").disk_reads_s
    assert _preset_with_memory(structs.replace(ABOUT, disk=DiskRates(refused="no"))).disk_reads_s == usual
