"""The policy of managed tables as dictionaries and lists, for one piece of whole buckets."""

from collections import Counter

WORD = (1 << 64) - 1


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & WORD
    return x ^ x >> 31


def hash_of(id_):
    return mix(id_ & WORD)


def bucket_of(id_, buckets):
    return hash_of(id_) * buckets >> 64


class PolicyReference:
    """State by row, as lists; `observe` is one step."""

    def __init__(self, policy, rows, buckets, first_row=0, piece_rows=None):
        self.policy, self.buckets, self.multiple, self.first_row = policy, buckets, rows // buckets, first_row
        count = rows if piece_rows is None else piece_rows
        self.state = {name: [value] * count for name, value in policy.initial_state.items()}
        self.counters = Counter()

    def row_of(self, id_):
        """The row of an id in the table."""
        top = bucket_of(id_, self.buckets) * self.multiple - self.first_row
        known = [top + k for k in range(1, self.multiple) if id_ != -1 and self.state["id"][top + k] == id_]
        return self.first_row + (known[0] if known else top)

    def observe(self, counts, step):
        """Counts is {id: occurrences}; returns the rows to reset and the ids that lost theirs."""
        state, reset, lost = self.state, [], []
        ttl = self.policy.ttl_steps
        period = max(1, (ttl or 8) // 8)
        for row in range(len(state["id"])) if ttl else ():
            due = (self.first_row + row) // self.multiple % period == step % period
            if due and state["id"][row] != -1 and step - state["used"][row] > ttl:
                self._drop(row, reset, lost)
                self.counters["expired"] += 1
        new = {}
        for id_, count in counts.items():
            row = self.row_of(id_) - self.first_row
            if id_ == -1:
                continue
            if state["id"][row] == id_:
                state["used"][row] = step
                state["count"][row] += count
            else:
                new.setdefault(bucket_of(id_, self.buckets), []).append((-count, hash_of(id_), id_))
        for bucket in sorted(new):
            top = bucket * self.multiple - self.first_row
            rows = range(top + 1, top + self.multiple)
            admitted = [(id_, -count) for count, _, id_ in sorted(new[bucket]) if self._admits(top, id_, -count, step)]
            self.counters["rejected"] += len(new[bucket]) - len(admitted)
            free = [row for row in rows if state["id"][row] == -1]
            old = [row for row in rows if state["id"][row] != -1 and state["used"][row] < step]
            lfu = self.policy.evict == "lfu"
            old.sort(key=lambda row: (state["count"][row] if lfu else 0, state["used"][row], row))
            places = free + old
            for (id_, count), row in zip(admitted, places, strict=False):
                if state["id"][row] != -1:
                    self._drop(row, reset, lost)
                    self.counters["evicted"] += 1
                state["id"][row], state["used"][row], state["count"][row] = id_, step, count
                self.counters["admitted"] += 1
            self.counters["overflowed"] += max(0, len(admitted) - len(places))
        return reset, lost

    def _drop(self, row, reset, lost):
        lost.append(self.state["id"][row])
        reset.append(row)
        self.state["id"][row], self.state["used"][row], self.state["count"][row] = -1, -1, 0

    def _admits(self, top, id_, count, step):
        slot, policy = None, self.policy
        if policy.admit > 1 and count < policy.admit:
            slot = top + (hash_of(id_) & 0xFFFFFFFF) % self.multiple
            candidate, seen = self.state["candidate"], self.state["seen"]
            if candidate[slot] == id_:
                seen[slot] += count
            else:
                seen[slot] -= count
                if seen[slot] > 0:
                    return False
                candidate[slot], seen[slot] = id_, count
            if seen[slot] < policy.admit:
                return False
        draw = mix(hash_of(id_) ^ mix(policy.seed ^ mix(step)))
        if policy.probability < 1 and draw >= int(policy.probability * (1 << 64)):
            return False
        if slot is not None:
            self.state["candidate"][slot], self.state["seen"][slot] = -1, 0
        return True
