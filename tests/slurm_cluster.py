"""A real Slurm of three nodes on this machine: munged, slurmctld and three slurmd, with files in a folder."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
from contextlib import ExitStack, contextmanager

from launching import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
PATH = f"{os.environ['PATH']}:/usr/sbin"
CONFIG = """
ClusterName=rowwise
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[3]}] CPUs=4 State=UNKNOWN
PartitionName=main Nodes=n[1-3] Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-3] State=UP PriorityTier=9 PreemptMode=OFF
"""


def missing():
    """The first program that is not installed."""
    return next((name for name in PROGRAMS if shutil.which(name, path=PATH) is None), None)


@contextmanager
def slurm(folder):
    """Start the cluster; yields the environment of its users."""
    folder.joinpath("key").write_bytes(os.urandom(128))
    folder.joinpath("key").chmod(0o600)
    folder.chmod(0o755)
    for name in ("state", "spool-n1", "spool-n2", "spool-n3", "home"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    settings = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": folder, "ports": free_ports(4)}
    config.write_text(CONFIG.format(**settings))
    environment = {"SLURM_CONF": str(config), "HOME": str(folder / "home"), "PATH": PATH}
    files = {f"--{key}={folder}/{name}" for key, name in (("key-file", "key"), ("socket", "munge.sock"))}
    files |= {f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")}
    with ExitStack() as stack:
        stack.enter_context(daemon(folder, environment, "munged", "--foreground", "--force", *files))
        wait_for((folder / "munge.sock").exists)
        stack.enter_context(daemon(folder, environment, "slurmctld", "-D"))
        for node in ("n1", "n2", "n3"):
            stack.enter_context(daemon(folder, environment, "slurmd", "-D", "-N", node))
        wait_for(lambda: ask(environment, "sinfo", "-h", "-o", "%D %t").strip() == "3 idle", 90)
        yield environment
        ask(environment, "scancel", "--state=PENDING", "--user", getpass.getuser())
        ask(environment, "scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
        wait_for(lambda: not ask(environment, "squeue", "-h", "-o", "%i").strip(), 90)


@contextmanager
def daemon(folder, environment, program, *args):
    with (
        (folder / f"{program}-{args[-1].strip('-/').replace('/', '-')}.out").open("wb") as out,
        subprocess.Popen(
            [program, *args], env={**os.environ, **environment}, stdout=out, stderr=out, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def ask(environment, *command):
    """What a program of Slurm prints."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=30
    )
    return done.stdout


def free_ports(count):
    """Ports in a row that nothing listens on; other processes of the tests begin to look elsewhere."""
    begin = os.getpid() % 500 * count
    for first in (17000 + (begin + more) % 2000 for more in range(0, 2000, count)):
        with ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise AssertionError("no free ports")
