"""The section with ten steps as intervals by rank and resource: as recorded, and as a model schedules the same costs.

The model (`planning/perf/timeline.py`) gets the mean busy seconds of each stage and rank, so the two pictures differ by
variation between steps and by stages that run at other places. The text separates the two: it also has the model's step
time from the costs of each step.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rowwise.base.quantity import format_duration, format_percent, is_finite
from rowwise.base.textfile import parse_whole
from rowwise.planning.perf.overlap import exposed_intervals, find_overlaps
from rowwise.planning.perf.step_program import RESOURCES, ScheduledStage, training_stages
from rowwise.planning.perf.timeline_costs import IDLE, complete_steps, costs_by_step, recorded_costs
from rowwise.report.markup import (
    Html,
    data_table,
    figure,
    join,
    legend,
    named_cell,
    note,
    row,
    section,
    span,
    tag,
    text,
)
from rowwise.report.plot import draw_label, draw_line, draw_picture
from rowwise.report.read import RecordedRun, StageLine
from rowwise.report.scale import Scale, tick_labels, ticks_inside

TITLE = "Timeline"
STEPS, RANKS = 10, 8  # drawn
DEPTH, MAX_DEPTH = "train.pipeline_depth", 16
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1080.0, 136.0, 10.0, 22.0, 26.0
LANE, LANE_GAP, RANK_GAP = 15.0, 2.0, 9.0
EDGE = 3.0  # height of the mark of an exposed transfer
MIN_WIDTH = 0.15  # of a drawn interval
STYLES = {  # label and colour; the second stage of a colour is pale
    "data": ("reading a batch", "orange"),
    "route": ("sending ids to their tables", "black"),
    "prefetch": ("reading table rows from the disk", "orange pale"),
    "lookup": ("looking up the vectors of ids", "sky"),
    "exchange": ("sending vectors", "vermillion"),
    "forward": ("layers, forward", "blue"),
    "backward": ("layers, backward", "green"),
    "return": ("sending gradients of vectors", "vermillion pale"),
    "reduce": ("summing gradients of layers", "green pale"),
    "status": ("agreeing with other processes", "grey"),
    "update": ("updating table rows", "purple"),
    "other": ("other", "grey pale"),
}
HEADERS = ("Stage", "Busy", "Exposed", "Exposed of busy")
INTRO = (
    "The work of the machine in ten steps of the training, to find out why a step takes its time. It is unrelated to "
    "the quality of the model."
)
NOTE = (
    "A row of bars is a part of the machine, of one process (rank): its main thread, its network link, its disk, or "
    "the thread that reads batches. Blank is idle. A bar of the link lasts until the last process has sent. Prefetched "
    "work belongs to the step that needs it; the pointer shows step and times. Simulated: the same stages with their "
    "mean times, in the order of the program; differences are variation between steps. A dark edge below a link: data "
    "travel while the main thread computes nothing."
)
TABLE_NOTE = (
    "Busy: time per step in which a stage occupies its part of the machine. Exposed: time that the main thread spends "
    "on the stage, or waits for it; the rest is hidden behind other work. Medians over the run, of the process with "
    "the largest median."
)


@dataclass(frozen=True, slots=True)
class _Picture:
    """The drawn intervals, in seconds since the first begins."""

    title: str
    key: str
    stages: Sequence[ScheduledStage]
    step_s: float
    varied_s: float  # a step, scheduled from the costs of each step instead of their means


class _Lane(NamedTuple):
    rank: int
    resource: str


def draw_timeline(run: RecordedRun) -> Html:
    """The section; empty for a run without recorded intervals and busy seconds."""
    table = _draw_stages(run.stages)
    if not run.timeline and not table:
        return Html("")
    pictures = _make_pictures(run)
    if not pictures:
        problem = note("timeline.csv has no step that all ranks have ended, so there is nothing to draw.")
        return section("timeline", TITLE, problem if run.timeline else Html(""), table)
    shown = {stage.name for picture in pictures for stage in picture.stages}
    entries = ((colour, label) for name, (label, colour) in STYLES.items() if name in shown)
    ranks = 1 + max(stage.rank for stage in run.timeline)
    cut = note(f"Ranks 0 to {RANKS - 1} are drawn, of {ranks:,}.") if ranks > RANKS else Html("")
    span_s = max((stage.end_s for picture in pictures for stage in picture.stages), default=0.0)
    figures = [
        figure(
            picture.title,
            tag("div", {"class": "wide gantt"}, _draw_picture(picture, span_s)),
            span("ends", f"{format_duration(picture.step_s)} a step"),
        )
        for picture in pictures
    ]
    top = join([note(INTRO), _sum_up(run, pictures), _describe_overlap(pictures[0])])
    return section("timeline", TITLE, top, legend(*entries, style="legend cubes"), cut, *figures, note(NOTE), table)


def _describe_overlap(picture: _Picture) -> Html:
    """The hidden share of each kind of transfer; empty for a single rank, which has no transfers."""
    steps = len({stage.step for stage in picture.stages}) * len({stage.rank for stage in picture.stages})
    parts = [
        f"{kind} {format_percent(hidden_s / busy_s)} of {format_duration(busy_s / steps)} a step"
        for kind, busy_s, hidden_s in find_overlaps(picture.stages)
    ]
    summary = f"Hidden behind computation, as measured, with waits for other ranks: {', '.join(parts)}."
    return note(summary) if parts else Html("")


def _pipeline_depth(run: RecordedRun) -> int:
    depth = parse_whole(run.settings.get(DEPTH, "2"))
    return 2 if depth is None else min(max(depth, 1), MAX_DEPTH)


def _make_pictures(run: RecordedRun) -> list[_Picture]:
    """Pictures of the recorded and the simulated steps; none without complete steps of ranks 0, 1, 2, ..."""
    from rowwise.planning.perf.timeline import WARM_UP, schedule, step_seconds  # here, as numpy takes a while to import

    steps = sorted(complete_steps(run.timeline))[-STEPS:]
    recorded = [stage for stage in run.timeline if stage.step in set(steps)]
    ranks = {stage.rank for stage in recorded}
    costs = recorded_costs(recorded) if ranks == set(range(len(ranks))) else None
    if costs is None:
        return []
    stages, step_costs = training_stages(costs, _pipeline_depth(run)), costs_by_step(recorded)
    scheduled = schedule(stages, WARM_UP + STEPS)
    later = steps[0] - WARM_UP
    model = [
        stage._replace(name=stage.kind, step=stage.step + later)
        for stage in scheduled
        if stage.step < WARM_UP + len(steps)
    ]
    measured_s, model_s = step_seconds(recorded), step_seconds(scheduled, WARM_UP)
    varied_s = step_seconds(schedule(stages, 3 * len(step_costs), step_costs), len(step_costs))
    return [
        _Picture("Measured", "timeline-measured", _select_drawn(run.timeline, steps), measured_s, measured_s),
        _Picture("Simulated", "timeline-model", _select_drawn(model, steps), model_s, varied_s),
    ]


def _select_drawn(stages: Sequence[ScheduledStage], steps: Sequence[int]) -> list[ScheduledStage]:
    """The busy intervals of these steps on the drawn ranks, in seconds since the end of the step before."""
    ends = [stage.end_s for stage in stages if stage.name == "update" and stage.step < steps[0]]
    origin_s = max(ends, default=0.0)
    return [
        stage._replace(
            name=stage.name if stage.name in STYLES else "other",
            begin_s=max(stage.begin_s - origin_s, 0.0),
            end_s=stage.end_s - origin_s,
        )
        for stage in stages
        if stage.rank < RANKS
        and steps[0] <= stage.step <= steps[-1]
        and stage.name != IDLE
        and stage.end_s > max(stage.begin_s, origin_s)
    ]


def _sum_up(run: RecordedRun, pictures: Sequence[_Picture]) -> Html:
    measured_s, model_s, varied_s = pictures[0].step_s, pictures[1].step_s, pictures[1].varied_s
    depth = _pipeline_depth(run)
    flight = f"with {depth} step{'s' * (depth > 1)} in flight"
    if not (is_finite(measured_s) and min(model_s, varied_s) > 0):
        return note(f"A single recorded step has no time from step to step; {flight}.")
    ratios = [f"{format_duration(s)} ({measured_s / s:.2f}\u00d7)" for s in (model_s, varied_s)]
    model = f"simulated {ratios[0]} from mean times, {ratios[1]} from the times of each step"
    return tag("p", {"class": "lead"}, text(f"{format_duration(measured_s)} a step {flight}; {model}."))


def _draw_picture(picture: _Picture, span_s: float) -> Html:
    lanes = _place_lanes(picture.stages)
    bottom = max(lanes.values(), default=TOP) + LANE
    x = Scale(low=0.0, high=max(span_s * 1000, 1e-9), begin=LEFT, end=WIDTH - RIGHT)
    parts = [_draw_time_axis(x, bottom), _draw_step_ends(picture.stages, x, bottom)]
    parts += [_draw_lane(lane, top) for lane, top in lanes.items()]
    parts += [_draw_interval(stage, x, lanes[_Lane(stage.rank, stage.resource)]) for stage in picture.stages]
    parts += [_draw_exposed(picture.stages, lane, x, top) for lane, top in lanes.items() if lane.resource == "link"]
    label = f"{picture.title}: stages of steps by rank and resource, {format_duration(picture.step_s)} a step"
    return draw_picture(picture.key, label, *parts, size=(WIDTH, bottom + BOTTOM))


def _place_lanes(stages: Iterable[ScheduledStage]) -> dict[_Lane, float]:
    """The top of each lane, of the resources with work."""
    used = {_Lane(stage.rank, stage.resource) for stage in stages}
    tops: dict[_Lane, float] = {}
    top, rank = TOP - RANK_GAP, -1
    for lane in sorted(used, key=lambda lane: (lane.rank, RESOURCES.index(lane.resource))):
        top += RANK_GAP if lane.rank != rank else 0.0
        rank = lane.rank
        tops[lane] = top
        top += LANE + LANE_GAP
    return tops


def _draw_time_axis(x: Scale, bottom: float) -> Html:
    values = ticks_inside(x.low, x.high)
    parts: list[Html] = []
    for value, label in zip(values, tick_labels(values), strict=True):
        tick_x = x.at(value)
        parts.append(draw_line("tick", (tick_x, tick_x), (bottom, bottom + 4)))
        parts.append(draw_label(tick_x, bottom + 17, label, "middle"))
    return join([*parts, draw_label(LEFT - 8, bottom + 17, "ms", "end", "title")])


def _draw_step_ends(stages: Iterable[ScheduledStage], x: Scale, bottom: float) -> Html:
    """A line at the end of each step on the slowest rank, with the number of the step."""
    ends: dict[int, float] = {}
    for stage in stages:
        if stage.name == "update" and stage.resource == "processor":
            ends[stage.step] = max(stage.end_s, ends.get(stage.step, 0.0))
    parts: list[Html] = []
    for step, end_s in sorted(ends.items()):
        end_x = x.at(end_s * 1000)
        parts.append(draw_line("level", (end_x, end_x), (TOP - 6, bottom)))
        parts.append(draw_label(end_x - 3, TOP - 9, f"{step}", "end"))
    return join([draw_label(LEFT - 8, TOP - 9, "end of step", "end", "title"), *parts])


def _draw_lane(lane: _Lane, top: float) -> Html:
    track = {"class": "track", "x": LEFT, "y": top, "width": WIDTH - RIGHT - LEFT, "height": LANE}
    words = draw_label(LEFT - 8, top + LANE - 3.5, f"rank {lane.rank} {lane.resource}", "end")
    return join([tag("rect", track), words])


def _draw_interval(stage: ScheduledStage, x: Scale, top: float) -> Html:
    left, right = x.at(stage.begin_s * 1000), x.at(stage.end_s * 1000)
    if right - left < MIN_WIDTH:
        return Html("")
    times = f"from {stage.begin_s * 1000:.3f} ms, {(stage.end_s - stage.begin_s) * 1000:.3f} ms"
    title = tag("title", None, text(f"{stage.name} of step {stage.step}: {times}"))
    position = {"x": left, "y": top, "width": right - left, "height": LANE}
    return tag("g", None, title, tag("rect", {"class": f"bar {STYLES[stage.name][1]}"} | position))


def _draw_exposed(stages: Sequence[ScheduledStage], lane: _Lane, x: Scale, top: float) -> Html:
    edges: list[Html] = []
    for begin_s, end_s in exposed_intervals(stages, lane.rank):
        left, right = x.at(begin_s * 1000), x.at(end_s * 1000)
        if right - left >= MIN_WIDTH:
            position = {"x": left, "y": top + LANE - EDGE, "width": right - left, "height": EDGE}
            edges.append(tag("rect", {"class": "edge"} | position))
    return join(edges)


# --- busy and exposed seconds ---


def _draw_stages(lines: Sequence[StageLine]) -> Html:
    """Busy and exposed seconds by stage; empty for runs of earlier versions without busy seconds."""
    by_phase: dict[str, dict[int, list[StageLine]]] = {}
    for line in lines:
        if is_finite(line.busy_s) and line.busy_s >= 0:
            by_phase.setdefault(line.phase, {}).setdefault(line.rank, []).append(line)
    rows: list[Html] = []
    for phase, by_rank in by_phase.items():
        busy_s = max(statistics.median(line.busy_s for line in rank_lines) for rank_lines in by_rank.values())
        exposed_s = max(statistics.median(line.measured_s for line in rank_lines) for rank_lines in by_rank.values())
        if busy_s or exposed_s:
            rows.append(_draw_row(phase, busy_s, exposed_s))
    if not rows:
        return Html("")
    return join([data_table(HEADERS, rows, "cards"), note(TABLE_NOTE)])


def _draw_row(phase: str, busy_s: float, exposed_s: float) -> Html:
    label = STYLES[phase][0] if phase in STYLES else ""
    busy = "" if phase == IDLE else format_duration(busy_s)
    share = format_percent(min(exposed_s / busy_s, 1.0)) if busy_s > 0 and busy else ""
    cells = zip(HEADERS[1:], (busy, format_duration(exposed_s), share), strict=True)
    return row(phase, label if label != phase else "", *(named_cell(header, text(cell)) for header, cell in cells))
