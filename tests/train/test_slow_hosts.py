"""A host that computes slowly is named after some lines, once; a slow rank of a host, or one slow line, is not."""

from hypothesis import given
from hypothesis import strategies as st

from rowwise.tables.spec import Topology
from rowwise.train.breakdown import PHASES, PhaseSeconds
from rowwise.train.slow_hosts import LINES, SlowHosts


def spent(forward_s):
    seconds = dict.fromkeys(PHASES, 0.0) | {"forward": forward_s, "wait": 9.0}
    return PhaseSeconds(seconds, seconds)


@given(hosts=st.integers(2, 6), devices=st.integers(1, 3), slow=st.integers(0, 5), lines=st.integers(0, 8))
def test_a_slow_host_is_named_once(hosts, devices, slow, lines):
    slow %= hosts
    topology = Topology(hosts=hosts, devices=devices)
    found = SlowHosts(topology)
    usual = [spent(1.0 + rank / 100) for rank in range(topology.world)]
    slower = [spent(2.0) if rank in topology.ranks_of(slow) else one for rank, one in enumerate(usual)]
    named = [line for _ in range(lines) for line in found.add(slower)]
    assert len(named) == (lines >= LINES)
    assert all(line.startswith(f"host {slow} (rank") for line in named)
    assert not found.add(usual)
    again = [line for _ in range(LINES) for line in found.add(slower)]  # it was usual in between
    assert len(again) == 1
    one_rank = [spent(5.0), *usual[1:]] if devices > 1 else usual
    assert not [line for _ in range(2 * LINES) for line in SlowHosts(topology).add(one_rank)]


def test_hosts_without_times_are_not_compared():
    found = SlowHosts(Topology(hosts=2))
    assert not [line for _ in range(9) for line in found.add([spent(0.0), spent(1.0)])]
