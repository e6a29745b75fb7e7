"""`rowwise net`: probe the links between hosts, show a network, and find the order of hosts for fast all-reduces.

Sizes and rates are in bytes. Only `probe` starts ranks and loads torch.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, TextColumn

from rowwise.base.errors import PeerError, RowwiseError, SpecError
from rowwise.base.textfile import write_new
from rowwise.cli.environment import CommandEnvironment
from rowwise.cli.options import AsJson, HtmlFile
from rowwise.cli.progress import fraction_bar
from rowwise.cli.signals import note_signals
from rowwise.cli.terminal import make_terminal, print_json, refuse_nan

if TYPE_CHECKING:
    from rowwise.parallel.comm.interface import Comm
    from rowwise.parallel.comm.probe import ProbeSamples
    from rowwise.planning.perf.links import NetworkHost

MIN_s, MAX_s = 1.0, 86_400.0
MAX_LOCAL = 64  # processes of a trial without torchrun
RENDEZVOUS_s = 300.0  # timeout for the ranks of torchrun
NetworkFile = Annotated[Path, typer.Argument(metavar="NETWORK", help="Network file, such as net.json.")]


def probe(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="NETWORK", help="Network file to write, such as net.json.")],
    seconds: Annotated[float, typer.Option(metavar="N", help="Time budget of the probe, in seconds.")] = 60.0,
    groups: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV with a host and its group per line, instead of measured groups."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Probe between N local processes, as a trial without torchrun.")
    ] = None,
) -> None:
    """Measure latency and bandwidth between all hosts of a job, idle and under load, and find groups and their uplinks.

    Runs under torchrun with a process on each host; of several on a host, the first one probes. Messages travel between
    the job's own ranks only. Ctrl-C keeps the measurements so far.

    Example: torchrun --nnodes 8 --nproc-per-node 1 ... -m rowwise net probe net.json --seconds 60

    Example: torchrun --nnodes 8 --nproc-per-node 1 ... -m rowwise net probe net.json --groups racks.csv

    Example: rowwise net probe net.json --nproc 4 --seconds 10
    """
    _check_seconds(seconds, MAX_s)
    environment: CommandEnvironment = ctx.obj
    torchrun = environment.torchrun
    if torchrun is None and nproc is None:
        raise SpecError("no ranks to probe between", "torchrun with a process on each host, or --nproc N for a trial")
    if torchrun is not None and nproc is not None:
        raise SpecError(f"--nproc {nproc} under torchrun, which has started {torchrun.world} ranks: leave out --nproc")
    if nproc is not None and not 2 <= nproc <= MAX_LOCAL:
        raise SpecError(f"--nproc {nproc}: nothing to order", f"2 to {MAX_LOCAL} processes")
    if out.is_dir() or not out.parent.is_dir():
        raise SpecError(out, "a file in a folder that exists")
    racks = None
    if groups is not None:
        from rowwise.planning.calibrate.net import read_racks

        racks = read_racks(groups)
    probed = _probe_job(seconds, torchrun.attempt) if torchrun is not None else _probe_local(nproc or 2, seconds)
    if probed is not None:
        write_network(out, *probed, racks)


def show(
    network: NetworkFile,
    html: HtmlFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the hosts of a network, their groups and uplinks, slow hosts, and the age of the measurements.

    Example: rowwise net show net.json

    Example: rowwise net show net.json --html net.html
    """
    from rowwise.cli.net_show import draw_network, show_network
    from rowwise.planning.perf.links import read_network

    read = read_network(network)
    if html is not None:
        from rowwise.report.page import write_page

        write_page(html, draw_network(read, str(network)))
    if as_json:
        print_json(read)
    else:
        show_network(read, str(network), make_terminal())


def order(
    network: NetworkFile,
    collective: Annotated[
        str,
        typer.Option("--for", metavar="COLLECTIVE=SIZE", help="all_reduce, halving_doubling or tree, and its bytes."),
    ] = "all_reduce=4MB",
    seconds: Annotated[float, typer.Option(metavar="N", help="Search budget in seconds.")] = 3.0,
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the ordered hosts, one per line, for mpirun or srun.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest order of hosts for a collective, and compare it with other orders and a lower bound.

    Nothing is run. The first host stays first, so rank 0 does not move.

    Example: rowwise net order net.json

    Example: rowwise net order net.json --for tree=64MB --json

    Example: rowwise net order net.json --hosts hosts.txt
    """
    from rowwise.cli.net_show import show_order
    from rowwise.planning.perf.links import age_notes, read_network
    from rowwise.planning.planner.order import find_order, parse_sum, sums_by_size

    _check_seconds(seconds, MAX_s)
    read, target = read_network(network), parse_sum(collective)
    if len(read.hosts) == 1:
        raise SpecError(f"{network}: one host: nothing to order", "a network of several hosts")
    ordering = find_order(read.arrays(), target, noise=read.noise, limit_s=seconds)
    names = [read.hosts[host].name for host in ordering.kept]
    net = read.arrays().among(ordering.kept)
    sums = sums_by_size(net, noise=read.noise, limit_s=seconds) if target.collective == "all_reduce" else []
    if hosts is not None:
        write_new(hosts, "".join(f"{name}\n" for name in names).encode())
    if as_json:
        facts = {"collective": target.collective, "bytes": target.size_bytes, "hosts": names}
        print_json({**facts, **ordering._asdict(), "by_size": [sizes._asdict() for sizes in sums]})
    else:
        show_order(ordering, names, sums, age_notes(read, str(network)), make_terminal())


def _check_seconds(seconds: float, max_s: float) -> None:
    refuse_nan("--seconds", seconds, "a number of seconds")
    if not MIN_s <= seconds <= max_s:
        raise SpecError(f"--seconds {seconds:g}", f"{MIN_s:g} to {max_s:,.0f}")


def _probe_job(seconds: float, attempt: int) -> "tuple[ProbeSamples, tuple[NetworkHost, ...]] | None":
    """Probe between the hosts of torchrun; only the first rank returns a result."""
    from rowwise.parallel.comm.launch import meet
    from rowwise.parallel.comm.probe import probe as probe_links
    from rowwise.recipes.hosts import list_hosts

    meeting = meet(RENDEZVOUS_s, attempt)
    if meeting.topology.hosts == 1:
        raise SpecError("one host: nothing to order", "torchrun on several hosts, or --nproc N for a trial")
    hosts, ranks = list_hosts(meeting), meeting.first_ranks
    if ranks is None:
        return None
    with note_signals() as received, _probe_bar(quiet=ranks.rank > 0) as tell:
        samples = probe_links(ranks, seconds, on_progress=partial(tell, "probing"), is_stopped=lambda: bool(received))
    return None if samples is None else (samples, hosts)


def _probe_local(nproc: int, seconds: float) -> "tuple[ProbeSamples, tuple[NetworkHost, ...]]":
    """Probe between local processes, each in the role of a host."""
    from rowwise.parallel.comm.rank_start import RankStart
    from rowwise.parallel.comm.spawn import RankProcesses
    from rowwise.planning.perf.links import NetworkHost
    from rowwise.tables.spec import Topology

    topology, start = Topology(hosts=nproc), RankStart(preload=("rowwise.parallel.comm.probe",))
    ranks = RankProcesses(topology, probe_rank, (seconds,), start)
    status = make_terminal(stderr=True).status(f"probing between {nproc} processes here")
    with status, ranks, note_signals(ranks.ask_to_stop):
        samples, *_ = ranks.wait()
    return samples, tuple(NetworkHost(name=f"process-{rank}") for rank in range(nproc))


def probe_rank(comm: "Comm", seconds: float) -> "ProbeSamples | None":
    """One process of a trial."""
    from rowwise.parallel.comm.group import TransportComm
    from rowwise.parallel.comm.probe import probe as probe_links
    from rowwise.parallel.comm.torch import TorchTransport

    assert isinstance(comm, TransportComm)
    assert isinstance(comm.transport, TorchTransport)
    with note_signals() as received:
        return probe_links(comm.transport.world, seconds, is_stopped=lambda: bool(received))


def write_network(
    out: Path, samples: "ProbeSamples", hosts: "tuple[NetworkHost, ...]", racks: Mapping[str, str] | None = None
) -> None:
    """Write and print the measured network; raises afterwards if a host has died."""
    from rowwise.cli.net_show import show_network
    from rowwise.planning.calibrate.net import make_network, number_racks

    try:
        groups, fault = None if racks is None else number_racks(racks, [host.name for host in hosts]), None
    except RowwiseError as error:
        groups, fault = None, error  # the measurements are kept, with groups inferred from the rates
    network = make_network(samples, hosts, groups)
    write_new(out, (network.to_json() + "\n").encode())
    show_network(network, str(out), make_terminal(stderr=True))
    if fault is not None:
        raise SpecError(f"{fault}; {out} has the groups that were measured") from None
    if samples.dead:
        dead = ", ".join(f"{hosts[index].name!r}" for index in samples.dead)
        raise PeerError(f"host {dead} has ended while links were probed: {out} has the measurements until then")


def _probe_bar(*, quiet: bool) -> AbstractContextManager[Callable[[str, float], None]]:
    columns = (BarColumn(24), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}"))
    return fraction_bar(make_terminal(stderr=True, quiet=quiet), columns)
