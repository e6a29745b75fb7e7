"""Versions change while clients ask: each answer has the bits of the version that it names, whatever happens."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from increments import Increments, predicted
from launching import is_there, rowwise, started, wait_for, write_recipe
from mutations import flip
from pyarrow import parquet as pq
from serving import Clients, about, forks_of, loader_of, score, server, tensors_of, workers_of
from small import WORLD, trained

from rowwise import RowType, RowwiseError
from rowwise.cli.export import versions
from rowwise.recipes.export import export
from rowwise.serve.package import list_versions, version_folder, write_traffic
from rowwise.serve.record import REQUEST, VERSION
from rowwise.serve.traffic import Canary, Traffic

pytestmark = pytest.mark.slow
VERSIONS = (None, RowType.INT8, RowType.FP16)
ROWS = 40


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Three versions of a run with different logits, and those of each."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("exported")
    run, _ = trained(folder)
    for rows in VERSIONS:
        export(run.folder.path, folder / "models", rows=rows)
    table = WORLD.rows(90_000, ROWS).drop_columns(["label", "logit"])
    pq.write_table(table, folder / "new.parquet")
    numbers = range(1, 1 + len(VERSIONS))
    logits = {number: predicted(folder / "models", number, folder / "new.parquet") for number in numbers}
    return Increments(run, folder / "models", None, folder / "new.parquet", table, logits)


@pytest.fixture
def models(exported, tmp_path):
    return exported.copied(tmp_path)


def test_each_answer_is_one_version_while_they_change(models, exported):
    with server(models) as (netloc, process), Clients(netloc, exported) as clients:
        clients.wait_for(1)
        for number in (2, 3, 1, 2):
            clients.seen.pop(number, None)
            write_traffic(models, Traffic(number))
            clients.wait_for(number)
        assert process.stdout.readline() == "version 2 is the current one\n"
    assert (clients.wrong, clients.failed) == (0, [])


def test_increments_are_served_from_one_memory(increments, tmp_path):
    """Each answer is that of the version it names, also after steps back; there is one file with rows, and not five."""
    models = increments.copied(tmp_path)
    with server(models) as (netloc, process), Clients(netloc, increments) as clients:
        clients.wait_for(1)
        for number in (2, 3, 1, 4, 2, 4):
            clients.seen.pop(number, None)
            write_traffic(models, Traffic(number))
            clients.wait_for(number)
        write_traffic(models, Traffic(4, Canary(3, 0.5)))
        clients.seen.pop(3, None)
        clients.wait_for(3)
        assert sum("memfd:rowwise-serve" in os.readlink(one) for one in fds_of(process.pid)) == 1
    assert (clients.wrong, clients.failed) == (0, [])


def test_versions_that_change_faster_than_they_load(increments, tmp_path):
    """The server moves all the time, skips wishes, and arrives at the newest after at most one other version."""
    models, moves, made, ending = increments.copied(tmp_path), [], [], threading.Event()

    def follow(lines):
        moves.extend(line for line in lines if "is the current one" in line)

    def change():
        g = random.Random(0)
        for number in cycle((2, 3, 1)):
            write_traffic(models, Traffic(number))
            made.append(number)
            if ending.wait(g.uniform(0.2, 0.5)):
                return

    with ThreadPoolExecutor(2) as pool, server(models) as (netloc, process), Clients(netloc, increments, 1) as clients:
        following, changing = pool.submit(follow, process.stdout), pool.submit(change)
        try:
            for least in (2, 4):
                wait_for(lambda least=least: len(moves) >= least, 120)
                os.kill(workers_of(process.pid)[0], signal.SIGKILL)
        finally:
            ending.set()
            changing.result()
        write_traffic(models, Traffic(4))
        wait_for(lambda: about(netloc)["wanted"] == 4)
        before = len(moves)
        wait_for(lambda: (now := about(netloc))["version"] == 4 and now["behind_s"] == 0)
        clients.wait_for(4)
        assert (moves[-1], len(moves) <= before + 2) == ("version 4 is the current one\n", True)
        assert len(made) > len(moves)
    following.result()
    assert clients.wrong == 0


def fds_of(pid):
    return [
        f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd") if os.path.lexists(f"/proc/{pid}/fd/{name}")
    ]


def test_a_stock_client_of_the_open_inference_protocol(models, exported):
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import InferenceServerException

    tensors = tensors_of(exported.rows)
    with server(models) as (netloc, _), InferenceServerClient(netloc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("small")
        assert not client.is_model_ready("big")
        assert client.is_model_ready("small", "1")
        assert not client.is_model_ready("small", "9")
        assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
        about = client.get_model_metadata("small", "1")
        with pytest.raises(InferenceServerException, match="no model 'big'"):
            client.get_model_metadata("big")
        assert {one["name"] for one in about["inputs"]} == tensors.keys()
        for binary in (True, False):
            inputs = []
            for name, (kind, array) in tensors.items():
                inputs.append(InferInput(name, list(array.shape), kind))
                inputs[-1].set_data_from_numpy(array, binary_data=binary)
            output = InferRequestedOutput("label_logit", binary_data=binary)
            found = client.infer("small", inputs, outputs=[output], model_version="1")
            assert found.as_numpy("label_logit").tobytes() == exported.logits[1].tobytes()
            assert found.get_response()["model_version"] == "1"


def test_a_canary_answers_its_share(models, exported):
    body = json.dumps({"rows": {name: values[:1] for name, values in exported.rows.items()}})
    with server(models, "--workers", "1") as (netloc, process):
        done = rowwise(models.parent, "versions", "models", "--canary", "3=25%")
        assert done.stdout.splitlines()[3].split()[:4] == ["3", "canary,", "25", "%"]
        assert "version 3 has 25 % of requests" in process.stdout.readline()
        with closing(HTTPConnection(netloc, timeout=60)) as connection:
            seen = []
            for _ in range(100):
                _, version, logits = score(connection, body)
                assert np.array(logits, np.float32).tobytes() == exported.logits[version][:1].tobytes()
                seen.append(version)
            assert abs(seen.count(3) - 25) <= 2
            assert set(seen) == {1, 3}
            assert about(netloc)["canary"]["version"] == 3
            assert {score(connection, body, f"/v1/models/small/versions/{n}/score")[1] for n in (1, 3)} == {1, 3}
            assert score(connection, body, "/v1/models/small/versions/2/score")[0] == 404
            assert rowwise(models.parent, "versions", "models", "--current", "3").returncode == 0
            assert process.stdout.readline() == "version 3 is the current one\n"
            assert {score(connection, body)[1] for _ in range(20)} == {3}


@pytest.mark.parametrize("text", ["3", "3=0", "3=150%", "x=5%", "1=5%", "9=5%"])
def test_canaries_that_are_none(models, text):
    with pytest.raises(RowwiseError, match=r"canary|has no version 9"):
        versions(str(models), current=1, canary=text)


def test_a_version_that_cannot_be_served_is_refused_and_the_old_one_goes_on(models, exported, tmp_path):
    flip(next(version_folder(models, 2).path.glob("*.safetensors")), -5)
    columns = {"sparse": [{"column": name, "ids": "direct"} for name in ("user", "item")], "dense": [{"column": "d0"}]}
    tables = [{"name": name, "rows": rows, "dim": 8, "pooling": "mean"} for name, rows in WORLD.ids]
    other, _ = trained(tmp_path, columns=columns, tables={"list": tables}, train={"epochs": 1})
    with server(models) as (netloc, process), Clients(netloc, exported) as clients:
        clients.wait_for(1)
        write_traffic(models, Traffic(2))
        line = process.stdout.readline()
        assert line.startswith("version 2 is refused: ")
        assert "do not match their checksum" in line
        wait_for(lambda: "checksum" in about(netloc)["refused"].get("2", ""))
        assert about(netloc)["version"] == 1
        write_traffic(models, Traffic(1, Canary(2, 0.5)))
        write_traffic(models, Traffic(3))
        assert process.stdout.readline() == "version 3 is the current one\n"
        clients.wait_for(3)
        export(other.folder.path, models)
        line = process.stdout.readline()
        assert "version 4 is refused: " in line
        assert "differs in columns from version 3" in line
        (models / "current.json").write_text("{")
        assert "current.json is damaged" in process.stdout.readline()
        write_traffic(models, Traffic(1))
        assert process.stdout.readline() == "version 1 is the current one\n"
    assert (clients.wrong, clients.failed) == (0, [])
    assert clients.seen.keys() == {1, 3}


def test_a_worker_that_is_killed_is_replaced(models, exported):
    with server(models) as (netloc, process), Clients(netloc, exported, 4) as clients:
        clients.wait_for(1)
        for number in (2, 3):
            write_traffic(models, Traffic(number))  # also while it starts
            victim = workers_of(process.pid)[0]
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda dead=victim: dead not in (now := workers_of(process.pid)) and len(now) == 2)
            clients.wait_for(number)
        seen = dict(clients.seen)
        wait_for(lambda: clients.seen[3] > seen[3] + 20)
    assert clients.wrong == 0
    assert len(clients.failed) <= 8, clients.failed  # requests and connections of the workers that were killed


def stop_loader(models, netloc, process, number):
    """Stop the loader, which is then told to load a version."""
    loader = loader_of(process.pid)
    os.kill(loader, signal.SIGSTOP)
    write_traffic(models, Traffic(number))
    wait_for(lambda: about(netloc)["behind_s"] > 0.1)
    return loader


def test_a_version_is_loaded_again_if_its_loader_is_killed(models, exported):
    """Also if it is killed while it waits, and at any time of a load: no request fails."""
    with server(models) as (netloc, process), Clients(netloc, exported, 2) as clients:
        clients.wait_for(1)
        os.kill(stop_loader(models, netloc, process, 2), signal.SIGKILL)
        killed = "was killed by SIGKILL (out of memory?)"
        assert process.stdout.readline() == f"version 2: the process that loaded it {killed}; it is loaded again\n"
        clients.wait_for(2)
        g = random.Random(0)
        for number in (3, 1, 2, 3):
            clients.seen.pop(number, None)
            loader = stop_loader(models, netloc, process, number)
            os.kill(loader, signal.SIGCONT)
            time.sleep(g.uniform(0, 0.1))
            os.kill(loader, signal.SIGKILL)
            clients.wait_for(number)
            assert loader_of(process.pid) != loader
        loader = loader_of(process.pid)
        os.kill(loader, signal.SIGKILL)
        line = f"the process that loads versions {killed}; another one starts\n"
        assert line in process.stdout
        wait_for(lambda: loader_of(process.pid) != loader)
        clients.seen.pop(1, None)
        write_traffic(models, Traffic(1))
        clients.wait_for(1)
        assert about(netloc)["refused"] == {}
    assert (clients.wrong, clients.failed) == (0, [])


def test_a_loader_that_finds_no_idle_processor_is_replaced(models, exported):
    limit = ("--limit", "starved_s=0.03")
    with server(models, *limit) as (netloc, process), Clients(netloc, exported, 1) as clients, ExitStack() as stack:
        clients.wait_for(1)
        loader, processor = loader_of(process.pid), min(os.sched_getaffinity(0))
        os.sched_setaffinity(loader, {processor})
        for _ in range(8):  # sessions of their own: Linux shares a processor between sessions first
            command = [sys.executable, "-c", "while True: pass"]
            busy = stack.enter_context(subprocess.Popen(command, start_new_session=True))
            stack.callback(busy.kill)
            os.sched_setaffinity(busy.pid, {processor})
        os.kill(loader, signal.SIGSTOP)  # else it may be faster than the other processes start
        write_traffic(models, Traffic(2))
        time.sleep(1.0)
        os.kill(loader, signal.SIGCONT)
        assert process.stdout.readline() == "version 2: no processor is idle; it is loaded at a higher priority\n"
        clients.wait_for(2)
    assert (clients.wrong, clients.failed) == (0, [])


def test_a_version_is_refused_if_its_loader_stands_still(models, exported):
    with server(models, "--limit", "load_s=30") as (netloc, process), Clients(netloc, exported, 1) as clients:
        clients.wait_for(1)
        stop_loader(models, netloc, process, 2)
        assert "not loaded within 30 s" in process.stdout.readline()
        wait_for(lambda: about(netloc)["refused"].keys() == {"2"})
        assert about(netloc)["version"] == 1
        write_traffic(models, Traffic(3))
        clients.wait_for(3)
    assert (clients.wrong, clients.failed) == (0, [])


def test_a_loader_has_the_memory_of_one_version(increments, tmp_path):
    """After fifty loads as after ten: of increments, and of a version with all rows."""
    models = increments.copied(tmp_path)
    with server(models, "--workers", "1") as (netloc, process), Clients(netloc, increments, 1) as clients:
        loader, sizes = loader_of(process.pid), []
        for _, number in zip(range(50), cycle((2, 3, 4, 1)), strict=False):
            write_traffic(models, Traffic(number))
            wait_for(lambda number=number: about(netloc)["version"] == number)
            text = Path(f"/proc/{loader}/smaps_rollup").read_text()
            memory = 1024 * int(re.search(r"^Private_Dirty: +(\d+)", text, re.MULTILINE)[1])
            sizes.append((memory, len(fds_of(loader))))
    memory, files = zip(*sizes[10:], strict=True)
    assert max(memory) - memory[0] < 2 << 20
    assert len(set(files)) == 1
    assert (clients.wrong, clients.failed) == (0, [])


@pytest.mark.parametrize("pinned", ["--version", "path"])
def test_a_server_of_one_version_stays_with_it(models, exported, pinned):
    place, more = (models, ["--version", "2"]) if pinned == "--version" else (version_folder(models, 2).path, [])
    with server(place, *more) as (netloc, _), Clients(netloc, exported) as clients:
        write_traffic(models, Traffic(3))
        clients.wait_for(2)
        time.sleep(0.5)
    assert (clients.seen.keys(), clients.wrong, clients.failed) == ({2}, 0, [])


def test_sigterm_lets_requests_end(models, exported):
    rows = {name: values * 200 for name, values in exported.rows.items()}
    body = json.dumps({"rows": rows})
    with server(models, "--timeout", "60000") as (netloc, process), ExitStack() as stack:
        connections = [stack.enter_context(closing(HTTPConnection(netloc, timeout=60))) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(score, connection, body) for connection in connections]
            time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            for one in found:
                code, version, logits = one.result()
                assert (code, version) == (200, 1)
                assert np.array(logits, np.float32).tobytes() == np.tile(exported.logits[1], 200).tobytes()
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_workers_end_with_their_host(models):
    with server(models) as (_, process):
        assert len(workers_of(process.pid)) == 2
        forks = forks_of(process.pid)
        assert loader_of(process.pid) in forks
        process.kill()
        wait_for(lambda: not any(is_there(fork) for fork in forks))


def test_versions_follow_a_run_that_trains(tmp_path):
    """Each checkpoint becomes a version while the run goes on, and a server answers by it."""
    folder = write_recipe(tmp_path / "job", 4000, train={"epochs": 40}, save={"every": 200, "keep": 2})
    with started(folder, "train", "small.yaml") as training:
        wait_for(lambda: list(folder.glob("runs/small/1/ckpt/step-*/manifest.json")))
        with started(folder, "export", "runs/small/1", "models", "--follow") as exporting:
            lines = [exporting.stdout.readline()]
            with server(folder / "models") as (netloc, _):
                assert training.wait(120) == 0, training.stderr.read()
                assert exporting.wait(60) == 0, exporting.stderr.read()
                lines += exporting.stdout.read().splitlines()
                steps = [int(line.split("step ")[1].split(",")[0]) for line in lines if line.startswith("wrote ")]
                assert steps == sorted(set(steps))
                assert len(steps) > 1
                wait_for(lambda: about(netloc)["version"] == len(steps))
    assert max(steps) == max(int(path.name[5:]) for path in folder.glob("runs/small/1/ckpt/step-*"))
    assert list_versions(folder / "models") == [*range(1, 1 + len(steps))]


def test_recorded_answers_are_computed_again(models, exported):
    """Of two versions; and a changed answer is found."""
    records = models.parent / "records"
    with server(models, "--record", "records", "--record-share", "50%") as (netloc, process):
        with Clients(netloc, exported) as clients:
            for number in (1, 2):
                write_traffic(models, Traffic(number))
                clients.wait_for(number)
                seen = clients.seen[number]
                wait_for(lambda n=number, least=seen + 50: clients.seen[n] > least)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    done = rowwise(models.parent, "audit", "models", "records", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == 0
    assert {one["version"] for one in found["files"]} == {1, 2}
    kept = sum(len(set(pq.read_table(file)[REQUEST].to_pylist())) for file in records.glob("*.parquet"))
    assert abs(kept - 0.5 * sum(clients.seen.values())) < 10
    file = max(records.glob("*.parquet"), key=lambda one: one.stat().st_size)
    table = pq.read_table(file)
    logits = table["logit:label"].to_numpy().copy()
    logits[3] = np.nextafter(logits[3], np.float32(9))
    place = table.column_names.index("logit:label")
    pq.write_table(table.set_column(place, "logit:label", [logits]), file)
    done = rowwise(models.parent, "audit", "models", "records")
    assert done.returncode == 2
    assert (
        f"records/{file.name}: version {table[VERSION][3]}, request {table[REQUEST][3]}: answered"
        in done.stderr.replace("\n", "")
    )
    shutil.rmtree(version_folder(models, 2).path)
    done = rowwise(models.parent, "audit", "models", "records")
    assert "models has no version 2; there are 1, 3" in done.stderr
