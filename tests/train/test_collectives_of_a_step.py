"""The collectives of a step of two ranks: those that docs/ARCHITECTURE.md lists, in its order."""

import re
from pathlib import Path

from ranked import Ranked, train
from trainings import fast

PAGE = Path(__file__).parents[2] / "docs" / "ARCHITECTURE.md"
ROW = re.compile(r"^\| (all-[a-z-]+) \| `([a-z ]+)`", re.MULTILINE)


class NotingTransport:
    """A transport that notes each collective."""

    def __init__(self, inner, started):
        self.inner, self.started, self.waited = inner, started, inner.waited

    def start(self, call, send_N):
        self.started.append((call.collective.replace("_", "-"), call.purpose))
        return self.inner.start(call, send_N)

    def split(self, groups, group):
        return NotingTransport(self.inner.split(groups, group), self.started)

    def close(self):
        self.inner.close()


class NotingRanks(Ranked):
    def on(self, comm, net, **more):
        if comm.rank == 0:
            comm.transport = NotingTransport(comm.transport, self.started)
        return super().on(comm, net, **more)


def test_a_step_has_the_collectives_of_the_page():
    listed = ROW.findall(PAGE.read_text())
    assert len(listed) == 8
    world = NotingRanks(fast(), None, count=80, valid=False)
    world.started = []
    train(world, 2)
    vectors = [k for k, (_, purpose) in enumerate(world.started) if purpose == "pooled"]
    # The header and the counts of the next step precede the vectors.
    step = world.started[vectors[4] - 2 : vectors[5] - 2]
    assert [*step[:4], *sorted(step[4:6], reverse=True), *step[6:]] == listed  # a bucket may be full before
