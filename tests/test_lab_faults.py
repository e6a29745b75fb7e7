"""Two racks of four hosts: hosts are killed and cables pulled while a run trains; its mirror is in an object store."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import lab
import pytest
from from_benchmarks import part
from lab import Lab, run_command
from launching import rowwise, wait_for, wait_for_step, write_recipe
from test_launch import same, tensors

from rowwise.checkpoint.named import step_in

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(lab.missing()), reason=f"no lab: {lab.missing()}"),
]
STEPS, HOSTS, KILLS = 80, 8, 10
TRAIN = {"batch": 2048, "determinism": "elastic", "virtual_shards": 8, "epochs": 100, "steps": STEPS}
SAVE = {"every": 4, "keep": 2}
TIMEOUT_s, LONGEST_s = 30, 12  # LONGEST_s: from the start of ranks to a kill


def on_host(rank, words, folder, environment):
    """A command on a host, whose process and error output are files of the folder."""
    os.environ.update(environment)
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    output = os.open(Path(folder) / f"err-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 2)
    os.close(output)
    return run_command(rank, words, folder)


@contextmanager
def job(folder, hosts=HOSTS, store=None):
    """A run on hosts of a lab while the block lasts; yields the lab, and what gives the exit codes of the ranks.

    `store`: the folder of an S3 server on the first host.
    """
    for path in folder.glob("pid-*"):
        path.unlink()
    words = ["rowwise", "train", "small.yaml", "--run", "run", "--timeout", str(TIMEOUT_s)]
    with Lab((4, 4)) as racks, ThreadPoolExecutor(1) as pool, server_on(racks.hosts[0], store) as environment:
        future = pool.submit(racks.run, on_host, words, str(folder), environment, order=range(hosts), limit_s=240)
        yield racks, future.result


@contextmanager
def server_on(host, store):
    """The variables by which ranks of a host reach a server of the folder."""
    if store is None:
        yield {}
        return
    (store / "bucket").mkdir(parents=True, exist_ok=True)
    command = [*lab._enter(host.pid), sys.executable, part("s3_server").__file__, str(store), "--port", "9000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == "9000\n"
            keys = {"AWS_ACCESS_KEY_ID": "key-1", "AWS_SECRET_ACCESS_KEY": "secret-2", "AWS_REGION": "x"}
            yield {**keys, "AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}
        finally:
            server.kill()


def process_of(folder, rank):
    path = folder / f"pid-{rank}"
    return int(path.read_text() or 0) if path.exists() else 0


def has_finished(run):
    path = run / "result.json"
    return path.exists() and json.loads(path.read_text())["status"] == "finished"


def step_of(run):
    return max((step_in(path) or 0 for path in (run / "ckpt").glob("step-*")), default=0)


def told_why(folder, victim, hosts):
    """The last lines of the ranks but the victim; each is one of rowwise's, and there is no traceback."""
    texts = [(folder / f"err-{rank}.txt").read_text() for rank in range(hosts) if rank != victim]
    lines = [(text.splitlines() or [""])[-1] for text in texts]
    assert not any("Traceback" in text for text in texts), texts
    assert any(line.startswith("rowwise: ") for line in lines), lines
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same run on one rank of this machine, whose bits elastic runs have on any number of hosts."""
    folder = write_recipe(tmp_path_factory.mktemp("undisturbed"), train=TRAIN, save=SAVE)
    done = rowwise(folder, "train", "small.yaml", "--run", "run")
    assert done.returncode == 0, done.stderr
    return tensors(folder / "run")


def test_hosts_that_are_killed_change_no_bit(undisturbed, tmp_path):
    """One host at a time, at random moments; started again on all hosts, or on four of them."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    folder, killed = write_recipe(tmp_path / "job", train=TRAIN, save={**SAVE, "mirror": "s3://bucket/run"}), 0
    while True:
        hosts = draw.choice((HOSTS, HOSTS, 4))
        victim = draw.randrange(hosts) if killed < KILLS else None
        with job(folder, hosts, tmp_path / "s3") as (_, codes):
            if victim is not None:
                pids = [wait_for(lambda rank=rank: process_of(folder, rank)) for rank in range(hosts)]
                time.sleep(draw.uniform(0, LONGEST_s))
                with suppress(ProcessLookupError):  # the run is over
                    os.kill(pids[victim], signal.SIGKILL)
                begin_s = time.monotonic()
            found = codes()
        if None not in found or has_finished(folder / "run"):
            break
        assert found.pop(victim) is None
        assert all(found), found
        killed, lines = killed + 1, told_why(folder, victim, hosts)
        took_s, at = time.monotonic() - begin_s, step_of(folder / "run")
        print(f"step {at}: rank {victim} of {hosts} killed, others ended after {took_s:.1f} s: {lines[0]}")
    assert killed
    assert None in found or found == [0] * hosts, found
    assert same(tensors(folder / "run"), undisturbed)
    stored = {path.name for path in (tmp_path / "s3/bucket").iterdir()}
    assert any("step-" in name and name.endswith("manifest.json") for name in stored)


def test_a_cable_that_is_pulled_for_ten_seconds_stops_nothing(undisturbed, tmp_path):
    folder = write_recipe(tmp_path / "job", train=TRAIN, save=SAVE)
    with job(folder) as (racks, codes):
        wait_for_step(folder / "run", 3)
        racks.cable(5, "down")
        time.sleep(10)
        assert not (folder / "run/result.json").exists()  # it waits
        racks.cable(5, "up")
        assert codes() == [0] * HOSTS
    assert same(tensors(folder / "run"), undisturbed)


def test_a_cable_that_stays_pulled_ends_the_run_with_one_line(tmp_path):
    folder = write_recipe(tmp_path / "job", train=TRAIN, save=SAVE)
    with job(folder) as (racks, codes):
        wait_for_step(folder / "run", 3)
        racks.cable(5, "down")
        begin_s = time.monotonic()
        found = codes()
        took_s = time.monotonic() - begin_s
    assert all(found), found
    print(f"ended after {took_s:.1f} s with: {told_why(folder, None, HOSTS)[0]}")
    assert took_s < 3 * TIMEOUT_s


@contextmanager
def slowed(process):
    """Stop a process for three quarters of the time while the block lasts."""
    ended = threading.Event()

    def alternate():
        with suppress(ProcessLookupError):
            while not ended.is_set():
                os.kill(process, signal.SIGSTOP)
                time.sleep(0.03)
                os.kill(process, signal.SIGCONT)
                time.sleep(0.01)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_slow_host_is_named(tmp_path):
    folder = write_recipe(tmp_path / "job", train=TRAIN | {"steps": 40}, log={"every": 5}, save=SAVE | {"every": 40})
    with job(folder, hosts=4) as (_, codes):
        wait_for_step(folder / "run", 3)
        with slowed(process_of(folder, 2)):
            assert codes() == [0] * 4
    named = [line for line in (folder / "run/warnings.txt").read_text().splitlines() if line.startswith("host")]
    assert any(line.startswith("host 2 (rank 2) takes ") for line in named), named
