"""`rowwise train --on ray`: its script, and real jobs on a cluster of three nodes: one is lost, ranks are stopped."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import (
    ENVIRONMENT,
    FILE_NAMES,
    LONGER,
    PRINTABLE,
    SCHEDULED,
    SMALL_JOB,
    is_there,
    ranks_of,
    rowwise,
    wait_for,
    wait_for_step,
    write_recipe,
)
from ray_cluster import kill_node, missing, node, ray_cluster
from test_launch import RUN, result, same, tensors

from rowwise.base.errors import DataError, SpecError
from rowwise.cli.job import Job, parse_settings
from rowwise.cli.ray import find_state, make_script
from rowwise.cli.ray_job import STOPPED, KEPT_bytes, RanksOfNode, choose_count, decide_code, parse_counts
from rowwise.train.saved import CheckpointFolder

pytestmark = pytest.mark.filterwarnings("default")  # of Ray

REQUEST = replace(SMALL_JOB, cwd=Path("/"))
COUNTS = st.lists(st.integers(1, 40), min_size=1, unique=True).map(lambda counts: tuple(sorted(counts)))
CODES = st.lists(st.sampled_from((0, 1, 2, STOPPED, -signal.SIGTERM, -signal.SIGKILL)), min_size=1)


def line_of(request, key):
    """The word after an option of the driver."""
    words = make_script(request, "ray-7").rpartition("exec ")[2].split()
    return words[words.index(key) + 1]


@given(st.lists(PRINTABLE, max_size=3), FILE_NAMES)
def test_any_text_reaches_the_driver_as_it_is(words, folder):
    request = replace(REQUEST, command=("train", *words), runs=Path("/") / folder)
    driver = f"{sys.executable} -m rowwise.cli.ray_job"
    script = make_script(request, "ray-7").replace(f"exec {driver}", "printf '%s\\n'")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-len(words) - 4 :] == ["--run", f"/{folder}/small/ray-7", "--", "train", *words]


@given(COUNTS)
def test_numbers_of_nodes_are_read_as_they_are_written(counts):
    request = replace(REQUEST, nodes=counts[-1], node_counts=counts)
    assert parse_counts(line_of(request, "--nodes")) == counts


@pytest.mark.parametrize("text", ["", "0", "2-1", "1-", "1-2-3", "1,", "\u0661", "1_0", "1-99999999999", "9" * 5000])
def test_numbers_of_no_nodes_are_refused(text):
    with pytest.raises(ValueError, match=r"^$"):
        parse_counts(text)


@given(COUNTS, st.integers(0, 50))
def test_a_job_takes_the_most_nodes_that_it_can_use(counts, there):
    assert choose_count(counts, there) == ([0] + [count for count in counts if count <= there])[-1]


@given(CODES, st.integers(0, 2), st.booleans())
def test_a_job_starts_again_after_lost_nodes_and_signals_alone(codes, lost, stopped):
    code = decide_code([*codes, *[None] * lost], lost, stopped=stopped)
    if not lost and not any(codes):
        assert code == 0
    elif stopped:
        assert code == STOPPED
    elif lost:
        assert code is None
    else:
        wrong = {1, 2, -signal.SIGKILL} & set(codes)
        assert (code is None) == (not wrong)
        assert code is None or code in {*codes, 128 + signal.SIGKILL}


def test_settings_are_those_of_a_rank():
    request = replace(REQUEST, settings=parse_settings(["cpus=4", "gpus=1", "wait=5", "grace=30"]))
    assert [line_of(request, f"--{key}") for key in ("nodes", "nproc", "cpus", "gpus", "wait")] == [*"32415"]
    assert '"RAY_JOB_STOP_WAIT_TIME_S": "30"' in make_script(request)


@pytest.mark.parametrize(
    "pair", ["x", "=1", "nope=1", "cpus=0", "gpus=-1", "grace=x", "wait=", "address=head:6379", "address=file:///etc"]
)
def test_settings_that_no_cluster_takes_are_refused(pair):
    with pytest.raises(SpecError, match=r"--job|dashboard"):
        make_script(replace(REQUEST, settings=parse_settings([pair])))


@pytest.mark.parametrize(
    ("code", "piece", "times"),
    [
        (200, b"[" * 200_000, 1),
        (200, b"x" * 9999, 99_999),
        (200, b"[]", 1),
        (200, b"{", 1),
        (500, b"y" * 65536, 10_000),
    ],
)
def test_what_is_no_dashboard_is_named_in_a_short_line(code, piece, times):
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(code)
            self.end_headers()
            with suppress(ConnectionError):
                for _ in range(times):
                    self.wfile.write(piece)

        def log_message(self, *said):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        job = Job(name="ray-1", id="ray-1", recipe="r", run="r", log="l", submitted="now", cluster=address)
        with pytest.raises(DataError, match=rf"Ray (answers )?at {address}") as caught:
            find_state(job)
        server.shutdown()
    assert len(str(caught.value)) < 1500


@pytest.mark.slow  # Ray is there
def test_without_a_cluster_a_line_names_the_way_out(tmp_path):
    write_recipe(tmp_path, **SCHEDULED)
    command = ("train", "small.yaml", "--on", "ray", "--nodes", "4")
    environment = {"RAY_ADDRESS": "http://127.0.0.1:1", "HOME": str(tmp_path)}
    for args, variables, error in (
        (command, environment, "4 ranks: expected 1, 2, 3, 6 ranks"),
        ((*command[:-1], "3"), environment, "no Ray answers at http://127.0.0.1:1 ([Errno 111] Connection refused)"),
        ((*command[:-1], "3"), {"RAY_ADDRESS": "auto"}, "'auto': expected the URL of Ray's dashboard, such as http://"),
    ):
        refused = rowwise(tmp_path, *args, environment=variables)
        assert (refused.returncode, refused.stderr.count("\n"), error in refused.stderr) == (2, 1, True), refused.stderr
    shown = rowwise(tmp_path, *command[:-1], "6", "--dry-run", environment=environment)
    assert "--nodes 1,2,3,6 --nproc 1" in shown.stdout, shown.stderr
    assert not list(tmp_path.glob(".local/state/rowwise/jobs/*"))


@pytest.mark.slow
def test_without_ray_a_line_names_the_extra(tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"}
    refused = rowwise(tmp_path, "train", "small.yaml", "--on", "ray", environment=environment)
    assert refused.returncode == 2
    assert refused.stderr.startswith("rowwise: --on ray needs Ray; pip install 'rowwise[cluster]'")
    driver = [sys.executable, "-m", "rowwise.cli.ray_job", "--nodes", "1", "--run", "x", "--", "train"]
    done = subprocess.run(driver, env=ENVIRONMENT | environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "; pip install 'rowwise[cluster]' there" in done.stderr) == (2, True)


def poll_all(node):
    """What the ranks of a node print, as their driver takes it, their exit codes, and how much is left out."""
    text, begin, lost, codes = b"", 0, 0, [None]
    while None in codes:
        time.sleep(0.05)
        at, new, codes = node.poll(begin)
        text, lost, begin = text + new, lost + at - begin, at + len(new)
    return text, codes, lost


MEETS = """
from rowwise.cli.environment import CommandEnvironment
from rowwise.parallel.comm.launch import ListeningSocket, meet
import os
one = CommandEnvironment.read(os.environ).torchrun
listener = None if one.listener is None else ListeningSocket(one.listener, one.world)
meeting = meet(60, listener=listener)
os.write(1, f"{one.rank} {meeting.agree('word', lambda: 'hello')}\\n".encode())  # whole, beside another rank's
# Rank 0 has the store, so it ends last.
meeting.world.store.set("read", b"") if one.rank else meeting.world.store.get("read")
"""


@pytest.mark.dist
@pytest.mark.skipif(missing() is not None, reason="no Ray")
def test_the_port_of_ranks_is_theirs_from_its_choice_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    node = RanksOfNode()
    address, port = node.meet(str(tmp_path))
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((address, port))
    world = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    node.start([sys.executable, "-c", MEETS], str(tmp_path), [{**world, "RANK": rank} for rank in "10"])
    text, codes, lost = poll_all(node)
    assert (sorted(text.decode().splitlines()), codes, lost) == (["0 hello", "1 hello"], [0, 0], 0)


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [0, 1000, 600_000])
def test_what_ranks_print_is_kept_up_to_a_bound(count, tmp_path):
    """The newest lines stay, and what is there together with what is left out is all that was printed."""
    node = RanksOfNode()
    code = f"print('no newline' * {count}, end='')\nfor n in range({count}): print(n)\nprint('the end', end='')"
    node.start([sys.executable, "-c", code], str(tmp_path), [{"RANK": "0"}])
    wait_for(lambda: None not in node.poll(0)[2])  # a driver that takes nothing meanwhile
    assert len(node._output._kept) <= KEPT_bytes
    text, codes, lost = poll_all(node)
    whole = ("no newline" * count + "".join(f"{n}\n" for n in range(count)) + "the end").encode()
    assert (lost + len(text), codes) == (len(whole), [0])
    assert whole.endswith(text)
    assert lost == max(0, len(whole) - KEPT_bytes)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing() is not None:
        pytest.skip(f"no {missing()}: pip install 'rowwise[cluster]'")
    with ray_cluster() as (nodes, address):
        yield nodes, {"RAY_ADDRESS": address, "HOME": str(tmp_path_factory.mktemp("home"))}


def submitted(folder, environment, *args):
    """The name of a job, which nobody follows yet."""
    done = rowwise(folder, "train", "small.yaml", "--on", "ray", "--detach", *args, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stderr.split()[0]


def ask(environment, path):
    with urllib.request.urlopen(f"{environment['RAY_ADDRESS']}/api/{path}", timeout=30) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
@pytest.mark.dist
def test_a_job_that_loses_a_node_ends_with_the_bits_of_a_local_run(cluster, tmp_path):
    nodes, environment = cluster
    alone = write_recipe(tmp_path / "alone", **SCHEDULED)
    assert rowwise(alone, "train", "small.yaml", "--nproc", "2").returncode == 0
    folder = write_recipe(tmp_path / "in a job", **SCHEDULED)
    name = submitted(folder, environment, "--nodes", "3", "--job", "wait=1")
    run = folder / f"runs/small/{name}"
    ranks = ranks_of(run)
    wait_for_step(run, 30)
    kill_node(nodes, nodes.worker_nodes.copy().pop())
    try:
        followed = rowwise(folder, "ps", name, environment=environment)
    finally:
        nodes.add_node(**node())
    assert followed.returncode == 0, followed.stderr
    assert "lost 1 node (" in followed.stderr
    assert "starts 2 ranks on 2 nodes" in followed.stderr
    assert "resumed at step " in followed.stderr
    assert "ranks   2 on 1 host" in followed.stderr
    assert (len(ranks), [pid for pid in ranks if is_there(pid)]) == (3, [])
    assert same(tensors(run), tensors(alone / RUN))
    assert "lost 1 node" in ask(environment, f"jobs/{name}/logs")["logs"]


@pytest.mark.slow
@pytest.mark.dist
def test_a_job_of_ray_that_is_stopped_saves(cluster, tmp_path):
    _, environment = cluster
    write_recipe(tmp_path, **LONGER)
    run = tmp_path / "runs/mine"
    name = submitted(tmp_path, environment, "--nodes", "2", "--run", "runs/mine")
    wait_for_step(run, 8)
    listed = rowwise(tmp_path, "ps", environment=environment).stdout
    assert (name in listed, "running" in listed) == (True, True)
    assert rowwise(tmp_path, "stop", name, environment=environment).returncode == 0
    followed = rowwise(tmp_path, "ps", name, environment=environment)
    assert followed.returncode == 2
    assert f"{name} is cancelled" in followed.stderr
    stopped = result(run)
    assert (stopped["status"], CheckpointFolder(run / "ckpt").steps()[-1]) == ("stopped", stopped["steps"])
    assert "has ended: cancelled" in rowwise(tmp_path, "stop", name, environment=environment).stderr


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_end_with_the_driver_of_their_job(cluster, tmp_path):
    _, environment = cluster
    write_recipe(tmp_path, **LONGER)
    name = submitted(tmp_path, environment, "--nodes", "3")
    ranks = ranks_of(tmp_path / f"runs/small/{name}")
    os.kill(int(ask(environment, f"jobs/{name}")["driver_info"]["pid"]), signal.SIGKILL)
    followed = rowwise(tmp_path, "ps", name, environment=environment)
    assert f"{name} is failed" in followed.stderr
    wait_for(lambda: not any(is_there(pid) for pid in ranks))


@pytest.mark.slow
@pytest.mark.dist
def test_errors_of_ranks_of_ray_come_back_as_a_line(cluster, tmp_path):
    _, environment = cluster
    write_recipe(tmp_path)
    failing = ("train", "small.yaml", "--on", "ray", "--nodes", "2", "--set", "init_from=nowhere")
    failed = rowwise(tmp_path, *failing, environment=environment)
    assert failed.returncode == 2
    assert "nowhere is not a checkpoint" in failed.stderr
    assert "is failed (Job entrypoint command failed with exit code 2): its log is" in failed.stderr


@pytest.mark.slow
@pytest.mark.dist
def test_the_script_that_is_printed_runs_as_it_says(cluster, tmp_path):
    _, environment = cluster
    write_recipe(tmp_path)
    command = ("train", "small.yaml", "--on", "ray", "--nodes", "2", "--dry-run")
    script = rowwise(tmp_path, *command, environment=environment).stdout
    (tmp_path / "job.sh").write_text(script)
    (submit,) = [line.strip("# ") for line in script.splitlines() if line.startswith("#   ray job submit")]
    submit = submit.replace(" --no-wait", "").replace("FILE", shlex.quote(str(tmp_path / "job.sh")))
    variables = ENVIRONMENT | environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", submit], env=variables, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starts 2 ranks on 2 nodes" in done.stdout
    (run,) = (tmp_path / "runs/small").iterdir()
    assert (run.name[:4], result(run)["status"]) == ("ray-", "finished")


@pytest.mark.slow
@pytest.mark.dist
def test_a_node_that_lacks_the_folder_is_named(cluster, tmp_path):
    nodes, _ = cluster
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("no mount namespaces")
    script = 'mount -t tmpfs none "$1" && mkdir "$1/here" && cd "$1/here" && exec "${@:2}"'  # the driver alone sees it
    driver = [sys.executable, "-m", "rowwise.cli.ray_job", "--nodes", "1", "--run", "x", "--", "train", "small.yaml"]
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script, "bash", str(tmp_path), *driver],
        env=ENVIRONMENT | {"RAY_ADDRESS": nodes.address}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f" has no folder {tmp_path}/here: expected the working folder, Python and the runs on storage" in done.stderr


@pytest.mark.slow
@pytest.mark.dist
def test_starts_that_save_nothing_are_not_repeated_for_ever(cluster, tmp_path):
    _, environment = cluster
    write_recipe(tmp_path, model="ends.py:Ends")
    (tmp_path / "ends.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    name = submitted(tmp_path, environment, "--nodes", "1")
    followed = rowwise(tmp_path, "ps", name, environment=environment)
    assert followed.stderr.count("starts 1 rank on 1 node\n") == 6, followed.stderr
    assert "6 starts have saved no checkpoint in" in followed.stderr
