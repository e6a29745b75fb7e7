"""The step of a plan as a timeline: the exposed time of exchanges of ids and vectors beside lookups and updates.

Known limits: dense layers count 0, so no transfer overlaps with them; reads of rows on disk are part of the lookup.
"""

from collections.abc import Mapping

import numpy as np

from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.step_program import PROGRAM, RESOURCES, StageCosts, training_stages
from rowwise.planning.perf.timeline import WARM_UP, exposed_seconds, schedule, sequential_s, step_seconds
from rowwise.planning.planner.explanation import StageTime, StepTimeline
from rowwise.planning.planner.rank_exchange import ExchangeSeconds

DEPTH = 2  # `train.pipeline_depth` by default


def plan_costs(stages_s: Mapping[str, Floats], exchange: ExchangeSeconds, dense_s: float = 0.0) -> StageCosts:
    """Costs from the seconds of a forecast, the parts of its exchange, and the transfers of the dense side."""
    rank_seconds = {
        "lookup": stages_s["lookup"],
        "update": stages_s["update"],
        "route.ids": exchange.ids_W,
        "exchange.send": exchange.vectors_W,
        "return.send": exchange.gradients_W,
        "reduce.late": np.full(len(exchange.ids_W), dense_s),
    }
    seconds = {name: tuple(np.maximum(seconds_W, 0.0).tolist()) for name, seconds_W in rank_seconds.items()}
    return StageCosts(len(exchange.ids_W), seconds)


def step_timeline(costs: StageCosts, depth: int = DEPTH) -> StepTimeline:
    """A step in the middle of a run with `depth` steps in flight, and one without any overlap."""
    scheduled = schedule(training_stages(costs, depth), 2 * WARM_UP)
    exposed = exposed_seconds(scheduled, range(WARM_UP, 2 * WARM_UP))
    stages: list[StageTime] = []
    for kind in dict.fromkeys(name.partition(".")[0] for name in PROGRAM):
        names = [name for name in PROGRAM if name.partition(".")[0] == kind and any(costs.of(name))]
        # Collectives without bytes, such as that of dense gradients, still make ranks wait for each other.
        waited_s = exposed.get(kind, 0.0)
        if names or waited_s:
            resource = PROGRAM[names[0]][0] if names else "link"
            busy_s = sum(max(costs.of(name)) for name in names)
            stages.append(StageTime(name=kind, resource=resource, busy_s=busy_s, exposed_s=waited_s))
    return StepTimeline(
        depth=depth,
        sequential_s=sequential_s(costs),
        pipelined_s=step_seconds(scheduled, WARM_UP),
        bounded_by=max(RESOURCES, key=costs.busy_s),
        bound_s=max(map(costs.busy_s, RESOURCES)),
        stages=tuple(stages),
    )
