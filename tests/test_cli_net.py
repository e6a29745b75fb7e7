"""The `net` commands: what they print and write, and what they refuse."""

import json

import pytest
from msgspec import structs
from recipes.test_hosts import make_network
from report.markup_check import check

from rowwise.base.errors import PeerError
from rowwise.cli.net import write_network
from rowwise.parallel.comm.probe import ProbeSample, ProbeSamples
from rowwise.planning.perf.links import NetworkHost, read_network


def test_the_algorithm_by_size_is_shown_where_latencies_are_long(command, tmp_path):
    (tmp_path / "far.json").write_text(make_network(latency_s=1e-3).to_json())
    assert "by size    halving_doubling from 0 bytes, all_reduce from " in command("net", "order", "far.json")[1]
    small, _ = json.loads(command("net", "order", "far.json", "--json")[1])["by_size"]
    assert (small["min_bytes"], small["collective"], sorted(small["order"])) == (0, "halving_doubling", [0, 1, 2, 3])


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.json"
    path.write_text(make_network().to_json())
    return path


def test_show_names_groups_uplinks_and_the_age(command, net):
    code, out, _ = command("net", "show", str(net))
    assert code == 0
    assert "4 hosts in 2 groups" in out
    assert "==[ uplink 500.0 MB/s ]==[ group 1 ]-- b0 b1" in out
    assert "probed 2020-01-01T00:00:00+00:00" in out


def test_slow_hosts_come_first(command, tmp_path):
    names = [f"h{k}" for k in range(4)]
    rate = tuple(tuple(None if a == b else 3e8 if 2 in (a, b) else 1e9 for b in range(4)) for a in range(4))
    slow = structs.replace(make_network(names), rate_Bps=rate)
    (tmp_path / "net.json").write_text(slow.to_json())
    code, out, _ = command("net", "show", "net.json")
    assert (code, out.splitlines()[0]) == (0, "slow host: h2 has 30% of the median host's rate")


def test_a_network_that_nobody_measured_says_so(command, tmp_path):
    (tmp_path / "net.json").write_text(structs.replace(make_network(), probed=None).to_json())
    for what in ("show", "order"):
        assert "net.json: this network was not measured" in command("net", what, "net.json")[1]


def test_the_page_is_valid_and_has_all_rates(command, net, tmp_path):
    assert command("net", "show", str(net), "--html", "net.html")[0] == 0
    page = (tmp_path / "net.html").read_text()
    check(page)
    assert page.count("1.0 GB/s") >= 12
    assert command("net", "show", str(net), "--json")[1].startswith("{")


def test_the_order_and_what_it_gains(command, net, tmp_path):
    code, out, _ = command("net", "order", str(net), "--hosts", "hosts.txt")
    assert code == 0
    assert "2.0x as fast as in the given order" in out
    assert "by size" not in out
    hosts = (tmp_path / "hosts.txt").read_text().split()
    assert hosts[0] == "a0"
    assert [name[0] for name in hosts] == ["a", "a", "b", "b"]
    found = json.loads(command("net", "order", str(net), "--for", "tree=1MB", "--json")[1])
    assert found["bound_s"] <= found["seconds"] <= found["given_s"]
    assert sorted(found["order"]) == [0, 1, 2, 3]


def test_equal_links_have_nothing_to_gain(command, tmp_path):
    (tmp_path / "net.json").write_text(make_network(["h0", "h1", "h2"]).to_json())
    out = command("net", "order", "net.json")[1]
    assert "nothing to gain: 1.0x" in out
    assert "order " not in out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("order", "net.json", "--for", "ring=1MB"), "--for ring=1MB: expected all_reduce or halving_doubling or tree"),
        (("order", "net.json", "--for", "tree=0"), "--for tree=0: expected a size of at least 1 byte"),
        (("order", "net.json", "--seconds", "nan"), "--seconds nan: expected a number of seconds"),
        (("order", "one.json"), "one.json: one host: nothing to order"),
        (("show", "gone.json"), "gone.json: No such file or directory"),
        (("probe", "net.json"), "expected torchrun with a process on each host, or --nproc N for a trial"),
        (("probe", "net.json", "--nproc", "1"), "--nproc 1: nothing to order: expected 2 to 64 processes"),
        (("probe", "net.json", "--nproc", "2", "--seconds", "0"), "--seconds 0: expected 1 to 86,400"),
    ],
)
def test_a_mistake_is_one_line(command, net, tmp_path, words, says):
    one = structs.replace(make_network(["h0"]), latency_s=((None,),), rate_Bps=((None,),))
    (tmp_path / "one.json").write_text(one.to_json())
    code, _, err = command("net", *words)
    assert code == 2
    (line,) = err.strip().splitlines()
    assert says in line


def test_a_host_that_died_is_named_and_the_rest_is_kept(tmp_path):
    hosts = tuple(NetworkHost(name=f"h{k}") for k in range(3))
    alone = [
        ProbeSample("alone", size, 1, a, b, size / 1e9) for size in (1000, 4000) for a, b in ((0, 1), (1, 0), (0, 2))
    ]
    samples = ProbeSamples((*alone, ProbeSample("ping", 4, 1, 0, 1, 1e-5)), ("a", "b", "c"), 1.0, dead=(2,))
    with pytest.raises(PeerError, match="host 'h2' has ended"):
        write_network(tmp_path / "net.json", samples, hosts, None)
    assert read_network(tmp_path / "net.json").arrays().rate_HH[2, 1] == pytest.approx(1e9)


@pytest.mark.dist
def test_a_trial_probe_writes_a_network(command, tmp_path):
    code, _, err = command("net", "probe", "net.json", "--nproc", "3", "--seconds", "20")
    assert code == 0, err
    network = read_network(tmp_path / "net.json")
    assert [host.name for host in network.hosts] == ["process-0", "process-1", "process-2"]
    assert network.probed is not None
    assert "3 hosts in" in err
