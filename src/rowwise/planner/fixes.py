"""Changes to a question that has no plan, each of which may give it one.

Changes that lose nothing rank before those that cost something, those before machines that have to be bought, and
memory that tables may not use comes last.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import structs

from rowwise import quantity
from rowwise.plan import TIERS
from rowwise.planner.constraints import ALL, Constraints
from rowwise.planner.layouts import LAYOUTS, NAMES
from rowwise.planner.options import TableArrays
from rowwise.planner.problem import PlanRequest
from rowwise.spec import RowType, Table, Topology

MOST_NAMED = 12  # tables whose limits are lifted one by one
MORE = 1.15  # times as many devices or bytes, each time that it was not enough
TRIES = 5
MORE_DEVICES, OTHER_MEMORY = 6, 7  # ranks of fixes: machines to be bought, memory that may not be used
HasPlan = Callable[[PlanRequest], bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A changed question, and the change in words."""

    question: PlanRequest
    change: str
    rank: int  # what is lost by it, from nothing up
    many: bool = False  # the change is called by a plural
    table: str | None = None  # whose pieces it makes smaller
    saved_bytes: float = 0.0
    enough: bool = False

    def words(self) -> str:
        s = "" if self.many else "s"
        saves = f"save{s} {quantity.of_bytes(self.saved_bytes)}" if self.saved_bytes >= 1 else ""
        return f"{self.change} {' and '.join(filter(None, (saves, f'suffice{s}' * self.enough)))}"


def all_fixes(question: PlanRequest, needed_bytes: float, has_plan: HasPlan) -> Iterator[Fix]:
    yield from _limits(question, has_plan)
    narrow = [fix for fix in (_row_wise_state(question), _narrow(question, RowType.FP16)) if fix]
    yield from narrow
    if len(narrow) == 2 and not any(has_plan(fix.question) for fix in narrow):
        both = _narrow(narrow[0].question, RowType.FP16)
        if both:
            yield dataclasses.replace(both, change="fp16 rows and row-wise optimizer state together", many=True)
    yield from _smaller_batch(question)
    if "host" in question.tiers:
        yield from _below(question, needed_bytes, has_plan)
    yield from _more_devices(question, needed_bytes, has_plan)
    yield from _more_tiers(question, has_plan)


def _limits(question: PlanRequest, has_plan: HasPlan) -> Iterator[Fix]:
    """Each kind of constraint lifted, and if that helps, as little of it as does."""
    constraints = question.constraints
    for field, what in (("pin", "pin"), ("forbid", "ranks forbidden")):
        many = field == "forbid"
        names: dict[str, tuple[int, ...]] = dict(getattr(constraints, field))
        without = _with(question, structs.replace(constraints, **{field: {}}))
        if not names or not has_plan(without):
            continue
        for name in _largest(question, names)[:MOST_NAMED]:
            left = {key: value for key, value in names.items() if key != name}
            single = _with(question, structs.replace(constraints, **{field: left}))
            if has_plan(single):
                yield Fix(question=single, change=f"no {what} for {name!r}", rank=0, many=many, enough=True)
                break
        else:
            yield Fix(question=without, change=f"no {what} at all", rank=0, many=many, enough=True)
    for group in constraints.together:
        rest = tuple(other for other in constraints.together if other != group)
        words = f"not keeping {' and '.join(map(repr, group[:3]))}{' and others' * (len(group) > 3)} together"
        yield Fix(question=_with(question, structs.replace(constraints, together=rest)), change=words, rank=0)
    if constraints.reserve:
        free = structs.replace(constraints, reserve=0.0)
        yield Fix(question=_with(question, free), change=f"no reserve (now {constraints.reserve:.0%})", rank=1)
    yield from _layouts(question, has_plan)


def _layouts(question: PlanRequest, has_plan: HasPlan) -> Iterator[Fix]:
    """A layout that is not allowed: for one table if that is enough, else for all."""
    given = question.constraints.layouts
    if not given or not has_plan(_with(question, structs.replace(question.constraints, layouts={}))):
        return
    names = _largest(question, [w.table.name for w in question.workloads])[:MOST_NAMED]
    for layout, words in [(one.name, one.words) for one in LAYOUTS if one.cuts_columns or one.cuts_rows]:
        for name in [n for n in names if layout not in question.constraints.layouts_of(n)][:2]:
            allowed = dict(given) | {name: (*question.constraints.layouts_of(name), layout)}
            one = _with(question, structs.replace(question.constraints, layouts=allowed))
            if has_plan(one):
                yield Fix(question=one, change=f"{words} for {name!r}", rank=0, table=name, enough=True)
                return
        allowed = {name: tuple(dict.fromkeys((*some, layout))) for name, some in given.items()}
        every = _with(question, structs.replace(question.constraints, layouts=allowed))
        if has_plan(every):
            yield Fix(question=every, change=f"{words} for all tables", rank=0, enough=True)
            return
    free = structs.replace(question.constraints, layouts={ALL: NAMES})
    yield Fix(question=_with(question, free), change="all layouts for all tables", rank=0, many=True, enough=True)


def _row_wise_state(question: PlanRequest) -> Fix | None:
    return _changed(question, with_row_state, "row-wise optimizer state", 2)


def with_row_state(table: Table) -> Table:
    """With one number of optimizer state a row, where its optimizer has such a form."""
    return structs.replace(table, optimizer=table.optimizer.with_row_state())


def _narrow(question: PlanRequest, row_type: RowType) -> Fix | None:
    def narrow(table: Table) -> Table:
        return structs.replace(table, row_type=row_type) if table.row_type is RowType.FP32 else table

    return _changed(question, narrow, f"{row_type} rows", 3)


def _changed(question: PlanRequest, change: Callable[[Table], Table], words: str, rank: int) -> Fix | None:
    """All tables changed; none if that changes nothing."""
    workloads = tuple(structs.replace(w, table=change(w.table)) for w in question.workloads)
    if workloads == question.workloads:
        return None
    many = words.endswith("rows")
    return Fix(question=dataclasses.replace(question, workloads=workloads), change=words, rank=rank, many=many)


def _smaller_batch(question: PlanRequest) -> Iterator[Fix]:
    """Where what a step needs beside the tables is much of what is short."""
    half = question.batch // 2
    if question.buffers and half:
        less = dataclasses.replace(question, batch=half)
        yield Fix(question=less, change=f"half the batch ({half:,} samples a step)", rank=4)


def _below(question: PlanRequest, needed_bytes: float, has_plan: HasPlan) -> Iterator[Fix]:
    """Host memory, where there is none or too little."""
    hosts, hardware = question.machine.topology.hosts, question.machine.hardware
    short = needed_bytes - sum(question.limits_bytes) * question.machine.topology.world
    extra = 1.05 * max(short, 0.02 * needed_bytes) / hosts / (1 - question.constraints.reserve)
    for _ in range(TRIES):
        size = _rounded_up(hardware.host_bytes + extra)
        larger = structs.replace(hardware, host_bytes=size)
        tried = dataclasses.replace(question, machine=structs.replace(question.machine, hardware=larger))
        if has_plan(tried):
            said = f"{quantity.of_bytes(size)} of host memory for tables on each host (:host={size // 10**9}GB)"
            yield Fix(question=tried, change=said, rank=5, enough=True)
            return
        extra *= 1.7


def _rounded_up(size: float) -> int:
    return math.ceil(size / 1e9) * 10**9


def _more_devices(question: PlanRequest, needed_bytes: float, has_plan: HasPlan) -> Iterator[Fix]:
    """The least number that is found to suffice, of hosts if there are several."""
    topology = question.machine.topology
    many = topology.hosts > 1
    now = topology.hosts if many else topology.devices
    each = max(sum(question.limits_bytes) * (topology.devices if many else 1), 1)
    count = max(now + 1, math.ceil(needed_bytes / each))
    for _ in range(TRIES):
        larger = Topology(hosts=count, devices=topology.devices) if many else Topology(hosts=1, devices=count)
        tried = _on(question, larger)
        if has_plan(tried):
            what = f"{count} hosts of {topology.devices}" if many else f"{count} devices"
            yield Fix(question=tried, change=f"{what} of this kind", rank=MORE_DEVICES, many=True, enough=True)
            return
        count = max(count + 1, math.ceil(count * MORE))


def _more_tiers(question: PlanRequest, has_plan: HasPlan) -> Iterator[Fix]:
    """Memory that the machine has and tables may not use, from the top down."""
    tiers = question.tiers
    for tier in question.unused:
        tiers |= {tier}
        tried = dataclasses.replace(question, tiers=tiers)
        if has_plan(tried):
            names = ",".join(name for name in TIERS if name in tiers)
            yield Fix(
                question=tried,
                change=f"`rowwise plan --tiers {names}` (not to be run here)",
                rank=OTHER_MEMORY,
                enough=True,
            )
            return


def _on(question: PlanRequest, topology: Topology) -> PlanRequest:
    machine = structs.replace(question.machine, topology=topology)
    return dataclasses.replace(question, machine=machine, model=question.model.on(topology))


def _with(question: PlanRequest, constraints: Constraints) -> PlanRequest:
    return dataclasses.replace(question, constraints=constraints)


def _largest(question: PlanRequest, names: Any) -> list[str]:
    columns = TableArrays.of(question)
    size_T = columns.rows_T * columns.dim_T
    size = {w.table.name: float(size_T[t]) for t, w in enumerate(question.workloads)}
    return sorted((name for name in names if name in size), key=lambda name: -size[name])
