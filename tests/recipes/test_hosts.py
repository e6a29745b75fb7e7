"""The hosts of a run are ordered by a network; a resume takes the order again."""

import json
from datetime import datetime, timedelta

import msgspec
import pytest
import torch.distributed as dist

from rowwise.base.errors import AgreedError, SpecError
from rowwise.parallel.comm.launch import HostOrder, Meeting
from rowwise.parallel.comm.torch import Rendezvous
from rowwise.planning.perf.links import Network, NetworkHost, NetworkProbe
from rowwise.recipes.hosts import OrderedHosts, list_hosts, order_hosts
from rowwise.tables.spec import Topology

NAMES = ("a0", "b0", "a1", "b1")


def make_network(names=NAMES, devices=1, when="2020-01-01T00:00:00+00:00", latency_s=1e-5):
    groups = tuple(int(name.startswith("b")) for name in names)
    rates = tuple(tuple(None if a == b else 1e9 for b in names) for a in names)
    return Network(
        hosts=tuple(NetworkHost(name=name, devices=devices) for name in names),
        latency_s=tuple(tuple(None if a == b else latency_s for b in names) for a in names),
        rate_Bps=rates,
        groups=groups if any(groups) else (),
        uplink_Bps=(5e8, 5e8) if any(groups) else (),
        probed=NetworkProbe(when=when, seconds=1.0, sizes=(1, 2), rounds=3),
    )


def now():
    return datetime.now().astimezone().isoformat()


def meet(names=NAMES, devices=1, rank=0, store=None):
    store = store or dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    topology = Topology(hosts=len(names), devices=devices)
    return Meeting(Rendezvous(store, "job", tuple(range(topology.world)), rank, {}, 1.0), topology, tuple(names))


def write(path, network):
    path.write_text(network.to_json())
    return str(path)


def test_hosts_of_a_group_follow_each_other_and_the_first_stays(tmp_path):
    found = order_hosts(meet(), write(tmp_path / "net.json", make_network()))
    assert found is not None
    order = found.ordered.order
    assert order is not None
    assert order.hosts[0] == "a0"
    assert order.groups == (2, 2)
    assert order.hosts[:2] == ("a0", "a1")
    assert found.ordered.gain == pytest.approx(2.0, abs=0.01)
    (note,) = found.ordered.notes
    assert "days ago; probe again" in note


def test_all_ranks_take_what_the_first_has_decided(tmp_path):
    store = dist.HashStore()
    first = order_hosts(meet(store=store), write(tmp_path / "net.json", make_network()))
    assert order_hosts(meet(rank=3, store=store), "no such file") == first


def test_ranks_move_with_their_hosts():
    order = HostOrder(hosts=("a0", "a1", "b0", "b1"), groups=(2, 2))
    for given, wanted in ((0, 0), (1, 1), (2, 4), (3, 5), (4, 2), (7, 7)):
        comm = meet(devices=2, rank=given).join(order, shared_memory=False)
        assert (comm.rank, comm.topology.groups) == (wanted, (2, 2))


def test_equal_links_leave_the_order(tmp_path):
    names = ("a0", "a1", "a2")
    found = order_hosts(meet(names), write(tmp_path / "net.json", make_network(names)))
    assert found is not None
    assert found.ordered.order is None
    assert "no better order of hosts: 1.0x" in found.ordered.in_words


def test_sums_of_a_run_have_an_algorithm_by_size(tmp_path):
    found = order_hosts(meet(), write(tmp_path / "net.json", make_network(latency_s=1e-3)))
    assert found is not None
    small, large = found.ordered.sums
    assert (small.min_bytes, small.algorithm, sorted(small.order)) == (0, "halving_doubling", [0, 1, 2, 3])
    assert (large.algorithm, large.order) == ("ring", ())
    assert (
        f"all-reduces by halving_doubling from 0 bytes, ring from {large.min_bytes:,} bytes" in found.ordered.in_words
    )
    devices = order_hosts(meet(devices=2), write(tmp_path / "two.json", make_network(devices=2, latency_s=1e-3)))
    assert devices is not None
    assert devices.ordered.sums == ()
    saved = found.ordered
    assert saved.fits(("b1", "b0", "a1", "a0"))
    assert not saved.fits(("a0", "b0"))
    assert not OrderedHosts(source="", order=None, gain=1.0, sums=saved.sums).fits(("a0", "b0"))


def test_more_hosts_than_the_job_has_are_fine(tmp_path):
    found = order_hosts(meet(("b1", "a1", "b0")), write(tmp_path / "net.json", make_network()))
    assert found is not None
    assert found.ordered.order is None or found.ordered.order.hosts[0] == "b1"


def test_one_host_and_no_network_have_nothing_to_order(tmp_path):
    assert order_hosts(meet(("a0",)), "no such file") is None
    assert order_hosts(meet(), None) is None


def test_a_resume_takes_the_order_again(tmp_path):
    found = order_hosts(meet(), write(tmp_path / "net.json", make_network()))
    assert found is not None
    run = tmp_path / "run"
    run.mkdir()
    (run / "env.json").write_text(json.dumps({"cores": 2, "network": msgspec.to_builtins(found.ordered)}))
    (run / "recipe.yaml").write_text("network: gone.json\n")
    assert order_hosts(meet(), None, run) == found
    names = ("a0", "a1", "b0", "b1")
    changed = order_hosts(meet(), write(tmp_path / "other.json", make_network(names, when=now())), run)
    assert changed is not None
    assert (changed.ordered.source, changed.ordered.notes) == (str(tmp_path / "other.json"), ())
    assert order_hosts(meet(), "", run) is None
    with pytest.raises(OSError, match=r"gone\.json"):  # other hosts: the recipe's network
        order_hosts(meet(("a0", "b0", "c0")), None, run)


@pytest.mark.parametrize(
    ("names", "devices", "says"),
    [
        (("a0", "gpu-17"), 1, "host 'gpu-17' was not probed; probe again"),
        (("a0", "b0"), 2, "host 'a0' has 2 devices, but had 1 when it was probed; probe again"),
        (("a0", "a0"), 1, "2 hosts are named 'a0': expected names that differ"),
    ],
)
def test_another_job_than_was_probed_is_refused_by_all_ranks(tmp_path, names, devices, says):
    store, path = dist.HashStore(), write(tmp_path / "net.json", make_network())
    with pytest.raises(SpecError, match=says):
        order_hosts(meet(names, devices, store=store), path)
    with pytest.raises(AgreedError, match=says):
        order_hosts(meet(names, devices, rank=1, store=store), path)


def test_hosts_have_the_devices_of_the_job():
    assert [host.devices for host in list_hosts(meet(devices=3))] == [3] * 4
