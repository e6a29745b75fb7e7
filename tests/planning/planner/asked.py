"""Questions about small made-up tables, for tests of what is said of plans."""

from msgspec import structs

from rowwise.parallel.plan import TIERS
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.hardware import Machine, hardware_named
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.problem import PlanRequest
from rowwise.tables.row_optimizers import Adam, RowWiseAdagrad, Sgd
from rowwise.tables.spec import Table


def question(
    tables, topology, device_bytes, *, access=None, constraints=None, host_bytes=0, machine="zionex", **kind
) -> PlanRequest:
    hardware = structs.replace(hardware_named(machine), device_bytes=int(device_bytes), host_bytes=int(host_bytes))
    access = access or [Access()] * len(tables)
    return PlanRequest(
        workloads=tuple(Workload(table=t, access=a) for t, a in zip(tables, access, strict=True)),
        machine=Machine(topology=topology, hardware=hardware),
        model=Roofline(hardware, topology),
        batch=kind.get("batch", 4096),
        constraints=constraints or Constraints(),
        buffers=kind.get("buffers", False),
        tiers=frozenset(kind.get("tiers", TIERS if host_bytes else TIERS[:1])),
    )


def stored(table: Table) -> int:
    return table.rows * (table.row_bytes + {Sgd: 0, RowWiseAdagrad: 4, Adam: 8 * table.dim}[type(table.optimizer)])
