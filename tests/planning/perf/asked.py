"""Questions for a planner, of some tables on a machine; and all of their tables as whole ones."""

import numpy as np

from rowwise.planning.perf.cost import Shards
from rowwise.planning.perf.hardware import Hardware, Machine
from rowwise.planning.perf.learned import model_of
from rowwise.planning.planner.kinds import PlacementKind
from rowwise.planning.planner.layouts import TABLE_WISE
from rowwise.planning.planner.options import TableArrays
from rowwise.planning.planner.problem import PlanRequest
from rowwise.tables.spec import Topology


def request_of(workloads, hardware: Hardware, topology=Topology(), *, batch=1000, model=None, **more) -> PlanRequest:  # noqa: B008 - frozen
    model = model or model_of(hardware, topology)
    machine = Machine(topology, hardware)
    return PlanRequest(workloads=tuple(workloads), machine=machine, model=model, batch=batch, **more)


def whole_tables(request: PlanRequest) -> Shards:
    index_T = np.arange(len(request.workloads))
    return TableArrays.of(request).shards(PlacementKind(TABLE_WISE), index_T, request)
