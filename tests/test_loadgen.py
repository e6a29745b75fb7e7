"""MLPerf LoadGen judges a server and the library by the example; wrong answers, refusals and wrong use are said."""

import importlib.util
import json
import math
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from small import trained

from rowwise.recipes.export import export
from rowwise.serve.start import end_server, start_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mlperf_loadgen") is None, reason="needs the extra 'judges'"),
]
EXAMPLE = Path(__file__).parents[1] / "examples" / "loadgen.py"
SHORT = ("--candidates", "item,seen", "--rate", "400", "--queries", "700", "--seconds", "0.2", "--p99", "100000")


@pytest.fixture(scope="module")
def loadgen():
    spec = importlib.util.spec_from_file_location("loadgen_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    run, _ = trained(folder, train={"epochs": 1})
    export(run.folder.path, folder / "models")
    return folder / "models"


@contextmanager
def answers(status, body, after=0):
    """A server that answers so, from a number of requests on; the URL of its endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version, seen = "HTTP/1.1", 0

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            Handler.seen += 1
            self.send_response(status if Handler.seen > after else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()
        server.server_close()


def test_all_scenarios_of_the_library_in_process(loadgen, served, tmp_path):
    saved = tmp_path / "rows.json"
    scenarios = ("--scenario", "server", "offline", "single-stream")
    assert loadgen.main([str(served), *SHORT, *scenarios, "--json", str(saved)]) == 0
    rows = json.loads(saved.read_text())["rows"]
    assert [row["scenario"] for row in rows] == ["server", "offline", "single-stream"]
    for row in rows:
        assert (row["verdict"], row["failed"], row["max_difference"]) == ("VALID", 0, 0)
        assert row["queries"] >= 700
        assert row["achieved_rate"] > 0


@pytest.mark.parametrize("body", ["json", "arrow"])
def test_a_server_has_the_bits_of_the_library(loadgen, served, tmp_path, body):
    server = start_server([str(served), "--workers", "1"])
    try:
        words = ["--url", server.url, "--body", body, "--find-rate", "--budget", "1", "--json", str(tmp_path / "j")]
        assert loadgen.main([str(served), *SHORT, *words]) == 0
    finally:
        end_server(server.process, 30)
    (row,) = json.loads((tmp_path / "j").read_text())["rows"]
    assert (row["verdict"], row["failed"], row["max_difference"]) == ("VALID", 0, 0)


def test_a_latency_target_that_is_missed_is_not_valid(loadgen, served, tmp_path):
    words = ["--p99", "0.001", "--json", str(tmp_path / "j")]
    assert loadgen.main([str(served), *SHORT, *words]) == 1
    (row,) = json.loads((tmp_path / "j").read_text())["rows"]
    assert row["verdict"] == "INVALID"
    assert "performance constraints" in row["reason"]


def test_a_search_keeps_the_highest_rate_that_is_valid(loadgen, served):
    """By a judge that knows the limit."""
    options = loadgen.read_options([str(served), *SHORT])

    class Known(loadgen.Judge):
        def __init__(self):
            self._options = options

        def run(self, scenario, rate):
            return {"target_rate": rate, "verdict": "VALID" if rate <= 333 else "INVALID", "failed": 0}

    for start in (10, 333, 5000):
        rate = Known().find_rate(start, 1e9)[-1]["target_rate"]
        assert 333 / loadgen.APART < rate <= 333
    assert [row["target_rate"] for row in Known().find_rate(5000, 0.0)] == [5000]


@pytest.mark.parametrize(
    ("status", "after", "outputs", "difference"),
    [(503, 100, {"label_logit": [0.5]}, None), (200, 0, {"label_logit": [0.5]}, math.inf), (200, 0, {}, math.inf)],
)
def test_quick_refusals_and_wrong_answers_are_not_good(loadgen, served, tmp_path, status, after, outputs, difference):
    """LoadGen sees latencies alone, and calls all of them VALID."""
    with answers(status, json.dumps({"outputs": outputs}).encode(), after) as url:
        words = ["--url", url, "--json", str(tmp_path / "j")]
        assert loadgen.main([str(served), *SHORT, *words]) == 1
    (row,) = json.loads((tmp_path / "j").read_text())["rows"]
    assert row["verdict"] == "VALID"
    assert (row["failed"] > 0) == (status != 200)
    assert row["max_difference"] == difference or status != 200


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--rate", "0"], "--rate 0.0: expected a number above 0"),
        (["--sizes", "700:100"], "--sizes 700:100: expected MIN:MAX, such as 100:700"),
        (["--candidates", "itm"], "--candidates itm: the model reads no itm: expected some of"),
        (["--candidates", "d0,d1,user,item,seen"], "no column is left for the context"),
        (["--url", "http://127.0.0.1:9/score"], "http://127.0.0.1:9/score: [Errno 111] Connection refused: expected a"),
        (["--rows", "missing.parquet"], "--rows missing.parquet: missing.parquet: expected a Parquet file"),
        (["--url", "127.0.0.1:8080"], "expected http://HOST:PORT/v1/models/NAME/score"),
    ],
)
def test_wrong_use_is_one_line(loadgen, served, words, line):
    with pytest.raises(SystemExit) as ended:
        loadgen.main([str(served), *SHORT, *words])
    assert line in ended.value.code
    assert "\n" not in ended.value.code


def test_a_folder_without_versions_is_one_line(loadgen, tmp_path):
    with pytest.raises(SystemExit, match="has no version of a model"):
        loadgen.main([str(tmp_path), *SHORT])
