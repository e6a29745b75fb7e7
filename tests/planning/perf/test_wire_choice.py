"""Wires that are chosen: the least lossy types within 2 % of the fastest step, so never narrow ones for a fast link."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rowwise import Topology, Wire
from rowwise.base.quantity import SPACE
from rowwise.planning.perf.collective import all_to_all_s, ring_s, two_level_s
from rowwise.planning.perf.hardware import hardware_named
from rowwise.planning.perf.links import Network, NetworkHost, PairLink, uniform_network
from rowwise.planning.perf.sums import SumCosts
from rowwise.planning.perf.wire_choice import SLACK, SUMS, VECTORS, WireChoice, choose_wire, fastest_sums
from rowwise.tables.spec import LINKS, Codecs, FarType, WireType

RACKS = Topology(hosts=4, devices=2, groups=(2, 2))
BYTES = {WireType.FP32: 4.0, WireType.FP16: 2.0, WireType.BF16: 2.0, WireType.INT8: 1.1}


def predicted(seconds_of, sum_s=0.0, rest_s=0.0):
    """A step whose links take so many seconds in floats, and as many less as their types have fewer bytes."""

    def predict(wire):
        vectors = sum(seconds_of.get(link, 0.0) * BYTES[wire.codecs(link).forward] / 4 for link in LINKS)
        kind = FarType.parse(wire.far or wire.dense)
        return rest_s + vectors + sum_s * kind.run_bytes / 1024 * (0.5 if wire.far else 1.0)

    return predict


@given(
    st.fixed_dictionaries({link: st.floats(0, 10) for link in LINKS}), st.floats(0, 10), st.floats(0.01, 100),
    st.sampled_from((RACKS, Topology(hosts=2), Topology(devices=3))),
)  # fmt: skip
def test_a_choice_is_nearly_the_fastest_and_no_link_could_be_less_lossy(seconds_of, sum_s, rest_s, topology):
    predict = predicted({link: seconds_of[link] for link in topology.links}, sum_s, rest_s)
    chosen = choose_wire(topology, predict)
    wire = chosen.wire
    narrowest = {link: Codecs("int8", "int8") for link in topology.links}
    fastest_s = predict(Wire(**narrowest, far="topk:1%", error_feedback=True))
    limit_s = SLACK * min(fastest_s, chosen.floats_s)
    assert predict(wire) == chosen.step_s <= limit_s
    assert chosen.floats_s == predict(Wire())
    for link in topology.links:
        at = VECTORS.index(wire.codecs(link).forward)
        for kind in VECTORS[:at]:  # the types of later links were the narrowest when this one was chosen
            later = {name: narrowest[name] for name in topology.links[topology.links.index(link) + 1 :]}
            sums = {"far": "topk:1%", "dense": WireType.FP32, "error_feedback": True}
            assert predict(structs.replace(wire, **later, **sums, **{link: Codecs(kind, kind)})) > limit_s
    assert wire.has_exact_sums == (not wire.error_feedback)


def test_fast_links_keep_floats_and_slow_ones_do_not():
    slow_uplink = choose_wire(RACKS, predicted({"uplink": 1.0, "network": 1e-3, "host": 1e-3}, rest_s=0.5))
    assert slow_uplink.wire.host == slow_uplink.wire.network == Codecs()
    assert slow_uplink.wire.uplink == Codecs("int8", "int8")
    assert slow_uplink.text() == (
        "vectors fp32 forward and fp32 back inside hosts, fp32 forward and fp32 back between them,"
        " int8 forward and int8 back between groups; dense sums fp32;"
        f" predicted 777{SPACE}ms a step; 1.93x as fast as floats"
    )
    computing = choose_wire(RACKS, predicted(dict.fromkeys(LINKS, 1e-3), sum_s=1e-3, rest_s=1.0))
    assert computing.wire.exact
    assert computing.text().endswith("narrower types gain nothing")
    half = choose_wire(Topology(hosts=2), predicted({"network": 1.0}, rest_s=24.0))
    assert half.wire.network == Codecs("fp16", "fp16")
    sums = choose_wire(RACKS, predicted({}, sum_s=1.0), sums=True).wire
    assert (sums.far, sums.dense, sums.error_feedback) == ("topk:1%", "fp32", True)
    coding = choose_wire(RACKS, lambda wire: predicted({}, sum_s=1.0)(wire) + ("topk" in (wire.far or "")))
    assert coding.wire.far == "int4"
    assert choose_wire(RACKS, predicted({}, sum_s=1.0), sums=False).wire == Wire(uplink=Codecs())


def test_sums_in_two_levels_round_only_what_was_to_be_rounded():
    predict = predicted({}, sum_s=1.0)
    assert fastest_sums(Wire(), predict) == Wire(far="fp32")
    assert fastest_sums(Wire(dense="int8", error_feedback=True), predict) == Wire(far="int8", error_feedback=True)
    assert fastest_sums(Wire(), lambda wire: 1.0 + (wire.far is not None)) == Wire()


def network_of(groups, rate_Bps=25e6, uplink_Bps=25e6 / 4):
    hosts = tuple(NetworkHost(name=f"h{k}") for k in range(sum(groups)))
    numbers = tuple(g for g, size in enumerate(groups) for _ in range(size))
    link = PairLink(latency_s=1e-4, rate_Bps=rate_Bps)
    return Network(hosts=hosts, link=link, groups=numbers, uplink_Bps=(uplink_Bps,) * len(groups))


def test_sums_take_what_the_formulas_say():
    hardware, topology, n = hardware_named("cpu"), Topology(hosts=8, groups=(4, 4)), 256 * 1024
    net = network_of((4, 4)).arrays()
    costs = SumCosts(topology, net, hardware, (n,))
    assert costs.seconds(Wire()) == ring_s(net, range(8), 4 * n)
    coding_s = hardware.coding_s(WireType.INT8)
    flat = all_to_all_s(net, np.full((8, 8), n / 256 * 264 / 8))
    assert costs.seconds(Wire(dense="int8")) == pytest.approx(2 * n * coding_s + 2 * flat)
    assert costs.seconds(Wire(far="fp32")) == pytest.approx(two_level_s(net, 4 * n, 4 * n))
    assert costs.seconds(Wire(far="int8")) == pytest.approx(n / 2 * coding_s + two_level_s(net, 4 * n, n / 256 * 264))
    twice = SumCosts(topology, net, hardware, (n, n))
    assert twice.seconds(Wire(far="int4")) == pytest.approx(2 * costs.seconds(Wire(far="int4")))
    # Where links within a rack dominate, top-k takes longer to encode than its bytes save.
    slowest_first = sorted(SUMS, key=lambda far: -costs.seconds(wire_far(far)))
    assert [far for far in slowest_first if far != "topk:1%"] == ["fp32", "bf16", "int8", "int4"]
    behind = SumCosts(topology, network_of((4, 4), uplink_Bps=1e5).arrays(), hardware, (n,))
    assert sorted(SUMS, key=lambda far: -behind.seconds(wire_far(far))) == list(SUMS)


def wire_far(far):
    return Wire(far=far, error_feedback=far != "fp32")


@pytest.mark.parametrize(("uplink_Bps", "far"), [(1e9, "fp32"), (125e6, "int8"), (12.5e6, "topk:1%")])
def test_the_slower_the_uplink_the_fewer_bytes_cross_it_and_fast_links_stay_exact(uplink_Bps, far):
    topology = Topology(hosts=8, groups=(4, 4))
    net = network_of((4, 4), 1e12, uplink_Bps).arrays()
    costs = SumCosts(topology, net, hardware_named("cpu"), (1 << 18,))
    wire = choose_wire(topology, lambda wire: 0.1 + costs.seconds(wire)).wire
    assert (wire.far, wire.dense, wire.error_feedback) == (far, "fp32", far != "fp32")


def test_sums_inside_a_host_take_its_rates():
    hardware, n = hardware_named("zionex"), 1 << 20
    for topology in (Topology(devices=4), Topology(hosts=2, devices=4)):
        net = uniform_network(topology, hardware).arrays()
        costs = SumCosts(topology, net, hardware, (n,))
        near_s = hardware.host.latency_s + 4 * n * 3 / 4 / hardware.host.reduce_scatter_Bps
        if topology.hosts == 1:
            assert costs.seconds(Wire()) == pytest.approx(10e-6 + 2 * 3 / 4 * 4 * n / 200e9)
            assert costs.seconds(Wire(far="int8")) == costs.seconds(Wire())
        else:
            assert costs.seconds(Wire(far="fp32")) == pytest.approx(2 * near_s + ring_s(net, range(2), 4 * n))
    assert SumCosts(Topology(), net, hardware, (n,)).seconds(Wire()) == 0


def test_a_machine_with_slow_uplinks_is_a_network_with_them():
    hardware, topology = hardware_named("zionex"), Topology(hosts=3, devices=2, groups=(2, 1))
    slow = structs.replace(hardware, uplink=structs.replace(hardware.network, all_to_all_Bps=1e9))
    assert uniform_network(topology, slow).uplink_Bps == (4e9, 2e9)
    assert uniform_network(topology, hardware).uplink_Bps == ()


def test_a_choice_names_its_sums():
    wire = Wire(far="int8", error_feedback=True)
    text = WireChoice(wire, 0.001, 0.002, Topology(hosts=2)).text()
    want = "vectors fp32 forward and fp32 back; dense sums in two levels, int8 between them; "
    assert text == want + f"predicted 1{SPACE}ms a step; 2.00x as fast as floats"
