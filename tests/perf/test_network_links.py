"""A network survives its file, and a file that is no network is refused with the place."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from link_networks import networks

from rowwise.errors import SpecError
from rowwise.perf.hardware import hardware_named
from rowwise.perf.links import Network, NetworkHost, PairLink, read_network, uniform_network
from rowwise.spec import Topology

TWO = (NetworkHost(name="a"), NetworkHost(name="b"))


@given(networks())
def test_file(network):
    assert msgspec.json.decode(network.to_json(), type=Network) == network


def test_read(tmp_path):
    path = tmp_path / "net.json"
    path.write_text(uniform_network(Topology(hosts=4, devices=8, groups=(1, 3)), hardware_named("zionex")).to_json())
    read = read_network(path)
    assert read.topology() == Topology(hosts=4, devices=8, groups=(1, 3))
    assert read.arrays().rate_HH[0, 3] == 7e9
    assert np.isinf(read.arrays().rate_HH[2, 2])


def test_order_gives_groups():
    network = Network(hosts=tuple(NetworkHost(name=x) for x in "abcd"), link=PairLink(0.0, 1.0), groups=(0, 1, 0, 1))
    assert network.topology([0, 2, 1, 3]).groups == (2, 2)
    assert network.topology().groups == (1, 1, 1, 1)


FAULTS = {
    "no hosts": {"hosts": []},
    "'a' is there twice": {"hosts": [{"name": "a"}, {"name": "a"}]},
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
    "is 3.0: want null": {"link": None, "latency_s": [[3.0, 0.1], [1, None]], "rate_Bps": [[None, 1], [1, None]]},
    "'b' is null: want a number": {
        "link": None,
        "latency_s": [[None, None], [1, None]],
        "rate_Bps": [[None, 1], [1, None]],
    },
    "want either `link`": {"link": None},
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
    with pytest.raises(SpecError, match=r"net\.json: not a network") as caught:
        read_network(path)
    assert message in str(caught.value)
