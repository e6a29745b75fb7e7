"""A simulated step as a Chrome trace, which chrome://tracing and Perfetto draw."""

import json
from collections.abc import Sequence
from typing import Any

from rowwise.planning.perf.step_program import TimelineStage
from rowwise.planning.perf.timeline import stage_times

MAX_RANKS = 8  # in the trace
STEPS = 4
MICRO = 1e6


def chrome_trace(stages: Sequence[TimelineStage], step_s: float) -> str:
    """Some steps of the first ranks: a process for each rank, a thread for each resource."""
    resources = list(dict.fromkeys(stage.resource for stage in stages))
    events: list[dict[str, Any]] = []
    ranks = 0
    for stage, step, begin_W, end_W, *_ in stage_times(stages, STEPS):
        ranks = min(len(begin_W), MAX_RANKS)
        for rank in range(ranks):
            taken_s = float(end_W[rank] - begin_W[rank])
            if taken_s > 0:
                event: dict[str, Any] = {"name": stage.name, "ph": "X", "pid": rank, "args": {"step": step}}
                event["tid"] = resources.index(stage.resource)
                event |= {"ts": round(float(begin_W[rank]) * MICRO, 3), "dur": round(taken_s * MICRO, 3)}
                events.append(event)
    for rank in range(ranks):
        names = [("process_name", 0, f"rank {rank}"), *(("thread_name", k, name) for k, name in enumerate(resources))]
        for kind, k, name in names:
            events.append({"name": kind, "ph": "M", "pid": rank, "tid": k, "args": {"name": name}})
    return json.dumps({"traceEvents": events, "otherData": {"step_s": step_s}}, indent=1) + "\n"
