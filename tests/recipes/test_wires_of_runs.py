"""`wire: auto` becomes types when a run starts, by the rates of its links; resumed runs keep them."""

import json

import pytest
from small import recipe, sections

from rowwise import SpecError, Topology, Wire
from rowwise.parallel.comm.launch import HostOrder
from rowwise.parallel.comm.thread import run_threads
from rowwise.planning.perf.links import Network, NetworkHost, PairLink
from rowwise.recipes.compose import resolve
from rowwise.recipes.hosts import NetworkOfRun, OrderedHosts, ordered_links
from rowwise.recipes.outlook import dry_run
from rowwise.recipes.recipe import check_ranks
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode
from rowwise.recipes.unused_keys import find_notes
from rowwise.recipes.wires import decide_wire
from rowwise.tables.spec import Codecs

RACKS = Topology(hosts=4, groups=(2, 2))


def network(rate_Bps, uplink_Bps, latency_s=1e-6):
    hosts = tuple(NetworkHost(name=f"h{k}") for k in range(4))
    link = PairLink(latency_s=latency_s, rate_Bps=rate_Bps)
    return Network(hosts=hosts, link=link, groups=(0, 0, 1, 1), uplink_Bps=(uplink_Bps,) * 2).arrays()


def test_slow_links_get_narrow_types_and_fast_ones_keep_floats(tmp_path):
    resolved = resolve(recipe(tmp_path, wire="auto", tables={"all": {"rows": 10**8}}))
    fast = decide_wire(resolved, RACKS, network(1e13, 1e13, 0.0))
    assert fast.recipe.wire.exact
    slow = decide_wire(resolved, RACKS, network(1e13, 1e5, 0.0))
    assert slow.recipe.wire.network == Codecs()
    # A vector of 8 numbers has 16 bytes in both narrow types.
    assert slow.recipe.wire.codecs("uplink") == Codecs("fp16", "fp16")
    assert slow.recipe.wire.far is not None
    assert not slow.recipe.wire.has_exact_sums
    assert slow.wire_choice.floats_s > 1.5 * slow.wire_choice.step_s
    assert "fp16 forward and fp16 back between groups" in slow.wire_choice.text()


def test_a_network_changes_how_sums_travel_and_rounds_nothing(tmp_path):
    given = resolve(recipe(tmp_path))
    assert decide_wire(given, RACKS) is given
    slow = decide_wire(given, RACKS, network(1e9, 1e5))
    assert slow.recipe.wire == Wire(far="fp32")
    far = resolve(recipe(tmp_path, wire={"far": "bf16"}))
    assert decide_wire(far, RACKS, network(1e9, 1e5)) is far
    sharded = resolve(recipe(tmp_path, train={"dense_parallel": {"kind": "full"}}))
    assert decide_wire(sharded, RACKS, network(1e9, 1e5)) is sharded


def test_one_rank_has_no_links(tmp_path):
    decided = decide_wire(resolve(recipe(tmp_path, wire="auto")), Topology())
    assert decided.recipe.wire == Wire()
    assert decided.wire_choice is None


@pytest.mark.slow
def test_a_run_records_what_it_has_chosen(tmp_path):
    made = recipe(tmp_path, wire="auto")
    assert "dense sums" in dry_run(made, 2).wire

    def rank(comm):
        run = TrainingRun.start(made, tmp_path / "runs", comm=comm)
        run.go()
        return run.folder.path, run.resolved.recipe.wire

    (path, wire), (_, same) = run_threads(2, rank, timeout_s=60)
    assert isinstance(wire, Wire)
    assert wire == same
    assert json.loads((path / "env.json").read_text())["wire"]["dense"] == wire.dense
    assert "wire vectors" in (path / "log.txt").read_text()
    assert "wire: auto" not in (path / "recipe.yaml").read_text()


def test_wires_that_a_recipe_may_not_ask_for(tmp_path):
    elastic = recipe(tmp_path, wire="auto", train={"determinism": "elastic"})
    with pytest.raises(SpecError, match="fp32 for all"):
        check_ranks(elastic, 2)
    with pytest.raises(SpecError, match="elastic with a wire"):
        check_ranks(recipe(tmp_path, wire={"far": "int4"}, train={"determinism": "elastic"}), 2)
    with pytest.raises(SpecError, match="far='int3'"):
        decode(sections(tmp_path, wire={"far": "int3"}), "")
    with pytest.raises(SpecError, match="wire"):
        decode(sections(tmp_path, wire="automatic"), "")


def test_settings_of_links_that_are_not_there_are_said_to_be_unused(tmp_path):
    wire = {"far": "int8", "uplink": {"forward": "fp16"}, "network": {"backward": "fp16"}}
    resolved = resolve(recipe(tmp_path, wire=wire))
    lines = "; ".join(find_notes(resolved, Topology(devices=2)))
    assert "wire.far='int8' is not used, because all ranks are near each other: on one host" in lines
    assert "wire.uplink.forward='fp16' is not used, because all hosts are one group" in lines
    assert "wire.network.backward='fp16' is not used, because all ranks are on one host" in lines
    assert not [line for line in find_notes(resolved, Topology(hosts=3, groups=(1, 2))) if "wire" in line]
    apart = find_notes(resolved, Topology(hosts=2, groups=(1, 1)))
    assert "wire.network.backward='fp16' is not used, because no two hosts share a group" in apart


def test_the_links_of_a_run_are_in_the_order_of_its_ranks(tmp_path):
    hosts = tuple(NetworkHost(name=name) for name in "abcd")
    rates = tuple(tuple(None if a == b else 1e6 * (10 * a + b + 1) for b in range(4)) for a in range(4))
    latencies = tuple(tuple(None if a == b else 1e-5 for b in range(4)) for a in range(4))
    given = Network(hosts=hosts, latency_s=latencies, rate_Bps=rates, groups=(0, 1, 0, 1), uplink_Bps=(1e5, 2e5))
    path = tmp_path / "net.json"
    path.write_text(given.to_json())
    order = HostOrder(hosts=("c", "a", "b"), groups=(2, 1))
    net = ordered_links(NetworkOfRun(ordered=OrderedHosts(source=str(path), order=order, gain=1.5)), 3)
    assert net.rate_HH[0, 1] == given.arrays().rate_HH[2, 0]
    assert net.group_H.tolist() == [0, 0, 1]
    kept = OrderedHosts(source="probe", order=None, gain=1.0)
    assert ordered_links(NetworkOfRun(ordered=kept, probed=given), 4).hosts == 4
    assert ordered_links(NetworkOfRun(ordered=kept, probed=given), 3) is None

    def rank(comm):
        run = TrainingRun.start(recipe(tmp_path), tmp_path / "runs", comm=comm, network=network_of_run)
        return run.resolved.recipe.wire

    slow = Network(hosts=hosts, link=PairLink(latency_s=0.0, rate_Bps=1e9), groups=(0, 1, 0, 1), uplink_Bps=(1e4, 1e4))
    path.write_text(slow.to_json())
    order = HostOrder(hosts=("a", "c", "b", "d"), groups=(2, 2))
    network_of_run = NetworkOfRun(ordered=OrderedHosts(source=str(path), order=order, gain=1.5))
    assert run_threads(RACKS, rank, timeout_s=60) == [Wire(far="fp32")] * 4
