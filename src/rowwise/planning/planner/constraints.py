"""Constraints on plans: where tables may be, which stay together, which layouts they may have.

Users write them by hand, so names and contradictions are checked here, before any search.
"""

from collections.abc import Mapping, Sequence

from rowwise.base.errors import SpecError
from rowwise.base.value import parse_json
from rowwise.planning.planner.layouts import NAMES
from rowwise.tables.spec import Topology, Value

ALL = "*"


class Constraints(Value, frozen=True):
    """Limits on a plan; none by default."""

    pin: Mapping[str, tuple[int, ...]] = {}  # table: the only ranks that may have parts of it
    forbid: Mapping[str, tuple[int, ...]] = {}  # table: ranks that may have no part of it
    together: tuple[tuple[str, ...], ...] = ()  # groups of tables that are cut alike and lie on the same ranks
    layouts: Mapping[str, tuple[str, ...]] = {}  # table, or * for all others: the layouts it may have
    reserve: float = 0.0  # share of each tier of memory that is left free

    @classmethod
    def from_json(cls, text: str | bytes) -> "Constraints":
        return parse_json(text, cls, "constraints")

    def layouts_of(self, table: str) -> tuple[str, ...]:
        return self.layouts.get(table, self.layouts.get(ALL, NAMES))

    def ranks_of(self, table: str, topology: Topology) -> frozenset[int]:
        ranks = self.pin.get(table, range(topology.world))
        return frozenset(ranks) - frozenset(self.forbid.get(table, ()))

    def check(self, tables: Sequence[str], topology: Topology) -> None:
        """Raises on unknown tables and ranks, and on contradictions."""
        known = frozenset(tables)
        if not 0 <= self.reserve < 1:
            raise SpecError(f"reserve={self.reserve}", "a share of memory, at least 0 and less than 1")
        for field in ("pin", "forbid", "layouts"):
            unknown = getattr(self, field).keys() - known - ({ALL} if field == "layouts" else set())
            if unknown:
                raise SpecError(f"{field}: no table is called {min(unknown)!r}", "names of the tables")
        self._check_ranks(topology)
        self._check_layouts()
        self._check_together(known, topology)

    def _check_ranks(self, topology: Topology) -> None:
        for field in ("pin", "forbid"):
            for name, ranks in getattr(self, field).items():
                wrong = [rank for rank in ranks if not 0 <= rank < topology.world]
                if wrong or (field == "pin" and not ranks):
                    got = f"rank {wrong[0]}" if wrong else "no ranks"
                    raise SpecError(f"{field}: table {name!r} and {got}", f"ranks 0 to {topology.world - 1}")
        for name in sorted(self.pin.keys() | self.forbid.keys()):
            if not self.ranks_of(name, topology):
                raise SpecError(f"table {name!r}: forbid excludes every rank that pin allows", "at least one rank left")

    def _check_layouts(self) -> None:
        for name, layouts in self.layouts.items():
            wrong = [layout for layout in layouts if layout not in NAMES]
            if wrong or not layouts:
                raise SpecError(f"layouts: table {name!r}: {wrong or 'none'}", f"some of {', '.join(NAMES)}")

    def _check_together(self, known: frozenset[str], topology: Topology) -> None:
        seen: set[str] = set()
        for group in self.together:
            for name in group:
                if name not in known:
                    raise SpecError(f"together: no table is called {name!r}", "names of the tables")
                if name in seen:
                    raise SpecError(f"together: table {name!r} is in two groups", "each table in one group")
                seen.add(name)
            common = frozenset.intersection(*(self.ranks_of(name, topology) for name in group))
            if not common:
                raise SpecError(f"together: {', '.join(group)} have no common rank", "a rank allowed for all of them")
            allowed = [layout for layout in NAMES if all(layout in self.layouts_of(name) for name in group)]
            if not allowed:
                raise SpecError(
                    f"together: {', '.join(group)} have no common layout", "a layout allowed for all of them"
                )


UNCONSTRAINED = Constraints()
