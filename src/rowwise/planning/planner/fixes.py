"""Fixes: changes to a request without a plan, each of which may give it one.

`infeasible` tries and ranks them. Changes that lose nothing rank first, then those that cost something, then machines
that have to be bought; tiers that tables may not use come last.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import structs

from rowwise.base import quantity
from rowwise.base.value import MAX_RANKS
from rowwise.parallel.plan import TIERS
from rowwise.planning.planner.constraints import ALL
from rowwise.planning.planner.layouts import LAYOUTS, NAMES
from rowwise.planning.planner.problem import PlanRequest
from rowwise.tables.spec import RowType, Table, Topology

MAX_NAMED = 12  # tables whose constraints are lifted one by one
GROWTH = 1.15  # of the number of devices, from try to try
TRIES = 5
MORE_DEVICES, OTHER_MEMORY = 6, 7  # values of `Fix.rank`: machines to be bought, tiers that may not be used
HasPlan = Callable[[PlanRequest], bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A changed request, and the change in words."""

    request: PlanRequest
    change: str
    rank: int  # order of fixes: 0 loses nothing
    many: bool = False  # `change` is a plural
    table: str | None = None  # whose pieces become smaller
    saved_bytes: float = 0.0
    enough: bool = False  # a plan was found for it

    def words(self) -> str:
        s = "" if self.many else "s"
        saves = f"save{s} {quantity.format_bytes(self.saved_bytes)}" if self.saved_bytes >= 1 else ""
        return f"{self.change} {' and '.join(filter(None, (saves, f'suffice{s}' * self.enough)))}"


def all_fixes(request: PlanRequest, needed_bytes: float, has_plan: HasPlan) -> Iterator[Fix]:
    yield from _relaxed_constraints(request, has_plan)
    narrow = [fix for fix in (_row_wise_state(request), _narrow_rows(request, RowType.FP16)) if fix]
    yield from narrow
    if len(narrow) == 2 and not any(has_plan(fix.request) for fix in narrow):
        combined = _narrow_rows(narrow[0].request, RowType.FP16)
        if combined:
            yield dataclasses.replace(combined, change="fp16 rows and row-wise optimizer state together", many=True)
    yield from _smaller_batch(request)
    if "host" in request.tiers:
        yield from _more_host_memory(request, needed_bytes, has_plan)
    yield from _more_devices(request, needed_bytes, has_plan)
    yield from _more_tiers(request, has_plan)


def _relaxed_constraints(request: PlanRequest, has_plan: HasPlan) -> Iterator[Fix]:
    """Each kind of constraint lifted, for one table or group where that suffices."""
    constraints = request.constraints
    for field, what in (("pin", "pin"), ("forbid", "ranks forbidden")):
        many = field == "forbid"
        names: dict[str, tuple[int, ...]] = dict(getattr(constraints, field))
        without = _with_constraints(request, **{field: {}})
        if not names or not has_plan(without):
            continue
        for name in _largest_first(request, names)[:MAX_NAMED]:
            left = {key: value for key, value in names.items() if key != name}
            single = _with_constraints(request, **{field: left})
            if has_plan(single):
                yield Fix(request=single, change=f"no {what} for {name!r}", rank=0, many=many, enough=True)
                break
        else:
            yield Fix(request=without, change=f"no {what} at all", rank=0, many=many, enough=True)
    for group in constraints.together:
        rest = tuple(kept for kept in constraints.together if kept != group)
        words = f"not keeping {' and '.join(map(repr, group[:3]))}{' and others' * (len(group) > 3)} together"
        yield Fix(request=_with_constraints(request, together=rest), change=words, rank=0)
    if constraints.reserve:
        free = _with_constraints(request, reserve=0.0)
        yield Fix(request=free, change=f"no reserve (now {constraints.reserve:.0%})", rank=1)
    yield from _more_layouts(request, has_plan)


def _more_layouts(request: PlanRequest, has_plan: HasPlan) -> Iterator[Fix]:
    """A layout that constraints exclude: for one table if that suffices, else for all."""
    layouts = request.constraints.layouts
    if not layouts or not has_plan(_with_constraints(request, layouts={})):
        return
    names = _largest_first(request, [w.table.name for w in request.workloads])[:MAX_NAMED]
    for layout, words in [(cut.name, cut.words) for cut in LAYOUTS if cut.cuts_columns or cut.cuts_rows]:
        for name in [n for n in names if layout not in request.constraints.layouts_of(n)][:2]:
            allowed = dict(layouts) | {name: (*request.constraints.layouts_of(name), layout)}
            single = _with_constraints(request, layouts=allowed)
            if has_plan(single):
                yield Fix(request=single, change=f"{words} for {name!r}", rank=0, table=name, enough=True)
                return
        allowed = {name: tuple(dict.fromkeys((*table_layouts, layout))) for name, table_layouts in layouts.items()}
        extended = _with_constraints(request, layouts=allowed)
        if has_plan(extended):
            yield Fix(request=extended, change=f"{words} for all tables", rank=0, enough=True)
            return
    unlimited = _with_constraints(request, layouts={ALL: NAMES})
    yield Fix(request=unlimited, change="all layouts for all tables", rank=0, many=True, enough=True)


def _row_wise_state(request: PlanRequest) -> Fix | None:
    return _change_tables(request, with_row_state, "row-wise optimizer state", 2)


def with_row_state(table: Table) -> Table:
    return structs.replace(table, optimizer=table.optimizer.with_row_state())


def _narrow_rows(request: PlanRequest, row_type: RowType) -> Fix | None:
    def narrow(table: Table) -> Table:
        return structs.replace(table, row_type=row_type) if table.row_type is RowType.FP32 else table

    return _change_tables(request, narrow, f"{row_type} rows", 3)


def _change_tables(request: PlanRequest, change: Callable[[Table], Table], words: str, rank: int) -> Fix | None:
    """All tables changed; None if that changes nothing."""
    workloads = tuple(structs.replace(w, table=change(w.table)) for w in request.workloads)
    if workloads == request.workloads:
        return None
    many = words.endswith("rows")
    return Fix(request=dataclasses.replace(request, workloads=workloads), change=words, rank=rank, many=many)


def _smaller_batch(request: PlanRequest) -> Iterator[Fix]:
    """Half the batch, where buffers of a step count as memory."""
    half = request.batch // 2
    if request.buffers and half:
        smaller = dataclasses.replace(request, batch=half)
        yield Fix(request=smaller, change=f"half the batch ({half:,} samples a step)", rank=4)


def _more_host_memory(request: PlanRequest, needed_bytes: float, has_plan: HasPlan) -> Iterator[Fix]:
    """Host memory, where a machine has none or too little."""
    hosts, hardware = request.machine.topology.hosts, request.machine.hardware
    missing = needed_bytes - sum(request.limits_bytes) * request.machine.topology.world
    extra = 1.05 * max(missing, 0.02 * needed_bytes) / hosts / (1 - request.constraints.reserve)
    for _ in range(TRIES):
        size = _round_up_to_GB(hardware.host_bytes + extra)
        larger = structs.replace(hardware, host_bytes=size)
        candidate = dataclasses.replace(request, machine=structs.replace(request.machine, hardware=larger))
        if has_plan(candidate):
            change = f"{quantity.format_bytes(size)} of host memory for tables on each host (:host={size // 10**9}GB)"
            yield Fix(request=candidate, change=change, rank=5, enough=True)
            return
        extra *= 1.7


def _round_up_to_GB(size: float) -> int:
    return math.ceil(size / 1e9) * 10**9


def _more_devices(request: PlanRequest, needed_bytes: float, has_plan: HasPlan) -> Iterator[Fix]:
    """The least number that suffices of those tried: of hosts if there are several, else of devices."""
    topology = request.machine.topology
    many = topology.hosts > 1
    now = topology.hosts if many else topology.devices
    unit_bytes = max(sum(request.limits_bytes) * (topology.devices if many else 1), 1)
    count = max(now + 1, math.ceil(needed_bytes / unit_bytes))
    for _ in range(TRIES):
        if count * (topology.devices if many else 1) > MAX_RANKS:
            return
        larger = Topology(hosts=count, devices=topology.devices) if many else Topology(hosts=1, devices=count)
        candidate = request.on(larger)
        if has_plan(candidate):
            what = f"{count} hosts of {topology.devices}" if many else f"{count} devices"
            yield Fix(request=candidate, change=f"{what} of this kind", rank=MORE_DEVICES, many=True, enough=True)
            return
        count = max(count + 1, math.ceil(count * GROWTH))


def _more_tiers(request: PlanRequest, has_plan: HasPlan) -> Iterator[Fix]:
    """Tiers of the machine that tables may not use, from the top down."""
    for candidate in request.lower_tiers():
        if has_plan(candidate):
            names = [name for name in TIERS if name in candidate.tiers]
            runs_here = names[-1] == "host" or not request.machine.hardware.host_bytes  # a CPU's
            yield Fix(
                request=candidate,
                change=f"`rowwise plan --tiers {','.join(names)}`" + " (not to be run here)" * (not runs_here),
                rank=OTHER_MEMORY,
                enough=True,
            )
            return


def _with_constraints(request: PlanRequest, **changes: Any) -> PlanRequest:
    return dataclasses.replace(request, constraints=structs.replace(request.constraints, **changes))


def _largest_first(request: PlanRequest, names: Any) -> list[str]:
    """Names of tables, the largest first."""
    size = {w.table.name: w.table.rows * w.table.dim for w in request.workloads}
    return sorted((name for name in names if name in size), key=lambda name: -size[name])
