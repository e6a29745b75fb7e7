"""Two hosts of a lab whose wall clocks are hours apart: a run, its mirror, and a resume with the clocks exchanged."""

import json
import signal
import subprocess
from contextlib import ExitStack, contextmanager

import clocks
import lab
import pytest
from base.storage.stores import s3_server
from lab import Lab
from launching import ENVIRONMENT, PYTHON, rowwise, wait_for, write_recipe
from serving import about, server
from small import trained
from test_lab_faults import server_on
from test_launch import RUN, result, same, tensors

from rowwise.train.saved import CheckpointFolder

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(clocks.missing()), reason=clocks.missing()),
]
TRAIN = {"batch": 2048, "determinism": "elastic", "virtual_shards": 8, "epochs": 100, "steps": 60}
SAVE = {"every": 4, "keep": 2, "background": True, "incremental": True}
APART = (1, -2)  # hours that the hosts are ahead
URL = "s3://bucket/run"


@contextmanager
def job(folder, hours, store, *words):
    """A command on two hosts with these clocks, and a server on the first; yields the processes."""
    with Lab((1, 1)) as racks, server_on(racks.hosts[0], store) as environment, ExitStack() as stack:
        world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": racks.hosts[0].address, "MASTER_PORT": "29500"}
        ranks = []
        for rank, host in enumerate(racks.hosts):
            variables = {**world, **environment, **clocks.shifted(hours[rank]), "RANK": str(rank)}
            process = subprocess.Popen(
                [*lab._enter(host.pid), *PYTHON, "-m", "rowwise", *words],
                cwd=folder, env=ENVIRONMENT | variables | {"GLOO_SOCKET_IFNAME": "eth0"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            stack.callback(process.communicate)
            stack.callback(process.kill)
            ranks.append(process)
        yield ranks


def ended(ranks):
    """The exit codes of ranks, and what they have said."""
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], said


@pytest.mark.skipif(bool(lab.missing()), reason=f"no lab: {lab.missing()}")
def test_a_run_on_hosts_with_clocks_hours_apart_ends_with_the_same_bits(tmp_path):
    alone = write_recipe(tmp_path / "alone", train=TRAIN, save=SAVE)
    assert rowwise(alone, "train", "small.yaml").returncode == 0
    folder = write_recipe(tmp_path / "job", train=TRAIN, save=SAVE | {"mirror": URL})
    bucket = tmp_path / "s3/bucket"
    with job(folder, APART, tmp_path / "s3", "train", "small.yaml") as ranks:
        wait_for(lambda: len(list(bucket.glob("*manifest.json"))) > 1 or ranks[0].poll() is not None)
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        codes, said = ended(ranks)
    assert codes == [-signal.SIGKILL] * 2, said
    (tmp_path / "elsewhere").mkdir()
    for where, again in ((folder, (RUN, "--set", "save.mirror=null")), (tmp_path / "elsewhere", (URL,))):
        with job(where, APART[::-1], tmp_path / "s3", "resume", *again) as ranks:
            codes, said = ended(ranks)
        assert codes == [0, 0], said
        assert "resumed at step " in said[0] + said[1]
        (run,) = (where / "runs/small").iterdir()
        assert result(run)["status"] == "finished"
        assert same(tensors(run), tensors(alone / RUN))
        assert CheckpointFolder(run / "ckpt").steps()[-1] == TRAIN["steps"]


def test_versions_and_runs_of_a_host_with_another_clock_are_followed(tmp_path):
    runs = [trained(tmp_path)[0].folder.path for _ in range(2)]
    with s3_server(tmp_path / "s3") as store:
        keys = {"AWS_ACCESS_KEY_ID": "key-1", "AWS_SECRET_ACCESS_KEY": "secret-2", "AWS_REGION": "x"}
        ahead, behind = (keys | {"AWS_ENDPOINT_URL": store.endpoint} | clocks.shifted(hours) for hours in APART)

        def export(run, environment):
            done = rowwise(tmp_path, "export", str(run), "s3://bucket/models", environment=environment)
            assert done.returncode == 0, done.stderr

        export(runs[0], ahead)
        with server("s3://bucket/models", "--cache", "here", folder=tmp_path, environment=behind) as (netloc, _):
            assert about(netloc)["version"] == 1
            for number, environment in ((2, ahead), (3, behind)):  # the newest one is the older one by its time
                export(runs[number % 2], environment)
                wait_for(lambda number=number: about(netloc)["version"] == number)
        for environment in (ahead, behind):
            watched = rowwise(tmp_path, "watch", str(runs[0]), "--once", "--json", environment=environment)
            assert json.loads(watched.stdout)["state"] == "finished"
            assert json.loads(watched.stdout)["age_s"] >= 0
