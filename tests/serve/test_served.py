"""A run is exported, opened and served: the answers are the bits of `rowwise predict`, and damage is refused."""

import json
import re
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import numpy as np
import pyarrow as pa
import pytest
import torch
from launching import started
from mutations import flip
from pyarrow import parquet as pq
from serving import ask, quiet_server
from small import RECIPE, WORLD, trained

from rowwise import CheckpointError, DataError, RowType, SpecError
from rowwise.base.errors import PeerError
from rowwise.checkpoint.check import verify
from rowwise.checkpoint.listing import list_checkpoints
from rowwise.recipes.ensemble import predict_ensemble
from rowwise.recipes.export import export, row_type_cost
from rowwise.recipes.served import open_version
from rowwise.recipes.trained import predict_rows
from rowwise.serve.admission import ServiceLimits
from rowwise.serve.client import ScoringClient
from rowwise.serve.package import (
    MODEL,
    find_version,
    list_versions,
    read_golden,
    read_traffic,
    write_golden,
    write_traffic,
)
from rowwise.serve.traffic import Traffic

TRANSFORMS = [
    {"kind": "log1p", "column": "d0"},
    {"kind": "bucketize", "column": "d1", "to": "step", "borders": [-1.0, 1.0]},
]
STEP = {"column": "step", "ids": "direct"}
STEPS = {"name": "step", "rows": 4, "dim": 8, "pooling": "mean"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A run with transforms, and two versions of it: as trained, and in int8."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("served")
    columns = {"sparse": [*RECIPE["columns"]["sparse"], STEP]}
    tables = {"list": [*RECIPE["tables"]["list"], STEPS]}
    run, _ = trained(folder, transforms=TRANSFORMS, columns=columns, tables=tables)
    first = export(run.folder.path, folder / "models")
    second = export(run.folder.path, folder / "models", rows=RowType.INT8)
    pq.write_table(WORLD.rows(90_000, 700).drop_columns(["label", "logit"]), folder / "new.parquet")
    return run.folder.path, folder / "models", first, second, folder / "new.parquet"


@pytest.fixture(scope="module")
def netloc(served):
    """The address of a server of the current version."""
    with quiet_server(served[1], "--rows-at-once", "64") as address:
        yield address


def predicted(folder, data, out):
    predict_ensemble([folder], out, data=f"parquet:{data}")
    return pq.read_table(out)


def test_a_version_predicts_what_its_run_predicts(served, tmp_path):
    run, models, first, second, data = served
    predict_rows(run, tmp_path / "p.parquet", data=f"parquet:{data}")
    of_run = pq.read_table(tmp_path / "p.parquet")
    assert predicted(first.folder.path, data, tmp_path / "q.parquet").equals(of_run)
    of_int8 = predicted(models, data, tmp_path / "q.parquet")  # the newest is the current one
    assert not of_int8.equals(of_run)
    np.testing.assert_allclose(of_int8["label_logit"], of_run["label_logit"], atol=0.1)
    (cost,) = row_type_cost(run, second.folder)
    assert 0 < abs(cost.version["ne"] - cost.run["ne"]) < 0.01
    (none,) = row_type_cost(run, first.folder)
    assert none.version == none.run


def test_versions_are_checkpoints(served):
    _, models, first, second, _ = served
    assert list_versions(models) == [1, 2]
    assert read_traffic(models) == Traffic(2)
    assert [one.name for one in list_checkpoints(models)] == ["000002", "000001"]
    assert {one.step for one in list_checkpoints(models)} == {first.step} == {second.step}
    assert verify(models).good
    assert {table.row_type for table in second.served.parts.tables} == {"int8"}
    assert second.size_bytes < first.size_bytes
    tensors = json.loads((first.folder.path / "manifest.json").read_bytes())["tensors"]
    assert tensors
    assert all(name.startswith("model/") for name in tensors)


def test_rolling_back_is_one_file(served):
    _, models, _, _, _ = served
    write_traffic(models, Traffic(1))
    version = open_version(models)
    assert (version.number, version.identity) == (1, "exact")
    write_traffic(models, Traffic(2))
    assert open_version(models, number=1).number == 1
    with pytest.raises(CheckpointError, match="3; there are 1"):
        write_traffic(models, Traffic(3))
    with pytest.raises(CheckpointError, match="folder that `rowwise export`"):
        find_version(models.parent)


def test_a_version_that_changed_is_refused(served, tmp_path):
    _, _, first, _, _ = served
    copy = tmp_path / "000001"
    shutil.copytree(first.folder.path, copy)
    digest = first.digest
    assert open_version(copy, digest).digest == digest

    def refused(message, **options):
        with pytest.raises(CheckpointError, match=message):
            open_version(copy, **options)

    as_exported = (copy / MODEL).read_bytes()
    (copy / MODEL).write_bytes(as_exported.replace(b'"small"', b'"other"'))
    refused(r"has digest .*: expected digest", expect=digest)
    (copy / MODEL).write_bytes(as_exported.replace(b'"format": 1', b'"format": 9'))
    refused("has format 9; this rowwise reads format 1")
    (copy / MODEL).write_bytes(as_exported[:-9])
    refused(r"model\.json is damaged")
    (copy / MODEL).write_bytes(as_exported)
    golden = read_golden(copy)
    logits = golden.logits["label"].to_numpy()
    write_golden(copy, golden._replace(logits=pa.table({"label": logits + np.float32(1e-6)})))
    assert open_version(copy).identity == "close"
    write_golden(copy, golden._replace(logits=pa.table({"label": logits + np.float32(1e-3)})))
    refused(r"golden rows differ by 1\.0e-03")
    write_golden(copy, golden)
    flip(next(copy.glob("*.safetensors")), -5)
    refused("do not match their checksum")


def test_an_export_that_fails_leaves_nothing(served, tmp_path):
    run, _, _, _, _ = served
    with pytest.raises(CheckpointError, match="has no checkpoint 'step-7'"):
        export(run, tmp_path / "models", which="step-7")
    assert not (tmp_path / "models").exists()
    with pytest.raises(DataError, match="is not a run"):
        export(tmp_path, tmp_path / "models")


def test_answers_are_the_bits_of_predict(served, netloc, tmp_path):
    """Of rows one by one, in groups, in JSON and Arrow, from several clients at once."""
    _, models, _, _, data = served
    wanted, rows = predicted(models, data, tmp_path / "p.parquet"), pq.read_table(data)
    names = ["label_logit", "label_probability"]

    def check(client, begin, count, kind):
        part, expected = rows.slice(begin, count), wanted.slice(begin, count).select(names)
        if kind == "arrow":
            assert client.score_table(part).equals(expected.combine_chunks())
            return
        if kind == "context":
            part = rows.slice(begin, 1).take([0] * count)
            context = {name: part[name][0].as_py() for name in ("user", "seen", "d0")}
            answer = client.score({name: part[name].to_pylist() for name in ("item", "d1")}, context)
            expected = wanted.slice(begin, 1).select(names).take([0] * count)
        else:
            answer = client.score(part.to_pydict())
        for name in names:
            assert np.array(answer[name], np.float32).tobytes() == expected[name].to_numpy().tobytes()

    def go(seed):
        g = np.random.default_rng(seed)
        with ScoringClient(f"http://{netloc}") as client:
            for _ in range(15):
                count = int(g.choice([1, 1, 2, 5, 17, 100, 300]))
                check(client, int(g.integers(0, len(rows) - count)), count, str(g.choice(["json", "arrow", "context"])))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(go, range(4)))
    with ScoringClient(f"http://{netloc}", timeout_s=60) as client:
        check(client, 0, len(rows), "arrow")  # of several batches
        about = client.versions()
    assert (about["model"], about["version"], about["identity"]) == ("small", 2, "exact")
    metrics = ask(netloc, "/metrics")[2].decode()
    assert 'rowwise_requests_total{code="200",version="2"}' in metrics
    assert "rowwise_waiting_rows 0.0" in metrics


def test_what_bad_requests_are_told(served, netloc):
    rows = {name: values[:1] for name, values in pq.read_table(served[4]).slice(0, 1).to_pydict().items()}
    path = "/v1/models/small/score"

    def told(body, where=path, **headers):
        code, _, answer = ask(netloc, where, json.dumps(body).encode(), **headers)
        return code, json.loads(answer).get("error", "")

    assert told({"rows": rows}) == (200, "")
    assert told({"rows": rows}, "/v1/models/small/versions/2/score") == (200, "")
    assert told({"rows": rows}, "/v1/models/small/versions/1/score") == (404, "version '1' is not served: expected 2")
    assert told({"rows": rows}, "/v1/models/big/score") == (404, "no model 'big': expected 'small'")
    code, error = told({"rows": rows | {"user": [50]}})
    assert code == 400
    assert error.startswith("request: row 0, column 'user': id 50: expected 0 to 49")
    assert told({"rows": rows}, **{"content-type": "text/csv"})[0] == 415
    soon = "x-timeout-ms: 'soon': expected milliseconds such as 50, of at most 9 digits"
    assert told({"rows": rows}, **{"x-timeout-ms": "soon"}) == (400, soon)
    many = {name: values * 100 for name, values in rows.items()} | {"user": [1] * 99 + [99]}  # in the second batch
    assert "row 99, column 'user'" in told({"rows": many})[1]
    assert ask(netloc, "/v1/health/ready")[0] == 200
    assert ask(netloc, "/nothing")[0] == 404


def test_a_body_that_is_too_large_is_not_read(served, netloc):
    connection = HTTPConnection(netloc, timeout=60)
    connection.putrequest("POST", "/v1/models/small/score")
    connection.putheader("content-length", str((64 << 20) + 1))
    connection.endheaders()
    for _ in range(64):
        connection.send(b" " * (1 << 20))
    connection.send(b" ")
    assert connection.getresponse().status == 413
    connection.close()


def test_a_bad_request_leaves_its_neighbours_alone(served, netloc):
    rows = pq.read_table(served[4]).slice(0, 20).to_pydict()
    bad = rows | {"item": [29] * 19 + [31]}
    ready = threading.Barrier(6)

    def go(body):
        found = []
        with ScoringClient(f"http://{netloc}", timeout_s=60) as client:
            ready.wait(60)
            for _ in range(5):
                try:
                    found.append(len(client.score(body)["label_logit"]))
                except DataError as error:
                    found.append(str(error))
        return found

    with ThreadPoolExecutor(6) as pool:
        for number, found in enumerate(pool.map(go, [rows, bad] * 3)):
            assert len(found) == 5
            assert all("row 19, column 'item': id 31" in one if number % 2 else one == 20 for one in found)


def test_what_cannot_be_answered_in_time_is_refused(served, netloc):
    body = json.dumps({"rows": {n: v * 20 for n, v in pq.read_table(served[4]).to_pydict().items()}}).encode()
    code, tries = 504, 0
    while code == 504:  # by a worker that has not computed a batch yet, and so does not know how long one takes
        tries += 1
        assert tries < 100
        assert ask(netloc, "/v1/models/small/score", body)[0] == 200
        code, headers, answer = ask(netloc, "/v1/models/small/score", body, **{"x-timeout-ms": "1"})
    assert code == 503
    refusal = r"it has 14,000 rows: about [\d,]+ ms are needed, more than is safe of its 1 ms"
    assert re.match(refusal, json.loads(answer)["error"])
    assert int(headers["retry-after"]) >= 1


@pytest.mark.slow
def test_a_server_that_cannot_start_and_a_client_without_a_server(served, netloc):
    models, port = served[1], netloc.partition(":")[2]
    with started(models.parent, "serve", str(models), "--port", port) as other:
        assert other.wait(60) == 2
        wanted = f"rowwise: 127.0.0.1:{port}: Address already in use: expected another --host or --port\n"
        assert other.stderr.read() == wanted
    with pytest.raises(DataError, match="expected http://HOST:PORT"):
        ScoringClient("localhost:80")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        free = nobody.getsockname()[1]
    with pytest.raises(PeerError, match="Connection refused"):
        ScoringClient(f"http://127.0.0.1:{free}")
    with pytest.raises(SpecError, match="more than 0"):
        ServiceLimits(rows_at_once=0)
