"""Orders the hosts of a run by a network: a file, or a short probe before the run; a resume reuses the order.

Only the first rank decides, as a search may find another order on another rank.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rowwise.base.errors import SpecError
from rowwise.base.textfile import decode_json, read_bytes, read_text
from rowwise.parallel.comm.launch import HostOrder, Meeting
from rowwise.parallel.comm.probe import probe
from rowwise.parallel.comm.sums import Algorithm, AllReduceSizes
from rowwise.planning.perf.links import LinkArrays, Network, NetworkHost, age_notes, group_runs, read_network
from rowwise.planning.planner.order import Sum, find_order, sums_by_size
from rowwise.recipes.recipe import PROBE
from rowwise.recipes.text import RECIPE, parse
from rowwise.tables.spec import Value
from rowwise.train.dense import BUCKET_BYTES

PROBE_s = 10.0  # longest probe before a run
ENVIRONMENT, NETWORK = "env.json", "network.json"  # in the folder of a run


class OrderedHosts(Value, frozen=True):
    """The order of a run's hosts, and its reason; the part `network` of env.json."""

    source: str  # the file, or probe
    order: HostOrder | None  # None: the launcher's order
    gain: float  # predicted speedup of a bucket's all-reduce
    notes: tuple[str, ...] = ()
    sums: tuple[AllReduceSizes, ...] = ()  # algorithms of all-reduces by size; empty: gloo's ring for all

    def fits(self, hosts: Sequence[str]) -> bool:
        """Whether a job of these hosts can use it."""
        is_same = self.order is None or sorted(self.order.hosts) == sorted(hosts)
        return is_same and all(len(sizes.order) in (0, len(hosts)) for sizes in self.sums)

    @property
    def in_words(self) -> str:
        if self.order is None:
            text = f"no better order of hosts: {self.gain:.1f}x"
        else:
            hosts = ", ".join(self.order.hosts)
            text = f"hosts in the order {hosts}; all-reduces {self.gain:.1f}x as fast as in the launcher's order"
        sizes = [f"{sizes.algorithm} from {sizes.min_bytes:,} bytes" for sizes in self.sums]
        return f"network {self.source}: {text}{'; all-reduces by ' if sizes else ''}{', '.join(sizes)}"


class _SavedEnvironment(msgspec.Struct):
    """The part of env.json that a resume reads."""

    network: OrderedHosts | None = None


class NetworkOfRun(Value, frozen=True):
    """The order of a run's hosts, and the network if it was probed for the run."""

    ordered: OrderedHosts
    probed: Network | None = None


def order_hosts(meeting: Meeting, network: str | None, run: Path | None = None) -> NetworkOfRun | None:
    """The order of the hosts of a job, from `network` (a file or `probe`), or else of `run` if it had these hosts.

    A collective of ranks that are not connected yet. An empty `network` disables it. Returns None on one host, or
    without a network.
    """
    if meeting.topology.hosts == 1:
        return None
    decision = meeting.agree("network", lambda: _decide(meeting, network, run))
    if decision == PROBE:
        ranks = meeting.first_ranks
        samples = None if ranks is None else probe(ranks, PROBE_s)

        def order_probed() -> str:
            assert samples is not None
            if samples.dead:
                raise SpecError(f"host {meeting.hosts[samples.dead[0]]!r} ended during the probe of links")
            from rowwise.planning.calibrate.net import make_network  # only on the host that probed

            probed = make_network(samples, list_hosts(meeting))
            return _encode(NetworkOfRun(ordered=choose_order(probed, meeting, PROBE), probed=probed))

        decision = meeting.agree("probed", order_probed)
    return decode_json(decision, NetworkOfRun) if decision else None


def list_hosts(meeting: Meeting) -> tuple[NetworkHost, ...]:
    """The hosts of a job as hosts of a network; raises for duplicate names."""
    for name in meeting.hosts:
        if meeting.hosts.count(name) > 1:
            raise SpecError(f"{meeting.hosts.count(name)} hosts are named {name!r}", "names that differ (hostname)")
    return tuple(NetworkHost(name=name, devices=meeting.topology.devices) for name in meeting.hosts)


def _decide(meeting: Meeting, network: str | None, run: Path | None) -> str:
    """The saved order of the run, `PROBE`, the order by the file, or "" without a network."""
    if run is not None:
        saved = _read_saved(run / ENVIRONMENT) if network is None else None
        if saved is not None and saved.fits(meeting.hosts):
            return _encode(NetworkOfRun(ordered=saved))
        network = parse(read_text(run / RECIPE), str(run / RECIPE)).get("network") if network is None else network
    if not network:
        return ""
    list_hosts(meeting)
    if network == PROBE:
        return PROBE
    return _encode(NetworkOfRun(ordered=choose_order(read_network(network), meeting, network)))


def _read_saved(path: Path) -> OrderedHosts | None:
    try:
        return msgspec.json.decode(read_bytes(path), type=_SavedEnvironment).network
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def choose_order(network: Network, meeting: Meeting, source: str) -> OrderedHosts:
    """The order of a job's hosts for all-reduces of a bucket; the launcher's if the gain is small."""
    net = links_of_job(network, meeting, source)
    search = find_order(net, Sum("all_reduce", BUCKET_BYTES), noise=network.noise)
    order_H = search.kept
    runs = group_runs(net.group_H[list(order_H)].tolist())
    groups = runs if 1 < len(runs) == len(net.uplink_G) else ()
    names = tuple(meeting.hosts[host] for host in order_H)
    sums = choose_sums(net.among(order_H), network.noise) if meeting.topology.devices == 1 else ()
    order = HostOrder(hosts=names, groups=groups) if search.is_worthwhile or groups else None
    return OrderedHosts(
        source=source,
        order=order,
        gain=round(search.gain if search.is_worthwhile else 1.0, 2),
        notes=tuple(age_notes(network, source)),
        sums=sums,
    )


def choose_sums(net: LinkArrays, noise: float) -> tuple[AllReduceSizes, ...]:
    """The algorithms of all-reduces by size, for hosts in the order of their ranks; empty for gloo's ring."""
    ranges = sums_by_size(net, noise=noise)
    algorithms: dict[str, Algorithm] = {"tree": "tree", "halving_doubling": "halving_doubling"}
    return tuple(
        AllReduceSizes(min_bytes=sizes.min_bytes, algorithm=algorithms.get(sizes.collective, "ring"), order=sizes.order)
        for sizes in ranges
    )


def links_of_job(network: Network, meeting: Meeting, source: str) -> LinkArrays:
    """The links between the hosts of a job, in the launcher's order; the network may have more hosts."""
    index_of = {host.name: index for index, host in enumerate(network.hosts)}
    devices = meeting.topology.devices
    for name in meeting.hosts:
        if name not in index_of:
            raise SpecError(f"{source}: host {name!r} was not probed", hint="probe again, or leave --network out")
        probed = network.hosts[index_of[name]].devices
        if probed != devices:
            problem = f"host {name!r} has {devices} devices, but had {probed} when it was probed"
            raise SpecError(f"{source}: {problem}", hint="probe again, or leave --network out")
    return network.arrays().among([index_of[name] for name in meeting.hosts])


def ordered_links(network: NetworkOfRun, hosts: int) -> LinkArrays | None:
    """The links between the hosts of a run, in the order of its ranks.

    None if unknown: the launcher's order was kept, and the network has more hosts than the run.
    """
    ordered = network.ordered
    probed = network.probed or read_network(ordered.source)
    index_of = {host.name: index for index, host in enumerate(probed.hosts)}
    if ordered.order is None:
        return probed.arrays() if len(probed.hosts) == hosts else None
    return probed.arrays().among([index_of[name] for name in ordered.order.hosts])


def _encode(value: NetworkOfRun) -> str:
    return msgspec.json.encode(value).decode()
