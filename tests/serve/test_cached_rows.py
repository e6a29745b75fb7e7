"""Tables that are larger than memory: the bits of those that are not, whatever is cached, in Redis, or gone."""

import json
import os
import shutil
import signal
from contextlib import closing
from http.client import HTTPConnection

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest
import torch
from increments import NUMBERS, TABLE_ROWS, open_all
from launching import rowwise, wait_for
from pyarrow import parquet as pq
from redis_server import one_server
from serving import Clients, get, server, workers_of
from small import RECIPE, WORLD, trained

from rowwise import CheckpointError, RowType, SpecError
from rowwise.base.errors import StoreError
from rowwise.checkpoint.manifest import CheckpointManifest
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.tables import table_modules
from rowwise.models.inference import inference_mode
from rowwise.recipes.export import export
from rowwise.recipes.predict import logits_on
from rowwise.recipes.served import load_model, load_rows, open_version, read_model
from rowwise.serve.cached_rows import CachedBatches
from rowwise.serve.default_rows import MEANS, DefaultRow, mean_rows, read_mean_rows
from rowwise.serve.forward import Forward, arrays_of
from rowwise.serve.hot_rows import HOT, read_hot_rows, write_hot_rows
from rowwise.serve.package import read_golden, version_folder, write_golden, write_traffic
from rowwise.serve.redis_rows import parse_addresses
from rowwise.serve.row_tiers import make_tiers
from rowwise.serve.traffic import Traffic

TABLES = 3 * TABLE_ROWS * 32
SMALL = 200_000


def tiers_of(models, memory, *, number=1, **options):
    return make_tiers(CheckpointManifest.read(version_folder(models, number).path), memory, **options)


def scored(version, table, most=256, *, exact=False):
    """Logits, where the rows came from, and how many ids of each sample had default rows."""
    arrays = arrays_of(table.select(version.schema.names))
    seen = CachedBatches(version.cached, exact=exact)
    logits = version.forward(arrays, table.num_rows, most, seen.collect).flatten().numpy()
    return logits, seen.counts, seen.defaults_of(0, table.num_rows)


@pytest.mark.few(1)
@pytest.mark.parametrize("memory", [SMALL, 700_000, TABLES - 1])
def test_versions_have_their_bits(increments, file, memory):
    """All at once, in any order, hot and cold, in batches of any size."""
    models, table, logits = increments.models, increments.table, increments.logits
    tiers = tiers_of(models, memory)
    assert tiers.layout.caches
    opened = open_all(models, tiers, file, NUMBERS)
    assert all(version.identity == "exact" for version in opened.values())
    for number in (3, 1, 4, 2, 3):
        for most in (256, 7):
            found, counts, zeros = scored(opened[number], table, most)
            np.testing.assert_array_equal(found, logits[number])
            assert counts.cache
            assert not zeros
    _, counts, _ = scored(opened[3], table)
    assert (counts.files, counts.redis, counts.defaults) == (0, 0, 0) or memory == SMALL
    assert os.fstat(file).st_blocks * 512 < 100_000


def test_a_server_may_start_with_an_increment(increments, file):
    models, table, logits = increments.models, increments.table, increments.logits
    tiers = tiers_of(models, SMALL, number=3)
    shared = load_rows(models, tiers, 3, file, None, None)
    shared = load_rows(models, tiers, 4, -1, 3, shared)
    assert shared[1:3] == (3, 4)
    for number in (3, 4, 3):
        version = open_version(models, number=number, rows=shared, tiers=tiers)
        np.testing.assert_array_equal(scored(version, table)[0], logits[number])


def test_rows_that_training_asked_for_are_cached_first(increments, file):
    """Those of the first batches of training; as many as there are slots."""
    models = increments.models
    tiers = tiers_of(models, 700_000)
    version = open_all(models, tiers, file)[1]
    hot = read_hot_rows(version_folder(models, 1).path)
    assert set(hot) == {f"model/embeddings.{name}" for name in ("user", "item", "seen")}
    for rows_M, counts_M in hot.values():
        assert (counts_M[:-1] >= counts_M[1:]).all()
        assert len(np.unique(rows_M)) == len(rows_M)
    _, counts, _ = scored(version, WORLD.rows(0, 500))
    assert counts.files == 0
    tiers.caches.bytes[:] = 0
    _, counts, _ = scored(version, WORLD.rows(0, 500))
    assert counts.files > 50


def test_a_number_that_is_used_again_is_another_version(increments, tmp_path, file):
    """A version was deleted, and the next export has its number: no row of the old one is left in the cache."""
    table, logits = increments.table, increments.logits
    tiers = tiers_of(increments.full, SMALL)
    for step, number in ((4, 1), (12, 3), (4, 1)):
        models = tmp_path / str(step)
        if not models.exists():
            export(increments.run.folder.path, models, which=f"step-{step}")
        own = os.memfd_create("rows")
        version = open_all(models, tiers, own)[1]
        np.testing.assert_array_equal(scored(version, table)[0], logits[number])
        os.close(own)


def test_hot_rows_may_be_none_or_numbers_of_no_row(increments, tmp_path, file):
    models = shutil.copytree(increments.models, tmp_path / "models")
    path, none = version_folder(models, 1).path, np.empty(0, np.int64)
    wrong = np.array([-1, 7, TABLE_ROWS, 1 << 50])
    for counts in (
        {},
        {"model/embeddings.user": (none, none)},
        {"model/embeddings.item": (wrong, np.ones(4, np.int64))},
    ):
        write_hot_rows(path, counts)
        assert read_hot_rows(path).keys() <= counts.keys()
        tiers = tiers_of(models, SMALL)
        version = open_all(models, tiers, file)[1]
        np.testing.assert_array_equal(scored(version, increments.table)[0], increments.logits[1])


@pytest.mark.parametrize("rows", [RowType.FP16, RowType.INT8, RowType.INT4])
def test_rows_of_all_types(increments, tmp_path, file, rows):
    export(increments.run.folder.path, tmp_path, which="step-4", rows=rows)
    whole = open_version(tmp_path)
    tiers = tiers_of(tmp_path, SMALL)
    version = open_all(tmp_path, tiers, file)[1]
    assert version.cached
    for most in (256, 5):
        np.testing.assert_array_equal(scored(version, increments.table, most)[0], scored(whole, increments.table)[0])


def test_memory_for_all_rows_needs_no_cache(increments, file):
    tiers = tiers_of(increments.models, TABLES)
    assert not tiers.layout.caches
    version = open_all(increments.models, tiers, file)[1]
    assert not version.cached
    np.testing.assert_array_equal(scored(version, increments.table)[0], increments.logits[1])


def test_memory_that_is_too_small_names_the_least(increments):
    with pytest.raises(SpecError, match=r"--memory 1.0 kB") as raised:
        tiers_of(increments.models, 1000)
    least = float(str(raised.value).rpartition("least ")[2].split()[0].replace(",", ""))
    assert tiers_of(increments.models, int(least * 1010)).layout.caches


@pytest.fixture
def opened(increments, file):
    """Version 1, with a cache that has none of its rows, and what a test asks for."""

    def make(**options):
        tiers = tiers_of(increments.models, SMALL, **options)
        version = open_all(increments.models, tiers, file)[1]
        tiers.caches.bytes[:] = 0
        return version

    return make


def test_a_batch_below_the_hit_rate_waits_and_one_above_has_zeros(increments, opened):
    version, table, logits = opened(hit_rate=0.5), increments.table, increments.logits[1]
    first, rest = table.slice(0, 5), table.slice(5, 3)
    found, counts, zeros = scored(version, first)
    np.testing.assert_array_equal(found, logits[:5])
    assert counts.files
    assert not zeros
    mixed = table.slice(0, 8)  # more of its rows are cached than not
    found, counts, zeros = scored(version, mixed)
    assert counts.defaults == sum(part.sum() for part in zeros.values()) > 0
    right = sum(zeros.values()) == 0
    assert right[:5].all()
    np.testing.assert_array_equal(found[right], logits[:8][right])
    assert (found != logits[:8]).any()
    wait_for(lambda: scored(version, rest)[1].defaults == 0)  # they were fetched meanwhile
    np.testing.assert_array_equal(scored(version, mixed)[0], logits[:8])


def test_an_exact_request_waits(increments, opened):
    version = opened(hit_rate=0.0)
    found, counts, zeros = scored(version, increments.table, exact=True)
    np.testing.assert_array_equal(found, increments.logits[1])
    assert (counts.defaults, zeros) == (0, {})
    version = opened(hit_rate=0.0)
    _, counts, zeros = scored(version, increments.table, most=7)
    assert counts.defaults
    assert set(zeros) == {"user", "item", "seen"}
    assert len(zeros["user"]) == len(increments.table)


def test_default_rows_are_means_where_they_are_asked_for(increments, opened):
    """With an empty cache, each id of a sample has the mean row of its table: the logits of a model of such rows."""
    table, models = increments.table.slice(0, 20), increments.models
    means = read_mean_rows(version_folder(models, 1).path)
    version = opened(hit_rate=0.0, default_row=DefaultRow.MEAN)
    found, counts, defaults = scored(version, table)
    assert counts.defaults > 0
    assert counts.cache == counts.files == 0
    assert sum(part.sum() for part in defaults.values()) >= counts.defaults
    model = load_model(version_folder(models, 1).path, read_model(version_folder(models, 1).path))
    ((_, embeddings),) = table_modules(model)
    with torch.no_grad():
        for name in ("user", "item", "seen"):
            embeddings.table(name)[:] = means[f"model/embeddings.{name}"]
    forward = Forward(version.forward.preparation, logits_on(model, "cpu"), version.forward.blocks)
    with inference_mode(model):  # a server packs its weights; unpacked ones may add in another order
        wanted = forward(arrays_of(table.select(version.schema.names)), 20, 256)
    np.testing.assert_array_equal(found, wanted.flatten().numpy())
    zeros, *_ = scored(opened(hit_rate=0.0), table)
    assert (zeros != found).any()


def test_mean_rows_are_weighted_by_counts(increments):
    """Those of training rows; of a table that none has asked for, all rows count."""
    path = version_folder(increments.full, 2).path
    version, hot, means = Checkpoint.open(path), read_hot_rows(path), read_mean_rows(path)
    plain = mean_rows(version, {})
    for name, row_D in means.items():
        rows_RD, (rows_M, counts_M) = version.load(name).double().numpy(), hot[name]
        np.testing.assert_allclose(row_D, np.average(rows_RD[rows_M], 0, counts_M), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(plain[name], rows_RD.mean(0), rtol=1e-5, atol=1e-9)
    assert means.keys() == plain.keys() == hot.keys()


def test_an_increment_has_means_of_its_own(increments):
    for number in NUMBERS:
        one, other = (
            read_mean_rows(version_folder(models, number).path) for models in (increments.models, increments.full)
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_version_without_means_is_refused(increments, tmp_path):
    models = shutil.copytree(increments.models, tmp_path / "models")
    path = version_folder(models, 1).path
    (path / MEANS).write_bytes(b"ARROW1")
    with pytest.raises(CheckpointError, match=r".*; export the version"):
        read_mean_rows(path)
    (path / MEANS).unlink()
    with pytest.raises(CheckpointError, match=r"mean_rows.arrow"):
        read_mean_rows(path)


def test_an_increment_that_is_refused_leaves_nothing_in_the_cache(increments, tmp_path, file):
    """Its rows would be where those of the next increment are."""
    models = tmp_path / "models"
    for step in (4, 8):
        export(increments.run.folder.path, models, which=f"step-{step}")
    tiers = tiers_of(models, SMALL)
    shared = load_rows(models, tiers, 1, file, None, None)
    golden = read_golden(version_folder(models, 2).path)
    wrong = golden.logits.set_column(0, "label", pa.compute.add(golden.logits["label"], np.float32(1)))
    write_golden(version_folder(models, 2).path, golden._replace(logits=wrong))
    with pytest.raises(CheckpointError, match="golden rows differ"):
        load_rows(models, tiers, 2, -1, 1, shared)
    shutil.rmtree(version_folder(models, 2).path)
    export(increments.run.folder.path, models, which="step-12")
    shared = load_rows(models, tiers, 2, -1, 1, shared)
    version = open_version(models, number=2, rows=shared, tiers=tiers)
    np.testing.assert_array_equal(scored(version, increments.table)[0], increments.logits[3])


def test_defaults_of_a_batch_that_failed_are_not_those_of_the_next(increments, opened):
    version, table = opened(hit_rate=0.0), increments.table
    scored(version, table.slice(0, 40))
    CachedBatches(version.cached, exact=False)
    version.forward(arrays_of(table.select(version.schema.names).slice(0, 40)), 40, 256)  # nobody collects its zeros
    _, _, zeros = scored(version, table.slice(0, 3))
    assert all(len(zeros_B) == 3 for zeros_B in zeros.values())


def test_a_file_that_is_cut_short_is_an_error_that_names_it(increments, opened, tmp_path, file):
    models = shutil.copytree(increments.models, tmp_path / "models")
    tiers = tiers_of(models, SMALL)
    version = open_all(models, tiers, file)[1]
    for path in version_folder(models, 1).path.glob("*.safetensors"):
        os.truncate(path, 5000)
    tiers.caches.bytes[:] = 0
    with pytest.raises(StoreError, match=r"000001/\S+\.safetensors: its rows"):
        scored(version, increments.table)


def test_predictions_with_less_memory_have_the_same_bits(increments, tmp_path, command):
    pq.write_table(increments.table, tmp_path / "rows.parquet")
    for number in (1, 3):
        version, found = version_folder(increments.models, number).path, []
        for memory in ((), ("--memory", "200kB")):
            out = tmp_path / "out.parquet"
            code, _, err = command(
                "predict", str(version), "--data", f"parquet:{tmp_path / 'rows.parquet'}", "--out", str(out), *memory
            )
            assert code == 0, err
            found.append(pq.read_table(out))
        assert found[0].equals(found[1])


def test_damage_is_found_before_a_version_answers(increments, tmp_path, file):
    models = shutil.copytree(increments.models, tmp_path / "models")
    for path in version_folder(models, 1).path.glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-TABLE_ROWS] ^= 4
        path.unlink()  # it may be a hard link
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_rows(models, tiers_of(models, SMALL), 1, file, None, None)


def test_a_version_with_wider_rows_needs_another_server(increments, tmp_path, file):
    models = tmp_path / "models"
    for rows in (RowType.INT8, None):
        export(increments.run.folder.path, models, which="step-4", rows=rows)
    tiers = tiers_of(models, SMALL)
    load_rows(models, tiers, 1, file, None, None)
    with pytest.raises(CheckpointError, match="rows of 32 bytes"):
        load_rows(models, tiers, 2, file, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["redis", "valkey"])
def test_rows_in_redis_are_used_and_not_trusted(name, increments, tmp_path, file):
    models, table, logits = increments.models, increments.table, increments.logits
    with one_server(tmp_path, name) as redis:
        tiers = tiers_of(models, SMALL, redis=parse_addresses(redis.address))
        version = open_all(models, tiers, file)[1]

        def cold():
            tiers.caches.bytes[:] = 0
            found, counts, _ = scored(version, table)
            np.testing.assert_array_equal(found, logits[1])
            return counts

        wait_for(lambda: cold().files == 0)
        assert cold().redis > 50
        wait_for(lambda: (redis.flush(), cold())[1].files)
        redis.kill()
        assert cold().redis == 0


@pytest.mark.slow
def test_servers_of_other_memory_share_a_redis(increments, tmp_path, file):
    """A key is another row's where other tables are cached."""
    models = tmp_path / "models"
    tables = [{**one, "rows": rows} for one, rows in zip(RECIPE["tables"]["list"], (4000, 20_000, 30_000), strict=True)]
    run, _ = trained(tmp_path, tables={"list": tables}, train={"steps": 4})
    export(run.folder.path, models)
    wanted = scored(open_version(models), increments.table)[0]
    with one_server(tmp_path) as redis:
        for memory in (700_000, 250_000, 1_200_000):
            tiers = tiers_of(models, memory, redis=parse_addresses(redis.address))
            own = os.memfd_create("rows")
            version = open_all(models, tiers, own)[1]
            os.close(own)

            def all_from_redis(tiers=tiers, version=version):
                tiers.caches.bytes[:] = 0
                found, counts, _ = scored(version, increments.table)
                np.testing.assert_array_equal(found, wanted)
                return counts.redis and not counts.files

            wait_for(all_from_redis)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["redis", "valkey"])
def test_a_server_with_small_memory(name, increments, tmp_path):
    """Versions change, a worker and Redis are killed: each answer has the bits of its version."""
    models = increments.copied(tmp_path)
    with one_server(tmp_path, name) as redis:
        options = ("--memory", f"{SMALL}B", "--redis", redis.address)
        with server(models, *options) as (netloc, process), Clients(netloc, increments) as clients:
            for number in (1, 2, 3, 4, 2):
                write_traffic(models, Traffic(number))
                clients.wait_for(number)
                clients.seen.clear()
            os.kill(workers_of(process.pid)[0], signal.SIGKILL)
            redis.kill()
            clients.seen.clear()
            write_traffic(models, Traffic(4))
            clients.wait_for(4)
            assert b'rowwise_cached_rows_total{origin="cache"}' in get(netloc, "/metrics")
    assert clients.wrong == 0
    assert len(clients.failed) <= 3  # those that the killed worker had


@pytest.mark.slow
def test_answers_say_which_rows_were_zeros(increments, tmp_path):
    models = shutil.copytree(increments.models, tmp_path / "models")
    (version_folder(models, 1).path / HOT).unlink()
    write_traffic(models, Traffic(1))
    body = json.dumps({"rows": increments.rows})

    def ask(netloc, **headers):
        with closing(HTTPConnection(netloc, timeout=60)) as connection:
            connection.request("POST", "/v1/models/small/score", body, {"content-type": "application/json"} | headers)
            response = connection.getresponse()
            return response.headers, json.loads(response.read())

    with server(models, "--memory", f"{SMALL}B", "--hit-rate", "0%") as (netloc, _):
        headers, answer = ask(netloc)
        total = sum(sum(counts) for counts in answer["degraded"].values())
        assert sum(int(part.partition("=")[2]) for part in headers["rowwise-degraded"].split(", ")) == total > 0
        headers, answer = ask(netloc, **{"rowwise-exact": "true"})
        assert "degraded" not in answer
        assert headers["rowwise-degraded"] is None
        found = np.array(answer["outputs"]["label_logit"], np.float32)
        np.testing.assert_array_equal(found, increments.logits[1])
        assert "rowwise-exact: 'yes'" in ask(netloc, **{"rowwise-exact": "yes"})[1]["error"]


@pytest.mark.slow
def test_explain_shows_where_rows_would_be(increments, tmp_path):
    done = rowwise(tmp_path, "serve", str(increments.models), "--memory", "1MB", "--explain")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a cache of") == 3
    assert "0 B of rows are in memory" in done.stdout
    done = rowwise(tmp_path, "serve", str(increments.models), "--explain")
    assert done.stdout.count("all rows") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1MB", "--redis", "x"], "--redis x: expected redis://HOST:PORT"),
        (["--memory", "1MB", "--redis", "redis://[::1"], "--redis redis://[::1: expected redis://HOST:PORT"),
        (["--memory", "1MB", "--hit-rate", "120%"], "--hit-rate 120%: expected a share of the rows"),
        (["--memory", "1MB", "--hit-rate", "9%", "--default-row", "x"], "--default-row x: expected zero or mean"),
        (["--memory", "large"], "--memory='large': expected a size"),
        (["--memory", "1kB"], "too small for a cache of the version's rows: expected at least"),
    ],
)
def test_options_that_are_none(increments, options, message):
    done = rowwise(increments.models.parent, "serve", str(increments.models), "--port", "0", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
