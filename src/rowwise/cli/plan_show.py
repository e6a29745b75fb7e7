"""The printed summary of a plan: tables, machine, predicted step, lower bound, memory, layouts and differences."""

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console

from rowwise.plan import TIERS, Forecast, Plan
from rowwise.quantity import format_bytes, format_seconds
from rowwise.shard.tiers import DEVICE_TIERS, runnable_tiers
from rowwise.spec import state_width

if TYPE_CHECKING:
    from rowwise.perf.hardware import Machine
    from rowwise.planner.pipeline import PlanResult
    from rowwise.planner.replan import ReplanResult

FLOAT_bytes = 4
SAME = 5e-5  # a smaller gap to the lower bound counts as optimal
DIFFERENCES = 200  # printed lines


def show_plan(planned: "PlanResult", console: Console) -> None:
    question, forecast = planned.problem.request, planned.plan.forecast
    assert forecast is not None, "a plan that was made has a forecast"
    tables = [workload.table for workload in question.workloads]
    rows = sum(table.rows for table in tables)
    held = sum(t.rows * (t.row_bytes + FLOAT_bytes * state_width(t)) for t in tables)
    shown = {
        "tables": f"{len(tables):,} of {rows:,} rows, {format_bytes(held)} with their optimizer state",
        "machine": _machine(question.machine),
        "step": _step(forecast, forecast.wire.in_words(question.machine.topology)),
        "bound": _bound(forecast),
        "memory": _memory(forecast),
        "layouts": _layouts(planned),
    }
    for lead, text in shown.items():
        console.print(f"{lead:8}{text}", markup=False, soft_wrap=True)
    if planned.searched.out_of_time:
        late = "the search ran out of time, so another run may find another plan; --seconds gives it more"
        show_note(late, console)


def show_note(text: str, console: Console) -> None:
    console.print(f"note    {text}", markup=False, soft_wrap=True)


def show_differences(old: Plan, new: Plan, console: Console, name: str) -> None:
    lines = old.diff(new)
    names = {tile.table for tile in old.tiles} | {tile.table for tile in new.tiles}
    changed = [table for table in sorted(names) if set(old.tiles_of(table)) != set(new.tiles_of(table))]
    before, after = old.forecast, new.forecast
    faster = ""
    if before and after and (before.model, before.batch) == (after.model, after.batch):
        faster = f"; a step takes {format_seconds(after.step_s)}, before {format_seconds(before.step_s)}"
    console.print(
        f"diff    {len(changed):,} of {len(names):,} tables are placed differently in {name}{faster}",
        markup=False,
        soft_wrap=True,
    )
    for line in lines[:DIFFERENCES]:
        console.print(line, markup=False, soft_wrap=True)
    if len(lines) > DIFFERENCES:
        console.print(f"... and {len(lines) - DIFFERENCES:,} more lines")


def note_unsupported_tiers(plan: Plan) -> tuple[str, ...]:
    """A note on a plan with rows in tiers that rowwise cannot run, on some devices or on any."""
    below = [tile for tile in plan.tiles if tile.tier not in DEVICE_TIERS]
    if not below:
        return ()
    tiers = [tier for tier in TIERS if tier in {tile.tier for tile in below}]
    where = " on any device but a CPU" if runnable_tiers("cpu").issuperset(tiers) else ""
    names = {tile.table for tile in below}
    rows = f"rows of table {min(names)!r}" + (f" and {_count(len(names) - 1, 'other')}" if len(names) > 1 else "")
    return (f"rowwise cannot run this plan yet{where}: {rows} are on the {' and the '.join(tiers)}",)


def note_one_device(planned: "PlanResult") -> tuple[str, ...]:
    """A note where one device holds all tables and is predicted to take no longer for their part of a step."""
    from rowwise.planner.pipeline import one_device_forecast

    here, request = planned.plan.forecast, planned.problem.request
    alone = one_device_forecast(request) if request.machine.topology.world > 1 else None
    if here is None or alone is None or alone.step_s > here.step_s:
        return ()
    alone_s, here_s = format_seconds(alone.step_s), format_seconds(here.step_s)
    return (
        f"one device is enough: it holds all tables, and their part of a step takes {alone_s} there, {here_s} here",
    )


def describe_replan(found: "ReplanResult") -> tuple[str, ...]:
    """Notes on a replan: bytes to move, the time of a step before and after, and cuts of guessed cost."""
    words: list[str] = []
    before = f"{format_seconds(found.old_cost)} without" if found.old_fits else "and it would not fit without"
    if found.changed:
        words.append(
            f"resuming with the new plan moves {format_bytes(found.moved_bytes)} to other ranks "
            f"({found.moved_share:.1%}); a step takes {format_seconds(found.new_cost)}, {before}"
        )
    else:
        words.append("nothing moves: no change is worth its cost")
    if found.recut:
        words.append(f"tables cut in a way that is no layout, so their costs are guessed: {', '.join(found.recut[:8])}")
    return tuple(words)


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _machine(machine: "Machine") -> str:
    topology = machine.topology
    hosts, ranks = _count(topology.hosts, "host"), _count(topology.world, "rank")
    return f"{ranks}: {hosts} of {topology.devices} {machine.hardware.name}"


def _step(forecast: Forecast, wire: str) -> str:
    slowest = max(range(len(forecast.operators_s)), key=forecast.operators_s.__getitem__)
    busiest = max(range(len(forecast.links_s)), key=forecast.links_s.__getitem__)
    operators = f"operators {format_seconds(forecast.operators_s[slowest])} on rank {slowest}"
    operators += f" (least {format_seconds(min(forecast.operators_s))})"
    least = format_seconds(min(forecast.links_s))
    links = f"links {format_seconds(forecast.links_s[busiest])} on rank {busiest} (least {least})"
    how = f"{forecast.model}, {forecast.batch:,} samples" + (f", vectors as {wire}" if wire else "")
    return f"{format_seconds(forecast.step_s)} for all tables by {how}: {operators}, {links}"


def _bound(forecast: Forecast) -> str:
    if forecast.bound_s is None or forecast.gap is None:
        return "not known"
    least = f"no plan takes less than {format_seconds(forecast.bound_s)} ({forecast.bound})"
    return f"{least}; this one is {'the best there is' if forecast.gap < SAME else f'{forecast.gap:.1%} above'}"


def _memory(forecast: Forecast) -> str:
    parts = []
    for tier, (name, limit) in enumerate(zip(TIERS, forecast.limits_bytes, strict=True)):
        taken_W = [row[tier] for row in forecast.memory_bytes]
        fullest = max(range(len(taken_W)), key=taken_W.__getitem__)
        if taken_W[fullest]:
            share = f" ({taken_W[fullest] / limit:.0%})" if limit else ""
            parts.append(
                f"{name} {format_bytes(taken_W[fullest])} of {format_bytes(limit)}{share} "
                f"on rank {fullest}, the fullest"
            )
    return "; ".join(parts) or "nothing"


def _layouts(planned: "PlanResult") -> str:
    counts: Counter[str] = Counter()
    problem = planned.problem
    for item, option in enumerate(planned.searched.placement.choice_I):
        kind = problem.kind_of(int(option))
        where = "" if kind.tier == "device" else f" on the {kind.tier}"
        counts[kind.layout.words + where] += len(problem.members[item])
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
