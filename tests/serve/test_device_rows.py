"""Rows in slots of a device, in front of those in the memory of the host: the bits of `predict`, whatever is where.

A CPU stands in for the device, with the reference of its kernels; one test is for a GPU.
"""

import re

import numpy as np
import pytest
from increments import NUMBERS, TABLE_ROWS, open_all
from serving import Clients, get, server
from towers import trained_towers

from rowwise import RowType, SpecError
from rowwise.recipes.export import export
from rowwise.recipes.served import CLOSE, open_version
from rowwise.serve.forward import arrays_of
from rowwise.serve.package import write_traffic
from rowwise.serve.row_tiers import DeviceRows, RowTiers
from rowwise.serve.traffic import Traffic

TABLES = 3 * TABLE_ROWS * 32
SMALL, CACHED, HALF = 150_000, 400_000, 1_000_000


def tiers_of(memory, device="cpu", samples=64):
    return RowTiers(device=DeviceRows(device, memory, samples))


def scored(version, table, most=64):
    return version.forward(arrays_of(table.select(version.schema.names)), table.num_rows, most).flatten().numpy()


@pytest.mark.few(1)
@pytest.mark.parametrize("memory", [CACHED, HALF, 2 * TABLES])
def test_versions_on_a_device_have_their_bits(increments, file, memory):
    """In any order, with slots that are full of rows, and in batches of any size."""
    opened = open_all(increments.models, tiers_of(memory), file, NUMBERS)
    for number in (3, 1, 4, 2, 3, 1):
        assert opened[number].identity == "exact"
        for most in (64, 7):
            found = scored(opened[number], increments.table, most)
            np.testing.assert_array_equal(found, increments.logits[number])


def test_rows_stay_in_slots(increments, file):
    (version,) = open_all(increments.models, tiers_of(SMALL, samples=1), file).values()
    (cache,) = version.device_caches
    table, logits = increments.table, increments.logits[1]
    cache.take_counts()  # of the golden rows
    for _ in range(2):
        np.testing.assert_array_equal(scored(version, table.slice(0, 3), 16), logits[:3])
    hits, misses = cache.take_counts()
    assert hits >= misses > 0
    np.testing.assert_array_equal(scored(version, table.slice(0, 3), 16), logits[:3])
    hits, misses = cache.take_counts()
    assert hits > misses == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [RowType.FP16, RowType.INT8, RowType.INT4])
def test_rows_of_all_types_on_a_device(increments, tmp_path, file, rows):
    export(increments.run.folder.path, tmp_path, which="step-4", rows=rows)
    (version,) = open_all(tmp_path, tiers_of(CACHED // 2), file).values()
    assert version.device_caches
    np.testing.assert_array_equal(scored(version, increments.table), scored(open_version(tmp_path), increments.table))


def test_a_server_may_start_with_an_increment_on_a_device(increments, file):
    opened = open_all(increments.models, tiers_of(CACHED), file, (3, 4))
    for number in (3, 4, 3):
        np.testing.assert_array_equal(scored(opened[number], increments.table), increments.logits[number])


@pytest.mark.slow
def test_a_version_of_items_is_refused(tmp_path):
    export(trained_towers(tmp_path), tmp_path / "models")
    with pytest.raises(SpecError, match="computed on the CPU"):
        open_version(tmp_path / "models", tiers=tiers_of(CACHED))


@pytest.mark.slow
def test_a_server_with_slots(increments, tmp_path):
    """Versions change while clients ask: each answer has the bits of its version."""
    models = increments.copied(tmp_path)
    options = ("--device", "cpu", "--device-memory", f"{CACHED}B", "--rows-at-once", "32")
    with server(models, *options) as (netloc, _), Clients(netloc, increments) as clients:
        for number in (1, 3, 2, 4, 1):
            write_traffic(models, Traffic(number))
            clients.wait_for(number)
            clients.seen.clear()
        text = get(netloc, "/metrics").decode()
    assert clients.wrong == 0
    assert not clients.failed
    for origin in ("slots", "host"):
        assert float(re.search(rf'rowwise_device_rows_total{{origin="{origin}"}} (\S+)', text)[1]) > 0


def test_what_is_on_a_device_is_shown(increments, command):
    code, out, _ = command("serve", str(increments.models), "--device", "cpu", "--device-memory", "1MB", "--explain")
    assert code == 0
    assert re.search(r"embeddings.seen +20,000 +640.0 kB +all rows +a cache of [\d,]+ rows", out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "tpu"), "--device tpu: expected cpu or cuda"),
        (
            ("--device", "cuda:99"),
            "--device cuda:99: torch finds no such GPU: expected --device cpu; see rowwise doctor",
        ),
        (("--device", "cpu", "--device-memory", "1kB"), "--device-memory 1.0 kB is too small for the version's tables"),
        (("--device", "cpu", "--device-memory", "1MB", "--memory", "1MB"), "--memory 1MB with --device cpu: the rows"),
    ],
)
def test_options_that_fit_no_device_are_one_line(increments, command, options, message):
    code, _, err = command("serve", str(increments.models), "--port", "0", *options, "--explain")
    assert code == 2
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [CACHED, 2 * TABLES])
def test_a_gpu_answers_within_rounding(increments, file, memory):
    """Versions beside each other, hot and cold; a row has the same bits in batches of any size."""
    opened = open_all(increments.models, tiers_of(memory, "cuda"), file, NUMBERS)
    first = {number: scored(opened[number], increments.table) for number in NUMBERS}
    for number in (3, 1, 4, 2):
        np.testing.assert_allclose(first[number], increments.logits[number], rtol=0, atol=CLOSE)
        for most in (64, 7):
            np.testing.assert_array_equal(scored(opened[number], increments.table, most), first[number])
