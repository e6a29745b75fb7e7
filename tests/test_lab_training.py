"""Training on hosts of the lab: in elastic mode the order of a network changes no bit, and a resume takes it again."""

import json

import lab
import pytest
from lab import Lab, run_command
from launching import write_recipe
from recipes.test_hosts import make_network
from test_launch import RUN, same, tensors

from rowwise.planning.perf.links import read_network

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(lab.missing()), reason=f"no lab: {lab.missing()}"),
]
ELASTIC = {"batch": 1024, "determinism": "elastic", "virtual_shards": 4, "epochs": 100, "steps": 6}
NAMES, TURNS = ("h0", "h2", "h1", "h3"), (0, 2, 1, 3)  # hosts of two racks in turn
RACKS = (2, 2)


def run(folder, *words, uplink=100):
    """A command on the hosts of a lab of its own, as labs end after two minutes."""
    with Lab(RACKS, uplink=uplink) as racks:
        assert racks.run(run_command, ["rowwise", *words], str(folder), order=TURNS) == [0] * len(TURNS)


def hosts_of(run_folder):
    return json.loads((run_folder / "env.json").read_text())["network"]["order"]


def test_an_order_changes_no_bit_of_elastic_training(tmp_path):
    network = make_network(NAMES)
    for name in ("given", "ordered"):
        write_recipe(tmp_path / name, train=ELASTIC, save={"every": 3})
    groups = json.loads(network.to_json()) | {"groups": [0, 1, 0, 1], "uplink_Bps": [5e8, 5e8]}
    (tmp_path / "ordered/net.json").write_text(json.dumps(groups))
    run(tmp_path / "given", "train", "small.yaml")
    run(tmp_path / "ordered", "train", "small.yaml", "--network", "net.json")
    ordered = hosts_of(tmp_path / "ordered" / RUN)
    assert ordered["groups"] == [2, 2]
    assert [int(name[1]) // 2 for name in ordered["hosts"]] == [0, 0, 1, 1]
    assert same(tensors(tmp_path / "given" / RUN), tensors(tmp_path / "ordered" / RUN))
    (tmp_path / "ordered/net.json").unlink()
    run(tmp_path / "ordered", "resume", RUN, "--set", "train.steps=8")
    assert hosts_of(tmp_path / "ordered" / RUN) == ordered
    run(tmp_path / "ordered", "resume", RUN, "--set", "train.steps=10", "--set", "network=null")
    assert "network" not in json.loads((tmp_path / "ordered" / RUN / "env.json").read_text())


def test_a_run_probes_its_own_hosts(tmp_path):
    write_recipe(tmp_path, train=ELASTIC)
    run(tmp_path, "train", "small.yaml", "--network", "probe", uplink=None)
    network = read_network(tmp_path / RUN / "network.json")
    assert tuple(host.name for host in network.hosts) == NAMES
    assert all(host.address.startswith("10.77.0.") for host in network.hosts)
    assert "network probe: " in (tmp_path / RUN / "log.txt").read_text()


def test_a_resumed_run_sums_by_the_same_algorithm(tmp_path):
    """Outside of elastic mode, where bits depend on it; hosts of one group, as sums in two levels are others."""
    network = make_network(NAMES, latency_s=1e-2).to_json()
    for name, steps in (("whole", 6), ("resumed", 3)):
        write_recipe(tmp_path / name, train={"batch": 1024, "epochs": 100, "steps": steps}, save={"every": 3})
        (tmp_path / name / "net.json").write_text(network)
        run(tmp_path / name, "train", "small.yaml", "--network", "net.json")
        (tmp_path / name / "net.json").unlink()
    run(tmp_path / "resumed", "resume", RUN, "--set", "train.steps=6")
    for name in ("whole", "resumed"):
        smallest, *_ = json.loads((tmp_path / name / RUN / "env.json").read_text())["network"]["sums"]
        assert (smallest["min_bytes"], smallest["algorithm"]) == (0, "halving_doubling")
    assert same(tensors(tmp_path / "whole" / RUN), tensors(tmp_path / "resumed" / RUN))
