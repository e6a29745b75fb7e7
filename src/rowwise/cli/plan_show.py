"""Prints the summary of a plan: tables, machine, predicted step, lower bound, memory, layouts and differences."""

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console

from rowwise.base.quantity import format_bytes, format_seconds, pluralise
from rowwise.cli.terminal import say
from rowwise.parallel.plan import TIERS, Forecast, Plan
from rowwise.tables.spec import stored_bytes

if TYPE_CHECKING:
    from rowwise.planning.perf.dense_parallel import DenseSide
    from rowwise.planning.perf.hardware import Machine
    from rowwise.planning.planner.pipeline import PlanResult
    from rowwise.planning.planner.problem import PlanRequest
    from rowwise.planning.planner.replan import ReplanResult

OPTIMAL_GAP = 5e-5  # a plan with a smaller gap to the lower bound counts as optimal
MAX_LINES = 200  # printed differences


def show_plan(result: "PlanResult", console: Console) -> None:
    request, forecast = result.problem.request, result.plan.forecast
    assert forecast is not None, "the planner sets the forecast"
    tables = [workload.table for workload in request.workloads]
    rows = sum(table.rows for table in tables)
    size_bytes = sum(map(stored_bytes, tables))
    lines = {
        "tables": f"{len(tables):,} of {rows:,} rows, {format_bytes(size_bytes)} with their optimizer state",
        "machine": _describe_machine(request.machine),
        "step": _describe_step(forecast, forecast.wire.in_words(request.machine.topology)),
        "bound": _describe_bound(forecast),
        "memory": _describe_memory(forecast),
        "layouts": _count_layouts(result),
    }
    if request.dense is not None:
        lines["dense"] = _describe_dense(request.dense, request)
    for name, text in lines.items():
        say(console, f"{name:8}{text}")
    if result.searched.out_of_time:
        advice = "the search ran out of time, so its result may vary; --seconds extends the budget"
        show_note(advice, console)


def _describe_dense(dense: "DenseSide", request: "PlanRequest") -> str:
    topology, hardware = request.machine.topology, request.machine.hardware
    memory_bytes, sent_bytes = dense.cost(topology).memory_bytes, dense.sent_bytes(topology)
    activations = "activations not counted"
    if dense.activations.kept:
        recomputed = ", recomputed" if dense.recompute else ""
        activations = f"{format_bytes(dense.activation_bytes(topology, request.batch))} of activations{recomputed}"
    memory = f"kind={dense.kind}: {format_bytes(memory_bytes)} of each rank's memory, {activations}"
    time = format_seconds(dense.seconds(topology, hardware))
    return f"{memory}; a rank sends {format_bytes(sent_bytes)} in a step, which takes {time}"


def note_dense(result: "PlanResult") -> tuple[str, ...]:
    """A note if another kind of `train.dense_parallel` fits with the tables and is predicted to be faster."""
    request, forecast = result.problem.request, result.plan.forecast
    if request.dense is None or forecast is None:
        return ()
    machine, used_bytes = request.machine, max(row[0] for row in forecast.memory_bytes)
    topology, hardware = machine.topology, machine.hardware
    available_bytes = machine.memory_bytes[0] * (1 - request.constraints.reserve) - used_bytes
    best = request.dense.fastest(topology, hardware, request.batch, available_bytes)
    if best is None or best.seconds(topology, hardware) >= request.dense.seconds(topology, hardware):
        return ()
    memory = format_bytes(best.memory_bytes(topology, request.batch))
    time = format_seconds(best.seconds(topology, hardware))
    where = "" if best.kind == "replicate" else " (on CPUs only)"
    return (f"{best.setting()}{where} sends in {time} of a step, and takes {memory} of a rank's memory",)


def show_note(text: str, console: Console) -> None:
    say(console, f"note    {text}")


def show_differences(old: Plan, new: Plan, console: Console, name: str) -> None:
    lines = old.diff(new)
    names = {tile.table for tile in old.tiles} | {tile.table for tile in new.tiles}
    changed = [table for table in sorted(names) if set(old.tiles_of(table)) != set(new.tiles_of(table))]
    before, after = old.forecast, new.forecast
    times = ""
    if before and after and (before.model, before.batch) == (after.model, after.batch):
        times = f"; a step takes {format_seconds(after.step_s)}, before {format_seconds(before.step_s)}"
    say(console, f"diff    {len(changed):,} of {len(names):,} tables are placed differently in {name}{times}")
    for line in lines[:MAX_LINES]:
        say(console, line)
    if len(lines) > MAX_LINES:
        console.print(f"... and {len(lines) - MAX_LINES:,} more lines")


def note_unsupported_tiers(plan: Plan) -> tuple[str, ...]:
    """Notes on tiers without GPU support yet: rows on disk, or column shards in host memory."""
    widths = {name: max(t.cols[1] for t in plan.tiles if t.table == name) for name in {t.table for t in plan.tiles}}
    on_disk = {tile.table for tile in plan.tiles if tile.tier == "disk"}
    cut = {t.table for t in plan.tiles if t.tier == "host" and t.cols != (0, widths[t.table])}
    return tuple(
        f"rowwise cannot run this plan yet on any device but a CPU: {what} of table {min(names)!r}"
        + (f" and {pluralise(len(names) - 1, 'other')}" if len(names) > 1 else "")
        + f" are {where}"
        for names, what, where in ((on_disk, "rows", "on the disk"), (cut, "parts of rows", "on the host"))
        if names
    )


def note_one_device(result: "PlanResult") -> tuple[str, ...]:
    """A note if one device holds all tables and is predicted to be as fast."""
    from rowwise.planning.planner.pipeline import one_device_forecast

    forecast, request = result.plan.forecast, result.problem.request
    one_device = one_device_forecast(request) if request.machine.topology.world > 1 else None
    if forecast is None or one_device is None or one_device.step_s > forecast.step_s:
        return ()
    alone_time, time = format_seconds(one_device.step_s), format_seconds(forecast.step_s)
    return (f"one device is enough: it holds all tables, and takes {alone_time} for them in a step, this plan {time}",)


def describe_replan(replanned: "ReplanResult") -> tuple[str, ...]:
    """Notes on a replan: bytes to move, the step time of both plans, and cuts whose cost is extrapolated."""
    notes: list[str] = []
    before = f"{format_seconds(replanned.old_cost)} without" if replanned.old_fits else "and it would not fit without"
    if replanned.changed:
        notes.append(
            f"resuming with the new plan moves {format_bytes(replanned.moved_bytes)} to other ranks "
            f"({replanned.moved_share:.1%}); a step takes {format_seconds(replanned.new_cost)}, {before}"
        )
    else:
        notes.append("no change: none repays the cost of moving rows")
    if replanned.recut:
        names = ", ".join(replanned.recut[:8])
        notes.append(f"tables cut in no standard layout, so their costs are guessed: {names}")
    return tuple(notes)


def _describe_machine(machine: "Machine") -> str:
    topology = machine.topology
    hosts, ranks = pluralise(topology.hosts, "host"), pluralise(topology.world, "rank")
    return f"{ranks}: {hosts} of {topology.devices} {machine.hardware.name}"


def _describe_step(forecast: Forecast, wire: str) -> str:
    slowest = max(range(len(forecast.operators_s)), key=forecast.operators_s.__getitem__)
    busiest = max(range(len(forecast.links_s)), key=forecast.links_s.__getitem__)
    operators = f"operators {format_seconds(forecast.operators_s[slowest])} on rank {slowest}"
    operators += f" (fastest {format_seconds(min(forecast.operators_s))})"
    min_links = format_seconds(min(forecast.links_s))
    links = f"links {format_seconds(forecast.links_s[busiest])} on rank {busiest} (fastest {min_links})"
    how = f"{forecast.model}, {forecast.batch:,} samples" + (f", vectors as {wire}" if wire else "")
    return f"{format_seconds(forecast.step_s)} for all tables by {how}: {operators}, {links}"


def _describe_bound(forecast: Forecast) -> str:
    if forecast.bound_s is None or forecast.gap is None:
        return "unknown"
    bound = f"at least {format_seconds(forecast.bound_s)} ({forecast.bound})"
    return f"{bound}; this one is {'optimal' if forecast.gap < OPTIMAL_GAP else f'{forecast.gap:.1%} above'}"


def _describe_memory(forecast: Forecast) -> str:
    parts = []
    for tier, (name, limit) in enumerate(zip(TIERS, forecast.limits_bytes, strict=True)):
        used_W = [row[tier] for row in forecast.memory_bytes]
        fullest = max(range(len(used_W)), key=used_W.__getitem__)
        if used_W[fullest]:
            percent = f" ({used_W[fullest] / limit:.0%})" if limit else ""
            parts.append(
                f"{name} {format_bytes(used_W[fullest])} of {format_bytes(limit)}{percent} "
                f"on rank {fullest}, the fullest"
            )
    return "; ".join(parts) or "nothing"


def _count_layouts(result: "PlanResult") -> str:
    counts: Counter[str] = Counter()
    problem = result.problem
    for item, option in enumerate(result.searched.placement.choice_I):
        kind = problem.kind_of(int(option))
        where = "" if kind.tier == "device" else f" on the {kind.tier}"
        counts[kind.layout.words + where] += len(problem.members[item])
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
