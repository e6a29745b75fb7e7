"""A transport that lists the collectives of a rank, in the order of their calls."""


class Counting:
    """A transport that writes down what is called."""

    def __init__(self, transport, calls):
        self._transport, self._calls = transport, calls
        self.waited = transport.waited

    def start(self, call, send_N):
        self._calls.append(f"{call.collective} of {call.purpose}")
        return self._transport.start(call, send_N)

    def split(self, groups, group):
        return Counting(self._transport.split(groups, group), self._calls)

    def close(self):
        self._transport.close()
