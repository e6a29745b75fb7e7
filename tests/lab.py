"""Hosts in racks on one machine: network namespaces behind shaped links, for tests, benchmarks and the tutorial.

    python tests/lab.py --racks 4,4 --host 200 --uplink 200 [--order 0,4,1,5,2,6,3,7] -- rowwise net probe net.json

Each host is a namespace of the kernel with a name, an address and a cable (a veth pair) to its rack's bridge; each rack
has one cable to the bridge of the fabric, its uplink. `tc tbf` limits the rate at both ends of a cable. A namespace
lives as long as a process that holds it: holders end when the process that made the lab ends, and after `LIFE_s` at the
latest. Packets cannot leave the lab. Needs Linux, network namespaces (as root, or with user namespaces) and iproute2.

Ranks are forks of a server that has imported torch once, one on each host, with the variables of torchrun.
"""

import argparse
import functools
import multiprocessing
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Self

LIFE_s = 120  # of a lab
QUEUE_bytes = 2 << 20  # of a cable: with a short queue, retransmissions after 200 ms are measured instead of rates
MIN_BURST_bytes = 70_000  # a whole packet as the kernel segments it
PORT = 29_500
TOOLS = ("ip", "tc", "unshare", "nsenter")
PRELOADED = ("rowwise.parallel.comm.launch", "rowwise.cli.rank", "rowwise.cli.main")


@functools.cache
def missing() -> str:
    """Why this machine can have no lab; empty if it can."""
    if not (lacking := [tool for tool in TOOLS if shutil.which(tool) is None]):
        done = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else f"no network namespaces: {done.stderr.strip()}"
    return f"no {', '.join(lacking)}: expected iproute2 and util-linux"


def _unshare() -> list[str]:
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--net", "--uts"]


@dataclass(frozen=True)
class LabHost:
    """A host of a lab."""

    name: str
    address: str
    rack: int
    pid: int  # of the process that holds its namespaces


class Lab:
    """Racks of hosts, in a `with`; rates are in Mbit/s."""

    def __init__(
        self,
        racks: Sequence[int] = (4, 4),
        *,
        host: float = 200.0,
        uplink: float | None = 200.0,
        slow: dict[int, float] | None = None,
    ) -> None:
        """`uplink`: of each rack; None: without limit. `slow`: rates of single hosts."""
        self.racks, self._host, self._uplink, self._slow = tuple(racks), host, uplink, slow or {}
        self.hosts: list[LabHost] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._stack = stack
            fabric = self._fabric = self._hold("fabric", None)
            self._configure(fabric, ["link add core type bridge", "link set core up"])
            for rack, count in enumerate(self.racks):
                self._add_rack(fabric, rack)
                for _ in range(count):
                    self._add_host(fabric, rack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, function: Callable[..., Any], *args: Any, order: Sequence[int] = (), limit_s: float = 100.0) -> list:
        """`function(rank, *args)` on each host, in rank order; rank k is on host `order[k]`.

        It must be importable. The result of a rank that was killed is None.
        """
        order = tuple(order) or tuple(range(len(self.hosts)))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", *PRELOADED])
        results: dict[int, Any] = {}
        with ExitStack() as stack:
            left: dict[Any, int] = {}
            for rank in range(len(order)):
                answer, to_parent = context.Pipe(duplex=False)
                given = (tuple(self.hosts[h] for h in order), rank, to_parent, function, args)
                process = context.Process(target=_run_rank, args=given, daemon=True)
                process.start()
                stack.callback(_end, process)
                to_parent.close()
                left[answer] = rank
            while left:
                ready = wait(list(left), limit_s)
                assert ready, f"rank {', '.join(map(str, left.values()))} has not ended in {limit_s} s"
                for answer in ready:
                    rank = left.pop(answer)
                    try:
                        fine, results[rank] = answer.recv()
                    except EOFError:
                        fine, results[rank] = True, None
                    assert fine, f"rank {rank}: {results[rank]}"
        return [results[rank] for rank in range(len(order))]

    def cable(self, host: int, state: str) -> None:
        """Pull the cable of a host, or plug it in again; `state`: down or up."""
        self._configure(self._fabric, [f"link set port{host} {state}"])

    def _hold(self, name: str, inside: int | None) -> int:
        """A process in namespaces of its own; without root, in the user namespace of the process `inside`."""
        enter = [] if inside is None or os.geteuid() == 0 else _enter(inside, user_only=True)
        command = ["unshare", "--net", "--uts"] if enter else _unshare()
        # Ends with this process, whose end of the pipe is closed then.
        script = f"hostname {name}; echo up; exec timeout {LIFE_s} cat >/dev/null"
        holder = subprocess.Popen(
            [*enter, *command, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._stack.callback(holder.communicate)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n", f"no namespace for {name}"
        return holder.pid

    def _configure(self, pid: int, links: Sequence[str], shapers: dict[str, float] | None = None) -> None:
        """Run commands of ip, and limit the rates of devices, in the namespace of a process."""
        for tool, lines in (("ip", links), ("tc", [_shaper(name, rate) for name, rate in (shapers or {}).items()])):
            done = subprocess.run(
                [*_enter(pid), tool, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{tool}: {done.stderr}"

    def _add_rack(self, fabric: int, rack: int) -> None:
        up, down = f"up{rack}", f"down{rack}"
        links = [f"link add rack{rack} type bridge", f"link set rack{rack} up", f"link add {up} type veth peer {down}"]
        links += [f"link set {up} master rack{rack} up", f"link set {down} master core up"]
        self._configure(fabric, links, {} if self._uplink is None else {up: self._uplink, down: self._uplink})

    def _add_host(self, fabric: int, rack: int) -> None:
        number = len(self.hosts)
        pid, port, rate = self._hold(f"h{number}", fabric), f"port{number}", self._slow.get(number, self._host)
        address = f"10.77.0.{number + 1}"
        cable = [f"link add {port} type veth peer name eth0 netns {pid}", f"link set {port} master rack{rack} up"]
        self._configure(fabric, cable, {port: rate})
        links = ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"]
        self._configure(pid, links, {"eth0": rate})
        self.hosts.append(LabHost(f"h{number}", address, rack, pid))


def _enter(pid: int, *, user_only: bool = False) -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", "--target", str(pid), *user, *([] if user_only else ["--net", "--uts"])]


def _shaper(device: str, rate: float) -> str:
    burst = max(MIN_BURST_bytes, int(rate * 1e6 / 8 / 250 * 1.5))  # more than passes between two ticks of the kernel
    return f"qdisc replace dev {device} root tbf rate {rate}mbit burst {burst} limit {QUEUE_bytes}"


def _end(process: Any) -> None:
    process.kill()
    process.join()


def _run_rank(hosts: Sequence[LabHost], rank: int, to_parent: Any, function: Callable[..., Any], args: Any) -> None:
    """The main function of a rank: enter the namespaces of its host, and answer with a result or a traceback."""
    try:
        _move_into(hosts[rank].pid)
        world = {"RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": 0, "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1}
        world |= {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": "eth0"}
        os.environ.update({name: str(value) for name, value in world.items()})
        answer = (True, function(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    with suppress(BrokenPipeError):
        to_parent.send(answer)


def _move_into(pid: int) -> None:
    """Move this process, which has one thread, into the namespaces of another."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "net", "uts"):
        path = f"/proc/{pid}/ns/{kind}"
        if os.stat(path).st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino:
            continue
        file = os.open(path, os.O_RDONLY)
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns {kind}")
        os.close(file)


def run_command(rank: int, words: Sequence[str], folder: str) -> int:
    """A command on one host: of rowwise in this process, or any other program."""
    os.chdir(folder)
    if words[0] != "rowwise":
        return subprocess.run(list(words), check=False).returncode
    from rowwise.cli.main import make_app

    try:
        make_app()(list(words[1:]))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--racks", default="4,4", help="hosts in each rack")
    parser.add_argument("--host", type=float, default=200.0, help="Mbit/s of each host")
    parser.add_argument("--uplink", type=float, default=200.0, help="Mbit/s of each rack")
    parser.add_argument("--slow", default="", help="rates of single hosts, as 3=60")
    parser.add_argument("--order", default="", help="the host of each rank")
    parser.add_argument("command", nargs="+", help="what each host runs")
    args = parser.parse_args()
    if reason := missing():
        sys.exit(f"lab: {reason}")
    slow = {int(host): float(rate) for host, _, rate in (word.partition("=") for word in args.slow.split(",") if word)}
    order = [int(host) for host in args.order.split(",") if host]
    with Lab([int(n) for n in args.racks.split(",")], host=args.host, uplink=args.uplink, slow=slow) as lab:
        sys.exit(max(lab.run(run_command, args.command, os.getcwd(), order=order)))


if __name__ == "__main__":
    main()
