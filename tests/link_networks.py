"""Networks of hosts with links that are all unlike."""

from hypothesis import strategies as st

from rowwise.planning.perf.links import Network, NetworkHost


@st.composite
def networks(draw, least: int = 1, most: int = 7):
    """Networks of hosts in groups, all pairs unlike."""
    size = draw(st.integers(least, most))
    hosts = tuple(NetworkHost(name=f"h{k}", devices=2) for k in range(size))
    groups = tuple(draw(st.permutations([k % draw(st.integers(1, min(3, size))) for k in range(size)])))
    groups = tuple(sorted(set(groups)).index(group) for group in groups)

    def matrix(low: float, high: float):
        numbers = st.floats(low, high)
        return tuple(tuple(None if a == b else draw(numbers) for b in range(size)) for a in range(size))

    uplinks = tuple(draw(st.floats(1e5, 1e9)) for _ in range(max(groups) + 1))
    return Network(hosts=hosts, latency_s=matrix(0, 1e-3), rate_Bps=matrix(1e6, 1e9), groups=groups, uplink_Bps=uplinks)
