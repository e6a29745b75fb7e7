"""A network survives its file, and a file that is no network is refused with the place."""

import json
import re
from datetime import datetime, timedelta

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_networks import networks
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.planning.perf.hardware import hardware_named
from rowwise.planning.perf.links import (
    Network,
    NetworkHost,
    NetworkProbe,
    PairLink,
    age_notes,
    read_network,
    uniform_network,
)
from rowwise.tables.spec import Topology

TWO = (NetworkHost(name="a"), NetworkHost(name="b"))


@given(networks())
def test_file(network):
    assert msgspec.json.decode(network.to_json(), type=Network) == network


def test_read(tmp_path):
    path = tmp_path / "net.json"
    path.write_text(uniform_network(Topology(hosts=4, devices=8, groups=(1, 3)), hardware_named("zionex")).to_json())
    read = read_network(path)
    assert read.topology() == Topology(hosts=4, devices=8, groups=(1, 3))
    assert read.arrays().rate_HH[0, 3] == 56e9
    assert np.isinf(read.arrays().rate_HH[2, 2])


def probed(when):
    link = PairLink(latency_s=1e-5, rate_Bps=1e9)
    return Network(hosts=TWO, link=link, probed=NetworkProbe(when=when, seconds=5.0, sizes=(1,), rounds=1))


def test_what_to_know_of_a_network_before_relying_on_it():
    now = datetime.now().astimezone()
    old, young = (probed((now - timedelta(days=days)).isoformat()) for days in (9, 6))
    assert age_notes(young, "net.json") == []
    assert "net.json: the network was probed 9 days ago; probe again" in age_notes(old, "net.json")[0]
    assert age_notes(structs.replace(old, probed=None), "net.json") == ["net.json: this network was not measured"]
    for when in ("yesterday", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00"):
        with pytest.raises(
            SpecError, match=f"probed\\.when is '{re.escape(when)}': expected a date and time, such as 2026-"
        ):
            probed(when)


@given(networks(), st.data())
def test_some_hosts_of_a_network_have_the_links_that_they_had(network, data):
    places = data.draw(st.permutations(range(len(network.hosts))))[: data.draw(st.integers(1, len(network.hosts)))]
    found = network.among([network.hosts[place].name for place in places])
    net, whole = found.arrays(), network.arrays()
    assert [host.name for host in found.hosts] == [network.hosts[place].name for place in places]
    for matrix_HH, whole_HH in ((net.latency_HH, whole.latency_HH), (net.rate_HH, whole.rate_HH)):
        assert (matrix_HH == whole_HH[np.ix_(places, places)]).all()
    assert (net.uplink_G[net.group_H] == whole.uplink_G[whole.group_H[places]]).all()
    near_HH = whole.group_H[places][:, None] == whole.group_H[places]
    assert ((net.group_H[:, None] == net.group_H) == near_HH).all()


def test_order_gives_groups():
    network = Network(hosts=tuple(NetworkHost(name=x) for x in "abcd"), link=PairLink(0.0, 1.0), groups=(0, 1, 0, 1))
    assert network.topology([0, 2, 1, 3]).groups == (2, 2)
    assert network.topology().groups == (1, 1, 1, 1)


FAULTS = {
    "no hosts": {"hosts": []},
    "'a' is listed twice": {"hosts": [{"name": "a"}, {"name": "a"}]},
    "latency_s has 1 rows": {"link": None, "latency_s": [[None]], "rate_Bps": [[None, 1.0], [1.0, None]]},
    "rate_Bps from 'a' to 'b' is 0": {
        "link": None,
        "latency_s": [[None, 0.1], [0.1, None]],
        "rate_Bps": [[None, 0], [1, None]],
    },
    "latency_s from 'b' to 'a' is -1": {
        "link": None,
        "latency_s": [[None, 0.1], [-1, None]],
        "rate_Bps": [[None, 1], [1, None]],
    },
    "is 3.0: expected null": {"link": None, "latency_s": [[3.0, 0.1], [1, None]], "rate_Bps": [[None, 1], [1, None]]},
    "'b' is null: expected a number": {
        "link": None,
        "latency_s": [[None, None], [1, None]],
        "rate_Bps": [[None, 1], [1, None]],
    },
    "expected either `link`": {"link": None},
    "one of them": {"latency_s": [[None, 1], [1, None]]},
    "1 groups for 2 hosts": {"groups": [0]},
    "without a gap": {"groups": [0, 2]},
    "2 groups and 1 uplinks": {"groups": [0, 1], "uplink_Bps": [1e9]},
    "uplink_Bps of group 1 is -1": {"groups": [0, 1], "uplink_Bps": [1e9, -1]},
    "unknown field `hostz`": {"hostz": 1},
    "has 0 devices": {"hosts": [{"name": "a", "devices": 0}]},
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults(message, tmp_path):
    good = {"hosts": [{"name": "a"}, {"name": "b"}], "link": {"latency_s": 1e-5, "rate_Bps": 1e9}}
    path = tmp_path / "net.json"
    path.write_text(json.dumps(good | FAULTS[message]))
    with pytest.raises(SpecError, match=r"net\.json") as caught:
        read_network(path)
    assert message in str(caught.value)
