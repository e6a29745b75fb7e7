"""Names hosts that compute slowly, by the forward and backward of their ranks: work that is alike on all of them."""

from collections.abc import Sequence
from statistics import median_low
from typing import final

from rowwise.tables.spec import Topology
from rowwise.train.breakdown import PhaseSeconds

SLOW = 1.5  # times the median of all hosts
LINES = 3  # of stages.csv, one after the other
ALIKE = ("forward", "backward")


@final
class SlowHosts:
    """Which hosts were slow in the newest lines."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._slow_H = [0] * topology.hosts  # lines in a row; a host that was named keeps counting

    def add(self, spent_W: Sequence[PhaseSeconds]) -> list[str]:
        """A line on each host that has been slow for long enough, once for each time that it becomes slow."""
        # The fastest rank of a host: where one of several is slow, it is not the host.
        seconds_H = [
            min(sum(spent_W[rank].exposed[phase] for phase in ALIKE) for rank in self._topology.ranks_of(host))
            for host in range(self._topology.hosts)
        ]
        usual_s, named = median_low(seconds_H), list[str]()
        for host, seconds in enumerate(seconds_H):
            self._slow_H[host] = self._slow_H[host] + 1 if seconds > SLOW * usual_s > 0 else 0
            if self._slow_H[host] == LINES:
                ranks, times = self._topology.ranks_of(host), seconds / usual_s
                who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
                named.append(
                    f"host {host} ({who}) takes {times:.1f} times as long as the median host for forward and backward, "
                    "and the others wait for it: look for other processes, a lower clock, or fewer cores there"
                )
        return named
